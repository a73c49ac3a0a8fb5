"""Negatives of retrieval, drawn with the row that they belong to.

    sampler ─► (epoch, rows) ─► data set ─► batch ─► + a feature of drawn ids ─► shuffle, look-up, …

A row brings its own negatives, so they are the same on whatever rank it is trained, and they follow from seed, epoch
and the row's place in the data set alone: ranks, workers and a resumed run draw the same.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from commons.datasets.hstu_batch import HSTUBatch, outline_kjt
from commons.datasets.loader.resumable import ResumableLoader
from commons.sequence_batch.fields import copy_batch
from commons.splitmix import as_fraction, splitmix64

RowKey = int | Sequence[int]


def draw_negatives(rows: np.ndarray, num_negatives: int, num_items: int, *, seed: int, epoch: int) -> np.ndarray:
    """Uniform ids in `[0, num_items)` for rows of a data set, with repetitions: int64 `(num_rows, num_negatives)`.

    Number k of a row is `splitmix64` of a state that seed, epoch, row and k determine. `rows` are int64 `(num_rows,)`.

    >>> draw_negatives(np.array([7, 8]), 3, 100, seed=0, epoch=0).shape
    (2, 3)
    """
    stream = np.random.SeedSequence([seed, epoch]).generate_state(1, np.uint64)
    of_row = splitmix64(stream + splitmix64(rows.astype(np.uint64)))
    drawn = splitmix64(of_row[:, None] + splitmix64(np.arange(num_negatives, dtype=np.uint64)))
    # The ids' probabilities differ by less than num_items ÷ 2^53.
    return (as_fraction(drawn) * num_items).astype(np.int64)


def with_negatives(batch: HSTUBatch, feature_name: str, negatives: torch.Tensor) -> HSTUBatch:
    """A host batch whose real rows have one more feature, `RetrievalConfig.negatives_feature_name`.

    `negatives` are integers `(real rows, num_negatives)`; padding rows get none.
    """
    features, num_negatives = batch.features, negatives.shape[1]
    lengths = torch.zeros(batch.batch_size, dtype=features.lengths().dtype)
    lengths[: negatives.shape[0]] = num_negatives
    extended = KeyedJaggedTensor(
        keys=[*features.keys(), feature_name],
        values=torch.cat([features.values(), negatives.flatten().to(features.values().dtype)]),
        lengths=torch.cat([features.lengths(), lengths]),
        stride=batch.batch_size,
        length_per_key=[*features.length_per_key(), negatives.numel()],
    )
    longest = batch.feature_to_max_seqlen | {feature_name: num_negatives}
    return copy_batch(batch, {"features": extended, "feature_to_max_seqlen": longest})


class NegativeSampling(Dataset[HSTUBatch]):
    """A data set of batches whose rows bring negatives; its keys are `(epoch, key of the data set)`.

    Args:
        dataset: its items are host batches; its keys are row numbers, or the number of a ready batch.
        feature_name: key of the negatives.
        num_negatives: ids per row; 0 for batches that only have the feature.
        num_items: ids lie in `[0, num_items)`.
        seed: of the run.
        rank: of this rank; distinguishes ready batches of several ranks.
        world_size: ranks.
    """

    def __init__(
        self,
        dataset: Dataset[HSTUBatch],
        feature_name: str,
        num_negatives: int,
        num_items: int,
        *,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.dataset = dataset
        self._feature_name = feature_name
        self._num_negatives = num_negatives
        self._num_items = num_items
        self._seed = seed
        self._rank = rank
        self._world_size = world_size

    def __getitem__(self, key: tuple[int, RowKey]) -> HSTUBatch:
        epoch, rows = key
        batch = self.dataset[cast(int, rows)]
        if isinstance(rows, int):
            first = (rows * self._world_size + self._rank) * batch.batch_size
            row_ids = np.arange(first, first + cast(int, batch.actual_batch_size))
        else:
            row_ids = np.asarray(rows, dtype=np.int64)
        drawn = draw_negatives(row_ids, self._num_negatives, self._num_items, seed=self._seed, epoch=epoch)
        return with_negatives(batch, self._feature_name, torch.from_numpy(drawn))

    def outlines(self) -> Iterator[HSTUBatch]:
        """What the data set gives as `outlines`, with the lengths of the negatives.

        Raises:
            ValueError: random data, whose lengths are not known beforehand.
        """
        dataset: Any = self.dataset  # torch's Dataset knows no outlines
        return map(self._with_outlined_negatives, dataset.outlines())

    def _with_outlined_negatives(self, outline: HSTUBatch) -> HSTUBatch:
        keys = outline.features.keys()
        lengths = dict(zip(keys, outline.features.lengths().view(len(keys), -1)))
        lengths[self._feature_name] = torch.full((outline.batch_size,), self._num_negatives)
        longest = outline.feature_to_max_seqlen | {self._feature_name: self._num_negatives}
        return copy_batch(outline, {"features": outline_kjt(lengths), "feature_to_max_seqlen": longest})


def sample_negatives(
    loader: DataLoader[Any], feature_name: str, num_negatives: int, num_items: int, **options: Any
) -> ResumableLoader:
    """A loader of the same batches, whose rows bring negatives; arguments as those of `NegativeSampling`."""
    sampler: Any = copy.copy(loader.sampler)
    sampler.yields_epochs = True
    return ResumableLoader(
        NegativeSampling(loader.dataset, feature_name, num_negatives, num_items, **options),
        sampler,
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory,
    )
