"""The `evenrank` command.

To add a subcommand: write a file with a dataclass whose fields are the arguments, whose docstring is the help and whose
`run()` does the work, and add it to `_COMMANDS`. Only the command that is asked for is imported: torch alone takes
seconds, and reading an archive needs none of it.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType
from typing import Protocol

from commons.console import parser_error, print_error
from commons.version import __version__


class Command(Protocol):
    """A subcommand with its arguments."""

    def run(self) -> int | None:
        """Do the work; a user's mistake is a ValueError, KeyError or OSError. Returns the exit status; None for 0."""


# The module of commons.cli and the class of every subcommand.
_COMMANDS = {
    "calibrate": ("calibrate", "Calibrate"),
    "doctor": ("doctor", "Doctor"),
    "make-sids": ("make_sids", "MakeSids"),
    "preprocess": ("preprocess", "Preprocess"),
    "simulate": ("simulate", "Simulate"),
}

_DESCRIPTION = """evenrank keeps data-parallel ranks evenly loaded.

`evenrank --version` tells the version, `evenrank --tyro-print-completion bash` (zsh, tcsh) prints a completion."""

# Packages that pip does not install with evenrank, or not without an extra.
_INSTALLED_APART = ("torchrec", "fbgemm_gpu", "megatron")

_CLOSED_PIPE = 1
_USAGE_ERROR = 2
_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand.

    Args:
        argv: arguments without the name of the program; those of the process if not given.

    Returns:
        Exit status: 0 for success and for help, 1 where `doctor` finds that training could not start and where nobody
        reads the output any more, 2 for a user's mistake, said in one line on stderr, 130 for Ctrl-C.

    """
    status = None
    try:
        arguments = sys.argv[1:] if argv is None else list(argv)
        if arguments == ["--version"]:
            sys.stdout.write(f"evenrank {__version__}\n")
        elif (command := _parse(arguments)) is not None:
            _quiet_torch()
            status = command.run()
        sys.stdout.flush()
    except BrokenPipeError:
        # The rest goes nowhere; the interpreter would flush it once more, and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _CLOSED_PIPE
    except (ValueError, KeyError, OSError) as error:
        print_error(str(error.args[0]) if isinstance(error, KeyError) else str(error))
        return _USAGE_ERROR
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in _INSTALLED_APART:
            raise
        print_error(f"{error.name} cannot be imported: `evenrank doctor` says what to install")
        return _USAGE_ERROR
    except KeyboardInterrupt:
        print_error("interrupted")
        return _INTERRUPTED
    return status or 0


def _quiet_torch() -> None:
    """Let torch's own loggers show errors alone; their hints are for developers of torch."""
    for handler in logging.getLogger("torch").handlers:
        if type(handler) is logging.StreamHandler:  # torch's own; pytest adds others, which all loggers share
            handler.setLevel(logging.ERROR)


@contextlib.contextmanager
def _ended_by_ctrl_c() -> Iterator[None]:
    """While modules are imported: Ctrl-C ends the process, which holds nothing yet.

    Some of them take KeyboardInterrupt for an error of their own, and go on or fail with another.
    """

    def end(number: int, frame: FrameType | None) -> None:
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, b"evenrank: interrupted\n")
        os._exit(_INTERRUPTED)

    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _load(names: Iterable[str]) -> dict[str, Callable[..., Command]]:
    """The classes of some subcommands."""
    with _ended_by_ctrl_c():
        return {
            name: getattr(importlib.import_module(f"commons.cli.{_COMMANDS[name][0]}"), _COMMANDS[name][1])
            for name in names
        }


def _parse(argv: list[str]) -> Command | None:
    """The subcommand that the arguments name; None if they ask for help, which is then printed."""
    with _ended_by_ctrl_c():
        import tyro
    errors = io.StringIO()
    asked = argv[:1] if argv and argv[0] in _COMMANDS else _COMMANDS
    try:
        with contextlib.redirect_stderr(errors):
            return tyro.extras.subcommand_cli_from_dict(
                _load(asked),
                prog="evenrank",
                description=_DESCRIPTION,
                args=argv,
            )
    except SystemExit as stop:
        if stop.code in (0, None):
            return None
        raise ValueError(parser_error(errors.getvalue())) from None


if __name__ == "__main__":
    sys.exit(main())
