"""The training loop: segments of training in one pipeline, with evaluations in another between them.

    train loader ─► epoch ─► segment of n batches ─► train pipeline ─► log
                                     │ the pipeline drains, all ranks at once
                                     └► eval loader ─► eval pipeline ─► metrics

Both pipelines drive one model, so only one may have batches in flight. A segment is an iterator of its own that ends
before the next evaluation: its last batch is trained before the model changes hands, and none is lost.
"""

from __future__ import annotations

import itertools
import statistics
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from commons.distributed.batch_shuffler import BaseTaskBalancedBatchShuffler
from commons.pipeline.factory import CUDA_PIPELINES, TrainPipelineFactory
from commons.sequence_batch.fields import real_rows
from commons.trainer.args import TrainerArgs
from commons.trainer.evaluation import Metrics, StepOutput, evaluate
from commons.trainer.launch import describe_ranks
from commons.trainer.logging import StatsMean, StepClock, StepSums, TrainLog, TrainSummary
from commons.trainer.profiling import StepProfiler


def count_tokens(batch: Any) -> int:
    """Tokens of a host batch: the values of its features, contextual ones too."""
    return int(batch.features.values().numel())


class TrainingLoop:
    """Trains one model.

    Args:
        args: settings.
        model: returns the loss to call `backward` on and a StepOutput.
        optimizer: of the dense parameters, or all.
        device: of this rank.
        shuffler: for training; `IdentityBalancedBatchShuffler` for batches as they are loaded.
        train_loader: host batches of this rank; it has a length.
        eval_shuffler: for evaluation, another one than `shuffler`; needed with an `eval_loader`.
        eval_loader: host batches of this rank; None for no evaluation.
        metrics: what an evaluation measures besides the loss.
        count: tokens of a host batch.
    """

    def __init__(
        self,
        args: TrainerArgs,
        *,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        shuffler: BaseTaskBalancedBatchShuffler,
        train_loader: DataLoader[Any],
        eval_shuffler: BaseTaskBalancedBatchShuffler | None = None,
        eval_loader: DataLoader[Any] | None = None,
        metrics: Metrics | None = None,
        count: Callable[[Any], int] = count_tokens,
    ) -> None:
        if (eval_loader is None) != (eval_shuffler is None) or eval_shuffler is shuffler:
            raise ValueError(
                "eval_loader and eval_shuffler go together, and eval_shuffler is not the shuffler of training; an "
                "evaluation agrees on the end of its own data: give both or none"
            )
        if device.type == "cpu" and args.pipeline_type in CUDA_PIPELINES:
            raise ValueError(
                f"pipeline_type is {args.pipeline_type!r}, the device is the CPU; TorchRec's pipeline of that name "
                "needs CUDA streams: choose 'native' or 'none'"
            )
        self._args = args
        self._model = model
        self._device = device
        self._train_loader = train_loader
        self._eval_loader = eval_loader
        self._metrics = metrics
        self._count = count
        pipeline: dict[str, Any] = {"model": model, "optimizer": optimizer, "device": device}
        self._pipeline = TrainPipelineFactory.create(args.pipeline_type, batch_shuffler=shuffler, **pipeline)
        if eval_shuffler is not None:
            self._eval_pipeline = TrainPipelineFactory.create("none", batch_shuffler=eval_shuffler, **pipeline)
        # Where only the number of steps is limited, the data repeats.
        self._num_epochs = args.num_epochs or (None if args.max_train_iters else 1)
        self._step = 0
        self._evaluated_at = -1
        self._sums = StepSums()
        self._clock = StepClock(device)
        self._stats, self._all_stats = StatsMean(), StatsMean()
        # Rows and tokens of batches that are loaded but not trained.
        self._loaded: deque[tuple[int, int]] = deque()
        self._profiler = StepProfiler(args, device)
        self._all_step_ms: list[float] = []
        self._all_tokens = 0

    def run(self) -> TrainSummary:
        """Train, evaluate and log; called on all ranks together.

        Raises:
            ValueError: the loaders have no batch on any rank.
            Exception: an error of any rank's data or shuffler, on every rank.
        """
        self._log = TrainLog(self._args.run_dir, self._total_steps())
        self._log.say(describe_ranks(self._device))
        self._summary = TrainSummary()
        try:
            for epoch in self._epochs():
                self._summary.epochs = epoch + 1
                self._train_epoch(epoch)
            self._write_line()
            if self._evaluated_at != self._step:
                self._evaluate()
        finally:
            self._profiler.close()
            self._log.close()
        self._summary.steps = self._step
        self._summary.shuffle = self._all_stats.means()
        if self._all_step_ms:
            self._summary.step_ms = statistics.median(self._all_step_ms)
            self._summary.tokens_per_s = self._all_tokens / sum(self._all_step_ms) * 1e3
        self._log.summary(str(self._args.run_dir), self._summary)
        return self._summary

    def _epochs(self) -> Iterator[int]:
        for epoch in itertools.count() if self._num_epochs is None else range(self._num_epochs):
            if self._is_done():
                return
            yield epoch

    def _is_done(self) -> bool:
        return self._args.max_train_iters is not None and self._step >= self._args.max_train_iters

    def _total_steps(self) -> int:
        """Steps of the run, for the bar; ranks with fewer batches go on with the others."""
        batches = torch.tensor(len(self._train_loader), device=self._device)
        dist.all_reduce(batches, op=dist.ReduceOp.MAX)
        limits = [] if self._args.max_train_iters is None else [self._args.max_train_iters]
        if self._num_epochs is not None:
            limits.append(self._num_epochs * int(batches))
        return min(limits)

    def _train_epoch(self, epoch: int) -> None:
        _set_epoch(self._train_loader, epoch)
        batches = iter(self._train_loader)
        started_at = self._step
        while not self._is_done():
            limit = self._steps_to_next_stop()
            trained = self._train_segment(itertools.islice(batches, limit))
            if self._step == started_at:
                raise ValueError(
                    f"epoch {epoch} has no batch on any rank; training needs at least one: check the data set, its "
                    "split and drop_last"
                )
            if self._eval_loader is not None and trained and self._step % self._args.eval_interval == 0:
                self._evaluate()
            if limit is None or trained < limit:  # the same on all ranks: they train together until the last has ended
                return

    def _steps_to_next_stop(self) -> int | None:
        """Steps until the next evaluation or the end of training; None for neither."""
        stops = []
        if self._args.max_train_iters is not None:
            stops.append(self._args.max_train_iters - self._step)
        if self._eval_loader is not None:
            stops.append(self._args.eval_interval - self._step % self._args.eval_interval)
        return min(stops, default=None)

    def _train_segment(self, batches: Iterator[Any]) -> int:
        """Train the batches of an iterator until all ranks' have ended; returns the number of steps."""
        self._model.train()
        segment = self._watch(batches)
        self._clock.begin()
        steps = 0
        while True:
            try:
                output = self._pipeline.progress(segment)
            except StopIteration:
                return steps
            steps += 1
            self._after_step(output)

    def _watch(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self._loaded.append((real_rows(batch), self._count(batch)))
            yield batch

    def _after_step(self, output: StepOutput) -> None:
        self._clock.end()
        self._step += 1
        # Rows move between ranks, but the rows of step n are those that all ranks loaded n-th.
        rows, tokens = self._loaded.popleft() if self._loaded else (0, 0)
        self._sums.rows += rows
        self._sums.tokens += tokens
        self._sums.add(output.loss_sum, output.num_loss_tokens)
        stats = self._pipeline.last_stats
        if stats is not None:
            self._stats.add(stats)
            self._all_stats.add(stats)
        self._log.step(stats)
        self._profiler.step(self._step)
        if self._step % self._args.log_interval == 0:
            self._write_line()

    def _write_line(self) -> None:
        step_ms = self._clock.take()
        if not step_ms:
            return
        sums, self._sums = self._sums.all_reduce(self._device), StepSums()
        stats, self._stats = self._stats, StatsMean()
        self._all_step_ms += step_ms
        self._all_tokens += sums.tokens
        self._summary.loss = sums.mean_loss
        self._log.line(
            {
                "step": self._step,
                "loss": sums.mean_loss,
                "tokens_per_s": sums.tokens / sum(step_ms) * 1e3,
                "rows_per_s": sums.rows / sum(step_ms) * 1e3,
                "step_ms": statistics.median(step_ms),
                **stats.means(),
            }
        )

    def _evaluate(self) -> None:
        """Evaluate without the training pipeline's changes to the model, which has no batch in flight."""
        if self._eval_loader is None:
            return
        self._evaluated_at = self._step
        if hasattr(self._pipeline, "detach"):
            self._pipeline.detach()
        batches = itertools.islice(iter(self._eval_loader), self._args.max_eval_iters)
        results = evaluate(self._eval_pipeline, self._model, batches, self._metrics, self._device)
        self._summary.metrics = {f"eval_{name}": value for name, value in results.items()}
        self._log.line({"step": self._step, **self._summary.metrics})
        if hasattr(self._pipeline, "attach"):
            self._pipeline.attach(self._model)


def _set_epoch(loader: DataLoader[Any], epoch: int) -> None:
    set_epoch = getattr(loader.sampler, "set_epoch", None)
    if set_epoch is not None:
        set_epoch(epoch)
