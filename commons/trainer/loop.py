"""The training loop: segments of training in one pipeline, with evaluations in another between them.

    train loader ─► epoch ─► segment of n batches ─► train pipeline ─► log
                                     │ the pipeline drains, all ranks at once
                                     └► eval loader ─► eval pipeline ─► metrics

Both pipelines drive one model, so only one may have batches in flight. A segment is an iterator of its own that ends
before the next evaluation: its last batch is trained before the model changes hands, and none is lost.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import statistics
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from commons.dispatch import SingleRankLoader
from commons.distributed.batch_shuffler import BaseTaskBalancedBatchShuffler
from commons.distributed.process_group import resolve_process_group
from commons.distributed.stats import ShuffleStats
from commons.perf_model.measured_saving import MeasuredSaving
from commons.perf_model.peak_rates import peak_flops_of
from commons.pipeline.factory import CUDA_PIPELINES, TrainPipelineFactory
from commons.sequence_batch.fields import real_rows
from commons.trainer.args import TrainerArgs
from commons.trainer.broadcast import broadcast_text
from commons.trainer.checkpoint import Checkpointer, TrainProgress
from commons.trainer.epochs import open_epoch, order_of
from commons.trainer.evaluation import Metrics, StepOutput, evaluate
from commons.trainer.launch import describe_ranks
from commons.trainer.loss_scaling import LossScaler
from commons.trainer.optimization import DeferredOptimizer, FiniteLossGuard, StepUpdate
from commons.trainer.profiling import StepProfiler
from commons.trainer.random_state import kept_random_state
from commons.trainer.stop import StopSignal, keep_workers
from commons.trainer.train_log import StatsMean, StepClock, StepSums, TrainLog, TrainSummary, step_imbalances


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
        fingerprint: what must be equal to load a checkpoint, JSON-ready; needed for checkpoints.
        flops: operations of forward and backward pass on a host batch; None leaves TFLOPS and MFU out of the log.
        compute_dtype: of the model's matrix products, for MFU.
        loss_scaler: of a model that scales its loss, as training in float16 needs it.
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
        count: Callable[[Any], int] = count_tokens,
        fingerprint: Mapping[str, Any] | None = None,
        flops: Callable[[Any], int] | None = None,
        compute_dtype: torch.dtype = torch.float32,
        loss_scaler: LossScaler | None = None,
    ) -> None:
        if (eval_loader is None) != (eval_shuffler is None) or eval_shuffler is shuffler:
            raise ValueError(
                "eval_loader and eval_shuffler go together, and eval_shuffler is not the shuffler of training; an "
                "evaluation agrees on the end of its own data: give both or none"
            )
        if args.single_rank_load and not isinstance(train_loader, SingleRankLoader):
            raise ValueError(
                f"single_rank_load is True and train_loader is a {type(train_loader).__name__}; every rank would train "
                "the batches of all: pass what commons.trainer.data.deal_out makes of it"
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
        self._eval_loader = eval_loader
        self._metrics = metrics
        self._count = count
        self._flops = flops
        self._loss_scaler = loss_scaler
        self._peak_flops = peak_flops_of(device, compute_dtype) if args.peak_tflops is None else args.peak_tflops * 1e12
        pipeline: dict[str, Any] = {"model": model, "optimizer": DeferredOptimizer(optimizer), "device": device}
        self._pipeline = TrainPipelineFactory.create(args.pipeline_type, batch_shuffler=shuffler, **pipeline)
        if eval_shuffler is not None:
            self._eval_pipeline = TrainPipelineFactory.create("none", batch_shuffler=eval_shuffler, **pipeline)
        # Where only the number of steps is limited, the data repeats.
        self._num_epochs = args.num_epochs or (None if args.max_train_iters else 1)
        self._step, self._first_epoch, self._progress = 0, 0, TrainProgress()
        self._evaluated_at = self._saved_at = -1
        self._saves = args.ckpt_save_interval > 0
        self._stop = StopSignal(enabled=self._saves)
        if self._saves:
            for loader in (getattr(train_loader, "loader", train_loader), eval_loader):
                keep_workers(loader)
        self._checkpoints = None
        if self._saves or args.ckpt_load_dir:
            self._checkpoints = Checkpointer(
                args.ckpt_save_dir,
                keep=args.ckpt_keep,
                model=model,
                optimizer=optimizer,
                fingerprint=fingerprint or {},
                device=device,
                order=order_of(train_loader),
                loss_scaler=loss_scaler,
            )
        self._sums = StepSums()
        self._clock = StepClock(device)
        # Of the steps since the last line; None for a step that was not balanced.
        self._stats: list[ShuffleStats | None] = []
        self._all_stats = StatsMean()
        # Rows, tokens and operations of batches that are loaded but not trained.
        self._loaded: deque[tuple[int, int, int]] = deque()
        # Operations of this rank in the steps since the last line, and the imbalance of all steps, where the shuffler
        # says nothing of it.
        self._step_flops: list[int] = []
        self._imbalances: list[float] = []
        self._saving = MeasuredSaving()
        self._guard = FiniteLossGuard(device, in_float16=loss_scaler is not None)
        self._profiler = StepProfiler(args, device)
        self._all_step_ms: list[float] = []
        self._all_tokens = 0

    def run(self) -> TrainSummary:
        """Train, evaluate and log; called on all ranks together.

        Raises:
            ValueError: the loaders have no batch on any rank.
            RuntimeError: the checkpoint at the end could not be written; everything else is done by then.
            Exception: an error of any rank's data or shuffler, on every rank.
        """
        with self._stop:
            return self._run()

    def _run(self) -> TrainSummary:
        resumed = self._resume()
        total = self._total_steps()
        self._update = StepUpdate(
            self._args.optimization, self._optimizer, self._model, total, self._device, self._loss_scaler
        )
        self._log = TrainLog(self._args.run_dir, total, self._args.tensorboard, first_step=self._step)
        self._log.say(describe_ranks(self._device))
        if resumed is not None:
            self._log.say(resumed)
        self._profiler.step(self._step)
        self._summary = TrainSummary(epochs=self._first_epoch + (self._step > 0))
        # A run that was complete is not evaluated once more.
        evaluated = json.loads(broadcast_text(json.dumps(self._log.evaluated), self._device))
        if evaluated:
            self._evaluated_at, self._summary.metrics = self._step, evaluated
        try:
            for epoch in self._epochs():
                self._summary.epochs = epoch + 1
                self._train_epoch(epoch)
            self._update.flush()
            self._write_line()
            self._save()
            if self._evaluated_at != self._step and not self._stop.agreed:
                self._evaluate()
            if self._stop.agreed:
                self._log.say(f"stopped by SIGTERM after step {self._step}{self._how_to_resume()}")
        finally:
            self._profiler.close()
            self._log.close()
        self._summary.steps = self._step
        self._summary.shuffle = self._all_stats.means() or _not_balanced(self._imbalances)
        if self._all_step_ms:
            self._summary.step_ms = statistics.median(self._all_step_ms)
            self._summary.tokens_per_s = self._all_tokens / sum(self._all_step_ms) * 1e3
        self._log.summary(str(self._args.run_dir), self._summary)
        if self._saves and self._saved_at != self._step:
            raise RuntimeError(
                f"the state after step {self._step} could not be saved to {self._args.ckpt_save_dir}; its checkpoints "
                "of earlier steps stay: make room there and go on from the last one"
            )
        return self._summary

    def _epochs(self) -> Iterator[int]:
        first = self._first_epoch
        for epoch in itertools.count(first) if self._num_epochs is None else range(first, self._num_epochs):
            if self._is_done():
                return
            yield epoch

    def _is_done(self) -> bool:
        trained_all = self._args.max_train_iters is not None and self._step >= self._args.max_train_iters
        return trained_all or self._may_stop()

    def _total_steps(self) -> int:
        """Steps of the run, those before a checkpoint included; ranks with fewer batches go on with the others."""
        batches = torch.tensor(len(self._train_loader), device=self._device)
        dist.all_reduce(batches, op=dist.ReduceOp.MAX)
        limits = [] if self._args.max_train_iters is None else [self._args.max_train_iters]
        if self._num_epochs is not None:
            # The steps before may have been larger or smaller ones, on another number of ranks.
            of_epoch = min(self._progress.rows_in_epoch // self._rows_per_step(), int(batches))
            limits.append(self._step + (self._num_epochs - self._first_epoch) * int(batches) - of_epoch)
        return min(limits)

    def _rows_per_step(self) -> int:
        return self._args.train_batch_size * dist.get_world_size(resolve_process_group())

    def _train_epoch(self, epoch: int) -> None:
        self._progress = TrainProgress(self._step, epoch, self._rows_done_before(epoch))
        place = {"first_row": self._progress.rows_in_epoch, "seed": self._args.seed, "rank": dist.get_rank()}
        batches = open_epoch(self._train_loader, epoch, **place)
        while not self._is_done():
            limit = self._steps_to_next_stop()
            trained = self._train_segment(itertools.islice(batches, limit))
            rows = trained * self._rows_per_step()
            self._progress = TrainProgress(self._step, epoch, self._progress.rows_in_epoch + rows)
            if self._progress.rows_in_epoch == 0:
                raise ValueError(
                    f"epoch {epoch} has no batch on any rank; training needs at least one: check the data set, its "
                    "split and drop_last"
                )
            if trained and self._saves and self._step % self._args.ckpt_save_interval == 0:
                self._save()
            evaluates = self._eval_loader is not None and self._step % self._args.eval_interval == 0
            if evaluates and trained and not self._stop.agreed:
                self._evaluate()
            if limit is None or trained < limit:  # the same on all ranks: they train together until the last has ended
                return

    def _steps_to_next_stop(self) -> int | None:
        """Steps until the next checkpoint, the next evaluation or the end of training; None for none of them."""
        stops = []
        if self._args.max_train_iters is not None:
            stops.append(self._args.max_train_iters - self._step)
        if self._eval_loader is not None:
            stops.append(self._args.eval_interval - self._step % self._args.eval_interval)
        if self._saves:
            stops.append(self._args.ckpt_save_interval - self._step % self._args.ckpt_save_interval)
        return min(stops, default=None)

    def _train_segment(self, batches: Iterator[Any]) -> int:
        """Train the batches of an iterator until all ranks' have ended; returns the number of steps."""
        self._model.train()
        segment = self._watch(batches)
        self._clock.begin()
        steps = 0
        while True:
            self._update.before_step(self._step)
            try:
                output = self._pipeline.progress(segment)
            except StopIteration:
                return steps
            self._update.after_step(self._step, output.num_loss_tokens)
            self._guard.look(self._step + 1, output.loss_sum)
            steps += 1
            self._after_step(output)

    def _watch(self, batches: Iterator[Any]) -> Iterator[Any]:
        while not self._may_stop():  # looked at before a batch is taken, which would be lost
            batch = next(batches, None)
            if batch is None:
                return
            flops = 0 if self._flops is None else self._flops(batch)
            self._loaded.append((real_rows(batch), self._count(batch), flops))
            yield batch

    def _may_stop(self) -> bool:
        """Whether a run that was asked to end may do so before the next batch: not within an accumulation."""
        next_step = self._step + len(self._loaded)
        return self._stop.agreed and next_step % self._args.optimization.accumulation_steps == 0

    def _after_step(self, output: StepOutput) -> None:
        self._clock.end()
        self._step += 1
        self._stop.after_step()
        # Rows move between ranks, but the rows of step n are those that all ranks loaded n-th.
        rows, tokens, flops = self._loaded.popleft() if self._loaded else (0, 0, 0)
        self._sums.rows += rows
        self._sums.tokens += tokens
        self._sums.flops += flops
        self._step_flops.append(flops)
        self._sums.add(output.loss_sum, output.num_loss_tokens)
        stats = self._pipeline.last_stats
        self._stats.append(stats)
        self._log.step(stats)
        self._profiler.step(self._step)
        if self._step % self._args.log_interval == 0:
            self._write_line()

    def _write_line(self) -> None:
        step_ms = self._clock.take()
        if not step_ms:
            return
        self._guard.check()
        sums, self._sums = self._sums.all_reduce(self._device), StepSums()
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
                **self._rates(sums.flops, sum(step_ms)),
                **({} if self._loss_scaler is None else {"loss_scale": self._loss_scaler.value()}),
                **self._take_imbalance(),
                **self._take_stats(step_ms).means(),
            }
        )

    def _rates(self, flops: float, total_ms: float) -> dict[str, float]:
        """TFLOPS per rank and, where the device's peak is known, the utilisation of the model."""
        if self._flops is None:
            return {}
        rate = flops / dist.get_world_size() / total_ms * 1e3
        utilisation = {} if self._peak_flops is None else {"mfu": rate / self._peak_flops}
        return {"tflops_per_rank": rate / 1e12, **utilisation}

    def _take_imbalance(self) -> dict[str, float]:
        """Mean imbalance of the operations since the last line, where no shuffler has looked at the rows."""
        step_flops, self._step_flops = self._step_flops, []
        if self._flops is None or any(stats is not None for stats in self._stats):
            return {}
        found = step_imbalances(step_flops, self._device)
        self._imbalances += found
        return _not_balanced(found)

    def _take_stats(self, step_ms: list[float]) -> StatsMean:
        """Means of the shuffler's numbers since the last line, completed by the time of the step that trained each."""
        timed = [dataclasses.replace(stats, step_ms=ms) for stats, ms in zip(self._stats, step_ms) if stats is not None]
        self._stats = []
        for stats in timed:
            self._saving.add(stats.largest_load_trained, stats.step_ms or 0.0)
        ms_per_load = self._saving.ms_per_load() if dist.get_rank() == 0 else None  # rank 0 says it
        mean = StatsMean()
        for stats in timed:
            if ms_per_load is not None:
                saved = stats.largest_load_before - stats.largest_load_after
                stats = dataclasses.replace(stats, measured_saving_ms=ms_per_load * saved)
            mean.add(stats)
            self._all_stats.add(stats)
        return mean

    def _resume(self) -> str | None:
        """Load the checkpoint that the settings name, if they do; returns what to say about that."""
        if self._checkpoints is None:
            return None
        said = None
        if self._args.ckpt_load_dir:
            folder, save_folder = Path(self._args.ckpt_load_dir), Path(self._args.ckpt_save_dir)
            # One command starts a run and, given again, goes on with it.
            is_own = self._saves and folder.resolve() == save_folder.resolve()
            progress = self._checkpoints.load(folder, may_be_empty=is_own)
            if progress is None:
                said = f"{folder} holds no checkpoint yet: a new run"
            else:
                self._step, self._first_epoch, self._progress = progress.step, progress.epoch, progress
                said = f"resumed after step {self._step}, from {self._checkpoints.loaded_from}"
        if self._saves:
            self._checkpoints.claim_folder(self._step)
            if self._checkpoints.has_loaded_own():
                self._saved_at = self._step
        return said

    def _rows_done_before(self, epoch: int) -> int:
        """Rows of an epoch that a checkpoint has seen trained."""
        return self._progress.rows_in_epoch if epoch == self._first_epoch else 0

    def _save(self) -> None:
        """Save a checkpoint, unless this step has one; no batch is in flight here."""
        if self._checkpoints is None or not self._saves or self._saved_at == self._step:
            return
        self._guard.check()
        if self._checkpoints.save(self._progress) is not None:
            self._saved_at = self._step

    def _how_to_resume(self) -> str:
        if self._saved_at != self._step:
            return ""  # an error says so
        return f"; go on with --trainer.ckpt-load-dir {self._args.ckpt_save_dir}"

    def _evaluate(self) -> None:
        """Evaluate without the training pipeline's changes to the model, which has no batch in flight."""
        if self._eval_loader is None:
            return
        if hasattr(self._pipeline, "detach"):
            self._pipeline.detach()
        with kept_random_state():  # training is the same, however often it is evaluated
            batches = itertools.islice(iter(self._eval_loader), self._args.max_eval_iters)
            results = evaluate(self._eval_pipeline, self._model, batches, self._metrics, self._device, self._stop)
        if not self._stop.agreed:
            self._evaluated_at = self._step
            self._summary.metrics = {f"eval_{name}": value for name, value in results.items()}
            self._log.line({"step": self._step, **self._summary.metrics})
        if hasattr(self._pipeline, "attach"):
            self._pipeline.attach(self._model)


def _not_balanced(imbalances: list[float]) -> dict[str, float]:
    """The mean imbalance of rows that stay where they are, by the shuffler's name for it."""
    return {"imbalance_before": statistics.fmean(imbalances)} if imbalances else {}
