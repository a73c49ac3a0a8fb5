"""TorchEasyRec's Batch and other nestings through the shuffler, windows, dispatch and a pipeline, as they are: nothing
is flattened, and every row arrives as it was.
"""

from __future__ import annotations

import collections
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torchrec.distributed.train_pipeline.train_pipelines import TrainPipelineBase
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from commons.dispatch import redistribute_balanced
from commons.distributed.options import ShufflerOptions
from commons.distributed.tokens_shuffler import TokensBalancedBatchShuffler
from commons.pipeline import balanced, windowed_iter
from commons.sequence_batch.batch import BaseBatch
from commons.sequence_batch.open_batch import row_fields
from tests.helpers.batches.any_batches import dense, jagged, keyed, kjt
from tests.helpers.batches.easyrec import ClicksShuffler, EasyRecBatch, clicks, easyrec_batch
from tests.helpers.batches.random_batches import rows_as_values
from tests.helpers.batches.square_shuffler import SquareShuffler, closing
from tests.helpers.models.torchrec_model import AnyBatch
from tests.helpers.pipelines.shuffled_pipelines import steps_of
from tests.helpers.ranks.faults import error_of
from tests.helpers.ranks.on_ranks import of_all, on_ranks

SIZES = [7, 2, 5, 1]
STEPS = 4


def ids_of(rank: int, step: int, sizes: list[int] = SIZES) -> list[int]:
    """Rows of a rank at a step; those of rank 0 cost most."""
    first = 10_000 * rank + 100 * step
    wanted = [10, 9, 4, 3] if rank == 0 else [0, 1]
    found = [sample for sample in range(first, first + 100) if clicks(sample) in wanted]
    return found[: sizes[rank]]


def own_batch(step: int, sizes: list[int] = SIZES, rows: int | None = None) -> EasyRecBatch:
    """This rank's; odd ranks fill their dicts the other way round."""
    rank = dist.get_rank()
    return easyrec_batch(ids_of(rank, step, sizes), rows, rank + step / 10, backwards=rank % 2 == 1)


def row_values(batches: list[Any]) -> list[Any]:
    return [row for batch in batches for row in rows_as_values(batch)]


def require_same_rows(before: list[Any], after: list[Any]) -> None:
    """The same rows with every field are on the ranks together."""
    counted = [collections.Counter(of_all(rows)) for rows in (before, after)]
    assert counted[0] == counted[1] and counted[0].total() > 0


@pytest.mark.parametrize("rows", [None, 9])
@pytest.mark.parametrize("shuffler_class", [ClicksShuffler, TokensBalancedBatchShuffler])
@on_ranks
def test_every_row_arrives_whole_by_both_transports(rows, shuffler_class):
    rank, by_transport = dist.get_rank(), []
    for transport in ("all_to_all", "all_gather"):
        batches = [own_batch(step, rows=rows) for step in range(2)]
        with closing(shuffler_class(options=ShufflerOptions(transport=transport, verify=True))) as shuffler:
            results = [shuffler.shuffle(batch) for batch in batches]
            stats = shuffler.last_stats
        # The values of KeyedJaggedTensors are looked up, those of JaggedTensors are not.
        held = [value for _, value in row_fields(batches[1]) if isinstance(value, KeyedJaggedTensor)]
        assert stats.moved and stats.lookups_before[rank] == sum(value.values().numel() for value in held) > 0
        for step, result in enumerate(results):
            assert type(result) is type(batches[0]) and result is not batches[step] and result.batch_size == -1
            assert result.data_timestamp == rank + step / 10  # each rank's own
            assert isinstance(result.sequence_dense_features["price"], JaggedTensor)
            assert result.dense_features["user"].keys() == ["age", "geo"]
        by_transport.append(row_values(results))
        require_same_rows(row_values(batches), by_transport[-1])
    assert by_transport[0] == by_transport[1]


@pytest.mark.parametrize("rows", [None, 8])
@on_ranks
def test_a_pipeline_trains_every_row_whole(rows):
    trained, own = [], [own_batch(step, rows=rows) for step in range(STEPS)]
    model = AnyBatch(lambda batch: trained.extend(rows_as_values(batch)))
    own = own[:-1] if dist.get_rank() == 1 else own  # one rank ends before the others
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with closing(ClicksShuffler()) as shuffler:
        pipeline = balanced(TrainPipelineBase)(model, optimizer, torch.device("cpu"), batch_shuffler=shuffler)
        assert [pipeline.last_stats.moved for _ in steps_of(pipeline, iter(own))] == [True] * STEPS
    require_same_rows(row_values(own), trained)


