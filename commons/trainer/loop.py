"""The training loop: segments of training in one pipeline, with evaluations in another between them.

    train loader ─► epoch (─► windows) ─► segment of n batches ─► train pipeline ─► log
                                     │ the pipeline drains, all ranks at once
                                     └► checkpoint ─► eval loader ─► eval pipeline ─► metrics

Both pipelines drive one model, so only one may have batches in flight: a segment ends before the next evaluation.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from commons.datasets.samplers.epoch import EPOCH_START, Place
from commons.dispatch import SingleRankLoader
from commons.distributed.batch_shuffler import BaseTaskBalancedBatchShuffler, IdentityBalancedBatchShuffler
from commons.distributed.process_group import resolve_process_group
from commons.perf_model.peak_rates import peak_flops_of
from commons.pipeline.factory import CUDA_PIPELINES, TrainPipelineFactory
from commons.trainer.checkpoint.checkpoints import Checkpointer, TrainProgress
from commons.trainer.config.args import TrainerArgs
from commons.trainer.epochs import Epochs
from commons.trainer.evaluation import Evaluations, Metrics
from commons.trainer.observe.meter import StepMeter, StepOutput, count_values, of_all_ranks
from commons.trainer.observe.profiling import StepProfiler
from commons.trainer.observe.rows_in_turn import RowsInTurn
from commons.trainer.observe.times import ForwardTimer
from commons.trainer.observe.train_log import TrainLog, TrainSummary
from commons.trainer.optimize.loss_scaling import LossScaler
from commons.trainer.optimize.schedule import Schedule
from commons.trainer.optimize.updates import DeferredOptimizer, FiniteLossGuard, StepUpdate
from commons.trainer.ranks.collectives import all_reduce, broadcast_text, missing_ranks_named
from commons.trainer.ranks.launch import describe_ranks
from commons.trainer.ranks.stop import StopSignal, keep_workers


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
        num_tokens: of a host batch, for the log.
        fingerprint: what must be equal to load a checkpoint, JSON-ready; needed for checkpoints.
        flops: operations of forward and backward pass on a host batch; None leaves TFLOPS and MFU out of the log.
        compute_dtype: of the model's matrix products, for MFU.
        loss_scaler: of a model that scales its loss, as training in float16 needs it.
        layers: the module whose forward pass is a rank's own work, see `Recipe.layers`; None for no rank speeds.
        in_turn: where a sampler has dealt the rows by their work, what they would cost dealt in turn; None elsewhere.
    """

    def __init__(
        self,
        args: TrainerArgs,
        *,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        shuffler: BaseTaskBalancedBatchShuffler,
        train_loader: DataLoader[Any] | SingleRankLoader,
        eval_shuffler: BaseTaskBalancedBatchShuffler | None = None,
        eval_loader: DataLoader[Any] | None = None,
        metrics: Metrics | None = None,
        num_tokens: Callable[[Any], int] = count_values,
        fingerprint: Mapping[str, Any] | None = None,
        flops: Callable[[Any], int] | None = None,
        compute_dtype: torch.dtype = torch.float32,
        loss_scaler: LossScaler | None = None,
        layers: torch.nn.Module | None = None,
        in_turn: RowsInTurn | None = None,
    ) -> None:
        if (eval_loader is None) != (eval_shuffler is None) or eval_shuffler is shuffler:
            raise ValueError(
                "eval_loader and eval_shuffler go together, and eval_shuffler is not the shuffler of training; an "
                "evaluation agrees on the end of its own data: give both or none"
            )
        if args.single_rank_load and not isinstance(train_loader, SingleRankLoader):
            raise ValueError(
                f"single_rank_load is True and train_loader is a {type(train_loader).__name__}; every rank would train "
                "the batches of all: pass the loader of commons.trainer.data.rank0_loader"
            )
        if device.type == "cpu" and args.pipeline_type in CUDA_PIPELINES:
            raise ValueError(
                f"pipeline_type is {args.pipeline_type!r}, the device is the CPU; TorchRec's pipeline of that name "
                "needs CUDA streams: choose 'native' or 'none'"
            )
        self._args = args
        self._model = model
        self._optimizer = optimizer
        self._device = device
        self._train_loader = train_loader
        self._shuffler = shuffler
        self._shufflers = [each for each in (shuffler, eval_shuffler) if each is not None]
        self._forward_timer = ForwardTimer(layers, device)
        self._in_turn = in_turn
        self._loss_scaler = loss_scaler
        # What comes out of a window needs no further shuffle.
        in_windows = args.balancing == "windows"
        self._after_windows = IdentityBalancedBatchShuffler(options=args.shuffler) if in_windows else None
        self._data = Epochs(train_loader, args, shuffler if in_windows else None, device)
        pipeline: dict[str, Any] = {"model": model, "optimizer": DeferredOptimizer(optimizer), "device": device}
        self._pipeline = TrainPipelineFactory.create(
            args.pipeline_type, batch_shuffler=self._after_windows or shuffler, **pipeline
        )
        eval_pipeline = None
        if eval_shuffler is not None:
            eval_pipeline = TrainPipelineFactory.create("none", batch_shuffler=eval_shuffler, **pipeline)
        self._evaluations = Evaluations(
            args, pipeline=eval_pipeline, batches=eval_loader, metrics=metrics, device=device
        )
        # Where only the number of steps is limited, the data repeats.
        self._num_epochs = args.num_epochs or (None if args.max_train_iters else 1)
        self._checkpoints = Checkpointer(
            args,
            model=model,
            optimizer=optimizer,
            fingerprint=fingerprint or {},
            device=device,
            order=self._data.order(),
            loss_scaler=loss_scaler,
        )
        self._stop = StopSignal(enabled=self._checkpoints.saves, timeout=args.shuffler.timeout)
        if self._checkpoints.saves:
            for loader in (getattr(train_loader, "loader", train_loader), eval_loader):
                keep_workers(loader)
        peak_flops = peak_flops_of(device, compute_dtype) if args.peak_tflops is None else args.peak_tflops * 1e12
        self._meter = StepMeter(device, num_tokens, flops, peak_flops)
        self._guard = FiniteLossGuard(device, in_float16=loss_scaler is not None)
        steps_per_update = args.optimization.accumulation_steps
        self._schedule = Schedule(in_rows=args.schedule_in == "rows", look_back=steps_per_update)
        self._step = 0

    def run(self) -> TrainSummary:
        """Train, evaluate and log; called on all ranks together.

        Raises:
            ValueError: the loaders have no batch on any rank.
            RuntimeError: the checkpoint at the end could not be written; everything else is done by then.
            RankMissingError: a collective has failed, of the shuffler or of the model.
            Exception: an error of any rank's data or shuffler, on every rank.
        """
        with missing_ranks_named(lambda: self._step + 1, self._shufflers), self._stop:
            summary = self._run()
        if self._after_windows is not None:  # not after a failure, when a worker may wait for a rank that is gone
            self._after_windows.close()
        return summary

    def _run(self) -> TrainSummary:
        self._progress, resumed = self._checkpoints.resume()
        self._step = self._progress.step
        start, again = self._start()
        self._schedule.resume(self._step, self._progress.rows or 0)
        total_steps = self._total_steps(start)
        self._update = StepUpdate(
            self._args.optimization,
            self._optimizer,
            self._model,
            self._total_rows() if self._schedule.in_rows else total_steps,
            self._device,
            self._loss_scaler,
            self._schedule,
        )
        self._log = TrainLog(self._args, total_steps, first_step=self._step)
        for line in filter(None, (describe_ranks(self._device), resumed, again)):
            self._log.say(line)
        # A run that was complete is not evaluated once more.
        logged = json.loads(broadcast_text(json.dumps(self._log.evaluated), self._device))
        self._evaluations.restore(self._step, logged)
        self._profiler = StepProfiler(self._args, self._device, self._step)
        try:
            epochs = self._train(start)
            self._update.flush()
            self._write_line()
            self._save()
            if not (self._stop.agreed or self._evaluations.has_evaluated(self._step)):
                self._evaluate()
            if self._stop.agreed:
                self._log.say(
                    f"stopped by SIGTERM after step {self._step}{self._checkpoints.how_to_resume(self._step)}"
                )
        finally:
            self._forward_timer.close()
            self._profiler.close()
            self._log.close()
        summary = TrainSummary(self._step, epochs, metrics=self._evaluations.results, **self._meter.totals())
        self._log.summary(str(self._args.run_dir), summary)
        self._checkpoints.require_saved(self._step)
        return summary

    def _start(self) -> tuple[Place, str]:
        """Where the current epoch goes on, and a line about rows that are trained a second time, or ""."""
        progress = self._progress
        if progress.rows is None:  # a checkpoint of an earlier version
            rows = progress.epoch * (self._data.num_rows or 0) + progress.rows_in_epoch
            self._progress = progress = replace(progress, rows=rows)
        if not progress.window_steps:
            return Place(progress.rows_in_epoch), ""
        # Rank 0 decides for all, because it wrote the checkpoint.
        if json.loads(broadcast_text(json.dumps(self._data.window_of()), self._device)) == progress.window_of:
            return Place(progress.rows_in_epoch, progress.window_steps), ""
        self._progress = replace(progress, window_steps=0, window_rows=0)
        return Place(progress.rows_in_epoch), (
            f"the checkpoint is behind {progress.window_steps} steps of a window that was planned for other ranks or "
            f"settings: the window is read again, and {progress.window_rows} rows come a second time"
        )

    def _train(self, start: Place) -> int:
        """Train until the last step or epoch, or until the run is stopped; returns the number of epochs begun."""
        first = self._progress
        epochs = first.epoch + (first.step > 0)
        for epoch in itertools.count(first.epoch):
            if self._is_done() or (self._num_epochs is not None and epoch >= self._num_epochs):
                break
            epochs = epoch + 1
            self._train_epoch(epoch, start if epoch == first.epoch else EPOCH_START)
        return epochs

    def _train_epoch(self, epoch: int, start: Place) -> None:
        """Train what is left of an epoch from a place on: segments, and what is due between them."""
        first_step = self._step
        behind_window = self._progress.window_rows if start.steps else 0
        self._schedule.begin_epoch(first_step, self._data.step_rows(epoch, start))
        first_rows = self._schedule.rows_after(first_step)
        batches = self._data.open(epoch, start)
        if self._in_turn is not None:
            self._in_turn.open(epoch, start)
        while not self._is_done():
            trained = self._train_segment(self._segment(batches, self._step + 1))
            place = self._data.place_after(self._step - first_step, epoch, start)
            if place == EPOCH_START:
                raise ValueError(
                    f"epoch {epoch} has no batch on any rank; training needs at least one: check the data set, its "
                    "split and drop_last"
                )
            rows = self._schedule.rows_after(self._step)
            in_window = start.row + behind_window + rows - first_rows - place.row
            self._progress = TrainProgress(
                self._step,
                epoch,
                place.row,
                place.steps,
                in_window if place.steps else 0,
                self._data.window_of() if place.steps else {},
                rows,
            )
            if trained and self._saves_after(self._step):
                self._save()
            if trained and self._evaluates_after(self._step) and not self._stop.agreed:
                self._evaluate()
            # The same on all ranks: they train together until the last has ended.
            if not trained or not self._pauses_after(self._step):
                break
        self._data.close()

    def _segment(self, batches: Iterator[Any], first_step: int) -> Iterator[Any]:
        """Batches of this rank until something else than training is due, or until the data end."""
        for step in itertools.count(first_step):
            if self._may_stop_after(step - 1):  # looked at before a batch is taken, which would be lost
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
        stats = self._data.take_stats() if self._data.in_windows else self._pipeline.last_stats
        if self._in_turn is not None:
            stats = self._in_turn.beside(stats)
        self._update.after_step(self._step, output.num_loss_tokens)
        self._step += 1
        self._guard.look(self._step, output.loss_sum)
        self._meter.step(output, stats)
        self._forward_timer.step(stats)
        self._report_forward_times()
        self._stop.after_step()
        self._log.step(stats)
        self._profiler.step(stats)
        if self._log.should_write(self._step):
            self._write_line()

    def _report_forward_times(self) -> None:
        for milliseconds, of_batch in self._forward_timer.take():
            self._shuffler.report_step_time(milliseconds, of_batch)

    def _write_line(self) -> None:
        self._guard.check()
        if numbers := self._meter.take():
            self._report_forward_times()  # the meter has waited for the end of the last step
            details = self._meter.details()
            if self._forward_timer.is_on and "loads_after" in details:
                details |= {"own_ms": of_all_ranks(self._forward_timer.last_ms, self._device)}
            scale = {} if self._loss_scaler is None else {"loss_scale": self._loss_scaler.value()}
            if self._in_turn is not None:  # without it, "before" is of rows that a sampler had made even already
                details |= {"before_in_turn": 1}
            self._log.line({"step": self._step, **numbers, **scale}, details)

    def _save(self) -> None:
        """Save a checkpoint, unless this step has one; no batch is in flight here."""
        if not self._checkpoints.has_saved(self._step):
            self._guard.check()
            self._checkpoints.save(self._progress)

    def _evaluate(self) -> None:
        if self._evaluations.evaluate(self._step, self._model, self._pipeline, self._stop):
            self._log.line({"step": self._step, **self._evaluations.results})

    def _pauses_after(self, step: int) -> bool:
        """Whether something else than training is due after a step; the same on all ranks."""
        return self._has_trained_all(step) or self._saves_after(step) or self._evaluates_after(step)

    def _saves_after(self, step: int) -> bool:
        """Whether a checkpoint is due after a step; it holds no half-accumulated gradient."""
        every = self._args.optimization.accumulation_steps
        return self._checkpoints.saves and self._schedule.is_due(self._args.ckpt_save_interval, step, every=every)

    def _evaluates_after(self, step: int) -> bool:
        return self._evaluations.enabled and self._schedule.is_due(self._args.eval_interval, step)

    def _has_trained_all(self, step: int) -> bool:
        limit = self._args.max_train_iters
        return limit is not None and self._schedule.done_after(step) >= limit

    def _may_stop_after(self, step: int) -> bool:
        """Whether a run that was asked to end may do so after a step: not within an accumulation."""
        return self._stop.agreed and self._update.is_whole_after(step)

    def _is_done(self) -> bool:
        return self._has_trained_all(self._step) or self._may_stop_after(self._step)

    def _total_steps(self, start: Place) -> int:
        """Steps of the run, those before a checkpoint included; an estimate where steps differ in their rows."""
        batches = torch.tensor(len(self._train_loader), device=self._device)
        all_reduce(batches, "count of batches", op=dist.ReduceOp.MAX)
        rows_per_step = self._args.train_batch_size * dist.get_world_size(resolve_process_group())
        limits = []
        if self._args.max_train_iters is not None:
            limit = self._args.max_train_iters
            limits.append(-(-limit // rows_per_step) if self._schedule.in_rows else limit)
        if self._num_epochs is not None:
            epochs = self._num_epochs - self._progress.epoch
            left = self._data.num_steps(self._progress.epoch, start) if epochs else 0
            if left is None:
                left = max(0, int(batches) - start.row // rows_per_step)
            limits.append(self._step + (left + (epochs - 1) * int(batches) if epochs else 0))
        return max(self._step, min(limits))

    def _total_rows(self) -> int:
        """Rows of the run, those before a checkpoint included."""
        progress, of_epoch = self._progress, self._data.num_rows or 0
        limits = [] if self._args.max_train_iters is None else [self._args.max_train_iters]
        if self._num_epochs is not None:
            left = max(0, of_epoch - progress.rows_in_epoch - progress.window_rows)
            limits.append((progress.rows or 0) + left + (self._num_epochs - progress.epoch - 1) * of_epoch)
        return min(limits)
