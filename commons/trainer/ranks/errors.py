"""Errors at the end of a run: a user's mistake is one line on stderr, printed once for all ranks.

The first failed rank claims the report in torchrun's store. The other ranks, which find the same mistake or lose their
connections a moment later, print nothing. The line is also written to torchrun's error file, so that torchrun prints it
as the root cause.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import json
import logging
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

from commons.distributed.channel.store import attempt_of_torchrun, call_store
from commons.distributed.engine.worker import DaemonWorker
from commons.distributed.errors import first_line

logger = logging.getLogger(__name__)

EXIT_FAILURE = 1
EXIT_USER_ERROR = 2
_OWN_PACKAGES = ("commons", "hstu", "sid_gr")
# Only the OSErrors about a path: a broken connection is not a user's mistake.
_PATH_ERRORS = (FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError, PermissionError)
_USER_ERRORS = (ValueError, TypeError, KeyError, ImportError, *_PATH_ERRORS)
# Silent ranks end this much later than the rank that reports, so that torchrun sees the reporting rank's failure first.
_SILENT_SECONDS = 5.0
# Store key of the rank that reports.
_FIRST_FAILURE = "evenrank/first_failure"
# Timeout of a rank's connection to torchrun's store.
_STORE_SECONDS = 2.5


def run_main(main: Callable[[], None]) -> None:
    """Run the main function of a rank, or of a program without ranks, and end the process with the right status.

    =============================  ======  =========================================================
    main                           status  on stderr
    =============================  ======  =========================================================
    returns                        0
    raises a user's mistake¹       2       `error: ...`, one line
    raises another exception       1       one line; the traceback is in the log file, named there, if
                                           `log_to_file` was called, else below (none of a broken group)
    is interrupted (Ctrl-C)        130     nothing; continues if started with SIGINT ignored
    =============================  ======  =========================================================

    ¹ ValueError, TypeError, KeyError, ImportError, or an OSError about a path, such as FileNotFoundError. The log file
    gets its traceback too, in case it is a bug and not a user's mistake.
    """
    joined = dist.is_initialized()
    # The default action ends a rank inside a collective too; Python's own handler would run only after the collective.
    # A program that was started with the signal ignored (`nohup ... &`) still ignores it.
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        main()
    except Exception as error:
        status = _report(error)
        sys.stdout.flush()
        sys.stderr.flush()
        # No destructors: a process group's destructor may wait for ranks that have failed.
        os._exit(status)
    if dist.is_initialized() and not joined:
        dist.destroy_process_group()
    # Ends the threads of groups in reference cycles: one that frees a tensor after Python's end aborts the process.
    gc.collect()


def log_to_file(run_dir: str | Path, *, append: bool = False) -> None:
    """Send logging to `<run_dir>/rank<r>.log`: warnings of rank 0, and errors of every rank.

    Rank 0 also prints evenrank's own warnings on stderr, but not those of libraries. An earlier log is removed or, with
    `append`, continued; the first line creates the file. From then on, text for stdout and stderr is dropped while they
    cannot be written. Called once per process, after `initialize_ranks`.

    Raises:
        ValueError: `run_dir` cannot be created or written.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    path = Path(run_dir) / f"rank{rank}.log"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not append:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise ValueError(
            f"run_dir is {str(run_dir)!r}, which cannot be written ({error.strerror}); logs and figures go there: give "
            "a folder of yours"
        ) from error
    handler = logging.FileHandler(path, encoding="utf-8", delay=True)
    handler.setLevel(logging.WARNING if rank == 0 else logging.ERROR)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.captureWarnings(True)
    logging.raiseExceptions = False  # otherwise a full disk prints a traceback for every line
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, _Lossy):  # None: closed when the program was started
            setattr(sys, name, _Lossy(stream))
    logging.getLogger().handlers = [handler]
    for torch_handler in logging.getLogger("torch").handlers:
        if type(torch_handler) is logging.StreamHandler:  # torch's own
            torch_handler.setLevel(logging.ERROR)
    if rank == 0:
        shown = logging.StreamHandler()
        shown.setLevel(logging.WARNING)
        shown.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
        for package in _OWN_PACKAGES:
            logging.getLogger(package).addHandler(shown)


