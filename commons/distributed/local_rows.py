"""WORKLOAD: what a rank knows of its own batch before anything is gathered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from commons.perf_model.partitioner import as_int64_workloads
from commons.perf_model.partitioner.core import encode_rows
from commons.sequence_batch.fields import batch_items, require_dataclass, require_no_grad, row_counts
from commons.sequence_batch.schema import BatchSchema


@dataclass(frozen=True)
class LocalRows:
    """One rank's batch at one step: what it tells the others, and what tells it from other batches.

    Attributes:
        schema: of the batch; None if there is none.
        rows: batch_size.
        real_rows: rows that are no padding.
        sizes: elements of every row field, in the schema's order.
        workloads: what `get_workloads` returned, on the host; None in mode "off".
        lengths: lengths `(keys, rows)` of every KeyedJaggedTensor field; none in mode "off".
        host_values: `(rows,)` of every field that the host keeps, see `BaseBatch`; none in mode "off".
        copied: the event after which copies from a device are complete.
        device: where the batch is trained; None if that is not known yet.
        error: what went wrong so far.
    """

    schema: BatchSchema | None = None
    rows: int = 0
    real_rows: int = 0
    sizes: tuple[int, ...] = ()
    workloads: Any = None
    lengths: tuple[np.ndarray, ...] = ()
    host_values: tuple[np.ndarray, ...] = ()
    copied: torch.Event | None = None
    device: torch.device | None = None
    error: Exception | None = None

    @classmethod
    def of(
        cls,
        batch: Any,
        device: torch.device | None,
        get_workloads: Callable[[Any, BatchSchema], Any] | None,
        *,
        moves: bool = False,
    ) -> LocalRows:
        """Describe a batch; what lies on CUDA is copied to the host without waiting.

        Args:
            batch: on the host, or on its device.
            device: where it is trained; None if that is not known yet.
            get_workloads: gives the workloads of the batch; None where they are not needed.
            moves: whether its rows may move, and so must not require grad.

        Raises:
            TypeError, ValueError: as `BatchSchema.of`, a field that requires grad, and whatever `get_workloads` raises.
        """
        require_dataclass(batch)
        items = batch_items(batch)  # the one walk over the fields
        rows, real = row_counts(batch, items)
        if moves:  # in any step: gradients must not depend on whether rows move in this one
            require_no_grad(items)
        schema = BatchSchema.of(batch, items)
        sizes = tuple(tensor.numel() for tensor in schema.row_tensors(batch))
        if get_workloads is None:
            return cls(schema, rows, real, sizes, device=device)
        jagged = [items[field.name] for field in schema.jagged]
        lengths = [value.lengths().view(len(value.keys()), rows) for value in jagged]
        kept = [items[field.name] for field in schema.host_fields]
        (workloads, *rest), copied = _on_host([get_workloads(batch, schema), *lengths, *kept])
        # As arrays, of values that may yet come: torch lets go of the interpreter lock wherever it is asked, and the
        # worker would have to wait for it as often.
        arrays = [values.numpy() for values in rest]
        lengths, kept = arrays[: len(lengths)], arrays[len(lengths) :]
        return cls(schema, rows, real, sizes, _as_array(workloads), tuple(lengths), tuple(kept), copied, device)

    @property
    def lookups(self) -> int:
        """Values of the KeyedJaggedTensors but the labels; 0 in mode "off"."""
        jagged = () if self.schema is None else self.schema.jagged
        return sum(size for field, size in zip(jagged, self.sizes) if field.name != "labels")

    def table(self, counted: Sequence[int] = ()) -> np.ndarray:
        """Workload, tokens, lengths and host values of every real row, packed; waits for copies from a device.

        Args:
            counted: keys of all KeyedJaggedTensors whose lengths add up to a row's tokens; none for one token each.

        Returns:
            int64 `(words,)`, see row_table.py.

        Raises:
            TypeError, ValueError: workloads that are not one int64 per row, or lengths that do not fit the values.
        """
        if self.copied is not None:
            self.copied.synchronize()
        workloads, sums = self.workloads, self.sizes[: len(self.lengths)]
        words = None
        if isinstance(workloads, np.ndarray) and workloads.dtype == np.int64 and workloads.flags.c_contiguous:
            words = encode_rows(workloads, self.lengths, sums, self.host_values, counted, self.rows, self.real_rows)
        if words is None:
            # They are of another type, or something is wrong with them: these two find out what.
            workloads = as_int64_workloads(_one_per_row(self.workloads, self.rows)[: self.real_rows])
            self._require_lengths()
            lengths = [each[:, : self.real_rows] for each in self.lengths]
            kept = [values[: self.real_rows] for values in self.host_values]
            words = encode_rows(workloads, lengths, sums, kept, counted, self.real_rows, self.real_rows)
        assert words is not None  # noqa: S101  everything has been checked
        return words

    def _require_lengths(self) -> None:
        """ValueError unless the lengths of every jagged field fit its values."""
        assert self.schema is not None  # noqa: S101  a rank without a batch has no lengths
        for field, lengths, num_values in zip(self.schema.jagged, self.lengths, self.sizes):
            table = lengths.astype(np.int64)
            stated = int(table.sum())
            if table.min(initial=0) < 0:
                raise ValueError(
                    f"field {field.name!r} has a length of {table.min()}; lengths are not negative: correct it"
                )
            if stated != num_values:
                raise ValueError(
                    f"field {field.name!r} has lengths that add up to {stated} and {num_values} values; values must be "
                    "exactly those of the rows: build the KeyedJaggedTensor from them alone"
                )
            if self.real_rows < self.rows and table[:, self.real_rows :].any():
                raise ValueError(
                    f"field {field.name!r} has values in padding rows [{self.real_rows}, {self.rows}); padding rows "
                    "have zero lengths: raise actual_batch_size or empty these rows"
                )


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


def _as_array(workloads: Any) -> Any:
    """A tensor of integers, one per row, as the array that shares its memory; anything else as it is."""
    if isinstance(workloads, torch.Tensor) and workloads.dim() == 1 and not workloads.is_floating_point():
        return workloads.detach().numpy()
    return workloads


def _on_host(values: list[Any]) -> tuple[list[Any], torch.Event | None]:
    """Copies in pinned memory of what lies on CUDA, and the event after which they are complete."""
    device = next((value.device for value in values if isinstance(value, torch.Tensor) and value.is_cuda), None)
    if device is None:
        return values, None
    host = [
        torch.empty(value.shape, dtype=value.dtype, pin_memory=True).copy_(value, non_blocking=True)
        if isinstance(value, torch.Tensor)
        else value
        for value in values
    ]
    # On the stream that copies: that of the tensors' device, which need not be the current one.
    copied = torch.cuda.Event()
    copied.record(torch.cuda.current_stream(device))
    return host, copied
