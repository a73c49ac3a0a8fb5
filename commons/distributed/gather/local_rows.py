"""WORKLOAD: LocalRows, the description of a rank's batch before the gather, and its encoding as a message."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from commons.perf_model.partitioner import as_int64_workloads
from commons.perf_model.partitioner.core import encode_rows
from commons.perf_model.partitioner.inputs import as_groups
from commons.sequence_batch.fields import path_name
from commons.sequence_batch.jagged_fields import require_sum
from commons.sequence_batch.schema import BatchSchema


@dataclass(eq=False)  # not frozen, because a frozen one takes longer to make, and one is made per batch
class LocalRows:
    """The description of one rank's batch at one step: the numbers to gather, and the sizes that identify the batch."""

    schema: BatchSchema | None = None  # of the batch; None without a batch
    rows: int = 0  # batch_size
    real_rows: int = 0  # rows that are no padding
    sizes: tuple[int, ...] = ()  # of every row field, see `BatchSchema.sizes`
    workloads: Any = None  # the result of `get_workloads`, on the host; None in mode "off"
    lengths: Sequence[np.ndarray] = ()  # lengths `(keys, rows)` of every jagged field; none in mode "off"
    # `(rows,)` of every field with host values, see `BaseBatch`; none in mode "off".
    host_values: Sequence[np.ndarray] = ()
    groups: Any = None  # the result of `get_groups`, on the host; None if every row moves independently
    copied: torch.Event | None = None  # the event after which copies from a device are complete
    error: Exception | None = None  # an error in the batch or its description

    @property
    def elements(self) -> int:
        """Elements of all row fields, for messages; in jagged fields, the values that the lengths count."""
        return sum(self.sizes)

    @property
    def lookups(self) -> int:
        """Values of the KeyedJaggedTensors except the labels; 0 in mode "off"."""
        jagged = () if self.schema is None else self.schema.jagged
        return sum(size for field, size in zip(jagged, self.sizes) if field.is_lookup)

    def table(self, counted: Sequence[int] | np.ndarray = ()) -> np.ndarray:
        """Pack workload, tokens, lengths, host values and group of every real row; waits for copies from a device.

        The lengths of the keys with the indices `counted` add up to a row's tokens; without any, a row is one token.

        Returns:
            int64 `(words,)`, see `GatheredRows`.

        Raises:
            TypeError, ValueError: workloads that are not one int64 per row, or lengths that do not fit the values.
        """
        if self.copied is not None:
            self.copied.synchronize()
        workloads, sums = self.workloads, self.sizes[: len(self.lengths)]
        kept = list(self.host_values)
        if self.groups is not None:
            kept.append(as_groups(self.groups, self.rows))
        words = None
        if isinstance(workloads, np.ndarray) and workloads.dtype == np.int64 and workloads.flags.c_contiguous:
            words = encode_rows(workloads, self.lengths, sums, kept, counted, self.rows, self.real_rows)
        if words is None:
            # Another integer type, or a mistake, which these two functions report.
            workloads = as_int64_workloads(_one_per_row(self.workloads, self.rows)[: self.real_rows])
            self._require_lengths()
            lengths = [each[:, : self.real_rows] for each in self.lengths]
            kept = [values[: self.real_rows] for values in kept]
            words = encode_rows(workloads, lengths, sums, kept, counted, self.real_rows, self.real_rows)
        assert words is not None  # noqa: S101  everything has been checked
        return words

    def _require_lengths(self) -> None:
        """ValueError unless the lengths of every jagged field fit its values."""
        assert self.schema is not None  # noqa: S101  a rank without a batch has no lengths
        for field, lengths, num_values in zip(self.schema.jagged, self.lengths, self.sizes):
            table, name = lengths.astype(np.int64), path_name(field.path)
            if table.min(initial=0) < 0:
                raise ValueError(f"field {name!r} has a length of {table.min()}; lengths are not negative: correct it")
            require_sum(field.path, int(table.sum()), num_values)
            if self.real_rows < self.rows and table[:, self.real_rows :].any():
                raise ValueError(
                    f"field {name!r} has values in padding rows [{self.real_rows}, {self.rows}); padding rows "
                    "have zero lengths: raise actual_batch_size or empty these rows"
                )


def message_of(
    step: int, local: Sequence[LocalRows], tables: Sequence[np.ndarray], header: int, capacity: int
) -> np.ndarray:
    """The message of a rank about its batches, int64 `(header + capacity,)`; shuffle_plan.py describes the numbers.

    `tables` has the packed rows of each batch, which are cut off at the capacity, and is empty after an error. Entries
    of `local` without a schema are skipped.
    """
    message, numbers, at = np.zeros(header + capacity, dtype=np.int64), [step, 0], header
    for each, words in zip(local, tables):
        if each.schema is not None:
            numbers[1] += 1
            numbers += (each.rows, each.real_rows, len(words))
            message[at : at + len(words)] = words[: max(0, len(message) - at)]
            at += len(words)
    message[: len(numbers)] = numbers
    return message


def counted_keys(schema: BatchSchema, features: tuple[str, ...] | None) -> np.ndarray:
    """Indices of the keys whose lengths count as tokens, int64: those in `features`, or all except the labels'."""
    keys = [key for field in schema.jagged for key in ((None,) * len(field.keys) if field.is_label else field.keys)]
    counted = [key is not None and (features is None or key in features) for key in keys]
    return np.flatnonzero(np.array(counted, dtype=bool))


def _one_per_row(workloads: Any, rows: int) -> Any:
    count = len(workloads) if hasattr(workloads, "__len__") else None
    if isinstance(workloads, (torch.Tensor, np.ndarray)) and workloads.ndim != 1:
        raise ValueError(
            f"workloads have shape {tuple(workloads.shape)}, batch_size is {rows}; one number per row is needed: "
            f"return shape ({rows},)"
        )
    if count != rows:
        raise ValueError(
            f"workloads has {count} entries, batch_size is {rows}; one per row is needed, padding included: return one "
            "per sample"
        )
    return workloads
