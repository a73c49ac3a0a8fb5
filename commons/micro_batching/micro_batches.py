"""MicroBatches: what packing returns, and what a training step needs of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from commons.sequence_batch.rows import concat_rows, count_rows, select_rows, states_padding

B = TypeVar("B")
R = TypeVar("R")


@dataclass(frozen=True, eq=False)
class MicroBatches(Generic[B]):
    """A batch cut into micro-batches. Iterating makes them one at a time, each in storage of its own.

        for micro_batch, weight in zip(micro_batches, micro_batches.loss_weights):
            (weight * mean_loss(model(micro_batch))).backward()

    Attributes:
        batch: the whole batch.
        groups: the rows of each micro-batch, ascending.
        lengths: for each micro-batch an int64 tensor `(its rows,)`: the tokens of its rows.
        num_tokens: the tokens of each micro-batch.
        workloads: what each micro-batch costs, where that is not its tokens.
        loss_tokens: terms of the loss in each micro-batch.
        loss_weights: for each micro-batch W · its loss tokens ÷ the loss tokens of all ranks, W being the number of
            ranks. The *mean* loss of each micro-batch times its weight, added up, has the gradient of the mean loss
            over the batches of all ranks, once DistributedDataParallel has averaged it. Zeros if there are no terms.
        loss_scale: the same for *sums*: W ÷ the loss tokens of all ranks, the factor of `global_mean_loss`.
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

    def __getitem__(self, index: int) -> B:
        return select_rows(self.batch, self.groups[index])

    def __iter__(self) -> Iterator[B]:
        return (self[index] for index in range(len(self)))

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
        for number, (result, rows) in enumerate(zip(results, self.groups)):
            if count_rows(result) != len(rows):
                raise ValueError(
                    f"result {number} has {count_rows(result)} rows, micro-batch {number} has {len(rows)}; a result "
                    "has a row per row: keep all of them"
                )
            if states_padding(result):
                raise ValueError(
                    f"result {number} is a {type(result).__name__}, which would gather its padding at the end; results "
                    "are tensors: restore its fields"
                )
        return select_rows(concat_rows(results), self.backward_indices)
