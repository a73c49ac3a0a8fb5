"""What commands write: looked at before any work, and the pages and pictures of answers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING

from commons.console import make_console
from commons.whole_folder import check_replaceable, whole_file

if TYPE_CHECKING:
    from commons.cli.page import Page
    from commons.cli.pictures import Picture


SUFFIXES = (".png", ".svg", ".pdf")  # of pictures
# The command that runs, as it was typed.
command_line: ContextVar[str] = ContextVar("command_line", default="evenrank")


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


def require_answer_outputs(html: Path | None, figure: Path | None, inputs: Mapping[str, Path | None]) -> None:
    """Raise unless the page and the pictures of an answer, where they have a path, can be written.

    Raises:
        ValueError: a file type of neither a page nor a picture, or one of the inputs, as for `require_output`.
        OSError: one cannot be written.
    """
    if html is not None and html.suffix not in (".html", ".htm"):
        raise ValueError(f"html is {str(html)!r}; a page is an .html file: give it that ending")
    if figure is not None and figure.suffix not in SUFFIXES:
        raise ValueError(f"figure is {str(figure)!r}; pictures are {', '.join(SUFFIXES)}: choose one of these endings")
    for option, output in (("--html", html), ("--figure", figure)):
        if output is not None:
            require_output(output, option=option, inputs=inputs)


def write_answer_outputs(
    html: Path | None,
    figure: Path | None,
    page: Callable[[], Page],
    pictures: Callable[[], Sequence[Picture]],
    *,
    quiet: bool,
) -> None:
    """Write the page and the pictures that have a path, and say so, but not beside JSON, where this is `quiet`."""
    # Imported here: what draws takes a second, and a table needs none of it.
    if html is not None:
        from commons.cli.page import write_page

        write_page(page(), html)
    if figure is not None:
        from commons.cli.pictures import write_pictures

        write_pictures(pictures(), figure)
    for path in (html, figure):
        if path is not None and not quiet:
            make_console(highlight=False).print(f"written: {path}", markup=False, soft_wrap=True)
