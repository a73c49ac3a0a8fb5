"""What packing has to know of each row, as a caller gives it or as a batch says it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from commons.dispatch.planning import as_int64_ids
from commons.perf_model.partitioner import as_int64_workloads
from commons.sequence_batch.jagged import is_keyed_jagged


@dataclass(frozen=True, eq=False)
class RowColumns:
    """Numbers of the rows of a batch, padding included."""

    lengths: np.ndarray  # int64 `(rows,)`, tokens
    workloads: np.ndarray | None  # int64 `(rows,)`, what each row costs; None where that is its tokens
    loss_tokens: np.ndarray  # int64 `(rows,)`, terms of the loss
    groups: np.ndarray | None = None  # int64 `(rows,)`: rows of equal numbers stay together; else None

    @classmethod
    def of(
        cls, batch: Any, rows: int, lengths: Any, workloads: Any, loss_tokens: Any, groups: Any = None
    ) -> RowColumns:
        """Check the columns of a batch.

        Args:
            batch: the batch, which may say how many terms of the loss its rows have.
            rows: its rows.
            lengths: tokens of each row.
            workloads: what each row costs; None where that is its tokens.
            loss_tokens: terms of the loss in each row; None where the batch says them, or they are its tokens.
            groups: integers or strings, equal for rows that stay together.

        Raises:
            ValueError: not one non-negative integer per row, or not one group.
        """
        tokens = _per_row(lengths, "lengths", rows)
        costs = None if workloads is None else _per_row(workloads, "workloads", rows)
        terms = _label_values(batch) if loss_tokens is None else _per_row(loss_tokens, "loss_tokens", rows)
        together = None if groups is None else as_int64_ids(groups, rows)
        return cls(tokens, costs, tokens if terms is None else terms, together)

    def select(self, rows: np.ndarray) -> RowColumns:
        """The numbers of some rows, int64 `(their number,)`."""
        costs = None if self.workloads is None else self.workloads[rows]
        together = None if self.groups is None else self.groups[rows]
        return RowColumns(self.lengths[rows], costs, self.loss_tokens[rows], together)


def _per_row(values: Any, name: str, rows: int) -> np.ndarray:
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu()
    return as_int64_workloads(values, name, rows)


def _label_values(batch: Any) -> np.ndarray | None:
    """Label values of each row of a BaseBatch, int64 `(rows,)`; None for other batches and without labels."""
    if not _is_base_batch(batch) or batch.labels is None:
        return None
    if is_keyed_jagged(batch.labels):
        return batch.labels.lengths().view(-1, batch.batch_size).sum(0).to("cpu", torch.int64).numpy()
    values = np.full(batch.batch_size, batch.labels[:1].numel(), np.int64)
    values[batch.actual_batch_size :] = 0
    return values


def _is_base_batch(batch: Any) -> bool:
    # Looked up rather than imported: the class needs TorchRec, and whoever has one has imported it.
    batches = sys.modules.get("commons.sequence_batch.batch")
    return isinstance(batch, getattr(batches, "BaseBatch", ()))
