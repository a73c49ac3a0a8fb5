"""Batches from the columnar files of a data set: histories, candidates and labels.

Input: files written by a preprocessor, and rows chosen by a sampler. Output: HSTUBatch on the CPU. Only a user's last
`max_history_seqlen + num_candidates` items are kept; the last `num_candidates` of them are the candidates.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data import Dataset
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from commons.datasets.hstu_batch import HSTUBatch, length_only_kjt, padded_kjt
from commons.datasets.sequences.file import SequenceFile, SequenceSchema
from commons.datasets.sequences.metadata import TIMESTAMP

_ROWS_PER_LENGTH_ONLY_BATCH = 2**16
_Batch_co = TypeVar("_Batch_co", covariant=True)


class UserDataset(Dataset[_Batch_co]):
    """Users of one split; `dataset[rows]` is the batch of these rows."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of users of the split."""

    def __getitem__(self, rows: int | Sequence[int]) -> _Batch_co:
        """The batch of `rows`, counted within the split; fewer rows than the batch size are padded.

        Raises:
            IndexError: a row outside the split.
        """
        selected = np.atleast_1d(np.asarray(rows, dtype=np.int64))
        outside = selected[(selected < 0) | (selected >= len(self))]
        if outside.size:
            raise IndexError(f"row {outside[0]} of a split of {len(self)} users")
        return self._assemble(selected)

    @property
    def row_order(self) -> dict[str, Any]:
        """What determines which user is which row, JSON-ready; empty if unknown."""
        return {}

    @property
    def row_contents(self) -> dict[str, Any]:
        """How much the rows contain, JSON-ready; empty if unknown."""
        return {}

    def length_only_batches(self) -> Iterator[_Batch_co]:
        """All users of the split in order, as batches of lengths only: their values are 0 and take no memory.

        They are arguments for any shuffler's `get_workloads`, because a row's workload depends only on its lengths.
        They have at most 65,536 rows, and no padding.
        """
        lengths = self._item_counts()
        for first in range(0, len(lengths), _ROWS_PER_LENGTH_ONLY_BATCH):
            yield self._length_only_batch(lengths[first : first + _ROWS_PER_LENGTH_ONLY_BATCH])

    @abstractmethod
    def _assemble(self, rows: np.ndarray) -> _Batch_co: ...

    @abstractmethod
    def _item_counts(self) -> np.ndarray:
        """Number of items of every user, int64 `(num_users,)`."""

    @abstractmethod
    def _length_only_batch(self, lengths: np.ndarray) -> _Batch_co:
        """A batch of lengths only, for users with these numbers of items."""


