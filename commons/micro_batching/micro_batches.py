"""MicroBatches: the result of packing, for a training step."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, overload

import numpy as np
import torch

from commons.dispatch.home import restore
from commons.dispatch.planning import as_int64_ids
from commons.dispatch.redistribute import RedistributedRows
from commons.micro_batching.block_packing import RowBlocks
from commons.micro_batching.fewest_groups import groups_of
from commons.micro_batching.metrics import packing_metrics
from commons.micro_batching.spec import MicroBatchSpec
from commons.perf_model.partitioner import as_int64_workloads
from commons.sequence_batch.open_batch import row_fields
from commons.sequence_batch.rows import Rows

B = TypeVar("B")
R = TypeVar("R")


@dataclass(frozen=True, eq=False)
class RowColumns:
    """One number per row of a batch, padding included, in each of several columns."""

    lengths: np.ndarray  # int64 `(rows,)`, tokens of each row
    workloads: np.ndarray | None  # int64 `(rows,)`, cost of each row; None if the cost is its tokens
    loss_tokens: np.ndarray  # int64 `(rows,)`, terms of the loss in each row
    groups: np.ndarray | None = None  # int64 `(rows,)`: rows with equal group numbers stay together; None for no groups

    @staticmethod
    def checked(
        batch: Any, rows: int, lengths: Any, workloads: Any, loss_tokens: Any, groups: Any = None
    ) -> dict[str, np.ndarray | None]:
        """The arguments of `pack_micro_batches` for `rows` rows; None if not given. Raises ValueError or TypeError."""
        return {
            "lengths": _per_row(lengths, "lengths", rows),
            "workloads": None if workloads is None else _per_row(workloads, "workloads", rows),
            "loss_tokens": _label_values(batch) if loss_tokens is None else _per_row(loss_tokens, "loss_tokens", rows),
            "groups": None if groups is None else as_int64_ids(groups, rows),
        }

    def select(self, rows: np.ndarray) -> RowColumns:
        """The columns of a selection of rows, int64 `(m,)`."""
        costs = None if self.workloads is None else self.workloads[rows]
        together = None if self.groups is None else self.groups[rows]
        return RowColumns(self.lengths[rows], costs, self.loss_tokens[rows], together)

    @classmethod
    def of(cls, columns: Mapping[str, np.ndarray | None]) -> RowColumns:
        """Columns from a dictionary; lengths are None if no rank has a row, loss tokens if they are the lengths."""
        lengths, terms = columns["lengths"], columns["loss_tokens"]
        lengths = np.empty(0, dtype=np.int64) if lengths is None else lengths
        return cls(lengths, columns["workloads"], lengths if terms is None else terms, columns["groups"])


@dataclass(frozen=True, eq=False)
class MicroBatches(Sequence[B]):
    """A sequence of the micro-batches of a batch; each is made on access, in its own storage.

    The scaled sums of loss terms add up to the gradient of the whole batch; a micro-batch without a term adds 0:

        for micro_batch in micro_batches:
            (micro_batches.loss_scale * loss_sum(model, micro_batch)).backward()
    """

    batch: B  # the whole batch; fields that are added to it later are in the micro-batches too
    groups: list[list[int]]  # the rows of each micro-batch, ascending
    lengths: list[torch.Tensor]  # tokens of each row: for each micro-batch an int64 tensor `(rows of the micro-batch,)`
    num_tokens: list[int]  # the tokens of each micro-batch
    workloads: list[int] | None  # cost of each micro-batch; None if the cost is its tokens
    loss_tokens: list[int]  # terms of the loss in each micro-batch
    # The weight of each micro-batch, loss_scale · its loss tokens, for a model that returns the *mean* of its loss
    # terms. Every micro-batch must have a term: a mean over no terms is NaN, also when multiplied by its weight of 0.
    loss_weights: list[float]
    # W ÷ the loss tokens of all ranks, where W is the number of ranks: the factor of `global_mean_loss`. loss_scale
    # times the *sum* of the loss terms, added up over the micro-batches and averaged over the ranks by
    # DistributedDataParallel, has the gradient of the mean loss over the batches of all ranks. 0.0 without terms.
    loss_scale: float
    # `packing_metrics` of the tokens under the budget (without a budget, under the largest micro-batch), with the
    # seconds that the packing took; with joint=True also the balance of the micro-batches over the ranks.
    metrics: dict[str, Any]
    # With joint=True: the exchange of the rows. `batch` then has the rows that this rank computes, and
    # `redistributed.home` the rank that each row is from. Else None.
    redistributed: RedistributedRows[B] | None = None

    @classmethod
    def of(
        cls,
        batch: B,
        spec: MicroBatchSpec,
        blocks: RowBlocks,
        parts: np.ndarray,
        columns: RowColumns,
        *,
        world_size: int,
        all_loss_tokens: int,
        seconds: float,
        costs_of_ranks: np.ndarray | None = None,
        redistributed: RedistributedRows[B] | None = None,
    ) -> MicroBatches[B]:
        """The micro-batches of a batch, from the micro-batch of each block, `parts` int64 `(blocks,)`.

        `all_loss_tokens`: terms of the loss on all ranks. `costs_of_ranks`: int64 `(ranks, micro-batches)`, if known.
        """
        lengths, workloads, loss_tokens = columns.lengths, columns.workloads, columns.loss_tokens
        groups = groups_of(parts[blocks.of_row])
        num_tokens = [int(lengths[rows].sum()) for rows in groups]
        terms = [int(loss_tokens[rows].sum()) for rows in groups]
        capacity = spec.max_tokens_per_mb or max(1, *num_tokens)
        return cls(
            batch=batch,
            groups=groups,
            lengths=[torch.from_numpy(lengths[rows]) for rows in groups],
            num_tokens=num_tokens,
            workloads=None if workloads is None else [int(workloads[rows].sum()) for rows in groups],
            loss_tokens=terms,
            loss_weights=[world_size * each / all_loss_tokens if all_loss_tokens else 0.0 for each in terms],
            loss_scale=world_size / all_loss_tokens if all_loss_tokens else 0.0,
            metrics=packing_metrics(
                blocks.sums(lengths), groups_of(parts), capacity, seconds, costs_of_ranks=costs_of_ranks
            ),
            redistributed=redistributed,
        )

    def __len__(self) -> int:
        return len(self.groups)

    def __iter__(self) -> Iterator[B]:
        rows = Rows.of(self.batch)
        return (rows.select(group).batch for group in self.groups)

    @overload
    def __getitem__(self, index: int) -> B: ...
    @overload
    def __getitem__(self, index: slice) -> list[B]: ...
    def __getitem__(self, index: int | slice) -> B | list[B]:
        rows = Rows.of(self.batch)  # on every access, because a caller may have added fields
        if isinstance(index, slice):
            return [rows.select(group).batch for group in self.groups[index]]
        return rows.select(self.groups[index]).batch

    def __repr__(self) -> str:
        rows, tokens = [len(group) for group in self.groups], self.num_tokens
        return f"MicroBatches({len(self)} of {min(rows)} to {max(rows)} rows, {min(tokens)} to {max(tokens)} tokens)"

    @property
    def forward_indices(self) -> torch.Tensor:
        """int64 `(rows,)`: for each row of the concatenated micro-batches, its row in the batch."""
        return torch.tensor([row for group in self.groups for row in group], dtype=torch.int64, device="cpu")

    @property
    def backward_indices(self) -> torch.Tensor:
        """int64 `(rows,)`: for each row of the batch, its row in the concatenated micro-batches.

        `torch.cat(outputs)[backward_indices]` is in the order of the batch.
        """
        return torch.argsort(self.forward_indices)

    def restore(self, results: Iterable[R]) -> R:
        """Concatenate the results of all micro-batches, in the order of the rows of `batch`.

        After packing with joint=True these are rows of any ranks: `send_home` returns the results of the rank's own.

        Args:
            results: for each micro-batch a tensor, or any other batch without padding, with one row per row.

        Raises:
            ValueError: the number of results or of their rows is wrong, or results cannot be joined or have padding.
        """
        return restore(
            results, [torch.tensor(group, device="cpu") for group in self.groups], "micro-batch", "micro-batches"
        )

    def send_home(self, results: Iterable[R]) -> R | None:
        """Send the results of all micro-batches to the ranks that their rows are from, in the order of these rows.

        Collective after packing with joint=True; else `restore`, because no row has moved. Results per token of trimmed
        batches are as wide as `batch`; `redistributed.untrim` restores their width.

        Args:
            results: as for `restore`.

        Returns:
            Results of this rank's own real rows; None if it had no rows.

        Raises:
            ValueError: as `restore`; on all ranks.
            TypeError: results that cannot be sent; on all ranks.
            RankMissingError: a rank did not call this in time.
        """
        if self.redistributed is None:
            return self.restore(results)
        return self.redistributed.send_home_made_by(lambda: self.restore(results))


def _per_row(values: Any, name: str, rows: int) -> np.ndarray:
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu()
    return as_int64_workloads(values, name, rows)


def _label_values(batch: Any) -> np.ndarray | None:
    """Label values of each row of a BaseBatch, int64 `(rows,)`; None for other batches and without labels."""
    # Looked up rather than imported, because the class needs TorchRec; a caller with a BaseBatch has imported it.
    base_batch = getattr(sys.modules.get("commons.sequence_batch.batch"), "BaseBatch", ())
    if not isinstance(batch, base_batch) or batch.labels is None:
        return None
    values = np.zeros(batch.batch_size, np.int64)
    for _, labels in row_fields(batch.labels) if batch.batch_size else ():
        if isinstance(labels, torch.Tensor):
            values[: batch.actual_batch_size] += labels[:1].numel()
        else:
            values += labels.lengths().view(-1, batch.batch_size).sum(0).cpu().numpy()
    return values
