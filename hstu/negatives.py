"""Negatives for retrieval, drawn per row when the row is loaded.

    sampler ─► (epoch, rows) ─► data set ─► batch ─► + a feature of drawn ids ─► shuffle, look-up, …

The negatives of a row are in the batch and move with the row, so they do not depend on the rank that trains it. They
are a function of seed, epoch and row number, so any rank or worker, and a resumed run, draws the same negatives.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from commons.datasets.hstu_batch import HSTUBatch, length_only_kjt, padded_kjt
from commons.datasets.loader.resumable import STATEMENTS, ResumableLoader, stated_by
from commons.sequence_batch.fields import copy_batch
from commons.splitmix import as_fraction, splitmix64

RowKey = int | Sequence[int]


def draw_negatives(rows: np.ndarray, num_negatives: int, num_items: int, *, seed: int, epoch: int) -> np.ndarray:
    """Uniform ids in `[0, num_items)` for rows of a data set, with repetitions: int64 `(num_rows, num_negatives)`.

    The k-th id of a row is from `splitmix64` of seed, epoch, row number and k. `rows` are row numbers, int64
    `(num_rows,)`.

    >>> draw_negatives(np.array([7, 8]), 3, 100, seed=0, epoch=0).shape
    (2, 3)
    """
    stream = np.random.SeedSequence([seed, epoch]).generate_state(1, np.uint64)
    of_row = splitmix64(stream + splitmix64(rows.astype(np.uint64)))
    drawn = splitmix64(of_row[:, None] + splitmix64(np.arange(num_negatives, dtype=np.uint64)))
    # The ids' probabilities differ by less than num_items ÷ 2^53.
    return (as_fraction(drawn) * num_items).astype(np.int64)


def with_negatives(batch: HSTUBatch, feature_name: str, negatives: torch.Tensor) -> HSTUBatch:
    """A host batch with one more feature of negatives, see `RetrievalConfig.negatives_feature_name`.

    `negatives` are integers `(real rows, num_negatives)`; padding rows have no negatives.
    """
    features, (num_rows, num_negatives) = batch.features, negatives.shape
    ids = negatives.flatten().to(features.values().dtype)
    lengths = features.lengths().new_full((num_rows,), num_negatives)
    added = padded_kjt({feature_name: ids}, {feature_name: lengths}, batch.batch_size)
    extended = KeyedJaggedTensor.concat([features, added])
    longest = batch.feature_to_max_seqlen | {feature_name: num_negatives}
    return copy_batch(batch, {"features": extended, "feature_to_max_seqlen": longest})


@dataclass(eq=False)
class NegativeSampling(Dataset[HSTUBatch]):
    """A data set whose batches have negatives; its keys are `(epoch, key of the wrapped data set)`."""

    # The wrapped data set of host batches; its keys are row numbers, or the number of a ready-made batch.
    dataset: Dataset[HSTUBatch]
    feature_name: str  # key of the negatives in the batch
    num_negatives: int  # negatives per row; 0 for an empty feature
    num_items: int  # ids are in `[0, num_items)`
    seed: int = field(kw_only=True)  # seed of the run
    # Number of this rank; used to number the rows of ready-made batches, which differ between ranks.
    rank: int = field(default=0, kw_only=True)
    world_size: int = field(default=1, kw_only=True)  # number of ranks

    def __post_init__(self) -> None:
        for name in STATEMENTS:
            setattr(self, name, stated_by(self.dataset, name))

    def __getitem__(self, key: tuple[int, RowKey]) -> HSTUBatch:
        epoch, rows = key
        batch = self.dataset[cast(int, rows)]
        if isinstance(rows, int):
            first = (rows * self.world_size + self.rank) * batch.batch_size
            row_ids = np.arange(first, first + cast(int, batch.actual_batch_size))
        else:
            row_ids = np.asarray(rows, dtype=np.int64)
        drawn = draw_negatives(row_ids, self.num_negatives, self.num_items, seed=self.seed, epoch=epoch)
        return with_negatives(batch, self.feature_name, torch.from_numpy(drawn))

    def length_only_batches(self) -> Iterator[HSTUBatch]:
        """The data set's `length_only_batches`, with the lengths of the negatives added.

        Raises:
            ValueError: random data, whose lengths are not known before they are drawn.
        """
        dataset: Any = self.dataset  # torch's Dataset has no length_only_batches
        return map(self._with_negative_lengths, dataset.length_only_batches())

    def _with_negative_lengths(self, batch: HSTUBatch) -> HSTUBatch:
        keys = batch.features.keys()
        lengths = dict(zip(keys, batch.features.lengths().view(len(keys), -1)))
        lengths[self.feature_name] = torch.full((batch.batch_size,), self.num_negatives, device="cpu")
        longest = batch.feature_to_max_seqlen | {self.feature_name: self.num_negatives}
        return copy_batch(batch, {"features": length_only_kjt(lengths), "feature_to_max_seqlen": longest})


def sample_negatives(
    loader: DataLoader[Any], feature_name: str, num_negatives: int, num_items: int, **options: Any
) -> ResumableLoader:
    """A loader of the same batches with negatives; for the arguments see `NegativeSampling`."""
    sampler: Any = copy.copy(loader.sampler)
    sampler.yields_epochs = True
    return ResumableLoader(
        NegativeSampling(loader.dataset, feature_name, num_negatives, num_items, **options),
        sampler,
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory,
    )
