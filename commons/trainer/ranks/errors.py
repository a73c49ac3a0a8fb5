"""How a run ends: a user's mistake is one line on stderr, printed once, whatever the number of ranks.

The rank that fails first claims the report in torchrun's store; its peers, whose connections break a moment later or
who find the same mistake, stay silent. The report also goes to torchrun's error file, so that the root cause that
torchrun names is this line.
"""

from __future__ import annotations

import contextlib
import datetime
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

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

from commons.distributed.channel.store import ask_store
from commons.distributed.engine.worker import DaemonWorker
from commons.distributed.errors import first_line

logger = logging.getLogger(__name__)

EXIT_FAILURE = 1
EXIT_USER_ERROR = 2
_OWN_PACKAGES = ("commons", "hstu", "sid_gr")
# Of the operating system's errors only those that are about a path: a broken connection is no mistake of the user's.
_PATH_ERRORS = (FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError, PermissionError)
_USER_ERRORS = (ValueError, TypeError, KeyError, ImportError, *_PATH_ERRORS)
# The failed rank must end before its silent peers do: torchrun then ends those.
_SILENT_SECONDS = 5.0
# Key of the rank that reports.
_FIRST_FAILURE = "evenrank/first_failure"
# How long a rank looks for torchrun's store.
_STORE_SECONDS = 2.5


def run_main(main: Callable[[], None]) -> None:
    """Run the main function of a rank, or of a program without ranks, and end the process as it went.

    =============================  ======  =========================================================
    main                           status  on stderr
    =============================  ======  =========================================================
    returns                        0
    raises a user's mistake¹       2       `error: ...`, one line
    raises another exception       1       one line, and where the traceback is: in the log file if
                                           `log_to_file` was called, else below
    is interrupted (Ctrl-C)        130     nothing; goes on if started with SIGINT ignored
    =============================  ======  =========================================================

    ¹ ValueError, TypeError, KeyError, ImportError, or an OSError about a path, such as FileNotFoundError. Its traceback
    goes to the log file as well, for the case that it is none of the user's.
    """
    joined = dist.is_initialized()
    # The default action ends a rank even inside a collective, where Python would notice Ctrl-C only after its end.
    # A program started with the signal ignored (`nohup ... &`) goes on ignoring it.
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        main()
    except Exception as error:
        status = _report(error)
        sys.stdout.flush()
        sys.stderr.flush()
        # No destructors: those of a process group may wait for ranks that have failed.
        os._exit(status)
    if dist.is_initialized() and not joined:
        dist.destroy_process_group()


def log_to_file(run_dir: str | Path) -> None:
    """Let logging go to `<run_dir>/rank<r>.log`: rank 0's warnings, and the errors of every rank.

    Warnings of libraries go there alone; evenrank's own are shown on rank 0's stderr too. The file is made with the
    first line. Called once per process, after `initialize_ranks`.

    Raises:
        ValueError: `run_dir` cannot be made or written.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    path = Path(run_dir) / f"rank{rank}.log"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
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
    logging.raiseExceptions = False  # or a full disk would print a traceback for every line
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


def _report(error: Exception) -> int:
    """Report the error, on one rank only; returns the exit status."""
    is_user_error = isinstance(error, _USER_ERRORS)
    status = EXIT_USER_ERROR if is_user_error else EXIT_FAILURE
    if not _claim_report():
        time.sleep(_SILENT_SECONDS)
        return status
    # When a peer ends, torchrun ends this rank too; the report is written first.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    message = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    line = " ".join(message.split()) or type(error).__name__
    travelled = re.match(r"rank \d+: ", line) is not None  # names its rank and type already
    # torch reports a broken group with the place in its sources, advice and perhaps forty lines of C++.
    in_gloo = type(error) is RuntimeError and re.match(r"\[[^\]\s]*gloo[^\]\s]*:\d+\]", str(error)) is not None
    if in_gloo or isinstance(error, dist.DistError):
        line = f"a collective of the training failed ({first_line(error)}); a rank exited or stalled: see its log"
    elif not is_user_error and not travelled:
        line = f"{type(error).__name__}: {line}"
    if dist.is_initialized() and not travelled:
        line = f"rank {dist.get_rank()}: {line}"
    log_file = _write_traceback(error)
    if not is_user_error and log_file is not None:
        line += f" (traceback in {log_file})"
    sys.stderr.write(f"error: {line}\n")
    if not is_user_error and log_file is None:
        traceback.print_exception(error)
    with contextlib.suppress(OSError):
        _TorchrunErrorFile().write(line)
    if _hosts_store():
        time.sleep(_SILENT_SECONDS)
    return status


def _hosts_store() -> bool:
    """Whether this process hosts the store in which the other ranks look up which rank failed first."""
    started_alone = not dist.is_torchelastic_launched() and dist.is_initialized()
    return started_alone and dist.get_rank() == 0 and dist.get_world_size() > 1


def _claim_report() -> bool:
    """Whether this is the first rank to fail; two reports are better than none where no store answers."""
    by_torchrun = dist.is_torchelastic_launched()
    try:
        if dist.is_initialized():
            if not by_torchrun:
                rank = str(dist.get_rank())
                first = ask_store(lambda store: store.compare_set(_FIRST_FAILURE, "", rank), _STORE_SECONDS)
                return first.decode() == rank
            ask_store(lambda store: store.check(["evenrank"]))  # torch would print forty lines of C++ of one that ended
        # On another thread: while the host of the store stands still, not even its timeout ends the call.
        return not by_torchrun or DaemonWorker("evenrank-report").submit(_claim_in_store).result(2 * _STORE_SECONDS)
    except Exception:
        return True


def _claim_in_store() -> bool:
    store, rank, _ = next(dist.rendezvous("env://", timeout=datetime.timedelta(seconds=_STORE_SECONDS)))
    return store.compare_set(_FIRST_FAILURE, "", str(rank)).decode() == str(rank)


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


class _TorchrunErrorFile(ErrorHandler):
    """The file from which torchrun takes the message of a failed rank."""

    def write(self, message: str) -> None:
        """Write a message in torchrun's format; without torchrun there is no such file, and nothing happens."""
        path = self._get_error_file_path()
        if path is not None:
            line = f"error: {message}"
            extra = {"py_callstack": line, "timestamp": str(int(time.time()))}
            report = {"message": {"message": line, "extraInfo": extra}}
            Path(path).write_text(json.dumps(report), encoding="utf-8")
