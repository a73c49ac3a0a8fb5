"""What `evenrank doctor` finds, and how it is told. Nothing here needs a package."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from commons.console import make_console

OK, NOTE, WRONG = "ok", "note", "wrong"
_STYLES = {OK: "green", NOTE: "yellow", WRONG: "bold red"}


@dataclass(frozen=True)
class Finding:
    """One line of the answer.

    Attributes:
        name: what was looked at.
        state: "ok"; "note": training starts all the same; "wrong": it does not.
        found: what there is.
        remedy: what mends it, a command where there is one; empty if nothing needs to be.
    """

    name: str
    state: str
    found: str
    remedy: str = ""


def print_findings(findings: list[Finding]) -> None:
    """Print a table, and the remedies below it, each on lines of its own to copy."""
    try:
        from rich.table import Table
        from rich.text import Text
    except ImportError:  # that, too, is told
        width = max(len(finding.name) for finding in findings)
        sys.stdout.writelines(f"{each.name:<{width}}  {each.state:<5}  {each.found}\n" for each in findings)
        sys.stdout.writelines(f"{each.name}: {each.remedy}\n" for each in findings if each.remedy)
        return
    console = make_console(highlight=False)
    table = Table(box=None, pad_edge=False, show_header=False)
    for finding in findings:
        table.add_row(Text(finding.name), Text(finding.state, style=_STYLES[finding.state]), Text(finding.found))
    console.print(table)
    for finding in findings:
        if finding.remedy:
            console.print(Text(f"{finding.name}: {finding.remedy}"), soft_wrap=True)
