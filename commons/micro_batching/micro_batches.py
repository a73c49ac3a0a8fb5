"""MicroBatches: what packing returns, and what a training step needs of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar, overload

import torch

from commons.sequence_batch.rows import Rows

B = TypeVar("B")
R = TypeVar("R")


@dataclass(frozen=True, eq=False)
class MicroBatches(Sequence[B]):
    """A batch cut into micro-batches; a sequence of these, each made when it is asked for, in storage of its own.

    Sums of loss terms add up to the gradient of the whole batch; a micro-batch without a term adds 0:

        for micro_batch in micro_batches:
            (micro_batches.loss_scale * loss_sum(model, micro_batch)).backward()

    Attributes:
        batch: the whole batch.
        groups: the rows of each micro-batch, ascending.
        lengths: for each micro-batch an int64 tensor `(its rows,)`: the tokens of its rows.
        num_tokens: the tokens of each micro-batch.
        workloads: what each micro-batch costs, where that is not its tokens.
        loss_tokens: terms of the loss in each micro-batch.
        loss_scale: W ÷ the loss tokens of all ranks, W being the number of ranks: the factor of `global_mean_loss`. The
            *sum* of the loss terms of each micro-batch times this, added up, has the gradient of the mean loss over the
            batches of all ranks, once DistributedDataParallel has averaged it. Zero if there are no terms.
        loss_weights: the same for a model that gives the *mean* of each micro-batch: loss_scale · its loss tokens. Only
            where every micro-batch has a term: a mean over none is 0 ÷ 0, and stays NaN times its weight of 0.
        metrics: `packing_metrics` of the tokens under the budget (without one, under the largest micro-batch), with the
            seconds that the packing took.
    """

    batch: B
    groups: list[list[int]]
    lengths: list[torch.Tensor]
    num_tokens: list[int]
    workloads: list[int] | None
    loss_tokens: list[int]
    loss_weights: list[float]
    loss_scale: float
    metrics: dict[str, Any]

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
            results: for each micro-batch a tensor, or any other batch that states no padding, with a row per row of it.

        Raises:
            ValueError: another number of results than micro-batches, or of rows than in a micro-batch; results that
                cannot be joined.
        """
        if len(results) != len(self):
            raise ValueError(
                f"there are {len(results)} results for {len(self)} micro-batches; each has one: pass them in order"
            )
        parsed = [Rows.of(result) for result in results]
        for number, (result, rows) in enumerate(zip(parsed, self.groups)):
            if result.count != len(rows):
                raise ValueError(
                    f"result {number} has {result.count} rows, micro-batch {number} has {len(rows)}; a result has a "
                    "row per row: keep all of them"
                )
            if result.states_padding:
                raise ValueError(
                    f"result {number} is a {type(result.batch).__name__}, which would gather its padding at the end; "
                    "results are tensors: restore its fields"
                )
        return Rows.concat(parsed).select(self.backward_indices).batch
