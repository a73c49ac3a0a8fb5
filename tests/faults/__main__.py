"""Puts faults into real ranks, and looks at how every one of them ends.

A trial is a kind of fault, its place in a step, a rank, two to four ranks, a host of the store and a way to use the
shuffler, drawn from the seed and the trial's number alone. What is expected stands beside every kind, in
tests/faults/kinds.py. The status is 0 only if no rank hung, none said something else than expected, no row was lost
where all go on, and no process, thread or file was left.

Examples:
    python -m tests.faults --trials 200 --seed 0
    python -m tests.faults --trials 200 --seed 0 --store rank0
    python -m tests.faults --seed 0 --only 17 --keep
"""

from __future__ import annotations

import multiprocessing
import sys
import textwrap
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Literal

from tqdm import tqdm

from benchmarks.shared.command_line import from_command_line
from benchmarks.shared.report import table
from tests.faults.kinds import KINDS
from tests.faults.supervisor import Result, run_trial
from tests.faults.trials import draw, kinds_for
from tests.helpers.ranks.fork_server import start_fork_server

_LONGEST_TEXT = 130


@dataclass
class Arguments:
    """What to run."""

    trials: int = 200  # how many
    seed: int = 0  # trials of one seed are always the same
    # Who hosts the store: a process beside the ranks, as under torchrun, or rank 0; or either, by chance.
    store: Literal["agent", "rank0", "both"] = "both"
    only: tuple[int, ...] = ()  # run the trials of these numbers alone
    kinds: tuple[str, ...] = ()  # kinds of fault whose name contains one of these; numbers then mean other trials
    jobs: int = 3  # trials that run at a time; most of a trial is waiting
    timeout: float = 3.0  # ShufflerOptions.timeout in seconds; a survivor's program has ten seconds more to end
    keep: bool = False  # what the ranks of every trial printed, not only of those with problems

    def __post_init__(self) -> None:
        if not 0 < self.timeout < 60:
            raise ValueError(f"timeout is {self.timeout:g}; it is above 0 and below 60: correct it")
        names = kinds_for(self.store)
        unknown = [word for word in self.kinds if not any(word in name for name in names)]
        if unknown:
            raise ValueError(
                f"kinds {unknown} are part of no name; store {self.store!r} has {', '.join(names)}: choose among these"
            )


def summary_rows(results: Sequence[Result]) -> list[dict[str, str]]:
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
            seconds = "–" if KINDS[name].all_go_on else f"{worst:.1f}"
            case = {"fault": name, "store host": store, "trials": count}
            rows.append(case | {"messages": _said(trials).replace("|", "\\|"), "worst, s": seconds})
    return rows


def _said(trials: Sequence[Result]) -> str:
    """A real text of every role, shortened."""
    if trials[0].trial.of_kind.all_go_on and not any(end.text for end in trials[0].ranks):
        return "all go on; every row is trained"
    by_role: dict[str, str] = {}
    for trial in sorted(trials, key=lambda each: bool(each.problems)):
        for end in trial.ranks:
            if end.text:
                by_role.setdefault("the faulty rank" if end.faulty else "the others", end.text)
    if len(by_role) > 1 and len(set(by_role.values())) == 1:
        by_role = {"all": by_role["the others"]}
    return "; ".join(
        f"{role}: {textwrap.shorten(text, _LONGEST_TEXT, placeholder=' …')}" for role, text in sorted(by_role.items())
    )


def main() -> int:
    """Run trials; returns the exit status."""
    args = from_command_line(Arguments, __doc__, {"only": 0})
    names = [name for name in kinds_for(args.store) if not args.kinds or any(word in name for word in args.kinds)]
    trials = [draw(args.seed, number, args.store, args.timeout, names) for number in args.only or range(args.trials)]
    started = time.monotonic()
    results: list[Result] = []
    # Each job supervises its ranks from a process of its own, which forks them by way of a server.
    pool = ProcessPoolExecutor(args.jobs, multiprocessing.get_context("fork"), initializer=start_fork_server)
    try:
        futures = [pool.submit(run_trial, trial, args.keep) for trial in trials]
        with tqdm(total=len(trials), unit="trial") as bar:
            for future in as_completed(futures):
                result = future.result()
                results.append(result)
                for problem in result.problems:
                    tqdm.write(f"trial {result.trial.describe()}: {problem} ({result.logs})", file=sys.stderr)
                bar.update()
                bar.set_postfix(failed=sum(bool(each.problems) for each in results))
    finally:
        pool.shutdown(cancel_futures=True)
    results.sort(key=lambda each: each.trial.number)
    print(table(summary_rows(results)))
    failed = sum(bool(each.problems) for each in results)
    took = time.monotonic() - started
    print(f"{len(results)} trials in {took:.0f} s, {failed} with problems")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
