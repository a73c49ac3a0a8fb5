"""What commands and scripts print: summary tables on stdout, one-line errors on stderr."""

from __future__ import annotations

import codecs
import contextlib
import io
import re
import shutil
import sys
import textwrap
import unicodedata
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from rich.console import Console
    from tqdm import tqdm

# Replacements for evenrank's special characters where the encoding of stdout lacks them, such as ASCII.
_PLAIN = {"×": "x", "÷": "/", "→": "->", "–": "-", "−": "-", "…": "...", "·": "*", "Σ": "sum ", "≥": ">=", "≤": "<="}
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
    """Make stdout replace characters that its encoding lacks instead of raising UnicodeEncodeError."""
    if getattr(sys.stdout, "errors", None) == "strict" and hasattr(sys.stdout, "reconfigure"):
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


def parser_error(text: str) -> str:
    """The message in tyro's error box as one line, without the names that tyro puts in front of evenrank's message.

    >>> parser_error("╭─ Value error ─╮\\n│ Error parsing trainer: seed is -1 │\\n╰───────────────╯")
    'seed is -1'
    >>> parser_error("╭─ Value error ─╮\\n│ Error parsing __tyro-dummy-inner__.shuffler: slack is -1 │")
    'slack is -1'
    >>> box = "╭─ Unrecognized options ─╮\\n│ Unrecognized options: --rank │\\n│ ──── │\\n│ Perhaps you meant: │\\n"
    >>> parser_error(box + "│ --ranks [INT [INT ...]] │\\n│ Numbers of ranks. │\\n│ in evenrank --help │\\n╰──╯")
    'Unrecognized options: --rank; perhaps you meant --ranks'
    >>> parser_error("╭─ Invalid choice ─╮\\n│ invalid choice 'gpt' for argument '--task'. │\\n╰──╯")
    "Invalid choice: 'gpt' for argument '--task'."

    """
    line = one_line(text).split("; For full helptext")[0]
    required = re.fullmatch(r"Required options[:;] Missing from ([^:]+): (.*)", line)
    if required:
        missing = re.findall(r"(?:^|\(required\) )(\{[^}]*\}|\S+)", required[2])
        return f"{required[1]} requires {', '.join(missing)}: see {required[1]} --help"
    line = re.sub(r"; Argument helptext: --\S+ ((?:\S*(?:[A-Z]{3}|[][{}])\S* )+).*", r"; it takes \1", line).rstrip()
    line = re.sub(r"^Value error[:;] ", "", line)
    line = re.sub(r"__tyro[-_]dummy[-_]inner__\.?", "", line)  # tyro's name for what has no name, such as a subcommand
    line = re.sub(r"^Error parsing (?!--)[\w.-]*: ", "", line)
    line = re.sub(r"(\}) \.$", r"\1", line)  # Missing subcommand
    line = re.sub(r"^(Unrecognized options|Invalid choice)[:;] \1:?", r"\1:", line, flags=re.IGNORECASE)
    error, _, suggestions = line.partition("; Perhaps you meant: ")
    # Without the help that follows each name; of the pair of a boolean, `--a, --no-a`, the first.
    names = dict.fromkeys(re.findall(r"(--[\w.-]+)(?:, --(?:[\w-]+\.)*no-[\w-]+|(?= [\[{A-Z]))", suggestions))
    return f"{error}; perhaps you meant {' or '.join(names)}" if names else line


@contextlib.contextmanager
def one_line_parser_errors() -> Iterator[None]:
    """Raise ValueError for a mistake that tyro finds in the block, instead of its box and SystemExit."""
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            yield
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        raise ValueError(parser_error(errors.getvalue())) from None


def wrapped_help(text: str, width: int | None = None) -> str:
    """Wrap the description in tyro's help, whose lines may have any length, at the width of the terminal.

    Indented lines, such as examples, are not wrapped.

    >>> print(wrapped_help("Looks at what is installed, and says what mends it.\\n\\n  evenrank doctor\\n╭─", 40))
    Looks at what is installed, and says
    what mends it.
    <BLANKLINE>
      evenrank doctor
    ╭─

    """
    width = shutil.get_terminal_size().columns if width is None else width
    description, box, rest = text.partition("╭")
    lines = []
    for line in description.split("\n"):
        fits = len(line) <= width or line.startswith((" ", "\x1b"))
        lines += [line] if fits else textwrap.wrap(line, width, break_long_words=False, break_on_hyphens=False)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)) + box + rest
