"""What commands and scripts print: summary tables on stdout, one-line errors on stderr."""

from __future__ import annotations

import codecs
import shutil
import sys
import unicodedata
from collections.abc import Mapping
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from rich.console import Console
    from tqdm import tqdm

# Replacements for evenrank's special characters where the encoding of stdout lacks them, such as ASCII.
_PLAIN = dict(zip("×÷→–−…·Σ±≥≤", ("x", "/", "->", "-", "-", "...", "*", "sum ", "+-", ">=", "<=")))
_PLAIN_ERRORS = "evenrank.plain"


def _plain(error: UnicodeError) -> tuple[str, int]:
    """Replace characters that an encoding lacks, without accents where possible; an error handler for codecs."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    written = []
    for character in error.object[error.start : error.end]:
        base = unicodedata.normalize("NFKD", character).encode("ascii", "ignore").decode()
        written.append(_PLAIN.get(character, base or "?"))
    return "".join(written), error.end


codecs.register_error(_PLAIN_ERRORS, _plain)


def accept_all_text() -> None:
    """Make stdout replace characters that its encoding lacks, unless the user has chosen how to treat them."""
    by_default = getattr(sys.stdout, "errors", None) in ("strict", "surrogateescape")  # the second in the C locale
    if by_default and hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors=_PLAIN_ERRORS)


def make_console(*, width: int = 80, highlight: bool = True) -> Console:
    """A console on stdout, after `accept_all_text`.

    Args:
        width: width of lines where stdout is no terminal and COLUMNS is not set; a terminal's own width is used.
        highlight: whether numbers, paths and similar text are coloured.
    """
    from rich.console import Console  # here, so that errors can be printed where rich is not installed

    accept_all_text()
    # rich and shutil both read COLUMNS; shutil takes our width for files and pipes.
    columns = None if sys.stdout.isatty() else shutil.get_terminal_size((width, 24)).columns
    return Console(width=columns, highlight=highlight)


def progress_bar(description: str, total: float | None, unit: str, *, show: bool) -> tqdm[NoReturn]:
    """A progress bar on stderr, advanced with `update()`; hidden if `show` is False or stderr is no terminal."""
    from tqdm import tqdm

    return tqdm(total=total, desc=description, unit=unit, unit_scale=True, disable=None if show else True)


def print_summary(title: str, rows: Mapping[str, str]) -> None:
    """Print a table of names and values."""
    from rich.table import Table

    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, value)
    make_console().print(table)


def format_number(pattern: str, value: float | None, unknown: str = "") -> str:
    """A number by a format; `unknown` for None and for NaN.

    >>> format_number("{:.1f}", 0.25), format_number("{:.1f}", None), format_number("{:.1f}", float("nan"), "–")
    ('0.2', '', '–')
    """
    return unknown if value is None or value != value else pattern.format(value)


def print_error(message: str) -> None:
    """Print an error as one line."""
    sys.stderr.write(f"evenrank: {one_line(message)}\n")


def reason_of(error: Exception) -> str:
    """The first line of an error's message, or its type if the message is empty."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def one_line(text: str) -> str:
    """Text, with or without a box around it, as one line; a horizontal rule in the box becomes a semicolon.

    >>> one_line("╭─ Value error ─╮\\n│ no such file  │\\n│ ───────────── │\\n│ see --help    │\\n╰───────────────╯")
    'Value error: no such file; see --help'
    """
    lines = [line.strip(" │") for line in text.splitlines()]
    title = "".join(line.strip("╭─╮ ") + ": " for line in lines if line.startswith("╭"))
    rules = {"─"}, {"-"}  # the second in ASCII terminals
    body = "\n".join(
        "\f" if len(line) > 3 and set(line) in rules else line for line in lines if line and line[0] not in "╭╰"
    )
    return title + "; ".join(" ".join(section.split()) for section in body.split("\f"))
