"""The table of results, as printed and between two markers of docs/reliability.md."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from tests.faults.kinds import KINDS
from tests.faults.supervisor import Result

BEGIN, END = "<!-- fault table: written by python -m tests.faults -->", "<!-- end of the fault table -->"
_LONGEST_TEXT = 130
HEAD = ("fault", "store of", "trials", "who says what", "worst, s")


def summary_rows(results: Sequence[Result]) -> list[tuple[str, ...]]:
    """A row per kind of fault and store host, in the order of the kinds."""
    by_kind: defaultdict[tuple[str, str], list[Result]] = defaultdict(list)
    for result in results:
        by_kind[result.trial.kind, result.trial.store].append(result)
    rows = []
    for name in KINDS:
        for store in ("agent", "rank0"):
            trials = by_kind.get((name, store), [])
            if not trials:
                continue
            failed = sum(bool(each.problems) for each in trials)
            count = f"{len(trials)}" + (f", {failed} failed" if failed else "")
            worst = max(each.worst_seconds for each in trials)
            rows.append((name, store, count, _said(trials), "–" if KINDS[name].all_go_on else f"{worst:.1f}"))
    return rows


def _said(trials: Sequence[Result]) -> str:
    """A real text of every role, shortened."""
    if trials[0].trial.of_kind.all_go_on and not any(end.text for end in trials[0].ranks):
        return "all go on; every row is trained"
    by_role: dict[str, tuple[int, str]] = {}
    for trial in sorted(trials, key=lambda each: bool(each.problems)):
        for end in trial.ranks:
            if end.text:
                by_role.setdefault("the faulty rank" if end.faulty else "the others", (end.rank, end.text))
    if len({text for _, text in by_role.values()}) == 1 and len(by_role) > 1:
        by_role = {"all": next(iter(by_role.values()))}
    return "; ".join(f"{role}: {shortened(text)}" for role, (_, text) in sorted(by_role.items()))


def shortened(text: str) -> str:
    """One line of a text, its beginning."""
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST_TEXT else line[: _LONGEST_TEXT - 1].rsplit(" ", 1)[0] + " …"


def table(results: Sequence[Result]) -> str:
    """A Markdown table, for the terminal and the page."""
    lines = ["| " + " | ".join(HEAD) + " |", "|" + "---|" * len(HEAD)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in summary_rows(results)]
    return "\n".join(lines)


def require_markers(page: Path) -> None:
    """Raise ValueError unless a page has both markers."""
    text = page.read_text()
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"{page} has not one {BEGIN!r} and one {END!r}; the table goes between them: put them there")


def rewrite_page(page: Path, results: Sequence[Result]) -> None:
    """Replace what is between the markers of a page; ValueError if it has none."""
    require_markers(page)
    text = page.read_text()
    before, rest = text.split(BEGIN)
    page.write_text(f"{before}{BEGIN}\n{table(results)}\n{END}{rest.split(END)[1]}")
