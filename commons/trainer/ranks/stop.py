"""SIGTERM: all ranks stop after the same step, so that they can save together."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from commons.distributed.channel.agree import ControlChannel
from commons.distributed.options import ShufflerOptions

# What the ranks wait for, in messages.
_QUESTION = "agreement to stop"


class _StopChannel(ControlChannel):
    remedy = "every rank must come to the end of every step: see the log there, or raise trainer.shuffler.timeout"


class StopSignal:
    """Listens for SIGTERM and agrees on it; a context manager around the steps of a run, entered by all ranks.

    A cluster's signal reaches ranks at different times, or only some of them. After every step the ranks reduce who has
    received it, in the background over a gloo group of their own, and look at the result one step later.

    Args:
        enabled: False leaves the signal to do what it did before. Python handles signals on the main thread alone: a
            run on another one, as in Ray Train, receives none, and stops with the ranks that do.
        timeout: seconds after which a rank that does not take part is reported.
    """

    def __init__(self, enabled: bool = True, timeout: float = ShufflerOptions.timeout) -> None:
        self.agreed = False  # some rank had the signal by the step before; the same on all ranks after the same step
        self._listens = enabled and threading.current_thread() is threading.main_thread()
        self._heard = False
        self._asked = 0
        self._pending: tuple[torch.Tensor, dist.Work] | None = None
        # Pairwise: of many ranks too, one group over all of them answers.
        self._channel = _StopChannel(dist.group.WORLD, timeout, moves_rows=False, pairwise=True) if enabled else None

    def __enter__(self) -> StopSignal:
        if self._listens:
            self._before = signal.signal(signal.SIGTERM, self._hear)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._listens:
            signal.signal(signal.SIGTERM, self._before)
        if kind is None:
            self._take_answer()
            if self._channel is not None:
                self._channel.close()

    def after_step(self) -> None:
        """Take the answer of the step before, and ask again; called on all ranks.

        Raises:
            RankMissingError: a rank did not take part in time; names it.
        """
        if self._channel is None:
            return
        self._take_answer()
        heard, group = torch.tensor([int(self._heard)]), self._channel.control_group
        if group is None:  # a single rank agrees with itself
            self.agreed = self._heard
            return
        with self._channel.collective(self._asked, _QUESTION):
            self._pending = heard, dist.all_reduce(heard, op=dist.ReduceOp.MAX, group=group, async_op=True)

    def _take_answer(self) -> None:
        if self._pending is None or self._channel is None:
            return
        heard, work = self._pending
        self._channel.wait(work, self._asked, _QUESTION)
        self.agreed = self.agreed or bool(heard)
        self._asked += 1
        self._pending = None

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._heard = True


def keep_workers(loader: Any) -> None:
    """Let a loader's worker processes outlive a SIGTERM that is meant for the run; called before its first iteration.

    torchrun and clusters send it to all processes of a rank. A worker that it ends takes its rank along, before that
    has saved. Workers still end when their rank tells them to, or is gone.
    """
    if isinstance(loader, DataLoader) and loader.num_workers > 0 and not isinstance(loader.worker_init_fn, _KeepWorker):
        loader.worker_init_fn = _KeepWorker(loader.worker_init_fn)


class _KeepWorker:
    """A worker_init_fn: after the user's own, only the parent's SIGTERM ends the worker."""

    def __init__(self, then: Callable[[int], None] | None) -> None:
        self._then = then

    def __call__(self, worker: int) -> None:
        if self._then is not None:
            self._then(worker)
        # A handler does not learn who has sent a signal; who waits for it does.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_end_when_parent_says, name="evenrank-sigterm", daemon=True).start()


def _end_when_parent_says() -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)  # as torch's own handler does it
