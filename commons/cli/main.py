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
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import tyro

from commons.console import parser_error, print_error


class Command(Protocol):
    """A subcommand with its arguments."""

    def run(self) -> None:
        """Do the work; a user's mistake is a ValueError, KeyError or OSError."""


# The module of commons.cli and the class of every subcommand.
_COMMANDS = {
    "calibrate": ("calibrate", "Calibrate"),
    "make-sids": ("make_sids", "MakeSids"),
    "preprocess": ("preprocess", "Preprocess"),
    "simulate": ("simulate", "Simulate"),
}

_USAGE_ERROR = 2
_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand.

    Args:
        argv: arguments without the name of the program; those of the process if not given.

    Returns:
        Exit status: 0 for success and for help, 2 for a user's mistake, said in one line on stderr, 130 for Ctrl-C.

    """
    try:
        command = _parse(sys.argv[1:] if argv is None else list(argv))
        _quiet_torch()
        if command is not None:
            command.run()
    except (ValueError, KeyError, OSError) as error:
        print_error(str(error.args[0]) if isinstance(error, KeyError) else str(error))
        return _USAGE_ERROR
    except KeyboardInterrupt:
        print_error("interrupted")
        return _INTERRUPTED
    return 0


def _quiet_torch() -> None:
    """Let torch's own loggers show errors alone; their hints are for developers of torch."""
    for handler in logging.getLogger("torch").handlers:
        handler.setLevel(logging.ERROR)


def _load(names: Iterable[str]) -> dict[str, Callable[..., Command]]:
    """The classes of some subcommands."""
    return {
        name: getattr(importlib.import_module(f"commons.cli.{_COMMANDS[name][0]}"), _COMMANDS[name][1])
        for name in names
    }


def _parse(argv: list[str]) -> Command | None:
    """The subcommand that the arguments name; None if they ask for help, which is then printed."""
    errors = io.StringIO()
    asked = argv[:1] if argv and argv[0] in _COMMANDS else _COMMANDS
    try:
        with contextlib.redirect_stderr(errors):
            return tyro.extras.subcommand_cli_from_dict(
                _load(asked),
                prog="evenrank",
                description="evenrank keeps data-parallel ranks evenly loaded.",
                args=argv,
            )
    except SystemExit as stop:
        if stop.code in (0, None):
            return None
        raise ValueError(parser_error(errors.getvalue())) from None


if __name__ == "__main__":
    sys.exit(main())
