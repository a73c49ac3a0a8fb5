"""The `evenrank` command.

To add a subcommand: write a file with a dataclass whose fields are the arguments, described by comments, whose
docstring is the help and whose `run()` does the work, and add it to `_COMMANDS`. `run()` returns the exit status, None
for 0; a user's mistake is a ValueError, KeyError or OSError. A class method `defaults(argv)` may return an object whose
values are the defaults. Only the module of the running command is imported, because importing torch takes seconds and
some commands do not need it.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import logging
import os
import re
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from commons.cli.answer import command_line
from commons.console import accept_all_text, print_error
from commons.parser import parse_arguments, run_parser, wrapped_help
from commons.version import __version__

# The module of commons.cli and the class of every subcommand.
_COMMANDS = {
    "calibrate": ("calibrate", "Calibrate"),
    "doctor": ("doctor", "Doctor"),
    "make-sids": ("make_sids", "MakeSids"),
    "preprocess": ("preprocess", "Preprocess"),
    "report": ("report", "Report"),
    "simulate": ("simulate.command", "Simulate"),
}

_DESCRIPTION = """evenrank keeps data-parallel ranks evenly loaded.

`evenrank SUBCOMMAND --help` lists the options of a subcommand, with examples; `evenrank --version` prints the version.

In bash, `source <(evenrank --tyro-print-completion bash)` lets Tab complete subcommands and options."""

# The shells for which tyro writes completions.
_COMPLETION, _SHELLS = "--tyro-print-completion", ("bash", "zsh", "fish")

# Our own packages: a failed import of these is a bug; other packages have to be installed.
_OURS = ("commons", "evenrank", "hstu", "sid_gr")

_CLOSED_PIPE, _USAGE_ERROR, _INTERRUPTED = 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; `argv` is without the name of the program, None for the process's arguments.

    Returns the exit status: 0 for success and for help, 1 if `doctor` finds that training cannot start or if the
    output's pipe is closed, 2 for a user's mistake, which is one line on stderr, 130 for Ctrl-C in a subcommand
    other than `doctor`, which Ctrl-C ends at once.
    """
    status = None
    accept_all_text()
    try:
        arguments = sys.argv[1:] if argv is None else list(argv)
        command_line.set(shlex.join(["evenrank", *arguments]))
        if arguments == ["--version"]:
            sys.stdout.write(f"evenrank {__version__}\n")
        else:
            # Some modules treat KeyboardInterrupt as a failed import, so most are imported without it.
            with _on_ctrl_c(signal.SIG_DFL):
                command = _parse(arguments)
                _quiet_torch()
            if command is not None:
                # doctor, which writes no file, would report an interrupted import as a broken package.
                with _on_ctrl_c(signal.SIG_DFL if arguments[0] == "doctor" else signal.default_int_handler):
                    status = command.run()
        sys.stdout.flush()
    except BrokenPipeError:
        # Discard the rest of the output, because the interpreter would flush it at exit and print an error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _CLOSED_PIPE
    except (ValueError, KeyError, OSError) as error:
        print_error(str(error.args[0]) if isinstance(error, KeyError) else str(error))
        return _USAGE_ERROR
    except ImportError as error:
        if (error.name or "").split(".")[0] in _OURS:
            raise
        named = "" if isinstance(error, ModuleNotFoundError) else f" ({error})"
        print_error(f"{error.name or 'a library'} cannot be imported{named}: `evenrank doctor` prints what to install")
        return _USAGE_ERROR
    except KeyboardInterrupt:
        print_error("interrupted")
        return _INTERRUPTED
    return status or 0


def _quiet_torch() -> None:
    """Let torch's loggers show only errors, because their hints are for developers of torch."""
    for handler in logging.getLogger("torch").handlers:
        if type(handler) is logging.StreamHandler:  # torch's own handler, and not those that pytest adds
            handler.setLevel(logging.ERROR)


@contextlib.contextmanager
def _on_ctrl_c(handler: Any) -> Iterator[None]:
    """Let Ctrl-C do this, unless it is ignored or has a handler of the user."""
    before = signal.getsignal(signal.SIGINT)
    is_ours = before in (signal.SIG_DFL, signal.default_int_handler)
    if is_ours:
        signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        if is_ours:
            signal.signal(signal.SIGINT, before)


def _load(name: str) -> type[Any]:
    """The class of a subcommand."""
    module, class_name = _COMMANDS[name]
    return getattr(importlib.import_module(f"commons.cli.{module}"), class_name)


def _parse(argv: list[str]) -> Any:
    """Parse the arguments into a subcommand; prints the help and returns None if they contain --help."""
    if argv == ["doctor"]:  # has no options, and reports tyro itself if it is missing
        return _load("doctor")()
    first = argv[0] if argv else ""
    if first in _COMMANDS:
        command = _load(first)
        options = {"default": command.defaults(argv[1:])} if hasattr(command, "defaults") else {}
        return parse_arguments(command, argv[1:], prog=f"evenrank {first}", **options)
    if first == _COMPLETION and argv[1:] not in ([shell] for shell in _SHELLS):
        raise ValueError(f"{_COMPLETION} is given {argv[1:]}; it takes one shell, {', '.join(_SHELLS)}: give one")
    from tyro.extras import subcommand_cli_from_dict

    # A completion has the options of all commands, the list of commands only their descriptions.
    load = _load if first == _COMPLETION else _outline
    commands = {name: load(name) for name in _COMMANDS}
    _, printed = run_parser(
        lambda: subcommand_cli_from_dict(commands, prog="evenrank", description=_DESCRIPTION, args=argv)
    )
    if first == _COMPLETION:  # the shell would show each line of a description as a completion
        printed = re.sub("^COMPLETION_SPEC = .*", lambda line: line[0].replace(r"\n", " "), printed, flags=re.MULTILINE)
    sys.stdout.write(printed if first == _COMPLETION else wrapped_help(printed))
    return None


def _outline(name: str) -> Callable[..., Any]:
    """A subcommand without its arguments, for the list of subcommands, without the slow import of its module."""
    module, class_name = _COMMANDS[name]
    file = Path(__file__).parent.joinpath(*module.split(".")).with_suffix(".py")
    tree = ast.parse(file.read_text(encoding="utf-8"))
    described = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == class_name)

    def outline() -> Any:
        return _load(name)()

    outline.__doc__ = (ast.get_docstring(described) or "").split("\n\n")[0]
    return outline


if __name__ == "__main__":
    sys.exit(main())
