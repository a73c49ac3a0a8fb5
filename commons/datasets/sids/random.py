"""Random semantic IDs as a data set, for benchmarks and tests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from commons.datasets.gpt_sid_batch import GPTSIDBatch, RandomDistribution
from commons.datasets.random.dataset import RandomBatches
from commons.datasets.random.distribution import LengthDistribution
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


class RandomSIDDataset(RandomBatches[GPTSIDBatch]):
    """Random batches whose rows all have `max_candidate_length` candidates.

    Items are equally likely. Without `max_candidate_length` all of a row's items are candidates, and histories empty;
    then `history_dist`, that of `LengthDistribution()` if not given, is that of the candidates. `options` are those of
    `RandomBatches`.

    >>> dataset = RandomSIDDataset(random_sid_map(9, [3, 3]), batch_size=4, num_batches=2, max_history_length=5)
    >>> [batch.batch_size for batch in dataset]
    [4, 4]

    """

    def __init__(
        self,
        sid_map: SIDMap,
        *,
        batch_size: int,
        max_history_length: int,
        max_candidate_length: int | None = 1,
        history_dist: RandomDistribution | None = None,
        **options: Any,
    ) -> None:
        most_candidates = max_history_length if max_candidate_length is None else max_candidate_length
        drawn = history_dist or LengthDistribution().within(max_history_length)
        distributions = {"candidate_dist": drawn}
        if max_candidate_length is not None:
            fixed = RandomDistribution("uniform", low=most_candidates, high=most_candidates)
            distributions = {"history_dist": drawn, "candidate_dist": fixed}
        longest = (0 if max_candidate_length is None else max_history_length, most_candidates)
        self.max_items = sum(longest)  # the most items of a row, candidates among them
        draw = partial(GPTSIDBatch.random, batch_size, sid_map.codebook_sizes, *longest, HISTORY, CANDIDATE)
        super().__init__(partial(draw, sids=torch.from_numpy(sid_map.codes), **distributions), **options)
