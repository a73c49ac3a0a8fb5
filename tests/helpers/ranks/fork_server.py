"""multiprocessing's fork server as a fork of this process: ranks then start with every module that it has imported.

The server that multiprocessing starts by itself imports TorchRec anew, and each rank what its test imports beside.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import multiprocessing.forkserver
import multiprocessing.util
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn
from unittest import mock


def start_fork_server() -> None:
    """Fork the server, before this process has threads of its own; it ends when this process does."""
    with mock.patch.object(multiprocessing.util, "spawnv_passfds", _fork):
        multiprocessing.forkserver.ensure_running()


def _fork(_: str, arguments: Sequence[str], kept: Sequence[int]) -> int:
    """Stands in for the start of an interpreter with these arguments, the last of which is a program."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # from 3.12 on: libraries have threads, which stay behind
        return os.fork() or _serve(arguments[-1], kept)


def _serve(program: str, kept: Sequence[int]) -> NoReturn:
    try:
        # Above all this process's end of the pipe that says when it ends. The numbers stay in use: objects of this
        # process would close what takes them.
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in {int(each.name) for each in Path("/dev/fd").iterdir()} - {0, 1, 2, nothing, *kept}:
            with contextlib.suppress(OSError):  # the listing's own is closed
                os.fstat(number)
                os.dup2(nothing, number)
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__  # pytest captures both, and logs
        logging.getLogger().handlers.clear()
        warnings.filterwarnings("ignore")
        gc.freeze()  # what is inherited stays, and its pages are shared
        exec(program, {})
    finally:
        os._exit(0)
