"""What a command answers: the content that `print_answer` prints, `write_page` writes as HTML, and `--json` gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from commons.console import make_console

if TYPE_CHECKING:
    from commons.cli.pictures import Picture

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
    pictures: Callable[[], Sequence[Picture]] = tuple  # draws them; matplotlib takes a second to import
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
    figures: tuple[
        tuple[str, str], ...
    ] = ()  # the most important numbers, each with what it is: `("1.63×", "speed-up")`

    def pictures(self) -> list[Picture]:
        """All of them."""
        return [picture for section in self.sections for picture in section.pictures()]


def print_answer(answer: Answer) -> None:
    """Print tables, what to know of them, and the answer last."""
    console = make_console(width=_WIDTH, highlight=False)
    below: list[str] = []
    if answer.subtitle:
        console.print(Text(answer.subtitle))
    for section in answer.sections:
        left_out: tuple[str, ...] = ()
        for table in section.tables:
            shown = _columns_that_fit(table, console) if table.is_cut else len(table.columns)
            console.print(_as_rich(table, shown))
            left_out = table.columns[shown:]
        if left_out:
            below.append(f"Lines are too short for {', '.join(left_out)}, which wider ones show, and --json.")
        if section.tables and section.terms:
            below.append("; ".join(f"{name}: {text}" for name, text in section.terms) + ".")
        if section.tables:
            below += section.notes
    for text in (*below, *(text for section in answer.sections for text in section.paragraphs)):
        console.print(Text(text))
    console.print(Text(answer.answer, style="bold"))
    for line in answer.copy:
        console.print(Text(f"  {line}"))


def _columns_that_fit(table: AnswerTable, console: Console) -> int:
    """How many columns, at least two, lines have room for."""
    wide = console.options.update_width(10_000)  # or the least width is that of the console
    fits = (
        shown
        for shown in range(len(table.columns), 2, -1)
        if console.measure(_as_rich(table, shown), options=wide).maximum <= console.width
    )
    return next(fits, 2)


def _as_rich(table: AnswerTable, shown: int) -> Table:
    """The first columns of a table, for the terminal."""
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
