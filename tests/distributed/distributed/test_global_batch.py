"""What a shuffled batch knows without asking: the lengths and loss terms of all ranks."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import pickle
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from commons.distributed.engine import window as engine_window
from commons.distributed.options import ShufflerOptions
from commons.pipeline import windowed_iter
from commons.sequence_batch.batch import BaseBatch
from hstu import HSTUBalancedBatchShuffler
from hstu.model import RetrievalConfig
from tests.helpers.batches.random_batches import RichBatch, random_batch
from tests.helpers.batches.square_shuffler import SquareShuffler, closing
from tests.helpers.models import hstu_models
from tests.helpers.models.hstu_models import random_batch as random_hstu_batch
from tests.helpers.ranks.on_ranks import of_all, on_ranks

META = torch.device("meta")


@contextlib.contextmanager
def collectives_counted() -> Iterator[Counter[str]]:
    """Calls of torch.distributed by name."""
    names = ("all_reduce", "all_gather", "all_gather_into_tensor", "all_to_all_single", "broadcast")
    calls = {name: mock.Mock(side_effect=getattr(dist, name)) for name in names}
    counter: Counter[str] = Counter()
    with mock.patch.multiple(dist, **calls):
        yield counter
    counter.update({name: each.call_count for name, each in calls.items() if each.called})


@dataclass
class MaskedBatch(RichBatch):
    """Counts in a way of its own."""

    def num_loss_tokens(self) -> int:
        return 3


def _square_batch(kind: str, seed: int, rows: int, real: int) -> BaseBatch:
    rank = dist.get_rank()
    batch = random_batch(seed * 100 + rank, rows, real, max_length=40 if rank == 0 else 2)
    if kind == "tensor":
        batch.labels = torch.nn.functional.pad(torch.ones(real, 2, 3), (0, 0, 0, 0, 0, rows - real))
    if kind == "none":
        batch.labels = None
    return MaskedBatch(**vars(batch)) if kind == "masked" else batch


UNEVEN = [(8, 8), (8, 3), (5, 5), (7, 1)]


def _require_terms(
    kind: str, options: dict[str, Any], sizes: list[tuple[int, int]], is_known: bool, moves: bool
) -> None:
    """What a shuffled batch says, also after copies, is what an all-reduce says, or nothing."""
    with closing(SquareShuffler(ShufflerOptions(**options))) as shuffler:
        batch = shuffler.shuffle(_square_batch(kind, 1, *sizes[dist.get_rank()]))
        assert bool(shuffler.last_stats and shuffler.last_stats.moved) == moves
    asked = torch.tensor(batch.num_loss_tokens())
    dist.all_reduce(asked)
    with collectives_counted() as collectives:
        said = [each.global_loss_terms() for each in (batch, batch.to(META), batch.to(META).to(META))]
    assert not collectives and said == [int(asked) if is_known else None] * 3


@pytest.mark.parametrize("kind", ["jagged", "tensor", "none"])
@pytest.mark.parametrize("sizes", [UNEVEN, [(8, 8)] * 4, [(8, 8), (1, 0), (8, 8), (1, 0)]], ids=str)
@on_ranks
def test_a_batch_knows_the_loss_terms_of_all_ranks(kind, sizes):
    _require_terms(kind, {}, sizes, is_known=True, moves=True)


@pytest.mark.parametrize(
    ("kind", "options"),
    [("jagged", {"mode": "off"}), ("jagged", {"mode": "observe"}), ("jagged", {"min_gain": 0.99}), ("masked", {})],
    ids=str,
)
@on_ranks
def test_it_knows_nothing_where_nobody_moves_or_a_batch_counts_in_its_own_way(kind, options):
    _require_terms(kind, options, UNEVEN, is_known=False, moves=kind == "masked")


@on_ranks
def test_it_forgets_with_the_labels_or_the_rows():
    pair = dist.new_group([0, 1]), dist.new_group(range(dist.get_world_size())[-2:])
    mine = pair[0] if dist.get_rank() < 2 else pair[1]
    brought = _square_batch("jagged", 1, 8, 8)
    with closing(SquareShuffler()) as shuffler:
        batch = shuffler.shuffle(brought)
    with closing(SquareShuffler()) as shuffler:
        labelled = shuffler.shuffle(_square_batch("none", 1, 8, 8))
    labelled.labels = brought.labels
    relabelled = batch.to(META)
    relabelled.labels = None
    other = batch.to(META)
    other.labels = brought.labels
    fewer = copy.copy(batch)
    fewer.actual_batch_size -= 1
    resized = batch.to(META)
    resized.batch_size += 1
    groups = {"world": dist.group.WORLD, "other": mine}
    lengths = {"other labels": other.to(META), "fewer real rows": fewer, "fewer real rows, copied": fewer.to(META)}
    on = {
        "itself": batch,
        "brought": brought,
        "replaced": dataclasses.replace(batch, labels=brought.labels),
        "labelled": labelled,
        "relabelled": relabelled,
        "relabelled and copied": relabelled.to(META),
        "other labels, copied": other.to(META),
        "fewer real rows": fewer,
        "fewer real rows, copied": fewer.to(META),
        "another batch size": resized,
        "some rows": batch.index_select([0]),
        "deep copy": copy.deepcopy(batch),
        "pickle": pickle.loads(pickle.dumps(batch)),
    }
    known = {name for name, each in on.items() if each.global_loss_terms() is not None}
    known |= {f"{name} group" for name in groups if batch.global_loss_terms(groups[name]) is not None}
    known |= {f"lengths of {name}" for name, each in lengths.items() if each.global_lengths("item") is not None}
    assert known == {"itself", "world group", "lengths of other labels"} | (
        {"other group"} if dist.get_world_size() == 2 else set()
    )
    assert not any("global" in name for name in vars(batch))


@pytest.mark.parametrize(("window", "kind"), [(1, "jagged"), (3, "jagged"), (3, "tensor")])
@on_ranks
def test_steps_of_a_window_know_their_own(window, kind):
    """On their way to a device, what an all-reduce says."""
    cached = _square_batch(kind, 7, 6, 6)  # a data set may hand out one batch again and again
    uneven = (_square_batch(kind, seed, *UNEVEN[dist.get_rank()]) for seed in range(5))
    source = itertools.chain(uneven, [cached] * 4)
    known = []
    with closing(SquareShuffler()) as shuffler:
        for batch in windowed_iter(source, shuffler, window):
            asked = torch.tensor(batch.num_loss_tokens())
            dist.all_reduce(asked)
            known.append(batch.to(META).global_loss_terms())
            assert known[-1] in (None, int(asked))
            own = batch.host_lengths("item")[0][: batch.actual_batch_size].tolist()
            lengths = batch.global_lengths("item")
            assert lengths is None or [each.tolist() for each in lengths] == of_all([own])
            assert (lengths is None) == (known[-1] is None)
    assert cached.global_loss_terms() is None
    assert len(known) == 9 and sum(each is not None for each in known) >= 5


@pytest.mark.parametrize(("kind", "forward", "asking"), [("ranking", {}, 1), ("retrieval", {"all_gather": 2}, 3)])
@on_ranks
def test_models_ask_no_rank(kind, forward, asking):
    """One gather each of the pool's embeddings and ids is what is left of retrieval's."""
    rank = dist.get_rank()
    brought = random_hstu_batch(6, actual_batch_size=4 + rank % 3, longest=30 if rank == 0 else 4, seed=rank)
    brought.feature_to_max_seqlen = dict.fromkeys(brought.feature_to_max_seqlen, 30)  # the same on all ranks
    hstu = dataclasses.replace(hstu_models.HSTU, max_sequence_length=80)
    config: Any = dataclasses.replace(hstu_models.CONFIG, hstu=hstu)
    if kind == "retrieval":
        brought = dataclasses.replace(brought, labels=None)
        config = RetrievalConfig(hstu, hstu_models.TABLES, "item", in_batch_pool="global")
    model = hstu_models.plain_model(config)
    for mode in ("balance", "off"):
        with closing(HSTUBalancedBatchShuffler(8, 2, 3, 2, options=ShufflerOptions(mode=mode, slack=0.0))) as shuffler:
            batch = shuffler.shuffle(brought)
        with collectives_counted() as collectives:
            model(batch)
        assert collectives == forward if mode == "balance" else collectives["all_reduce"] == asking


@dataclass
class _PinsItself(RichBatch):
    """A user's own pin_memory, which makes a new batch."""

    def pin_memory(self):
        return dataclasses.replace(self)


@on_ranks
def test_pinned_batches_of_a_window_know_it_on_all_ranks_or_on_none():
    """A rank without batches pins nothing: the others waited in a collective that it left out."""
    rank = dist.get_rank()
    own = [_PinsItself(**vars(_square_batch("jagged", seed, 5, 5))) for seed in range(4)]
    with (
        mock.patch.object(engine_window, "_are_pinned", lambda schema, batches: bool(batches)),
        closing(SquareShuffler(ShufflerOptions())) as shuffler,
    ):
        batches = list(windowed_iter(iter(own if rank else own[:0]), shuffler, 2))
    known = [each.global_loss_terms() is not None for each in batches]
    assert known and all(known)
