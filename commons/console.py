"""What commands and scripts print: summary tables on stdout, one-line errors on stderr."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping

from rich.console import Console
from rich.table import Table


def print_summary(title: str, rows: Mapping[str, str]) -> None:
    """Print a table of names and values."""
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, value)
    Console().print(table)


def print_error(message: str) -> None:
    """Print an error as one line."""
    sys.stderr.write(f"evenrank: {one_line(message)}\n")


def one_line(text: str) -> str:
    """Text, perhaps in a box, as one line; what a rule separates in the box, a semicolon separates in the line.

    >>> one_line("╭─ Value error ─╮\\n│ no such file  │\\n│ ───────────── │\\n│ see --help    │\\n╰───────────────╯")
    'Value error: no such file; see --help'

    """
    lines = [line.strip(" │") for line in text.splitlines()]
    title = "".join(line.strip("╭─╮ ") + ": " for line in lines if line.startswith("╭"))
    body = "\n".join("\f" if set(line) == {"─"} else line for line in lines if line and line[0] not in "╭╰")
    return title + "; ".join(" ".join(section.split()) for section in body.split("\f"))


def parser_error(text: str) -> str:
    """What tyro says in its box, as one line, without the names it puts in front of a message of ours.

    >>> parser_error("╭─ Value error ─╮\\n│ Error parsing trainer: seed is -1 │\\n╰───────────────╯")
    'seed is -1'
    >>> parser_error("╭─ Value error ─╮\\n│ Error parsing __tyro-dummy-inner__.shuffler: slack is -1 │")
    'slack is -1'

    """
    line = one_line(text).split("; For full helptext")[0].removeprefix("Value error: ")
    line = re.sub(r"__tyro[-_]dummy[-_]inner__\.?", "", line)  # its name for what has none, such as a subcommand
    line = re.sub(r"^Error parsing (?!--)[\w.-]*: ", "", line)
    return re.sub(r"^(Unrecognized options): \1:", r"\1:", line)
