"""Ctrl-C while a command imports what it needs."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

INTERRUPTED = 130


@contextlib.contextmanager
def ended_by_ctrl_c() -> Iterator[None]:
    """While modules are imported: Ctrl-C ends the process, which holds nothing yet.

    Some of them take KeyboardInterrupt for an error of their own, and go on or fail with another.
    """

    def end(number: int, frame: FrameType | None) -> None:
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, b"evenrank: interrupted\n")
        os._exit(INTERRUPTED)

    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
