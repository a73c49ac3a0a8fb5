"""As documented_names.py, for the pages of single questions: DLRM, other projects' names, answers."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import evenrank


def of_all(items: list[Any]) -> list[Any]:
    """The items of all ranks, in the order of the ranks."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, items)
    return [item for part in gathered for item in part]


def _sparse(lengths: dict[str, list[int]]) -> KeyedJaggedTensor:
    rows = len(next(iter(lengths.values())))
    flat = torch.tensor([length for each in lengths.values() for length in each])
    return KeyedJaggedTensor(keys=list(lengths), values=torch.arange(int(flat.sum())), lengths=flat, stride=rows)


def lookups_are_balanced(names: dict[str, Any]) -> None:
    """A row costs its values times their width, and ranks end up with equal costs."""
    widths, rank = {"clicks": 64, "searches": 128}, dist.get_rank()
    try:
        shuffler = evenrank.BatchShufflerFactory.create("lookups", widths=widths)
    finally:
        evenrank.BatchShufflerFactory.unregister("lookups")
    lengths = {"shop": [5, 5], "clicks": [4, 4] if rank else [40, 40], "searches": [1, 1] if rank else [10, 10]}
    labels = torch.arange(2) + 10 * rank
    batch = Batch(dense_features=torch.rand(2, 3), sparse_features=_sparse(lengths), labels=labels)
    with contextlib.closing(shuffler):
        assert shuffler.get_workloads(batch).tolist() == ([384, 384] if rank else [3840, 3840])
        result = shuffler.shuffle(batch)
        stats = shuffler.last_stats
    assert sorted(of_all(result.labels.tolist())) == [0, 1, 10, 11]
    assert (stats.loads_before, stats.loads_after) == ((7680, 768), (4224, 4224))
    assert stats.num_tokens == 2 * (40 + 10 + 4 + 1)  # without the shops


def padding_is_stated(names: dict[str, Any]) -> None:
    """A rank for which there is no row trains one of padding."""
    rows = 1 - dist.get_rank()
    batch = names["DLRMBatch"](
        features=_sparse({"history": [3 * rows]}),
        batch_size=1,
        feature_to_max_seqlen={"history": 3},
        labels=torch.ones(1) * rows,
        actual_batch_size=rows,
        dense_features=torch.ones(1, 2) * rows,
    )
    with contextlib.closing(evenrank.TokensBalancedBatchShuffler()) as shuffler:
        result = shuffler.shuffle(batch)
    counts = of_all([(result.batch_size, result.actual_batch_size, float(result.dense_features.sum()))])
    assert counts == [(1, 1, 2.0), (1, 0, 0.0)]
