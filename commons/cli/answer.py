"""The answer of a command, and its outputs: tables on the terminal, JSON, a page, pictures.

Outputs are checked before any work, so that no work is lost. Libraries are imported only where they are needed, because
importing matplotlib takes a second and `doctor` must run without rich.
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

# The running command as the user typed it.
command_line: ContextVar[str] = ContextVar("command_line", default="evenrank")
_PAGES, _PICTURES = (".html", ".htm"), (".png", ".svg", ".pdf")
# Width of output to a file or a pipe, in characters.
_WIDTH = 120


@dataclass(frozen=True)
class AnswerTable:
    """A table; its first column names the rows."""

    columns: tuple[str, ...]  # headings
    # rows with a cell for every column; a row with one cell is a heading of the rows below it
    rows: tuple[tuple[str, ...], ...]
    title: str = ""  # "" for no title
    marked: int | None = None  # number of the row to highlight on the page; None for no row
    is_cut: bool = False  # if lines are too short, leave out the last columns instead of wrapping cells


@dataclass(frozen=True)
class Section:
    """A part of an answer; the terminal shows no pictures, and terms and notes only of a section with tables."""

    title: str
    paragraphs: tuple[str, ...] = ()  # text at the top
    pictures: Callable[[], Sequence[Picture]] = tuple  # makes the pictures
    tables: tuple[AnswerTable, ...] = ()  # below the pictures
    terms: tuple[tuple[str, str], ...] = ()  # terms and their meanings, below the tables
    notes: tuple[str, ...] = ()  # small text at the end


@dataclass(frozen=True)
class Answer:
    """The result of a command, for all outputs."""

    title: str  # heading of the page
    answer: str  # the most important sentence
    sections: tuple[Section, ...]
    content: dict[str, Any]  # the whole answer as JSON
    subtitle: str = ""  # one line that describes the rows or runs; "" if a table does
    copy: tuple[str, ...] = ()  # lines for the user to copy, such as options
    figures: tuple[tuple[str, str], ...] = ()  # the most important numbers and their names: `("1.63×", "speed-up")`


@dataclass(frozen=True)
class AnswerOutputs:
    """The outputs of an answer; a table on the terminal by default."""

    html: Path | None = None  # write the results to this .html file, a page with pictures that needs no network
    figure: Path | None = None  # draw the pictures into this .png, .svg or .pdf file
    json: bool = False  # print JSON instead of a table

    def require(self, inputs: Mapping[str, Path | None]) -> None:
        """Raise ValueError for a wrong file ending; other errors as for `require_output`."""
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
        """Print an answer, and write its page and its pictures."""
        try:
            if self.json:
                sys.stdout.write(json.dumps(answer.content, indent=2) + "\n")
            else:
                _print(answer)
        except (BrokenPipeError, SystemExit):  # the reader of the output has ended (`| head`); rich exits then
            self._write(answer)
            raise
        self._write(answer)
        for path in (self.html, self.figure):
            if path is not None and not self.json:
                make_console(highlight=False).print(f"written: {path}", markup=False, soft_wrap=True)

    def _write(self, answer: Answer) -> None:
        if self.html is not None or self.figure is not None:
            from commons.cli.pictures import write_page, write_pictures

            if self.html is not None:
                write_page(answer, self.html, command_line.get())
            if self.figure is not None:
                write_pictures([each for section in answer.sections for each in section.pictures()], self.figure)


ON_TERMINAL = AnswerOutputs()


class _TriedError(Exception):
    """Raised to discard a file that was written as a trial."""


def require_output(
    output: Path,
    *,
    option: str = "--output",
    inputs: Mapping[str, Path | None],
    may_replace: Callable[[Path], bool] = lambda path: True,
    what: str = "file",
) -> None:
    """Raise unless a command can write its output, named by `option`, without overwriting other files.

    ValueError if it is one of `inputs`, which are files by their option, also through a link; FileExistsError if it
    exists and is not an earlier output of this kind (`may_replace`; `what` names the kind); OSError if it cannot be
    written.
    """
    for name, path in inputs.items():
        if path is not None and path.exists() and output.exists() and path.samefile(output):
            raise ValueError(
                f"{option} is {output}, which {name} names too; no command overwrites its input: give another path"
            )
    if output.is_dir():
        raise IsADirectoryError(f"{output} is a folder; a {what} is written there: name a file in it")
    if output.exists() and (not output.is_file() or output.stat().st_size):
        check_replaceable(output, lambda path: path.is_file() and may_replace(path), what)
    with contextlib.suppress(_TriedError), whole_file(output):
        raise _TriedError  # an error discards the trial file


def _print(answer: Answer) -> None:
    """Print the tables, their notes, and last the answer."""
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
            lines.append(f"Lines are too short for {', '.join(left_out)}; use a wider terminal or --json.")
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
    """The number of columns, at least two, that fit into a line."""
    wide = console.options.update_width(10_000)  # otherwise widths are limited to the console's width
    shown = len(table.columns)
    while shown > 2 and console.measure(_as_rich(table, shown), options=wide).maximum > console.width:
        shown -= 1
    return shown


def _as_rich(table: AnswerTable, shown: int) -> Table:
    """The first `shown` columns of a table, for the terminal."""
    from rich.table import Table
    from rich.text import Text

    padding = (0, 1 if table.is_cut else 2, 0, 0)
    made = Table(
        title=table.title or None, title_justify="left", title_style="bold", box=None, padding=padding, pad_edge=False
    )
    for number, name in enumerate(table.columns[:shown]):
        no_wrap = number == 0 or table.is_cut
        made.add_column(Text(name), justify="right" if number else "left", no_wrap=no_wrap, overflow="fold")
    indent = "  " if any(len(row) == 1 for row in table.rows) else ""
    for name, *cells in table.rows:
        made.add_row(Text(indent + name) if cells else Text(name, style="bold"), *map(Text, cells[: shown - 1]))
    return made
