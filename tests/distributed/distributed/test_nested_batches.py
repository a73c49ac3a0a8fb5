"""TorchEasyRec's Batch and other nestings through the shuffler, windows, dispatch and a pipeline, as they are: nothing
is flattened, and every row arrives as it was.
"""

from __future__ import annotations

import collections
import itertools
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torchrec.distributed.train_pipeline.train_pipelines import TrainPipelineBase
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from commons.dispatch import redistribute_balanced
from commons.distributed.batch_shuffler import BaseTaskBalancedBatchShuffler
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
from tests.helpers.ranks.faults import raised_by

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


def same_rows(before: list[Any], after: list[Any]) -> bool:
    """Whether the same rows with every field are on the ranks together; of all ranks' answers."""
    counted = [collections.Counter(row for rank in rows for row in rank) for rows in (before, after)]
    return counted[0] == counted[1] and sum(counted[0].values()) > 0


def _shuffled(sizes, rows, shuffler_class, **options):
    batches = [own_batch(step, sizes, rows) for step in range(2)]
    with closing(shuffler_class(options=ShufflerOptions(**options))) as shuffler:
        results = [shuffler.shuffle(batch) for batch in batches]
        stats = shuffler.last_stats
        moved = stats is not None and stats.moved
    if stats is not None:  # the values of KeyedJaggedTensors are looked up, those of JaggedTensors are not
        held = [value for _, value in row_fields(batches[1]) if isinstance(value, KeyedJaggedTensor)]
        assert stats.lookups_before[dist.get_rank()] == sum(value.values().numel() for value in held) > 0
    for step, result in enumerate(results):
        assert type(result) is type(batches[0]) and result.batch_size == -1
        assert result.data_timestamp == dist.get_rank() + step / 10  # each rank's own
        assert isinstance(result.sequence_dense_features["price"], JaggedTensor)
        assert result.dense_features["user"].keys() == ["age", "geo"]
    same = [result is batch for result, batch in zip(results, batches)]
    return row_values(batches), row_values(results), moved, same


@pytest.mark.parametrize("rows", [None, 9])
@pytest.mark.parametrize("shuffler", [ClicksShuffler, TokensBalancedBatchShuffler])
def test_every_row_arrives_whole_by_both_transports(ranks, rows, shuffler):
    by_transport = []
    for transport in ("all_to_all", "all_gather"):
        answers = ranks.run(_shuffled, SIZES, rows, shuffler, transport=transport, verify=True)
        before, after, moved, same = zip(*answers)
        assert all(moved) and not all(itertools.chain(*same)) and same_rows(before, after)
        by_transport.append(after)
    assert by_transport[0] == by_transport[1]


def _trained(rows):
    trained, own = [], [own_batch(step, rows=rows) for step in range(STEPS)]
    model = AnyBatch(lambda batch: trained.extend(rows_as_values(batch)))
    own = own[:-1] if dist.get_rank() == 1 else own  # one rank ends before the others
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with closing(ClicksShuffler()) as shuffler:
        pipeline = balanced(TrainPipelineBase)(model, optimizer, torch.device("cpu"), batch_shuffler=shuffler)
        moved = sum(pipeline.last_stats.moved for _ in steps_of(pipeline, iter(own)))
    return row_values(own), trained, moved


@pytest.mark.parametrize("rows", [None, 8])
def test_a_pipeline_trains_every_row_whole(ranks, rows):
    before, after, moved = zip(*ranks.run(_trained, rows))
    assert same_rows(before, after) and set(moved) == {STEPS}


def _windowed(counts):
    own = [own_batch(step, rows=8) for step in range(counts[dist.get_rank()])]
    with closing(ClicksShuffler()) as shuffler:
        window = windowed_iter(iter(own), shuffler, 2)
        results = list(window)
        window.close()
    stamps = [result.data_timestamp for result in results]
    return row_values(own), row_values(results), stamps