class SequenceDataset(UserDataset[HSTUBatch]):
    """Users of one split; `dataset[rows]` is the batch of these rows.

    Args:
        path: the folder `<name>.parquet`, or its parent folder.
        schema: schema of the data set.
        split: "train" or "test".
        batch_size: rows of every batch; batches of fewer rows are padded.
        max_history_seqlen: maximum items of the history; older items are cut off.
        max_num_candidates: maximum candidates. A user of n items has at most n − 1, so that a history remains.
        num_tasks: number of labels, for the first of the schema's tasks; no labels if the schema has no tasks.
        table_sizes: rows of the model's embedding tables by feature, to check the vocabularies against; None if the
            model makes its tables from `vocabulary_sizes`.
        timestamps: whether batches have a further feature "timestamp": the time of every item in seconds, also if the
            files have another unit. It adds no tokens, and has no vocabulary.

    Raises:
        FileNotFoundError: no data set at `path`.
        ValueError: files that are damaged or of another data set, an empty split, too many tasks, or a vocabulary
            larger than its table.
    """

    def __init__(
        self,
        path: str | Path,
        schema: SequenceSchema,
        *,
        split: str,
        batch_size: int,
        max_history_seqlen: int,
        max_num_candidates: int = 0,
        num_tasks: int = 1,
        table_sizes: Mapping[str, int] | None = None,
        timestamps: bool = False,
    ) -> None:
        if schema.tasks and num_tasks > len(schema.tasks):
            raise ValueError(
                f"num_tasks is {num_tasks}, {schema.dataset_name!r} has labels for {len(schema.tasks)} tasks: give a "
                f"number between 1 and {len(schema.tasks)}"
            )
        self.schema = schema
        self.max_history_seqlen = max_history_seqlen
        self.max_num_candidates = max_num_candidates
        self.num_tasks = num_tasks if schema.tasks else 0
        self.timestamps = timestamps
        self._batch_size = batch_size
        # Maximum tokens of each feature in a row; for timestamps, which are not tokens, maximum values.
        longest = max_history_seqlen + max_num_candidates
        listed = [name for name in (schema.item_feature_name, schema.action_feature_name) if name is not None]
        tokens = {**dict.fromkeys(schema.contextual_feature_names, 1), **dict.fromkeys(listed, longest)}
        self.feature_to_max_seqlen = {**tokens, TIMESTAMP: longest} if timestamps else tokens
        # Maximum tokens of a row: contextual features, items and, if any, their interleaved actions.
        self.max_sequence_length = sum(tokens.values())
        if timestamps and schema.timestamps_per_second is None:
            raise ValueError(
                f"timestamps is True, and {schema.dataset_name!r} was preprocessed without times: set columns.time and "
                "preprocess the data again, or turn off what needs timestamps (time_bias)"
            )
        self._file = SequenceFile(path, schema.dataset_name, list(self.feature_to_max_seqlen))
        self.metadata = self._file.metadata
        columns = self.metadata.columns
        plain = [name for name in self.metadata.vocabulary_sizes if not columns.get(name, "list").startswith("list")]
        wrong = [name for name in schema.contextual_feature_names if name not in plain]
        if wrong:
            raise ValueError(
                f"contextual_feature_names has {wrong}; a contextual feature has one id per user: choose from {plain}"
            )
        self._rows = self._file.split_rows(split)
        if not self._rows:
            raise ValueError(
                f"split {split!r} of {self._file.path} has no users; a data set has at least one: preprocess the data "
                "with another test fraction or seed"
            )
        # Number of ids of each feature, except timestamps.
        self.vocabulary_sizes = {name: self.metadata.vocabulary_sizes[name] for name in tokens}
        digests = self.metadata.vocabulary_digests
        self.vocabulary_digests = {name: digests[name] for name in tokens if name in digests}
        if schema.action_names:  # a few names, which need no digest
            self.vocabulary_digests[str(schema.action_feature_name)] = ", ".join(schema.action_names)
        self.labels = schema.task_names[: self.num_tasks]
        for name, ids in self.vocabulary_sizes.items():
            size = (table_sizes or {}).get(name)
            if size is not None and ids > size:
                raise ValueError(
                    f"the table of {name!r} has {size:,} rows, the vocabulary has {ids:,} ids; every id needs a row: "
                    f"give the table {ids:,} rows"
                )

    def __len__(self) -> int:
        """Number of users of the split."""
        return len(self._rows)

    @property
    def row_order(self) -> dict[str, Any]:
        return self.metadata.row_order(self.schema.user_feature_name)

    @property
    def row_contents(self) -> dict[str, Any]:
        return self.metadata.row_contents()

    def _item_counts(self) -> np.ndarray:
        return self._file.list_lengths(self.schema.item_feature_name, self._rows)

    def _length_only_batch(self, lengths: np.ndarray) -> HSTUBatch:
        num_candidates, kept = self._cut(lengths)
        tasks = [f"task_{index}" for index in range(self.num_tasks)]
        targets = dict.fromkeys(tasks, kept if self.max_num_candidates == 0 else num_candidates)
        labels = length_only_kjt(targets, torch.float32) if tasks else None
        return self._batch(length_only_kjt(self._feature_lengths(kept)), labels, num_candidates, batch_size=len(kept))

    def _cut(self, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Numbers of candidates, and of kept items including candidates, for rows of given numbers of items."""
        num_candidates = np.clip(lengths - 1, 0, self.max_num_candidates)
        return num_candidates, np.minimum(lengths, self.max_history_seqlen + num_candidates)

    def _feature_lengths(self, kept: np.ndarray) -> dict[str, np.ndarray]:
        """Lengths of every feature in rows with these numbers of items."""
        contextual = set(self.schema.contextual_feature_names)
        return {name: np.ones_like(kept) if name in contextual else kept for name in self.feature_to_max_seqlen}

    def _assemble(self, rows: np.ndarray) -> HSTUBatch:
        schema = self.schema
        users = self._file.select(rows + self._rows.start)
        num_candidates, kept = self._cut(users.lengths(schema.item_feature_name))  # (num_rows,)
        batch_size = max(self._batch_size, len(rows))
        values = {name: users.values(name) for name in schema.contextual_feature_names}
        values[schema.item_feature_name] = users.tails(schema.item_feature_name, kept)
        actions = np.empty(0, np.int64)
        if schema.action_feature_name is not None:
            actions = values[schema.action_feature_name] = users.tails(schema.action_feature_name, kept)  # (sum(kept),)
        if self.timestamps:
            values[TIMESTAMP] = users.tails(TIMESTAMP, kept) // (schema.timestamps_per_second or 1)
        return self._batch(
            padded_kjt(values, self._feature_lengths(kept), batch_size),
            self._labels(actions, kept, num_candidates, batch_size),
            num_candidates,
            batch_size=batch_size,
        )

    def _batch(
        self, features: KeyedJaggedTensor, labels: KeyedJaggedTensor | None, num_candidates: np.ndarray, batch_size: int
    ) -> HSTUBatch:
        schema, num_rows = self.schema, len(num_candidates)
        padded = torch.from_numpy(np.pad(num_candidates, (0, batch_size - num_rows)))
        return HSTUBatch(
            features=features,
            batch_size=batch_size,
            feature_to_max_seqlen=dict(self.feature_to_max_seqlen),
            contextual_feature_names=list(schema.contextual_feature_names),
            labels=labels,
            actual_batch_size=num_rows,
            item_feature_name=schema.item_feature_name,
            action_feature_name=schema.action_feature_name,
            max_num_candidates=self.max_num_candidates,
            num_candidates=padded if self.max_num_candidates > 0 else None,
        )

    def _labels(
        self, actions: np.ndarray, kept: np.ndarray, num_candidates: np.ndarray, batch_size: int
    ) -> KeyedJaggedTensor | None:
        """Labels, one per candidate or, without candidates, per item; None without tasks."""
        tasks = {f"task_{index}": task for index, task in enumerate(self.schema.tasks[: self.num_tasks])}
        if not tasks:
            return None
        targets = kept
        if self.max_num_candidates > 0:
            actions, targets = actions[are_last(kept, num_candidates)], num_candidates
        return padded_kjt(
            {name: (task(actions) != 0).astype(np.float32) for name, task in tasks.items()},
            dict.fromkeys(tasks, targets),
            batch_size,
        )


def are_last(lengths: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Mask of the last `counts` entries of each row: bool `(sum(lengths),)`; arguments are int64 `(num_rows,)`."""
    from_end = np.repeat(np.cumsum(lengths), lengths) - np.arange(lengths.sum())
    return from_end <= np.repeat(counts, lengths)