@on_ranks
def test_windows_of_nested_batches():
    rank = dist.get_rank()
    own = [own_batch(step, rows=8) for step in range([4, 2, 3, 4][rank])]
    with closing(ClicksShuffler()) as shuffler:
        window = windowed_iter(iter(own), shuffler, 2)
        results = list(window)
        window.close()
    require_same_rows(row_values(own), row_values(results))
    stamps = [result.data_timestamp for result in results]
    assert len(stamps) == 4
    if rank == 0:
        assert sorted(stamps) == [0.0, 0.1, 0.2, 0.3]
    if rank == 1:
        assert set(stamps) <= {1.0, 1.1, 0.0}


@on_ranks
def test_dispatch_of_nested_batches():
    batch = None if dist.get_rank() == 1 else own_batch(0)
    workloads = None if batch is None else ClicksShuffler.get_workloads(None, batch)
    result = redistribute_balanced(batch, workloads)
    assert result.batch.data_timestamp == (0.0 if batch is None else dist.get_rank())  # its own, or the first rank's
    after = rows_as_values(result.batch)
    require_same_rows([] if batch is None else rows_as_values(batch), after)
    assert after


# ------------------------------------------------------------------------------------------ every other nesting


@dataclass
class Deep(BaseBatch):
    """Branches beside the fields of BaseBatch."""

    more: dict[str, Any] = field(default_factory=dict)
    listed: list[Any] = field(default_factory=list)


def _deep(ids):
    tensors = TensorDict({"x": dense(ids, torch.int16), "y": {"z": dense(ids, torch.bool)}}, batch_size=[len(ids)])
    return Deep(
        features=kjt(ids),
        labels=dense(ids, torch.float32),
        more={"td": tensors, "jt": jagged(ids), "groups": {"kt": keyed(ids)}, "unit": "s"},
        listed=[(dense(ids)[:, 0], "kept"), kjt(ids, weights=False)],
    )


@pytest.mark.parametrize("transport", ["all_to_all", "all_gather"])
@on_ranks
def test_branches_of_every_kind(transport):
    rank = dist.get_rank()
    ids = [5 * each + 2 for each in range(6)] if rank == 0 else [5 * (100 * rank + each) for each in range(4)]
    batch = _deep(ids) if rank != 1 else None
    with closing(SquareShuffler(ShufflerOptions(transport=transport))) as shuffler:
        handle = shuffler.start_shuffle(batch)
        result = shuffler.finish_shuffle(handle.empty_batch() if batch is None else batch, handle)
        assert shuffler.last_stats.moved
    assert isinstance(result.more["td"], TensorDict) and result.more["td"].batch_size == (result.batch_size,)
    assert isinstance(result.more["groups"]["kt"], KeyedTensor) and result.more["unit"] == "s"
    assert isinstance(result.listed[0], tuple) and result.listed[0][1] == "kept"
    require_same_rows([] if batch is None else rows_as_values(batch), rows_as_values(result))
    assert result.global_loss_terms() == sum(of_all([result.num_loss_tokens()]))


@dataclass
class Inner:
    ids: torch.Tensor
    actual_batch_size: int


@dataclass
class Outer:
    """A part of it states the padding."""

    inner: Inner
    values: torch.Tensor


@on_ranks
def test_padding_that_a_part_of_the_batch_states():
    batch = Outer(Inner(torch.arange(2) + 1, 2), torch.arange(2.0) + 1) if dist.get_rank() == 0 else None
    with closing(SquareShuffler()) as shuffler:
        shuffler.get_workloads = lambda batch: torch.tensor([5, 3])
        handle = shuffler.start_shuffle(batch)
        result = shuffler.finish_shuffle(handle.empty_batch() if batch is None else batch, handle)
    values = result.values.tolist()
    assert result.inner.ids.tolist() == values and result.inner.actual_batch_size == (dist.get_rank() < 2)
    assert len(values) == (2 if dist.get_rank() == 0 else 1)
    assert sorted(of_all(values)) == [*[0] * (dist.get_world_size() - 1), 1, 2]


@dataclass
class Stamped:
    """Nothing is declared."""

    values: dict[str, torch.Tensor]
    stamp: float = 0.0


@on_ranks
def test_a_plain_value_that_differs_says_how_it_is_declared():
    """In rank 1's first batch, and in its second one."""
    for stamps, said in (
        ([1.0], "the batches of ranks 0 and 1 differ: field 'stamp': 0.0 and 1.0; "),
        ([0.0, 1.0], "rank 1: this batch differs from the first: field 'stamp': 0.0 and 1.0; "),
    ):
        with closing(SquareShuffler()) as shuffler:
            shuffler.get_workloads = lambda batch: torch.ones(3, dtype=torch.int64)
            for stamp in stamps:
                batch = Stamped({"a": torch.ones(3)}, stamp if dist.get_rank() == 1 else 0.0)
                text = error_of(shuffler.shuffle, batch)
        assert said in text and "\n" not in text
        assert (
            "make values of single rows a tensor, and let others differ between ranks: register_batch_type(Stam" in text
        )
