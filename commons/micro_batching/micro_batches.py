"""MicroBatches: what packing returns, and what a training step needs of it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
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
    """Numbers of the rows of a batch, padding included."""

    lengths: np.ndarray  # int64 `(rows,)`, tokens
    workloads: np.ndarray | None  # int64 `(rows,)`, what each row costs; None where that is its tokens
    loss_tokens: np.ndarray  # int64 `(rows,)`, terms of the loss
    groups: np.ndarray | None = None  # int64 `(rows,)`: rows of equal numbers stay together; else None

    @classmethod
    def of(
        cls, batch: Any, rows: int, lengths: Any, workloads: Any, loss_tokens: Any, groups: Any = None
    ) -> RowColumns:
        """Check the columns of a batch of so many rows, as `pack_micro_batches` takes them; ValueError, TypeError."""
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

    @classmethod
    def of_gathered(cls, columns: Mapping[str, np.ndarray | None]) -> RowColumns:
        """The columns by name, of the rows of all ranks or of real rows alone; None where nobody has a row."""
        nothing = np.empty(0, dtype=np.int64)
        lengths, terms = (nothing if (each := columns[name]) is None else each for name in ("lengths", "loss_tokens"))
        return cls(lengths, columns["workloads"], terms, columns["groups"])


@dataclass(frozen=True, eq=False)
class MicroBatches(Sequence[B]):
    """A batch cut into micro-batches; a sequence of these, each made when it is asked for, in storage of its own.

    Sums of loss terms add up to the gradient of the whole batch; a micro-batch without a term adds 0:

        for micro_batch in micro_batches:
            (micro_batches.loss_scale * loss_sum(model, micro_batch)).backward()
    """

    batch: B  # the whole batch
    groups: list[list[int]]  # the rows of each micro-batch, ascending
    lengths: list[torch.Tensor]  # for each micro-batch an int64 tensor `(its rows,)`: the tokens of its rows
    num_tokens: list[int]  # the tokens of each micro-batch
    workloads: list[int] | None  # what each micro-batch costs, where that is not its tokens
    loss_tokens: list[int]  # terms of the loss in each micro-batch
    # The same for a model that gives the *mean* of each micro-batch: loss_scale · its loss tokens. Only where every
    # micro-batch has a term: a mean over none is 0 ÷ 0, and stays NaN times its weight of 0.
    loss_weights: list[float]
    # W ÷ the loss tokens of all ranks, W being the number of ranks: the factor of `global_mean_loss`. The *sum* of the
    # loss terms of each micro-batch times this, added up, has the gradient of the mean loss over the batches of all
    # ranks, once DistributedDataParallel has averaged it. Zero if there are no terms.
    loss_scale: float
    # `packing_metrics` of the tokens under the budget (without one, under the largest micro-batch), with the seconds
    # that the packing took; with joint=True also how even the micro-batches are over the ranks.
    metrics: dict[str, Any]
    # How the rows came here, where all ranks were planned together (joint=True): `batch` is the rows that this rank
    # computes, `redistributed.home` says where each comes from. Else None.
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
        """A batch whose rows are packed.

        `parts` int64 `(blocks,)` is the micro-batch of each block; `columns` the numbers of the rows; `all_loss_tokens`
        the terms of the loss on all ranks; `costs_of_ranks` int64 `(ranks, micro-batches)`, where they are known.
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
        return (self[index] for index in range(len(self)))

    @overload
    def __getitem__(self, index: int) -> B: ...
    @overload
    def __getitem__(self, index: slice) -> list[B]: ...
    def __getitem__(self, index: int | slice) -> B | list[B]:
        if isinstance(index, slice):
            return [self._rows.select(rows).batch for rows in self.groups[index]]
        return self._rows.select(self.groups[index]).batch

    @cached_property
    def _rows(self) -> Rows[B]:
        return Rows.of(self.batch)

    def __repr__(self) -> str:
        rows, tokens = [len(group) for group in self.groups], self.num_tokens
        return f"MicroBatches({len(self)} of {min(rows)} to {max(rows)} rows, {min(tokens)} to {max(tokens)} tokens)"

    @property
    def forward_indices(self) -> torch.Tensor:
        """int64 `(rows,)`: the row of the batch that each row of the micro-batches, put end to end, is."""
        return torch.tensor([row for group in self.groups for row in group], dtype=torch.int64)

    @property
    def backward_indices(self) -> torch.Tensor:
        """int64 `(rows,)`: where each row of the batch is in the micro-batches put end to end.

        So `torch.cat(outputs)[backward_indices]` is in the order of the batch.
        """
        return torch.argsort(self.forward_indices)

    def restore(self, results: Sequence[R]) -> R:
        """Results of all micro-batches as one, in the order of the batch.

        Args:
            results: for each micro-batch a tensor, or any other batch without padding, with a row per row of it.

        Raises:
            ValueError: another number of results than micro-batches, or of rows than in a micro-batch; results that
                cannot be joined, or with padding.
        """
        return restore(results, [torch.tensor(group) for group in self.groups], "micro-batch", "micro-batches")

    def send_home(self, results: Sequence[R]) -> R | None:
        """Results of all micro-batches, each with the rank that its rows come from, in the order of the rows there.

        After packing with joint=True all ranks call this together; else no row came from elsewhere, and this is
        `restore`. Results per token of batches that were trimmed are as wide as `batch`: `redistributed.untrim`.

        Args:
            results: as for `restore`.

        Returns:
            Results of this rank's own real rows; None if it had no rows.

        Raises:
            ValueError: as `restore`; on all ranks.
            TypeError: on all ranks: results that cannot be sent.
            RankMissingError: a rank did not take part in time.
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
    # Looked up rather than imported: the class needs TorchRec, and whoever has one has imported it.
    base_batch = getattr(sys.modules.get("commons.sequence_batch.batch"), "BaseBatch", ())
    if not isinstance(batch, base_batch) or batch.labels is None:
        return None
    values = np.zeros(batch.batch_size, np.int64)
    for path, labels in row_fields(batch) if batch.batch_size else ():
        if path[0] != "labels":
            continue
        if isinstance(labels, torch.Tensor):
            values[: batch.actual_batch_size] += labels[:1].numel()
        else:
            values += labels.lengths().view(-1, batch.batch_size).sum(0).cpu().numpy()
    return values
