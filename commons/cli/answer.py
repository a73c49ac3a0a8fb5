"""What a command answers, and where that goes: tables on the terminal, JSON, a page, pictures.

Outputs are checked before any work, so that no work is lost. Libraries are imported where they are needed: what draws
takes a second, and `doctor` runs without rich.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from commons.console import make_console
from commons.whole_folder import check_replaceable, whole_file

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from commons.cli.pictures import Picture

# The command that runs, as it was typed.
command_line: ContextVar[str] = ContextVar("command_line", default="evenrank")
_PAGES, _PICTURES = (".html", ".htm"), (".png", ".svg", ".pdf")
# Columns of output that goes to a file or a pipe.
_WIDTH = 120


@dataclass(frozen=True)
class AnswerTable:
    """A table; its first column names the rows."""

    columns: tuple[str, ...]  # headings
    # cells, as many per row as there are columns; a row of one cell is a heading of those that follow
    rows: tuple[tuple[str, ...], ...]
    title: str = ""  # above it; "" for none
    marked: int | None = None  # number of the row that the page is about; None for none
    is_cut: bool = False  # whether short lines leave out the last columns; cells are wrapped otherwise


@dataclass(frozen=True)
class Section:
    """A part of an answer; pictures are for pages, and so are terms and notes without a table."""

    title: str  # its heading
    paragraphs: tuple[str, ...] = ()  # text above
    pictures: Callable[[], Sequence[Picture]] = tuple  # makes them
    tables: tuple[AnswerTable, ...] = ()  # below them
    terms: tuple[tuple[str, str], ...] = ()  # words with what they mean, below
    notes: tuple[str, ...] = ()  # text below, small


@dataclass(frozen=True)
class Answer:
    """All that a command has to say."""

    title: str  # heading of the page
    answer: str  # the one sentence to remember
    sections: tuple[Section, ...]
    content: dict[str, Any]  # all of it as JSON
    subtitle: str = ""  # the rows or runs in a line; "" where a table has them
    copy: tuple[str, ...] = ()  # lines to copy, such as options
    figures: tuple[tuple[str, str], ...] = ()  # the most important numbers with what they are: `("1.63×", "speed-up")`


@dataclass(frozen=True)
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
        if self.json:
            sys.stdout.write(json.dumps(answer.content, indent=2) + "\n")
        else:
            _print(answer)
        if self.html is not None or self.figure is not None:
            from commons.cli.pictures import write_page, write_pictures

            if self.html is not None:
                write_page(answer, self.html, command_line.get())
            if self.figure is not None:
                write_pictures([each for section in answer.sections for each in section.pictures()], self.figure)
        for path in (self.html, self.figure):
            if path is not None and not self.json:
                make_console(highlight=False).print(f"written: {path}", markup=False, soft_wrap=True)


ON_TERMINAL = AnswerOutputs()


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


def _print(answer: Answer) -> None:
    """Print tables, what to know of them, and the answer last."""
    from rich.text import Text

    console = make_console(width=_WIDTH, highlight=False)
    lines: list[str] = []
    if answer.subtitle:
        console.print(Text(answer.subtitle))
    for section in answer.sections:
        left_out: tuple[str, ...] = ()
        for table in section.tables:
            shown = _columns_that_fit(table, console) if table.is_cut else len(table.columns)
            console.print(_as_rich(table, shown))
            left_out = table.columns[shown:]
        if left_out:
            lines.append(f"Lines are too short for {', '.join(left_out)}, which wider ones show, and --json.")
        if section.tables and section.terms:
            lines.append("; ".join(f"{name}: {text}" for name, text in section.terms) + ".")
        if section.tables:
            lines += section.notes
    for text in (*lines, *(text for section in answer.sections for text in section.paragraphs)):
        console.print(Text(text))
    console.print(Text(answer.answer, style="bold"))
    for line in answer.copy:
        console.print(Text(f"  {line}"))


def _columns_that_fit(table: AnswerTable, console: Console) -> int:
    """How many columns, at least two, lines have room for."""
    wide = console.options.update_width(10_000)  # or the least width is that of the console
    shown = len(table.columns)
    while shown > 2 and console.measure(_as_rich(table, shown), options=wide).maximum > console.width:
        shown -= 1
    return shown


def _as_rich(table: AnswerTable, shown: int) -> Table:
    """The first columns of a table, for the terminal."""
    from rich.table import Table
    from rich.text import Text

    padding = (0, 1 if table.is_cut else 2, 0, 0)
    made = Table(
        title=table.title or None, title_justify="left", title_style="bold", box=None, padding=padding, pad_edge=False
    )
    for place, name in enumerate(table.columns[:shown]):
        no_wrap = place == 0 or table.is_cut
        made.add_column(Text(name), justify="right" if place else "left", no_wrap=no_wrap, overflow="fold")
    indent = "  " if any(len(row) == 1 for row in table.rows) else ""
    for name, *cells in table.rows:
        made.add_row(Text(indent + name) if cells else Text(name, style="bold"), *map(Text, cells[: shown - 1]))
    return made
