"""What commands write: checked before any work, so that no work is lost."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from commons.console import make_console
from commons.whole_folder import check_replaceable, whole_file

if TYPE_CHECKING:
    from commons.cli.answer import Answer

# The command that runs, as it was typed.
command_line: ContextVar[str] = ContextVar("command_line", default="evenrank")
_PAGES, _PICTURES = (".html", ".htm"), (".png", ".svg", ".pdf")


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
    """Raise unless a command can write the output that an option names, and overwrites nothing else by it.

    The inputs are what it reads, by what names it on the command line. `may_replace` says whether a file is of the kind
    that the command writes, and `what` that kind is.

    Raises:
        ValueError: `output` is one of the inputs, also by a link.
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


@dataclass
class AnswerOutputs:
    """Where an answer goes; a table on the terminal by default."""

    html: Path | None = None
    """Where to write the answer as a page with pictures, one .html file that needs no network; None for none."""

    figure: Path | None = None
    """Where to draw its pictures, as .png, .svg or .pdf."""

    json: bool = False
    """Print JSON instead of a table."""

    def require(self, inputs: Mapping[str, Path | None]) -> None:
        """Raise ValueError for a file that is neither a page nor a picture; and as `require_output`."""
        if self.html is not None and self.html.suffix not in _PAGES:
            raise ValueError(f"html is {str(self.html)!r}; a page is an .html file: give it that ending")
        if self.figure is not None and self.figure.suffix not in _PICTURES:
            raise ValueError(
                f"figure is {str(self.figure)!r}; pictures are {', '.join(_PICTURES)}: choose one of these endings"
            )
        for option, output in (("--html", self.html), ("--figure", self.figure)):
            if output is not None:
                require_output(output, option=option, inputs=inputs)

    def give(self, answer: Answer) -> None:
        """Print an answer, and write its page and pictures."""
        # Imported where it is needed: what draws takes a second, and `doctor` runs without rich.
        if self.json:
            sys.stdout.write(json.dumps(answer.content, indent=2) + "\n")
        else:
            from commons.cli.answer import print_answer

            print_answer(answer)
        if self.html is not None:
            from commons.cli.pictures import write_page

            write_page(answer, self.html, command_line.get())
        if self.figure is not None:
            from commons.cli.pictures import write_pictures

            write_pictures(answer.pictures(), self.figure)
        for path in (self.html, self.figure):
            if path is not None and not self.json:
                make_console(highlight=False).print(f"written: {path}", markup=False, soft_wrap=True)