def test_windows_of_nested_batches(ranks):
    before, after, stamps = zip(*ranks.run(_windowed, [4, 2, 3, 4]))
    assert same_rows(before, after)
    assert len({len(each) for each in stamps}) == 1 and sorted(stamps[0]) == [0.0, 0.1, 0.2, 0.3]
    assert all(stamp in (1.0, 1.1, 0.0) for stamp in stamps[1])


def _redistributed():
    batch = None if dist.get_rank() == 1 else own_batch(0)
    workloads = None if batch is None else ClicksShuffler.get_workloads(None, batch)
    result = redistribute_balanced(batch, workloads)
    assert result.batch.data_timestamp == (0.0 if batch is None else dist.get_rank())  # its own, or the first rank's
    costs = ClicksShuffler.get_workloads(None, result.batch)
    home = result.send_home({"cost": costs, "groups": result.batch.dense_features})
    if batch is not None:
        assert home["cost"].tolist() == workloads.tolist()
        assert torch.equal(home["groups"]["user"].values(), batch.dense_features["user"].values())
    return [] if batch is None else rows_as_values(batch), rows_as_values(result.batch)


def test_dispatch_of_nested_batches(ranks):
    before, after = zip(*ranks.run(_redistributed))
    assert same_rows(before, after) and all(after)


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


def _every_nesting(transport):
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
    terms = result.global_loss_terms()
    return [] if batch is None else rows_as_values(batch), rows_as_values(result), terms, result.num_loss_tokens()


@pytest.mark.parametrize("transport", ["all_to_all", "all_gather"])
def test_branches_of_every_kind(ranks, transport):
    before, after, terms, own_terms = zip(*ranks.run(_every_nesting, transport))
    assert same_rows(before, after) and set(terms) == {sum(own_terms)}


@dataclass
class Inner:
    ids: torch.Tensor
    actual_batch_size: int


@dataclass
class Outer:
    """A part of it states the padding."""

    inner: Inner
    values: torch.Tensor


def _stated_by_a_part():
    batch = Outer(Inner(torch.arange(2) + 1, 2), torch.arange(2.0) + 1) if dist.get_rank() == 0 else None
    with closing(OneEach()) as shuffler:
        shuffler.get_workloads = lambda batch: torch.tensor([5, 3])
        handle = shuffler.start_shuffle(batch)
        result = shuffler.finish_shuffle(handle.empty_batch() if batch is None else batch, handle)
    assert result.inner.ids.tolist() == result.values.tolist()
    return result.values.tolist(), result.inner.actual_batch_size


def test_padding_that_a_part_of_the_batch_states(ranks):
    values, real = zip(*ranks.run(_stated_by_a_part))
    assert sorted(itertools.chain(*values))[-2:] == [1, 2] and sum(real) == 2
    assert real[:2] == (1, 1) and values[0] == ([1, 0] if values[0][0] == 1 else [2, 0])
    assert all(each == [0] for each in values[2:])


# ------------------------------------------------------------------------------------------------------- mistakes


@dataclass
class Stamped:
    """Nothing is declared."""

    values: dict[str, torch.Tensor]
    stamp: float = 0.0


class OneEach(BaseTaskBalancedBatchShuffler):
    def get_workloads(self, batch):
        return torch.ones(3, dtype=torch.int64)


def _other_stamps():
    """Errors where rank 1's first batch has another value, and where its second one has."""
    said = []
    for stamps in ([1.0], [0.0, 1.0]):
        with closing(OneEach()) as shuffler:
            for stamp in stamps:
                batch = Stamped({"a": torch.ones(3)}, stamp if dist.get_rank() == 1 else 0.0)
                text = raised_by(lambda batch=batch: shuffler.shuffle(batch))
        said.append(text)
    return said


def test_a_plain_value_that_differs_says_how_it_is_declared(ranks):
    for first, later in ranks.run(_other_stamps):
        assert "the batches of ranks 0 and 1 differ: field 'stamp': 0.0 and 1.0; " in first
        assert "rank 1: this batch differs from the first: field 'stamp': 0.0 and 1.0; " in later
        for text in (first, later):
            assert "let these values differ between ranks: register_batch_type(Stamped, " in text and "\n" not in text
