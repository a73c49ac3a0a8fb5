"""The shuffler: workload → gather → plan → exchange, in two phases.

`start_shuffle` takes a rank's next batch, as soon as it is known, and lets the worker thread gather and plan while
earlier batches compute. `finish_shuffle` takes the same batch on its device, right after the copy, and exchanges rows.
`shuffle` is one after the other. The work is done by the engine (engine.py).
"""

from __future__ import annotations

import dataclasses
import numbers
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from commons.distributed.channel.absence import RankMissingError
from commons.distributed.engine.engine import ShuffleEngine
from commons.distributed.engine.shuffle_handle import ShuffleHandle
from commons.distributed.options import ShufflerOptions
from commons.distributed.process_group import require_process_group
from commons.distributed.stats import ShuffleStats
from commons.perf_model.calibration import CalibratedTask
from commons.perf_model.task_estimator import AttentionTask
from commons.sequence_batch.open_batch import batch_device, batch_rows, real_rows

T = TypeVar("T")


class BaseTaskBalancedBatchShuffler(ABC):
    """Re-deals the rows of a global batch so that all ranks carry equal work.

    A subclass says what a row costs, in one method; everything else is here. All ranks of a group construct the
    shuffler with equal options and call it once per step, in the same order.

    Args:
        options: settings; the defaults balance.
        pg_group: ranks that share a global batch; default megatron-core's data-parallel group where parallel_state is
            initialised, else all ranks. Where torch.distributed is not initialised yet, the group is looked up at first
            use.

    Attributes:
        options: the settings.
        token_feature_names: keys of KeyedJaggedTensors whose values are tokens, for `max_tokens_per_rank` and the
            stats: a subclass may name them, the same on all ranks, before the first shuffle. None counts all but the
            labels', and so whatever else comes with a row, such as times or drawn negatives.
        engine: the threads and process groups; for pipelines.
    """

    token_feature_names: Sequence[str] | None = None

    def __init__(self, options: ShufflerOptions | None = None, pg_group: dist.ProcessGroup | None = None) -> None:
        if options is not None and not isinstance(options, ShufflerOptions):
            raise TypeError(f"options is a {type(options).__name__}; it must be ShufflerOptions: build one")
        if pg_group is not None:
            require_process_group(pg_group)
        self.options = options or ShufflerOptions()
        has_groups = type(self).get_groups is not BaseTaskBalancedBatchShuffler.get_groups
        self.engine = ShuffleEngine(self, pg_group, has_groups)
        self.engine.connect()

    @abstractmethod
    def get_workloads(self, batch: Any) -> torch.Tensor:
        """Cost of every row of a batch.

        Args:
            batch: a host batch where the pipeline has one, else the batch on its device.

        Returns:
            int64 `(batch_size,)` on the device of the batch, not negative; the values of padding rows are ignored.
        """

    def get_groups(self, batch: Any) -> torch.Tensor:
        """The group of every row: rows with equal numbers, of all ranks, end on one rank and in one batch.

        For rows that a loss compares, such as the samples of one prompt. A subclass that has this method keeps groups
        together, whatever `min_gain` says; one that has not moves every row by itself. A group counts as one row with
        the sum of its workloads and tokens. With `equal_size` all groups have the same number of rows.

        Args:
            batch: as in `get_workloads`.

        Returns:
            int64 `(batch_size,)` on the device of the batch; the values of padding rows are ignored.
        """
        raise NotImplementedError

    def calibrated(self, task: AttentionTask) -> AttentionTask | CalibratedTask:
        """What a subclass computes its workloads with: measured times if `options.calibration` is set, else the task.

        To be called once, by the subclass' constructor after that of this class. A file that cannot be read, or was
        measured on another model, is reported by the first shuffle, on every rank, since the ranks of other machines
        may have a good one; so is one that was measured on another device, as soon as the batches' is known.

        Args:
            task: operations of the model.
        """
        return self.engine.costs.calibrate(task)

    def shuffle(
        self,
        batch: T,
        pg_group: dist.ProcessGroup | None = None,
        return_indices: bool = False,
        return_workloads: bool = False,
    ) -> Any:
        """Start and finish a shuffle at once.

        Args:
            batch: this rank's batch.
            pg_group: the group, if not the shuffler's own.
            return_indices: also return the global ids of the rows of the result.
            return_workloads: also return their workloads.

        Returns:
            The batch, or a tuple of the batch and then int64 CPU tensors `(actual_batch_size,)`: the indices (ascending
            global ids: rows of the ranks before, padding included, plus the row) and the workloads.

        Raises:
            ValueError, TypeError, KeyError: a mistake on any rank, on all of them; a field that requires grad is one.
            RankMissingError: a rank did not take part in time.
        """
        self.engine.look_at(batch)
        handle = self.start_shuffle(batch, pg_group)
        # In mode "off" nobody else asks for them, and they are of this rank's own rows.
        own = self.get_workloads(batch) if return_workloads and self.options.mode == "off" else None
        result = self.finish_shuffle(batch, handle)
        if not (return_indices or return_workloads):
            return result
        indices, workloads = handle.prepared().rows_trained(real_rows(batch), own)
        return (result, *([indices] if return_indices else []), *([workloads] if return_workloads else []))

    def start_shuffle(
        self,
        batch: Any | None,
        pg_group: dist.ProcessGroup | None = None,
        *,
        error: Exception | None = None,
    ) -> ShuffleHandle:
        """Begin the shuffle of one step; returns at once, the worker thread gathers and plans.

        Args:
            batch: this rank's batch, on the host or on its device; None if it has none.
            pg_group: the group, if not the shuffler's own.
            error: an exception of the dataloader, to be raised on every rank.

        Returns:
            The handle for `finish_shuffle`.

        Raises:
            RuntimeError: the shuffler is closed, or this process was forked from the shuffler's.
        """
        return self.engine.start(batch, pg_group, error)

    def finish_shuffle(self, batch: T, handle: ShuffleHandle) -> T:
        """Exchange rows according to the plan of `start_shuffle`.

        On CUDA call it on the stream that copied the batch; nothing is read back from the device.

        Args:
            batch: the batch that the shuffle was started with, on its device; `handle.empty_batch()` there if it was
                started with None.
            handle: what `start_shuffle` returned.

        Returns:
            The rows this rank trains, in ascending global id, padding last; `batch_size` is the largest of 1, the
            batch's own and the number of real rows.

        Raises:
            ValueError: a handle used twice or on another batch, or no rank had a batch.
            Exception: what went wrong on any rank.
        """
        if not isinstance(handle, ShuffleHandle):
            raise TypeError(
                f"handle is a {type(handle).__name__}; finish needs what start_shuffle returned: start first"
            )
        return self.engine.finish(batch, handle)

    def report_step_time(
        self, milliseconds: float, stats: ShuffleStats | None, pg_group: dist.ProcessGroup | None = None
    ) -> None:
        """Report how long this rank's own work on a batch took, for `speeds`, `rank_speeds` and warnings of slow ranks.

        What counts is a part of the step that waits for no other rank and takes time by the load: the forward pass of
        the dense layers, say, timed by CUDA events that have passed. The time of a whole step shows nothing, since in
        collective training all ranks take as long as the slowest. The report travels with a later batch; ranks may
        report every step or some.

        Args:
            milliseconds: positive, and less than an hour: any other time is dropped, with one warning.
            stats: of the batch, such as the pipeline's `last_stats` after it was trained; None has no effect.
            pg_group: the group, if not the shuffler's own.

        Raises:
            ValueError: not a number.
        """
        if not isinstance(milliseconds, numbers.Real):
            raise ValueError(f"milliseconds is {milliseconds!r}; a step takes a positive number of them: correct it")
        if stats is not None:
            self.engine.report_step_time(float(milliseconds), stats, pg_group)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint should keep of the shuffler: the speeds of the ranks; any rank's will do."""
        return {"speeds": self.engine.step_times.speeds}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the speeds of an earlier run, before the first shuffle; other numbers of ranks begin anew.

        Args:
            state: of `state_dict`, the same on all ranks.

        Raises:
            RuntimeError: the shuffler has shuffled.
            ValueError: speeds that are no integers.
        """
        self.engine.step_times.load(state.get("speeds", []))

    @property
    def last_stats(self) -> ShuffleStats | None:
        """Stats of the batch that was finished last; None before, and in mode "off"."""
        return self.engine.read_stats()

    @property
    def num_cap_exceeded(self) -> int:
        """Batches in which no plan could keep `max_tokens_per_rank`."""
        return self.engine.num_cap_exceeded

    @property
    def failure(self) -> RankMissingError | None:
        """Which rank is missing, as soon as the worker thread knows; None while all is well."""
        return self.engine.failure

    def drain(self) -> None:
        """Wait until the worker threads are idle.

        Raises:
            RuntimeError: they are not, ten seconds after the timeout: an iterator of windows has not given its batch.
        """
        self.engine.drain()

    def abort(self) -> None:
        """Break off whatever waits in this shuffler, on any thread, and close it: for a restart within the process.

        A wait for a shuffle, for a window or for another rank raises ShufflerAbortedError at once, on this rank; on the
        others it fails as for any rank that fails. What is called later raises it too. Takes a second at most, and
        leaves neither a thread nor a connection that waits for a rank; a thread inside the user's iterator ends when
        that returns. May be called on any thread, before the first shuffle, after `close`, and again.

        NCCL's collectives are not this method's to end: `torch.distributed` aborts those.
        """
        self.engine.abort()

    def close(self) -> None:
        """End the worker thread and give back the shuffler's groups; the shuffler cannot be used afterwards."""
        self.engine.close()


class IdentityBalancedBatchShuffler(BaseTaskBalancedBatchShuffler):
    """Moves nothing; its use is the agreement on the end of the data, in training without balancing and evaluation."""

    def __init__(self, options: ShufflerOptions | None = None, pg_group: dist.ProcessGroup | None = None) -> None:
        if options is None or isinstance(options, ShufflerOptions):
            options = dataclasses.replace(options or ShufflerOptions(), mode="off")
        super().__init__(options, pg_group)

    def get_workloads(self, batch: Any) -> torch.Tensor:
        """One per row."""
        return torch.ones(batch_rows(batch), dtype=torch.int64, device=batch_device(batch))
