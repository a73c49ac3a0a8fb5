"""The shuffler: workload → gather → plan → exchange, in two phases.

`start_shuffle` takes a rank's next batch as soon as it is loaded; the worker thread gathers and plans while earlier
batches compute. `finish_shuffle` takes the same batch on its device, right after the copy, and exchanges rows.
`shuffle` calls both. The engine (engine.py) does the work.
"""

from __future__ import annotations

import dataclasses
import numbers
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch
import torch.distributed as dist

from commons.checks import kind_of
from commons.distributed.channel.absence import RankMissingError
from commons.distributed.engine.engine import ShuffleEngine
from commons.distributed.engine.shuffle_handle import ShuffleHandle
from commons.distributed.errors import capture_error
from commons.distributed.options import ShufflerOptions
from commons.distributed.process_group import require_process_group
from commons.distributed.stats import ShuffleStats
from commons.perf_model.calibration import CalibratedTask
from commons.perf_model.task_estimator import AttentionTask
from commons.sequence_batch.open_batch import batch_device, batch_rows, real_rows

T = TypeVar("T")


class _ConstructorNotCalledError(TypeError, AttributeError):
    """An attribute is missing; an AttributeError too, for `hasattr` and `getattr` with a default."""


class BaseTaskBalancedBatchShuffler(ABC):
    """Redistributes the rows of a global batch so that all ranks get equal work.

    A subclass defines the cost of a row in one method. All ranks of a group construct the shuffler with equal options
    and call it once per step, in the same order.

    Args:
        options: settings; by default the shuffler balances.
        pg_group: ranks that share a global batch; default megatron-core's data-parallel group if parallel_state is
            initialised, else all ranks. If torch.distributed is not initialised yet, the default is resolved at the
            first use.

    Attributes:
        options: the settings.
        token_feature_names: keys of KeyedJaggedTensors whose values count as tokens, for `max_tokens_per_rank` and the
            stats. A subclass may set it before the first shuffle, equal on all ranks. None: all keys except the
            labels', which includes other features of a row, such as timestamps or sampled negatives.
        engine: the threads and process groups; for pipelines.
    """

    token_feature_names: Sequence[str] | None = None

    def __init__(self, options: ShufflerOptions | None = None, pg_group: dist.ProcessGroup | None = None) -> None:
        if options is not None and not isinstance(options, ShufflerOptions):
            raise TypeError(f"options is {kind_of(options)}; it must be ShufflerOptions: build one")
        if pg_group is not None:
            require_process_group(pg_group)
        self.options = options or ShufflerOptions()
        has_groups = type(self).get_groups is not BaseTaskBalancedBatchShuffler.get_groups
        self.engine = ShuffleEngine(self, pg_group, has_groups)
        self.engine.connect()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Called for a missing attribute only."""
            if name not in ("options", "engine"):
                find = getattr(super(), "__getattr__", super().__getattribute__)  # a second base may be an nn.Module
                return find(name)
            raise _ConstructorNotCalledError(
                f"{type(self).__name__} has no {name}; the constructor of BaseTaskBalancedBatchShuffler sets it: "
                "call super().__init__(options, pg_group) in __init__"
            )

    @abstractmethod
    def get_workloads(self, batch: Any) -> torch.Tensor:
        """Cost of every row of a batch.

        Args:
            batch: the host batch if the pipeline has one, else the batch on its device.

        Returns:
            int64 `(batch_size,)` on the device of the batch, not negative; the values of padding rows are ignored.
        """

    def get_groups(self, batch: Any) -> torch.Tensor:
        """The group of every row: rows with the same number, of all ranks, end on one rank and in one batch.

        For rows that a loss compares, such as the samples of one prompt. If a subclass has this method, groups are
        kept together whatever `min_gain` is; if not, every row moves independently. A group is planned like one row
        with the sum of its workloads and tokens. With `equal_size` all groups must have the same number of rows.

        Args:
            batch: see `get_workloads`.

        Returns:
            int64 `(batch_size,)` on the device of the batch; the values of padding rows are ignored.
        """
        raise NotImplementedError

    def calibrated(self, task: AttentionTask) -> AttentionTask | CalibratedTask:
        """The task to compute workloads with: measured times if `options.calibration` is set, else `task` itself.

        Call it once, in the subclass' constructor after `super().__init__()`. The first shuffle reports, on every rank,
        a calibration file that cannot be read on some rank, or was measured on another model or another device.

        Args:
            task: counts the model's operations.
        """
        return self.engine.costs.calibrate(task)

    @overload
    def shuffle(self, batch: T, pg_group: dist.ProcessGroup | None = None) -> T: ...
    @overload
    def shuffle(
        self,
        batch: T,
        pg_group: dist.ProcessGroup | None = None,
        return_indices: bool = False,
        return_workloads: bool = False,
    ) -> Any: ...
    def shuffle(
        self,
        batch: T,
        pg_group: dist.ProcessGroup | None = None,
        return_indices: bool = False,
        return_workloads: bool = False,
    ) -> Any:
        """Start a shuffle and finish it at once.

        Args:
            batch: this rank's batch.
            pg_group: the group, if not the shuffler's own.
            return_indices: also return the global ids of the rows of the result.
            return_workloads: also return their workloads.

        Returns:
            The batch, or a tuple of the batch and then int64 CPU tensors `(actual_batch_size,)`: the indices (ascending
            global ids: rows of the ranks before, padding included, plus the row) and the workloads.

        Raises:
            ValueError, TypeError, KeyError: a mistake of any rank, raised on all; such as a field that requires grad.
            RankMissingError: a rank did not join in time.
        """
        self.engine.look_at(batch)
        own: torch.Tensor | None = None
        error: Exception | None = None
        if batch is None:
            error = TypeError(
                "the batch is None; shuffle() needs one: without a batch, call start_shuffle(None), then "
                "finish_shuffle(handle.empty_batch(), handle)"
            )
        elif return_workloads and self.options.mode == "off":  # which computes no workloads elsewhere
            own, error = capture_error(lambda: self.engine.costs.workloads_of(batch))
        handle = self.start_shuffle(batch, pg_group, error=error)
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
        """Start the shuffle of one step and return at once; the worker thread gathers and plans.

        Args:
            batch: this rank's batch, on the host or on its device; None if it has none.
            pg_group: the group, if not the shuffler's own.
            error: an exception of this rank's dataloader, to be raised on every rank.

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
            batch: the batch that the shuffle was started with, on its device; `handle.empty_batch()` on that device if
                it was started with None.
            handle: the result of `start_shuffle`.

        Returns:
            The rows that this rank trains, in ascending global id, padding last; `batch_size` is the largest of 1, the
            batch's own and the number of real rows.

        Raises:
            ValueError: a handle of another shuffler, used twice or with another batch, or no rank had a batch.
            RuntimeError: the shuffler is closed.
            Exception: an error of any rank, raised on all.
        """
        if not isinstance(handle, ShuffleHandle):
            raise TypeError(f"handle is {kind_of(handle)}; finish_shuffle takes the result of start_shuffle: pass that")
        return self.engine.finish(batch, handle)

    def report_step_time(
        self, milliseconds: float, stats: ShuffleStats | None, pg_group: dist.ProcessGroup | None = None
    ) -> None:
        """Report how long this rank's own work on a batch took, for `speeds`, `rank_speeds` and warnings of slow ranks.

        Time a part of the step whose duration depends on the load and that waits for no other rank, for example the
        forward pass of the dense layers, with CUDA events that have completed. The time of a whole step does not
        differ between ranks, because each waits for the slowest. The report is sent with a later batch; ranks may
        report every step or only some.

        Args:
            milliseconds: positive and less than an hour; any other time is ignored, with one warning.
            stats: of the batch, such as the pipeline's `last_stats` after it was trained; None has no effect.
            pg_group: the group, if not the shuffler's own.

        Raises:
            ValueError: not a number, or stats of a group of another size.
            TypeError: stats that are not a ShuffleStats.
        """
        if not isinstance(milliseconds, numbers.Real):
            raise ValueError(f"milliseconds is {kind_of(milliseconds)}; it must be a number: pass it before the stats")
        if not isinstance(stats, (ShuffleStats, type(None))):
            raise TypeError(f"stats is {kind_of(stats)}; they are a ShuffleStats: pass last_stats, without to_dict()")
        if stats is not None:
            self.engine.report_step_time(float(milliseconds), stats, pg_group)

    def state_dict(self) -> dict[str, Any]:
        """The state to save in a checkpoint: the speeds of the ranks; equal on all ranks."""
        return {"speeds": self.engine.step_times.speeds}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Start with the speeds of an earlier run; ignored if that run had another number of ranks.

        Args:
            state: a result of `state_dict`, equal on all ranks.

        Raises:
            RuntimeError: the shuffler has already shuffled.
            ValueError: not a result of `state_dict`, or speeds that are not integers.
        """
        if "speeds" not in state:  # such as a whole checkpoint: the speeds would be lost without a message
            raise ValueError(
                f"the state has the entries {sorted(state)}; a shuffler's state has 'speeds': load the result of "
                "state_dict"
            )
        self.engine.step_times.load(state["speeds"])

    @property
    def last_stats(self) -> ShuffleStats | None:
        """Stats of the last finished batch; None before the first, and in mode "off"."""
        return self.engine.read_stats()

    @property
    def num_cap_exceeded(self) -> int:
        """Batches in which no plan could keep `max_tokens_per_rank`."""
        return self.engine.num_cap_exceeded

    @property
    def failure(self) -> RankMissingError | None:
        """The error about a missing rank, as soon as the worker thread has it; None before."""
        return self.engine.failure

    def drain(self) -> None:
        """Wait until the worker threads are idle.

        Raises:
            RuntimeError: they are still busy ten seconds after the timeout, because an iterator of windows blocks.
        """
        self.engine.drain()

    def abort(self) -> None:
        """Abort every wait in this shuffler, on any thread, and close it: for a restart within the process.

        On this rank, a wait for a shuffle, a window or another rank raises ShufflerAbortedError at once, and so does
        every later call; on the other ranks the wait fails as after any rank's failure. Takes a second at most. No
        thread or connection of this rank still waits for another rank afterwards, with two exceptions: a thread inside
        the user's iterator ends when the iterator returns, and making process groups, for the first window or another
        `pg_group`, ends when all ranks take part or at the timeout. May be called on any thread, before the first
        shuffle, after `close`, and again.

        It does not abort NCCL's collectives; `torch.distributed` has functions for that.
        """
        self.engine.abort()

    def close(self) -> None:
        """End the worker thread and release the shuffler's groups; the shuffler cannot be used afterwards."""
        self.engine.close()


