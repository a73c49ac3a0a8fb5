"""What the faults do, inside the faulty rank: `act(injector, value)` returns the value of the place, changed or not."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.faults.injector import Injector


def kill(injector: Injector, value: Any) -> Any:
    injector.say("fault")
    os.kill(os.getpid(), signal.SIGKILL)


def _stop(injector: Injector, value: Any, seconds: float) -> Any:
    injector.say("fault", later=[[seconds, int(signal.SIGCONT), os.getpid()]])
    os.kill(os.getpid(), signal.SIGSTOP)
    injector.say("resumed")
    return value


def stop_long(injector: Injector, value: Any) -> Any:
    return _stop(injector, value, injector.trial.timeout + 3.0)


def stop_briefly(injector: Injector, value: Any) -> Any:
    return _stop(injector, value, injector.trial.timeout / 3)
