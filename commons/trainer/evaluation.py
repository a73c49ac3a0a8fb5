"""Evaluations: every real row of every rank once, in a pipeline of their own, metrics over all ranks."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from commons.sequence_batch.open_batch import real_rows
from commons.trainer.checkpoint.random_state import kept_random_state
from commons.trainer.config.args import TrainerArgs
from commons.trainer.observe.meter import StepSums
from commons.trainer.ranks.stop import StopSignal

# Such as "NDCG@10".
_TOP_K_NAME = re.compile(r"([A-Za-z]+)@([1-9][0-9]*)")


class Metrics(Protocol):
    """What an evaluation measures; all ranks call its methods together."""

    def update(self, output: Any) -> None:
        """Take the output of one batch on this rank."""

    def compute(self) -> dict[str, float]:
        """Metrics over all ranks by name."""

    def reset(self) -> None:
        """Forget what was taken."""


class Evaluations:
    """The evaluations of a run: when they are due, and what the latest found.

    Args:
        args: settings.
        pipeline: a balanced pipeline over the model, for evaluations alone.
        batches: host batches of this rank, iterated once per evaluation; None for no evaluation.
        metrics: what to measure besides the loss.
        device: of this rank.
    """

    def __init__(
        self,
        args: TrainerArgs,
        *,
        pipeline: Any,
        batches: Iterable[Any] | None,
        metrics: Metrics | None,
        device: torch.device,
    ) -> None:
        self._args = args
        self._pipeline = pipeline
        self._batches = batches
        self._metrics = metrics
        self._device = device
        self._evaluated_at = -1
        self.results: dict[str, Any] = {}  # of the latest one, by their names in the log

    @property
    def enabled(self) -> bool:
        """Whether there is something to evaluate on."""
        return self._batches is not None

    def has_evaluated(self, step: int) -> bool:
        """Whether the state after a step needs no evaluation (any more)."""
        return self._batches is None or self._evaluated_at == step

    def restore(self, step: int, results: Mapping[str, Any]) -> None:
        """Take what an earlier part of a run has found after a step, if it has."""
        if results:
            self._evaluated_at, self.results = step, dict(results)

    def evaluate(self, step: int, model: torch.nn.Module, training: Any, stop: StopSignal) -> bool:
        """Evaluate the state after a step; a collective call, which leaves the random states as they were.

        Meanwhile `training`, the pipeline that trains the model, has no batch in flight, and its changes to the model
        are undone. The model is left in evaluation mode.

        Returns:
            Whether there are results; not if `stop` has ended the evaluation early.
        """
        if hasattr(training, "detach"):
            training.detach()
        with kept_random_state():  # training is the same, however often it is evaluated
            batches = itertools.islice(iter(self._batches or ()), self._args.max_eval_iters)
            results = evaluate(self._pipeline, model, batches, self._metrics, self._device, stop)
        if not stop.agreed:
            self.restore(step, {f"eval_{name}": value for name, value in results.items()})
        if hasattr(training, "attach"):
            training.attach(model)
        return not stop.agreed


def evaluate(
    pipeline: Any,
    model: torch.nn.Module,
    batches: Iterator[Any],
    metrics: Metrics | None,
    device: torch.device,
    stop: StopSignal | None = None,
) -> dict[str, Any]:
    """Evaluate a model on the batches of all ranks; a collective call, after which it is in evaluation mode.

    Args:
        pipeline: a balanced pipeline over `model` without batches in flight; no other pipeline is attached to it.
        model: the model.
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


class TopKMetric(NamedTuple):
    """A metric and the number of items that it looks at."""

    kind: str
    top_k: int


def parse_top_k_metric(name: str, kinds: Sequence[str], purpose: str) -> TopKMetric:
    """Read a name such as "NDCG@10" of one of the metrics `kinds`; `purpose` is what they judge, for the error.

    Raises:
        ValueError: another form, or another kind.

    >>> parse_top_k_metric("HitRate@10", ["HR", "NDCG"], "retrieval")
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
    return TopKMetric(kind, int(match[2]))
