"""What the faults do, inside the faulty rank: `act(injector, value)` returns the value of the place, changed or not."""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from tests.faults.injector import Injector


Act = Callable[["Injector", Any], Any]


def _end_by(number: int) -> Act:
    def act(injector: Injector, value: Any) -> Any:
        os.kill(os.getpid(), number)
        time.sleep(60)

    return act


def _raise(make: Callable[[], BaseException]) -> Act:
    def act(injector: Injector, value: Any) -> Any:
        raise make()

    return act


def _change(change: Callable[[Any], Any]) -> Act:
    def act(injector: Injector, value: Any) -> Any:
        return change(value)

    return act


kill, segmentation_fault, abort = (_end_by(number) for number in (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT))
system_exit = _raise(lambda: SystemExit("exit on purpose"))
end_thread = _raise(SystemExit)  # which threading takes for a quiet end
model_error = _raise(lambda: RuntimeError("the model is broken"))
loader_error = _raise(lambda: OSError("shard 3 cannot be read"))
out_of_memory = _raise(lambda: torch.OutOfMemoryError("tried to allocate 7 GiB"))
memory_error = _raise(MemoryError)
disk_full = _raise(lambda: OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
workloads_nan = _change(lambda value: value.double().fill_(float("nan")))
workloads_negative = _change(lambda value: -value)
workloads_short = _change(lambda value: value[:-1])
workloads_overflow = _change(lambda value: value.fill_(torch.iinfo(torch.int64).max // 2))
other_schema = _change(lambda value: dataclasses.replace(value, target=value.target.double()))
other_digest = _change(lambda value: value ^ 1)


class AsynchronousError(Exception):
    """Set on a thread from outside."""


def asynchronous(injector: Injector, value: Any) -> Any:
    main = ctypes.c_ulong(threading.main_thread().ident or 0)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(main, ctypes.py_object(AsynchronousError))
    return value


def interrupt(injector: Injector, value: Any) -> Any:
    os.kill(os.getpid(), signal.SIGINT)
    return value


def _pause(pause: Callable[[Injector, float], object], *, for_long: bool) -> Act:
    """A rank that does not answer until the others are looking for names, or have gone; or only briefly."""

    def act(injector: Injector, value: Any) -> Any:
        timeout = injector.trial.timeout
        pause(injector, timeout + (3.0 if injector.trial.number % 2 else 7.0) if for_long else timeout / 3)
        injector.say("resumed")
        return value

    return act


def _stop(injector: Injector, seconds: float) -> None:
    injector.say("stopped", later=[[seconds, int(signal.SIGCONT), os.getpid()]])
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(0.1)  # another thread may take the signal, and this one runs on for a moment


def _hold(injector: Injector, seconds: float) -> None:
    """Sleep in C without giving the GIL up."""
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


stop_long, stop_briefly = (_pause(_stop, for_long=for_long) for for_long in (True, False))
hold_long, hold_briefly = (_pause(_hold, for_long=for_long) for for_long in (True, False))
block = _pause(lambda injector, seconds: time.sleep(seconds), for_long=True)


def other_options(injector: Injector, value: Any) -> Any:
    changes = ({"slack": 0.5}, {"partitioner": "lpt"}, {"mode": "observe"}, {"timeout": injector.trial.timeout + 1})
    return dataclasses.replace(value, **changes[injector.trial.number % len(changes)])


def jump(injector: Injector, value: Any) -> Any:
    """The wall clock goes back and forth by days, from call to call."""
    now, days = time.time, itertools.cycle((0, 3, -2, 400, -400))
    time.time = lambda: now() + 86_400 * next(days)  # type: ignore[assignment]
    return value


def _on_store(number: int, then: Act | None = None) -> Act:
    def act(injector: Injector, value: Any) -> Any:
        os.kill(injector.store_pid, number)
        return value if then is None else then(injector, value)

    return act


kill_store, stop_store = (_on_store(number) for number in (signal.SIGKILL, signal.SIGSTOP))
kill_store_and_rank, stop_store_kill_rank = (_on_store(number, kill) for number in (signal.SIGKILL, signal.SIGSTOP))