class IdentityBalancedBatchShuffler(BaseTaskBalancedBatchShuffler):
    """Moves nothing, but lets all ranks agree on the end of the data; for unbalanced training, and for evaluation."""

    def __init__(self, options: ShufflerOptions | None = None, pg_group: dist.ProcessGroup | None = None) -> None:
        if options is None or isinstance(options, ShufflerOptions):
            options = dataclasses.replace(options or ShufflerOptions(), mode="off")
        super().__init__(options, pg_group)

    def get_workloads(self, batch: Any) -> torch.Tensor:
        """One per row."""
        return torch.ones(batch_rows(batch), dtype=torch.int64, device=batch_device(batch))


def require_shuffler(name: str, value: Any) -> None:
    """Raise TypeError unless `value`, an argument, is a shuffler."""
    if not isinstance(value, BaseTaskBalancedBatchShuffler):
        is_class = isinstance(value, type)
        kind = f"the class {value.__name__}" if is_class else kind_of(value)
        is_shuffler_class = is_class and issubclass(value, BaseTaskBalancedBatchShuffler)
        remedy = f"pass {value.__name__}(...)" if is_shuffler_class else "such as TokensBalancedBatchShuffler()"
        raise TypeError(
            f"{name} is {kind}; it must be an object of a class that derives from BaseTaskBalancedBatchShuffler: "
            f"{remedy}"
        )
