"""Evaluation in its own pipeline: every real row of every rank once, metrics over all ranks."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import nn

from commons.distributed.batch_shuffler import BaseTaskBalancedBatchShuffler
from commons.pipeline.factory import TrainPipelineFactory
from commons.sequence_batch.open_batch import real_rows
from commons.trainer.checkpoint.random_state import kept_random_state
from commons.trainer.checkpoint.state import kept_table_steps
from commons.trainer.observe.meter import StepSums
from commons.trainer.ranks.stop import StopSignal

if TYPE_CHECKING:
    from commons.trainer.recipe import Recipe

# A name such as "NDCG@10".
_TOP_K_NAME = re.compile(r"([A-Za-z]+)@([1-9][0-9]*)")


class Metrics(Protocol):
    """The metrics of an evaluation; all ranks call the methods together."""

    def update(self, output: Any) -> None:
        """Add the model's output for one batch of this rank."""

    def compute(self) -> dict[str, float]:
        """The metrics over all ranks, by name."""

    def reset(self) -> None:
        """Discard all outputs."""


class Evaluation:
    """Evaluates a model on the batches of all ranks; created and called on all ranks together.

    `batches` are host batches of this rank, iterated once per evaluation; ranks may have different numbers of batches.
    `shuffler` is only for evaluations: in it ranks agree on the end of the evaluation data.
    """

    def __init__(
        self, recipe: Recipe, model: nn.Module, batches: Iterable[Any], shuffler: BaseTaskBalancedBatchShuffler
    ) -> None:
        self._model, self._batches, self._device = model, batches, recipe.device
        self._most_batches = recipe.config.trainer.max_eval_iters
        self._metrics = recipe.metrics(model)
        self._pipeline = TrainPipelineFactory.create(
            "none",
            model=model,
            optimizer=None,  # type: ignore[arg-type]  # an evaluation takes no step
            device=recipe.device,
            batch_shuffler=shuffler,
        )

    def run(self, stop: StopSignal | None = None) -> dict[str, Any]:
        """Evaluate the model; leaves it in evaluation mode, restores the random states and the tables' step counts.

        No other pipeline may be attached to the model. `stop` ends the evaluation early, on all ranks after the same
        batch; the results are then of the rows until that batch.

        Returns:
            `loss`, the mean over all loss terms, NaN without any; `rows`, the number of real rows; and the metrics.
        """
        sums = StepSums()

        def counted() -> Iterator[Any]:
            batches = itertools.islice(self._batches, self._most_batches)
            while stop is None or not stop.agreed:  # looks before it reads
                batch = next(batches, None)
                if batch is None:
                    return
                sums.rows += real_rows(batch)
                yield batch

        self._model.eval()
        with torch.no_grad(), kept_random_state(), kept_table_steps(self._model):  # as training left them
            source = counted()
            while True:
                try:
                    output = self._pipeline.progress(source)
                except StopIteration:
                    break
                sums.add(output.loss_sum, output.num_loss_tokens)
                if self._metrics is not None:
                    self._metrics.update(output)
                if stop is not None:
                    stop.after_step()
            total = sums.all_reduce(self._device)
            loss = total.mean_loss if total.loss_terms else math.nan  # 0 would be the loss of a perfect model
            results: dict[str, Any] = {"loss": loss, "rows": total.rows}
            if self._metrics is not None:
                results |= self._metrics.compute()
                self._metrics.reset()
        return results


class TopKMetric(NamedTuple):
    """A metric and K, the number of top items that it counts."""

    kind: str
    top_k: int


def parse_top_k_metric(
    name: str, kinds: Sequence[str], purpose: str, num_ranked: int, remedy: str = "lower K"
) -> TopKMetric:
    """Parse a name such as "NDCG@10" of one of the metrics `kinds`; `purpose`, such as "retrieval", is for errors.

    Raises:
        ValueError: the name has another form, the metric is not in `kinds`, or K is above `num_ranked`, with `remedy`.

    >>> parse_top_k_metric("HitRate@10", ["HR", "NDCG"], "retrieval", 50)
    TopKMetric(kind='HR', top_k=10)
    """
    match = _TOP_K_NAME.fullmatch(name)
    kind = "" if match is None else match[1].replace("HitRate", "HR")
    if match is None or kind not in kinds:
        known = ", ".join(f"{known}@K" for known in kinds)
        raise ValueError(
            f"eval_metrics has {name!r}; metrics of {purpose} are {known} with K of at least 1, and HitRate is another "
            "name of HR: correct it"
        )
    if (top_k := int(match[2])) > num_ranked:
        raise ValueError(f"eval_metrics has {name!r}, {purpose} ranks {num_ranked} items; K is at most that: {remedy}")
    return TopKMetric(kind, top_k)
