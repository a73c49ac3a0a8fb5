"""Looking at where a command will write, before it does any work; and how the command is typed."""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from commons.whole_folder import check_replaceable, whole_file


class _TriedError(Exception):
    """The file could be made."""


def require_output(
    output: Path,
    *,
    option: str = "--output",
    inputs: Mapping[str, Path | None],
    may_replace: Callable[[Path], bool] = lambda path: True,
    what: str = "file",
) -> None:
    """Raise unless a command can write its output, and overwrites nothing else by it.

    Args:
        output: the file that the command will write.
        option: what names it on the command line.
        inputs: what the command reads, by what names it on the command line; missing files and None are left out.
        may_replace: whether a file at `output` is of the kind that the command writes; an empty one always is.
        what: that kind, for errors.

    Raises:
        ValueError: `output` is one of the inputs, by whatever path.
        FileExistsError: something else is at `output`.
        OSError: `output` cannot be written.

    """
    for name, path in inputs.items():
        if path is not None and path.exists() and output.exists() and path.samefile(output):
            raise ValueError(
                f"{option} is {output}, which {name} names too; no command overwrites what it reads: give another path"
            )
    if output.is_dir():
        raise IsADirectoryError(f"{output} is a folder; a {what} is written there: name a file in it")
    if output.exists() and (not output.is_file() or output.stat().st_size):
        check_replaceable(output, lambda path: path.is_file() and may_replace(path), what)
    with contextlib.suppress(_TriedError), whole_file(output):
        raise _TriedError  # an error, so that what was made for the trial goes again


def as_command(name: str, arguments: Any, *, positional: str = "") -> str:
    """The command line that gives a command's arguments, without what is at its default.

    Args:
        name: of the command, as it is typed.
        arguments: a dataclass of flags, which may hold dataclasses; those called `of_...` add no prefix to theirs.
        positional: the field that comes first, without a flag; "" for none.
    """
    first = map(str, getattr(arguments, positional)) if positional else ()
    return shlex.join([*name.split(), *first, *_flags(arguments, "", but=positional)])


def _flags(arguments: Any, prefix: str, but: str = "") -> list[str]:
    words = []
    for item in dataclasses.fields(arguments):
        if item.name == but:
            continue
        value, name = getattr(arguments, item.name), item.name.replace("_", "-")
        if dataclasses.is_dataclass(value):
            words += _flags(value, prefix if item.name.startswith("of_") else f"{prefix}{name}.")
        elif value != item.default:
            flag = f"--{prefix}{name}"
            if isinstance(value, bool):
                words.append(flag if value else f"--{prefix}no-{name}")
            else:
                words += [flag, *map(str, value if isinstance(value, (tuple, list)) else (value,))]
    return words
