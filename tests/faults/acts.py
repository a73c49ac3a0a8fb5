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


def _end_by(number: int) -> Callable[[Injector, Any], Any]:
    def act(injector: Injector, value: Any) -> Any:
        injector.say("fault")
        os.kill(os.getpid(), number)
        time.sleep(60)

    return act


kill, segmentation_fault, abort = (_end_by(number) for number in (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT))


def _raise(make: Callable[[], BaseException]) -> Callable[[Injector, Any], Any]:
    def act(injector: Injector, value: Any) -> Any:
        injector.say("fault")
        raise make()

    return act


system_exit = _raise(lambda: SystemExit("told to end"))
end_thread = _raise(SystemExit)  # which threading takes for a quiet end
model_error = _raise(lambda: RuntimeError("the model is broken"))
loader_error = _raise(lambda: OSError("shard 3 cannot be read"))
out_of_memory = _raise(lambda: torch.OutOfMemoryError("tried to allocate 7 GiB"))
memory_error = _raise(MemoryError)


class AsynchronousError(Exception):
    """Set on a thread from outside."""


def asynchronous(injector: Injector, value: Any) -> Any:
    injector.say("fault")
    main = ctypes.c_ulong(threading.main_thread().ident or 0)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(main, ctypes.py_object(AsynchronousError))
    return value


def interrupt(injector: Injector, value: Any) -> Any:
    injector.say("fault")
    os.kill(os.getpid(), signal.SIGINT)
    return value


def _stop(injector: Injector, value: Any, seconds: float) -> Any:
    injector.say("fault", later=[[seconds, int(signal.SIGCONT), os.getpid()]])
    os.kill(os.getpid(), signal.SIGSTOP)
    injector.say("resumed")
    return value


def _too_long(injector: Injector) -> float:
    """Seconds after which the others are looking for names, or have gone."""
    return injector.trial.timeout + (3.0 if injector.trial.number % 2 else 7.0)


def stop_long(injector: Injector, value: Any) -> Any:
    return _stop(injector, value, _too_long(injector))


def stop_briefly(injector: Injector, value: Any) -> Any:
    return _stop(injector, value, injector.trial.timeout / 3)


def _hold(injector: Injector, value: Any, seconds: float) -> Any:
    """Sleep in C without giving the interpreter lock up."""
    injector.say("fault")
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))
    injector.say("resumed")
    return value


def hold_long(injector: Injector, value: Any) -> Any:
    return _hold(injector, value, _too_long(injector))


def hold_briefly(injector: Injector, value: Any) -> Any:
    return _hold(injector, value, injector.trial.timeout / 3)


def block(injector: Injector, value: Any) -> Any:
    injector.say("fault")
    time.sleep(_too_long(injector))
    injector.say("resumed")
    return value


def workloads_nan(injector: Injector, value: torch.Tensor) -> torch.Tensor:
    injector.say("fault")
    return value.double().fill_(float("nan"))


def workloads_negative(injector: Injector, value: torch.Tensor) -> torch.Tensor:
    injector.say("fault")
    return -value


def workloads_short(injector: Injector, value: torch.Tensor) -> torch.Tensor:
    injector.say("fault")
    return value[:-1]


def workloads_overflow(injector: Injector, value: torch.Tensor) -> torch.Tensor:
    injector.say("fault")
    return value.fill_(torch.iinfo(torch.int64).max // 2)


def other_schema(injector: Injector, value: Any) -> Any:
    injector.say("fault")
    return dataclasses.replace(value, target=value.target.double())


def other_options(injector: Injector, value: Any) -> Any:
    injector.say("fault")
    changes = ({"slack": 0.5}, {"partitioner": "lpt"}, {"mode": "observe"}, {"timeout": injector.trial.timeout + 1})
    return dataclasses.replace(value, **changes[injector.trial.number % len(changes)])


def other_digest(injector: Injector, value: int) -> int:
    injector.say("fault")
    return value ^ 1


def disk_full(injector: Injector, value: Any) -> Any:
    injector.say("fault")
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def jump(injector: Injector, value: Any) -> Any:
    """The wall clock goes back and forth by days, from call to call."""
    injector.say("fault")
    now, days = time.time, itertools.cycle((0, 3, -2, 400, -400))
    time.time = lambda: now() + 86_400 * next(days)  # type: ignore[assignment]
    return value


def _on_store(number: int, then: Callable[[Injector, Any], Any] | None = None) -> Callable[[Injector, Any], Any]:
    def act(injector: Injector, value: Any) -> Any:
        injector.say("fault")
        os.kill(injector.store_pid, number)
        return value if then is None else then(injector, value)

    return act


kill_store, stop_store = (_on_store(number) for number in (signal.SIGKILL, signal.SIGSTOP))
kill_store_and_rank, stop_store_kill_rank = (_on_store(number, kill) for number in (signal.SIGKILL, signal.SIGSTOP))
