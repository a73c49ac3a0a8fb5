"""The training loop: segments of training in one pipeline, with evaluations in another between them.

    train loader ─► epoch (─► windows) ─► segment of n batches ─► train pipeline ─► log
                                     │ the pipeline drains, all ranks at once
                                     └► checkpoint ─► eval loader ─► eval pipeline ─► metrics

Both pipelines drive one model, so only one may have batches in flight: a segment ends before the next evaluation.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from commons.console import make_console
from commons.datasets.samplers.epoch import EPOCH_START, Place
from commons.distributed.batch_shuffler import BaseTaskBalancedBatchShuffler, IdentityBalancedBatchShuffler
from commons.pipeline.factory import CUDA_PIPELINES, TrainPipelineFactory
from commons.trainer.checkpoint.checkpoints import Checkpointer, TrainProgress
from commons.trainer.data import require_equal_data
from commons.trainer.epochs import Epochs
from commons.trainer.evaluation import Evaluation
from commons.trainer.observe.meter import StepMeter, StepOutput, of_all_ranks
from commons.trainer.observe.profiling import StepProfiler
from commons.trainer.observe.times import ForwardTimer
from commons.trainer.observe.train_log import TrainLog, TrainSummary
from commons.trainer.optimize.schedule import Schedule
from commons.trainer.optimize.updates import DeferredOptimizer, FiniteLossGuard, StepUpdate
from commons.trainer.ranks.collectives import (
    missing_ranks_named,
    on_all_ranks,
    on_rank_0,
    raised_on_all_ranks,
)
from commons.trainer.ranks.launch import describe_ranks
from commons.trainer.ranks.stop import StopSignal, keep_workers
from commons.trainer.recipe import Recipe


class TrainingLoop:
    """One run of a recipe: its loaders, model, optimizer and shufflers; made and run on all ranks together.

    `on_start` is called on rank 0 after all checks that are possible before training, and before the first line of the
    log.
    """

    def __init__(self, recipe: Recipe, on_start: Callable[[], None] = lambda: None) -> None:
        self._recipe, self._on_start = recipe, on_start
        self._args, self._device = recipe.config.trainer, recipe.device
        self._shufflers: list[BaseTaskBalancedBatchShuffler] = []
        self._step = 0

    def run(self) -> TrainSummary:
        """Train, evaluate and log; called on all ranks together.

        Raises:
            KeyError, FileNotFoundError, ValueError: wrong data or settings, or no batch on any rank.
            RuntimeError: the checkpoint at the end could not be written; all other work is complete by then.
            RankMissingError: a collective of the shuffler or of the model has failed.
            Exception: an error of any rank's data or shuffler, raised on every rank.
        """
        with missing_ranks_named(lambda: self._step + 1, self._shufflers):
            self._build()
            with self._stop:
                summary = self._run()
        # Not after a failure: closing would wait for a worker thread that waits for a rank that has exited.
        for shuffler in self._shufflers:
            shuffler.close()
        self._data.close()
        return summary

    def _build(self) -> None:
        """Build the loaders, the model, the optimizer, the shufflers and what else the run needs."""
        recipe, args, device = self._recipe, self._args, self._device
        if device.type == "cpu" and args.pipeline_type in CUDA_PIPELINES:
            raise ValueError(
                f"pipeline_type is {args.pipeline_type!r} and the device is the CPU; this TorchRec pipeline needs CUDA "
                "streams: choose 'native' or 'none'"
            )
        # Data may be missing on one host: the other ranks must not wait for its ranks.
        train_loader, eval_loader = raised_on_all_ranks(lambda: recipe.loaders, device)
        require_equal_data(train_loader, device)
        if dist.get_rank() == 0:
            for line in recipe.notes():
                make_console(highlight=False).print(line)
        self._model = recipe.build_model()
        if isinstance(self._model, DistributedDataParallel) and args.pipeline_type in ("native", *CUDA_PIPELINES):
            raise ValueError(
                f"pipeline_type is {args.pipeline_type!r} and the model is a DistributedDataParallel; this TorchRec "
                "pipeline traces the model, which torch's wrapper prevents: choose 'none', or wrap the model in "
                "TorchRec's DistributedModelParallel"
            )
        # After a build that may have failed on one rank: the others learn it here.
        self._optimizer = raised_on_all_ranks(lambda: recipe.build_optimizer(self._model), device)
        self._shuffler = recipe.build_shuffler(balances=args.balancing != "none")
        self._data = Epochs(train_loader, recipe, self._shuffler)
        self._shufflers.append(self._shuffler)
        if self._data.in_windows:  # the batches of a window are balanced already
            self._shufflers.append(IdentityBalancedBatchShuffler(options=args.shuffler))
        self._pipeline = TrainPipelineFactory.create(
            args.pipeline_type,
            model=self._model,
            optimizer=DeferredOptimizer(self._optimizer),  # type: ignore[arg-type]  # has an optimizer's methods
            device=device,
            batch_shuffler=self._shufflers[-1],
        )
        self._evaluation: Evaluation | None = None
        if eval_loader is not None:
            of_evaluation = recipe.build_shuffler(balances=args.shuffle_eval)
            of_evaluation.options = replace(of_evaluation.options, speeds="equal")  # nothing times its steps
            self._shufflers.append(of_evaluation)
            self._evaluation = Evaluation(recipe, self._model, eval_loader, of_evaluation)
        # The step of the latest evaluation, and its results by their names in the log.
        self._evaluated_at, self._results = -1, dict[str, Any]()
        # Steps or rows of the run. With this limit only, epochs repeat until it is reached.
        self._limit = math.inf if args.max_train_iters is None else args.max_train_iters
        self._num_epochs = args.num_epochs or (None if args.max_train_iters else 1)
        self._has_cosine = args.optimization.lr_schedule == "cosine"
        self._loss_scaler = recipe.loss_scaler
        self._checkpoints = Checkpointer(recipe, self._model, self._optimizer, self._shuffler, self._data.order())
        self._stop = StopSignal(enabled=self._checkpoints.saves, timeout=args.shuffler.timeout)
        for loader in (self._data.loader, eval_loader):
            keep_workers(loader)
        self._meter = StepMeter(recipe)
        self._forward_timer = ForwardTimer(recipe.layers(self._model), device)
        self._guard = FiniteLossGuard(device, in_float16=recipe.loss_scaler is not None)

    def _run(self) -> TrainSummary:
        self._progress, resumed = self._checkpoints.resume()
        self._step = self._progress.step
        start, again = self._start()
        optimization, in_rows = self._args.optimization, self._args.schedule_in == "rows"
        self._schedule = Schedule(
            in_rows=in_rows, look_back=optimization.accumulation_steps, step=self._step, rows=self._progress.rows
        )
        total_steps = self._total_steps(start)
        total = self._total_rows() if in_rows and self._has_cosine else total_steps
        self._update = StepUpdate(
            optimization, self._optimizer, self._model, total, self._device, self._loss_scaler, self._schedule
        )
        on_rank_0(self._on_start, self._device)
        self._log = on_all_ranks(lambda: TrainLog(self._args, total_steps, first_step=self._step), self._device)
        for line in filter(None, (describe_ranks(self._device), resumed, again)):
            self._log.print_line(line)
        # A run that was complete is not evaluated a second time, unless its last update came after an evaluation.
        evaluated = on_rank_0(lambda: self._log.evaluated, self._device)
        is_of_these_weights = self._update.is_whole_after(self._step) or not self._progress.evaluates
        self._results = evaluated if is_of_these_weights else {}
        self._evaluated_at = self._step if self._results else -1
        self._profiler = StepProfiler(self._args, self._device, self._step)
        self._of_first_line = {"resumed": 1} if self._step else {}  # the report leaves this line out of times
        is_complete = False
        try:
            # The run that saved the checkpoint ended before this evaluation.
            if self._progress.evaluates and self._evaluated_at != self._step and not self._is_done():
                self._evaluate()
            epochs = self._train(start)
            if self._update.flush():
                # An evaluation after the last step had the weights before this update; the log keeps it, and the last
                # evaluation of a step counts.
                self._evaluated_at, self._results = -1, {}
            self._write_line()
            self._save()
            if self._evaluated_at != self._step:
                self._evaluate()
            if self._stop.agreed:
                self._log.print_line(
                    f"stopped by SIGTERM after step {self._step}{self._checkpoints.how_to_resume(self._step)}"
                )
            is_complete = self._checkpoints.has_saved(self._step)
        finally:
            self._forward_timer.close()
            self._profiler.close()
            self._log.close(failed=not is_complete)
        summary = TrainSummary(self._step, epochs, metrics=self._results, **self._meter.totals())
        self._log.summary(str(self._args.run_dir), summary)
        self._checkpoints.require_saved(self._step)
        return summary

    def _start(self) -> tuple[Place, str]:
        """The place where the current epoch continues, and a line about rows that are trained a second time, or ""."""
        progress = self._progress
        if not progress.window_steps:
            return Place(progress.rows_in_epoch), ""
        # Rank 0 decides for all ranks, because it wrote the checkpoint.
        if on_rank_0(self._data.window_of, self._device) == progress.window_of:
            return Place(progress.rows_in_epoch, progress.window_steps), ""
        self._progress = replace(progress, window_steps=0, window_rows=0)
        return Place(progress.rows_in_epoch), (
            f"the checkpoint was saved {progress.window_steps} steps into a window that was planned by another "
            "release, or for other ranks, settings or speeds: the window is read again, and "
            f"{progress.window_rows} rows are trained a second time"
        )

    def _train(self, start: Place) -> int:
        """Train until the last step or epoch, or until the run is stopped; returns the number of epochs begun."""
        first = self._progress
        epochs = first.epoch + (first.rows_in_epoch + first.window_steps > 0)
        for epoch in itertools.count(first.epoch):
            if self._is_done() or (self._num_epochs is not None and epoch >= self._num_epochs):
                break
            epochs = epoch + 1
            place = start if epoch == first.epoch else EPOCH_START
            # A checkpoint may be at the end of its epoch, where a user's own sampler could not begin.
            if place == EPOCH_START or self._data.has_steps(epoch, place):
                self._train_epoch(epoch, place)
        return epochs

    def _train_epoch(self, epoch: int, start: Place) -> None:
        """Train an epoch from a place to its end: segments, with checkpoints and evaluations between them."""
        first_step = self._step
        behind_window = self._progress.window_rows if start.steps else 0
        batches = self._data.open(epoch, start)
        self._schedule.begin_epoch(first_step, self._data.step_rows())
        first_rows = self._schedule.rows_after(first_step)
        while not self._is_done():
            trained = self._train_segment(self._segment(batches, self._step + 1))
            place = self._data.place_after(self._step - first_step)
            if self._step == first_step and start == EPOCH_START:
                raise ValueError(
                    f"epoch {epoch} has no batch on any rank; training needs at least one: check the data set, its "
                    "split and drop_last"
                )
            rows = self._schedule.rows_after(self._step)
            in_window = start.row + behind_window + rows - first_rows - place.row if place.steps else 0
            window_of = self._data.window_of() if place.steps else {}
            evaluates = self._evaluates_after(self._step)
            self._progress = TrainProgress(
                self._step, epoch, place.row, place.steps, in_window, window_of, rows, evaluates
            )
            if trained and self._saves_after(self._step):
                self._save()
            # After the last step, the evaluation follows the last update.
            if trained and evaluates and not self._has_trained_all(self._step):
                self._evaluate()
            # `trained` is equal on all ranks: they train together until the data of the last rank end.
            if not trained or not self._pauses_after(self._step):
                break
        self._data.leave()

    def _segment(self, batches: Iterator[Any], first_step: int) -> Iterator[Any]:
        """Batches of this rank until a checkpoint, an evaluation or the end of the run is due, or the data end."""
        for step in itertools.count(first_step):
            if self._may_stop_after(step - 1):  # checked before a batch is read: that batch would be lost
                return
            batch = next(batches, None)
            if batch is None:
                return
            self._meter.loaded(batch)
            yield batch
            if self._pauses_after(step):
                return

    def _train_segment(self, segment: Iterator[Any]) -> int:
        """Train until the segments of all ranks have ended; returns the number of steps."""
        self._model.train()
        self._meter.begin()
        first = self._step
        while True:
            self._update.before_step(self._step)
            try:
                output = self._pipeline.progress(segment)
            except StopIteration:
                return self._step - first
            self._after_step(output)

    def _after_step(self, output: StepOutput) -> None:
        stats = self._data.stats_of_step(self._pipeline.last_stats)
        self._update.after_step(self._step, output.num_loss_tokens)
        self._step += 1
        self._guard.record(self._step, output.loss_sum)
        self._meter.step(output, stats)
        self._forward_timer.step(stats)
        self._report_forward_times()
        self._stop.after_step()
        self._log.step(stats)
        self._profiler.step(stats)
        if self._step % self._args.log_interval == 0:
            self._write_line()

    def _report_forward_times(self) -> None:
        for milliseconds, of_batch in self._forward_timer.take():
            self._shuffler.report_step_time(milliseconds, of_batch)

    def _write_line(self) -> None:
        self._guard.check()
        numbers, details = self._meter.take()
        if numbers:
            self._report_forward_times()  # the meter has waited until the last step ended on the device
            if self._forward_timer.is_on and "loads_after" in details:
                details |= {"own_ms": of_all_ranks(self._forward_timer.last_ms, self._device)}
            scale = {} if self._loss_scaler is None else {"loss_scale": self._loss_scaler.get_scale()}
            if self._args.balances_at_loading:
                details |= {"before_in_turn": int(self._data.is_before_in_turn)}
            details |= self._of_first_line
            self._of_first_line = {}
            self._log.line({"step": self._step, **numbers, **scale}, details)

    def _save(self) -> None:
        """Save a checkpoint, unless this step has one; no batch is in flight here."""
        if not self._checkpoints.has_saved(self._step):
            self._write_line()  # a run that continues here keeps the log's lines until here
            self._checkpoints.save(self._progress)
            self._stop.agree()  # torchrun waits 30 s for ranks to end: no further steps and a second checkpoint

    def _evaluate(self) -> None:
        """Evaluate the state after this step, unless the run ends early; the training pipeline has no batch in flight.

        The training pipeline detaches from the model for the evaluation: it replaces forward methods of the model.
        """
        if self._evaluation is None or self._stop.agreed:
            return
        if hasattr(self._pipeline, "detach"):
            self._pipeline.detach()
        results = self._evaluation.run(self._stop)
        if hasattr(self._pipeline, "attach"):
            self._pipeline.attach(self._model)
        if not self._stop.agreed:
            self._evaluated_at = self._step
            self._results = {f"eval_{name}": value for name, value in results.items()}
            self._log.line({"step": self._step, **self._results})

    def _pauses_after(self, step: int) -> bool:
        """Whether a checkpoint, an evaluation or the end of the run is due after a step; equal on all ranks."""
        return self._has_trained_all(step) or self._saves_after(step) or self._evaluates_after(step)

    def _saves_after(self, step: int) -> bool:
        """Whether a checkpoint is due after a step; never within an accumulation, because gradients are not saved."""
        every = self._args.optimization.accumulation_steps
        return self._checkpoints.saves and self._schedule.is_due(self._args.ckpt_save_interval, step, every=every)

    def _evaluates_after(self, step: int) -> bool:
        return self._evaluation is not None and self._schedule.is_due(self._args.eval_interval, step)

    def _has_trained_all(self, step: int) -> bool:
        return self._schedule.done_after(step) >= self._limit

    def _may_stop_after(self, step: int) -> bool:
        """Whether a run that received SIGTERM may end after a step: not within an accumulation."""
        return self._stop.agreed and self._update.is_whole_after(step)

    def _is_done(self) -> bool:
        return self._has_trained_all(self._step) or self._may_stop_after(self._step)

    def _total_steps(self, start: Place) -> int:
        """Steps of the run, including the steps before a checkpoint.

        Estimated where nothing depends on the exact number, because counting the steps of a budget plans every epoch.
        """
        data, epoch, limit = self._data, self._progress.epoch, self._limit
        is_exact = self._has_cosine and not self._schedule.in_rows
        of_epoch = data.steps_of_epoch if is_exact else lambda _: data.most_batches
        left = data.num_steps(epoch, start) if self._num_epochs is not None and epoch < self._num_epochs else 0
        steps_limit = limit / data.rows_per_step if self._schedule.in_rows else limit
        return max(self._step, self._with_later_epochs(self._step + left, of_epoch, steps_limit))

    def _total_rows(self) -> int:
        """Rows of the run, including the rows before a checkpoint."""
        progress, of_epoch = self._progress, self._data.rows_of_epoch
        left = max(0, of_epoch(progress.epoch) - progress.rows_in_epoch - progress.window_rows)
        return self._with_later_epochs(progress.rows + left, of_epoch, self._limit)

    def _with_later_epochs(self, total: int, of_epoch: Callable[[int], int], limit: float) -> int:
        """A number until the end of the current epoch, and `of_epoch` of every later one of the run, up to a limit."""
        if self._num_epochs is None:
            return math.ceil(limit)
        for epoch in range(self._progress.epoch + 1, self._num_epochs):
            if total >= limit:
                break
            total += of_epoch(epoch)
        return math.ceil(min(limit, total))
