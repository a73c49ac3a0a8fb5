"""Random semantic IDs as a data set, for benchmarks and tests."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from commons.datasets.gpt_sid_batch import GPTSIDBatch, RandomDistribution
from commons.datasets.random.distribution import LengthDistribution
from commons.datasets.samplers.epoch import check_rank, lengths_unknown
from commons.datasets.sids.dataset import CANDIDATE, HISTORY
from commons.datasets.sids.map import SIDMap


def random_sid_map(num_items: int, codebook_sizes: Sequence[int], seed: int = 0) -> SIDMap:
    """Items 0 … num_items − 1 with SIDs drawn without repetition.

    Raises:
        ValueError: more items than there are SIDs.

    >>> random_sid_map(4, [2, 2]).num_items
    4

    """
    capacity = math.prod(codebook_sizes)
    if not 1 <= num_items <= capacity:
        raise ValueError(
            f"num_items is {num_items}, codebooks of {list(codebook_sizes)} codes make {capacity} SIDs; items have "
            "different SIDs: lower num_items or enlarge the codebooks"
        )
    rng = np.random.default_rng(seed)
    if 2 * num_items > capacity:
        chosen = rng.permutation(capacity)[:num_items]
        codes = np.stack(np.unravel_index(chosen, tuple(codebook_sizes)), axis=1)
    else:
        codes = np.empty((0, len(codebook_sizes)), np.int64)
        while len(codes) < num_items:
            drawn = rng.integers(0, codebook_sizes, (2 * num_items, len(codebook_sizes)))
            codes = np.unique(np.concatenate([codes, drawn]), axis=0)
        codes = rng.permutation(codes)[:num_items]
    return SIDMap(np.arange(num_items), codes, tuple(codebook_sizes), {"random": True, "seed": seed})


class RandomSIDDataset(Dataset[GPTSIDBatch]):
    """`num_batches` random batches, different on every rank and the same in every run.

    Batch i of a rank depends on `seed`, `rank`, `world_size` and i alone, so workers may draw batches in any order.
    All rows have `max_candidate_length` candidates.

    Args:
        sid_map: the items, equally likely.
        batch_size: rows of a batch.
        num_batches: batches of this rank.
        max_history_length: the most items of a history.
        max_candidate_length: the candidates of a row. None: all of a row's items are candidates, and histories empty.
        history_dist: distribution of the items per history, or of the candidates where all items are candidates; that
            of `LengthDistribution()` if not given.
        last_batch_size: rows of the last batch that are no padding; all if not given.
        seed: of the whole data set; the same on every rank.
        rank: this rank.
        world_size: number of ranks.

    Raises:
        ValueError: a negative `num_batches`, a length below 1, `rank` outside `[0, world_size)`.

    >>> dataset = RandomSIDDataset(random_sid_map(9, [3, 3]), batch_size=4, num_batches=2, max_history_length=5)
    >>> [batch.batch_size for batch in dataset]
    [4, 4]

    """

    def __init__(
        self,
        sid_map: SIDMap,
        *,
        batch_size: int,
        num_batches: int,
        max_history_length: int,
        max_candidate_length: int | None = 1,
        history_dist: RandomDistribution | None = None,
        last_batch_size: int | None = None,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if num_batches < 0:
            raise ValueError(f"num_batches is {num_batches}; a data set has no fewer than 0 batches: raise it")
        most_candidates = max_history_length if max_candidate_length is None else max_candidate_length
        if min(max_history_length, most_candidates) < 1:
            raise ValueError(
                f"max_history_length is {max_history_length}, max_candidate_length is {max_candidate_length}; both "
                "count items, at least one: raise them"
            )
        check_rank(rank, world_size)
        self.sid_map = sid_map
        self.max_history_length = 0 if max_candidate_length is None else max_history_length
        self.max_candidate_length = most_candidates
        self._batch_size = batch_size
        self._num_batches = num_batches
        self._last_batch_size = last_batch_size
        self._entropy = (seed, rank, world_size)
        self._sids = torch.from_numpy(sid_map.codes)
        if history_dist is None:
            history_dist = LengthDistribution().within(max_history_length)
        fixed = RandomDistribution("uniform", low=most_candidates, high=most_candidates)
        self._distributions: dict[str, Any] = (
            {"candidate_dist": history_dist}
            if max_candidate_length is None
            else {"history_dist": history_dist, "candidate_dist": fixed}
        )

    def __len__(self) -> int:
        return self._num_batches

    @property
    def max_items(self) -> int:
        """The most items of a row, history and candidates together."""
        return self.max_history_length + self.max_candidate_length

    def __getitem__(self, index: int) -> GPTSIDBatch:
        if not 0 <= index < self._num_batches:
            raise IndexError(f"batch {index} of a data set of {self._num_batches}")
        return self._draw(index)

    def stream(self) -> Iterator[GPTSIDBatch]:
        """The batches of the data set, and on from there without end."""
        return map(self._draw, itertools.count())

    def outlines(self) -> Iterator[GPTSIDBatch]:
        """Raise ValueError: no lengths are known beforehand."""
        raise lengths_unknown()

    def _draw(self, index: int) -> GPTSIDBatch:
        seed, rank, world_size = self._entropy
        # Batch numbers are global, so that the streams of two ranks never meet.
        entropy = np.random.SeedSequence([seed, index * world_size + rank])
        return GPTSIDBatch.random(
            self._batch_size,
            self.sid_map.codebook_sizes,
            self.max_history_length,
            self.max_candidate_length,
            HISTORY,
            CANDIDATE,
            self._last_batch_size if index == self._num_batches - 1 else None,
            **self._distributions,
            sids=self._sids,
            device="cpu",
            generator=torch.Generator().manual_seed(int(entropy.generate_state(1, np.uint64)[0])),
        )
