"""An evaluation: every real row of every rank once, in a pipeline of its own, metrics over all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch

from commons.sequence_batch.fields import real_rows
from commons.trainer.stop import StopSignal
from commons.trainer.train_log import StepSums


class StepOutput(Protocol):
    """What the model returns beside the loss to call `backward` on."""

    @property
    def loss_sum(self) -> torch.Tensor:
        """0-dimensional: the loss terms of this rank, summed."""

    @property
    def num_loss_tokens(self) -> int:
        """How many terms that are."""


class Metrics(Protocol):
    """What an evaluation measures; all ranks call its methods together."""

    def update(self, output: Any) -> None:
        """Take the output of one batch on this rank."""

    def compute(self) -> dict[str, float]:
        """Metrics over all ranks by name."""

    def reset(self) -> None:
        """Forget what was taken."""


def evaluate(
    pipeline: Any,
    model: torch.nn.Module,
    batches: Iterator[Any],
    metrics: Metrics | None,
    device: torch.device,
    stop: StopSignal | None = None,
) -> dict[str, Any]:
    """Evaluate a model on the batches of all ranks; a collective call.

    Args:
        pipeline: a balanced pipeline over `model` without batches in flight; no other pipeline is attached to it.
        model: left in evaluation mode.
        batches: host batches of this rank; ranks may have different numbers of them.
        metrics: what to measure besides the loss; reset afterwards.
        device: of this rank.
        stop: ends the evaluation early, on all ranks after the same batch.

    Returns:
        `loss`, the mean over all terms; `rows`, the number of real rows; and the metrics. If it was stopped, those of
        some rows.
    """
    sums = StepSums()

    def watch() -> Iterator[Any]:
        while stop is None or not stop.agreed:
            batch = next(batches, None)
            if batch is None:
                return
            sums.rows += real_rows(batch)
            yield batch

    model.eval()
    watched = watch()
    with torch.no_grad():
        while True:
            try:
                output = pipeline.progress(watched)
            except StopIteration:
                break
            sums.add(output.loss_sum, output.num_loss_tokens)
            if metrics is not None:
                metrics.update(output)
            if stop is not None:
                stop.after_step()
    total = sums.all_reduce(device)
    results: dict[str, Any] = {"loss": total.mean_loss, "rows": total.rows}
    if metrics is not None:
        results |= metrics.compute()
        metrics.reset()
    return results
