"""Puts faults into real ranks, and looks at how every one of them ends.

A trial is a kind of fault, its place in a step, a rank, two to four ranks, a host of the store and a way to use the
shuffler, drawn from the seed and the trial's number alone. What is expected stands beside every kind, in
tests/faults/kinds.py. The status is 0 only if no rank hung, none said something else than expected, no row was lost
where all go on, and no process, thread or file was left.

Examples:
    python -m tests.faults --trials 200 --seed 0
    python -m tests.faults --trials 200 --seed 0 --store rank0 --out rank0.jsonl
    python -m tests.faults --seed 0 --only 17 --keep
    python -m tests.faults --trials 0 --merge agent.jsonl rank0.jsonl --page docs/reliability.md
"""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tqdm import tqdm

from benchmarks.command_line import from_command_line
from tests.faults.nursery import Nursery
from tests.faults.page import require_markers, rewrite_page, table
from tests.faults.supervisor import Result, run_trial
from tests.faults.trials import draw, kinds_for


@dataclass
class Arguments:
    """What to run."""

    trials: int = 200
    """How many trials."""

    seed: int = 0
    """Trials of one seed are always the same."""

    store: Literal["agent", "rank0", "both"] = "both"
    """Who hosts the store: a process beside the ranks, as under torchrun, or rank 0; or either, by chance."""

    only: tuple[int, ...] = ()
    """Run the trials of these numbers alone."""

    kinds: tuple[str, ...] = ()
    """Only kinds of fault whose name contains one of these; numbers then mean other trials."""

    jobs: int = 3
    """Trials that run at a time; most of a trial is waiting."""

    timeout: float = 3.0
    """ShufflerOptions.timeout in seconds; a survivor has ten seconds more to end."""

    out: Path | None = None
    """Write the results there, a JSON line for each trial."""

    merge: tuple[Path, ...] = ()
    """Results of earlier runs, for the table too."""

    page: Path | None = None
    """Rewrite the table between the markers of this page."""

    keep: bool = False
    """Keep what the ranks of every trial printed, not only of those with problems."""

    def __post_init__(self) -> None:
        if not 0 < self.timeout < 60:
            raise ValueError(f"timeout is {self.timeout:g}; it is above 0 and below 60: correct it")
        names = kinds_for(self.store)
        unknown = [word for word in self.kinds if not any(word in name for name in names)]
        if unknown:
            raise ValueError(
                f"kinds {unknown} are part of no name; store {self.store!r} has {', '.join(names)}: choose among these"
            )
        missing = [str(path) for path in (*self.merge, *filter(None, [self.page])) if not path.is_file()]
        if missing:
            raise ValueError(f"{', '.join(missing)} cannot be read; give files that exist")
        if self.out is not None and not self.out.parent.is_dir():
            raise ValueError(f"out is {self.out}; there is no folder {self.out.parent}: make it")
        if self.page is not None:
            require_markers(self.page)
        self.earlier()

    def earlier(self) -> list[Result]:
        """Results of the earlier runs; ValueError for a file that has something else."""
        results = []
        for path in self.merge:
            try:
                results += [Result.from_json(json.loads(line)) for line in path.read_text().splitlines()]
            except (ValueError, TypeError, KeyError):
                raise ValueError(
                    f"merge is {path}, which does not hold one JSON line for each trial: give what --out has written"
                ) from None
        return results


def main() -> int:
    """Run trials; returns the exit status."""
    args = from_command_line(Arguments, __doc__, {"trials": 0, "only": 0})
    names = [name for name in kinds_for(args.store) if not args.kinds or any(word in name for word in args.kinds)]
    trials = [draw(args.seed, number, args.store, args.timeout, names) for number in args.only or range(args.trials)]
    started = time.monotonic()
    results: list[Result] = []
    if trials:
        nursery = Nursery()
        pool = ThreadPoolExecutor(args.jobs)
        try:
            futures = [pool.submit(run_trial, nursery, trial, args.keep) for trial in trials]
            with tqdm(total=len(trials), unit="trial") as bar:
                for future in as_completed(futures):
                    result = future.result()
                    results.append(result)
                    for problem in result.problems:
                        tqdm.write(f"trial {result.trial.describe()}: {problem} ({result.logs})", file=sys.stderr)
                    bar.update()
                    bar.set_postfix(failed=sum(bool(each.problems) for each in results))
        finally:
            nursery.close()
            pool.shutdown(cancel_futures=True)
    results.sort(key=lambda each: each.trial.number)
    if args.out is not None:
        args.out.write_text("".join(json.dumps(each.to_json()) + "\n" for each in results))
    every = [*args.earlier(), *results]
    print(table(every))
    failed = sum(bool(each.problems) for each in results)
    took = time.monotonic() - started
    print(f"{len(results)} trials in {took:.0f} s, {failed} with problems")
    if args.page is not None:
        rewrite_page(args.page, every)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
