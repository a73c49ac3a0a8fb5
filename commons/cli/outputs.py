"""Looking at where a command will write, before it does any work."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path

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
