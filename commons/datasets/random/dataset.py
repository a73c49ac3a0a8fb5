"""Random batches as a data set, for benchmarks and tests."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data import Dataset

from commons.checks import require_names
from commons.datasets.gpt_sid_batch import GPTSIDBatch
from commons.datasets.hstu_batch import FeatureConfig, HSTUBatch
from commons.datasets.random.distribution import LengthDistribution, RandomDistribution
from commons.datasets.sids.dataset import CANDIDATE, HISTORY
from commons.datasets.sids.map import SIDMap

_Batch_co = TypeVar("_Batch_co", covariant=True)


class RandomBatches(Dataset[_Batch_co]):
    """`num_batches` random batches, different on every rank and equal in every run.

    Batch i of a rank depends only on `seed`, `rank`, `world_size` and i, so workers may draw batches in any order.

    Args:
        draw: makes a batch; called with `actual_batch_size` (None for all rows), `device` and `generator`.
        num_batches: batches of this rank.
        last_batch_size: real rows of the last batch; None for all rows.
        seed: seed of the data set, equal on every rank.
        rank: this rank.
        world_size: number of ranks.
    """

    def __init__(
        self,
        draw: Callable[..., _Batch_co],
        *,
        num_batches: int,
        last_batch_size: int | None = None,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self._make, self._num_batches, self._last_batch_size = draw, num_batches, last_batch_size
        self._seed, self._rank, self._world_size = seed, rank, world_size

    def __len__(self) -> int:
        return self._num_batches

    def __getitem__(self, index: int) -> _Batch_co:
        if not 0 <= index < self._num_batches:
            raise IndexError(f"batch {index} of a data set of {self._num_batches}")
        return self._draw(index)

    def stream(self) -> Iterator[_Batch_co]:
        """The batches of the data set, followed by further batches without end."""
        return map(self._draw, itertools.count())

    def length_only_batches(self) -> Iterator[_Batch_co]:
        """Raise ValueError: lengths are drawn with the batches."""
        raise ValueError(
            "random data are drawn while they are read, so the lengths of their rows are not known before: balance "
            "loaded batches (enable_balanced_shuffler, with a shuffle_window), or read a file"
        )

    def _draw(self, index: int) -> _Batch_co:
        # Batch numbers are global, so that two ranks never draw the same batch.
        entropy = [self._seed, index * self._world_size + self._rank]
        seed = int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0])
        num_real = self._last_batch_size if index == self._num_batches - 1 else None
        return self._make(actual_batch_size=num_real, device="cpu", generator=torch.Generator().manual_seed(seed))


class RandomHSTUDataset(RandomBatches[HSTUBatch]):
    """Random HSTU batches; arguments as for `HSTUBatch.random`; `options` are arguments of `RandomBatches`.

    >>> configs = [FeatureConfig(["item"], [100], 10, is_jagged=True)]
    >>> dataset = RandomHSTUDataset(configs, "item", batch_size=4, num_batches=2)
    >>> [batch.batch_size for batch in dataset]
    [4, 4]
    """

    def __init__(
        self,
        feature_configs: Sequence[FeatureConfig],
        item_feature_name: str,
        contextual_feature_names: Sequence[str] = (),
        action_feature_name: str | None = None,
        *,
        batch_size: int,
        max_num_candidates: int = 0,
        num_tasks: int | None = None,
        timestamps: bool = False,
        **options: Any,
    ) -> None:
        contextual_feature_names = require_names("contextual_feature_names", contextual_feature_names)
        names = (item_feature_name, contextual_feature_names, action_feature_name)
        draw = partial(HSTUBatch.random, batch_size, feature_configs, *names, max_num_candidates, num_tasks)
        super().__init__(partial(draw, timestamps=timestamps), **options)
        self.item_feature_name, self.contextual_feature_names = item_feature_name, contextual_feature_names
        self.action_feature_name, self.num_tasks = action_feature_name, num_tasks
        # Number of ids of each feature.
        self.vocabulary_sizes: dict[str, int] = {}
        longest: dict[str, int] = {}
        for config in feature_configs:
            self.vocabulary_sizes |= dict(zip(config.feature_names, config.max_item_ids))
            longest |= dict.fromkeys(config.feature_names, config.max_sequence_length)
        # Maximum tokens of a row: contextual features, items and, if interleaved, their actions.
        items = longest[item_feature_name] * (1 if action_feature_name is None else 2)
        self.max_sequence_length = items + sum(longest[name] for name in contextual_feature_names)


def user_like_dataset(
    *,
    max_history_seqlen: int,
    max_num_candidates: int = 0,
    num_tasks: int | None = 1,
    num_batches: int = 100,
    length_distribution: LengthDistribution | None = None,
    **options: Any,
) -> RandomHSTUDataset:
    """Random batches that resemble a public data set: two contextual features, items and actions.

    The default of `length_distribution` is lognormal; mean and standard deviation are a quarter of the maximum length,
    so that a few long histories are a large part of the work, as in real data. `options` are arguments of
    `RandomHSTUDataset`.

    Raises:
        ValueError: lengths beyond `max_history_seqlen + max_num_candidates`; and as `RandomHSTUDataset`.
    """
    longest = max_history_seqlen + max_num_candidates
    lengths = (length_distribution or LengthDistribution()).within(longest)
    return RandomHSTUDataset(
        [
            FeatureConfig(["user_id", "age"], [100_000, 10], 1, is_jagged=False),
            FeatureConfig(["item_id", "action"], [10_000, 6], longest, is_jagged=True, seqlen_dist=lengths),
        ],
        "item_id",
        ["user_id", "age"],
        "action",
        num_batches=num_batches,
        max_num_candidates=max_num_candidates,
        num_tasks=num_tasks,
        **options,
    )


class RandomSIDDataset(RandomBatches[GPTSIDBatch]):
    """Random batches of semantic IDs, in which every row has `max_candidate_length` candidates.

    All items are equally likely. `history_dist`, by default `LengthDistribution()`, is the distribution of items per
    history or, with `max_history_length` 0, of candidates per row. `options` are arguments of `RandomBatches`.

    >>> sid_map = SIDMap(np.arange(2), np.array([[0, 1], [1, 0]]), (2, 2))
    >>> dataset = RandomSIDDataset(sid_map, batch_size=4, num_batches=2, max_history_length=5)
    >>> [batch.batch_size for batch in dataset]
    [4, 4]
    """

    def __init__(
        self,
        sid_map: SIDMap,
        *,
        batch_size: int,
        max_history_length: int,
        max_candidate_length: int = 1,
        history_dist: RandomDistribution | None = None,
        **options: Any,
    ) -> None:
        drawn = history_dist or LengthDistribution().within(max_history_length or max_candidate_length)
        distributions = {"candidate_dist": drawn}
        if max_history_length:
            fixed = RandomDistribution("uniform", low=max_candidate_length, high=max_candidate_length)
            distributions = {"history_dist": drawn, "candidate_dist": fixed}
        longest = (max_history_length, max_candidate_length)
        self.max_items = sum(longest)  # maximum items of a row, including candidates
        draw = partial(GPTSIDBatch.random, batch_size, sid_map.codebook_sizes, *longest, HISTORY, CANDIDATE)
        super().__init__(partial(draw, sids=torch.from_numpy(sid_map.codes), **distributions), **options)