class _Lossy:
    """A stream that drops text while its file cannot be written: a run goes on where its output has filled the disk."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()


def _report(error: Exception) -> int:
    """Report the error, on one rank only; returns the exit status."""
    is_user_error = isinstance(error, _USER_ERRORS)
    status = EXIT_USER_ERROR if is_user_error else EXIT_FAILURE
    if not _claim_report():
        time.sleep(_SILENT_SECONDS)
        return status
    # When a peer ends, torchrun sends SIGTERM to this rank, which must finish its report first.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    message = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    line = " ".join(message.split()) or type(error).__name__
    travelled = re.match(r"rank \d+: ", line) is not None  # an error from another rank has its rank and type already
    # torch's message about a broken group has a path of its sources, advice and up to forty lines of C++.
    in_gloo = type(error) is RuntimeError and re.match(r"(Gloo .* with )?\[[^\]\s]*gloo[^\]\s]*:\d+\]", str(error))
    is_broken = bool(in_gloo) or isinstance(error, dist.DistError)
    if is_broken:
        line = f"a collective of the training failed ({first_line(error)}); a rank exited or stalled: see its log"
    elif not is_user_error and not travelled:
        line = f"{type(error).__name__}: {line}"
    if dist.is_initialized() and not travelled:
        line = f"rank {dist.get_rank()}: {line}"
    log_file = _write_traceback(error)
    if not is_user_error and log_file is not None:
        line += f" (traceback in {log_file})"
    sys.stderr.write(f"error: {line}\n")
    if log_file is None and not (is_user_error or is_broken):
        traceback.print_exception(error)
    _tell_torchrun(line)
    started_alone = dist.is_initialized() and not dist.is_torchelastic_launched()
    if started_alone and dist.get_rank() == 0 and dist.get_world_size() > 1:
        time.sleep(_SILENT_SECONDS)  # this process hosts the store in which the other ranks claim the report
    return status


def _claim_report() -> bool:
    """Whether this is the first rank to fail; also True if the store is unreachable: better two reports than none."""
    by_torchrun = dist.is_torchelastic_launched()
    try:
        if dist.is_initialized():
            if not by_torchrun:
                rank = str(dist.get_rank())
                first = call_store(lambda store: store.compare_set(_FIRST_FAILURE, "", rank), _STORE_SECONDS)
                return first.decode() == rank
            call_store(lambda store: store.check(["evenrank"]))  # raises if the store has ended; torch would print C++
        # On another thread: if the store's host is stalled, the store's timeout does not end the call.
        return not by_torchrun or DaemonWorker("evenrank-report").submit(_claim_in_store).result(2 * _STORE_SECONDS)
    except Exception:
        return True


def _claim_in_store() -> bool:
    store, rank, _ = next(dist.rendezvous("env://", timeout=datetime.timedelta(seconds=_STORE_SECONDS)))
    # The store may outlast attempts. Where the agents of two hosts count them differently, there are two reports.
    key = f"{_FIRST_FAILURE}/{attempt_of_torchrun()}"
    return store.compare_set(key, "", str(rank)).decode() == str(rank)


def _write_traceback(error: Exception) -> str | None:
    """Log the traceback; returns the log file, if there is one."""
    files = [handler for handler in logging.getLogger().handlers if isinstance(handler, logging.FileHandler)]
    if not files:
        return None
    record = logger.makeRecord(
        logger.name, logging.ERROR, __file__, 0, "the run failed", (), (type(error), error, error.__traceback__)
    )
    files[0].handle(record)
    path = Path(files[0].baseFilename)
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def _tell_torchrun(line: str) -> None:
    """Write the error to the file from which torchrun reads that of a failed rank; does nothing without torchrun."""
    path = ErrorHandler()._get_error_file_path()
    if path is not None:
        extra = {"py_callstack": f"error: {line}", "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps({"message": {"message": f"error: {line}", "extraInfo": extra}}), "utf-8")
