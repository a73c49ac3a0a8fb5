"""Soak: random episodes of training on gloo ranks, with every row accounted for and no resource that grows.

An episode is a few dozen steps: ragged batches of a random type (rows 0 to 8, padding, ranks without data, data that
end at different steps), a pipeline, a window, options, iterator switches, evaluations, resets and resumes, all drawn
from the seed. After each, the digests of all rows that all ranks brought are compared with those of the rows that they
trained, step by step. In between, memory, threads, descriptors and process groups are looked at; then shufflers are
made, used and closed.

The exit status is 1 where a row was lost, doubled or changed, or something grew, and 2 for a mistake in the arguments.

Examples:
    python -m tests.soak --steps 20000 --ranks 4 --seed 0
    python -m tests.soak --steps 500 --ranks 2 --shufflers 20
    python -m tests.soak --episode 17            one episode again, by its number
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.shared.command_line import from_command_line
from commons.console import print_error, print_summary
from tests.helpers.ranks.rank_pool import RankFailure
from tests.soak.footprint import COUNTS, growth, per_10k
from tests.soak.ranks import RankReport, run

# Fewer steps say nothing of a slope: what is cached the first time outweighs it.
_STEPS_FOR_A_SLOPE = 5000
# Most growth per 10,000 steps. Python's small blocks: one for each step. Resident memory grows by what malloc cannot
# give back, too, most at first; the limit is for what the other two do not see, such as mapped files and stacks.
_LIMITS = (
    ("in_use_kib", 1024, "KiB of memory in use"),
    ("blocks", 10_000, "of Python's blocks"),
    ("resident_kib", 16 * 1024, "KiB of resident memory"),
)


@dataclass(frozen=True)
class Args:
    """What to run."""

    steps: int = 20_000  # trained at least, evaluations included
    ranks: int = 4  # processes
    seed: int = 0  # of everything that is drawn
    shufflers: int = 500  # made, used and closed afterwards
    episode: int | None = None  # run this one alone


def problems_of(reports: Sequence[RankReport]) -> list[str]:
    """What grew, a line for each."""
    problems = []
    for rank, report in enumerate(reports):
        looks = report.looks
        if looks[-1].step >= _STEPS_FOR_A_SLOPE:
            problems += [
                f"rank {rank}: {slope:.0f} more {what} per 10,000 steps; the limit is {limit:,}"
                for name, limit, what in _LIMITS
                if (slope := per_10k(looks, name)) > limit
            ]
        for what, more in (("steps", looks), ("shufflers", report.shuffler_looks)):
            if more:
                problems += [
                    f"rank {rank}: {count} more {name} after all {what}"
                    for name, count in growth(more).items()
                    if count > 0
                ]
    return problems


def summary(reports: Sequence[RankReport], seconds: float) -> dict[str, str]:
    """The table of a run."""
    totals, rows = reports[0].totals, dict[str, str]()
    rows["steps"] = f"{totals.steps} on {len(reports)} ranks, in {seconds:.0f} s"
    rows["rows, each trained once"] = str(totals.rows)
    rows["steps in which rows changed rank"] = str(totals.moved)
    for what, numbers in (("episodes", totals.episodes), ("in between", totals.events)):
        rows[what] = ", ".join(f"{count} {name}" for name, count in sorted(numbers.items()))
    for unit, name in (("steps", "looks"), ("shufflers", "shuffler_looks")):
        of_ranks = [looks for report in reports if (looks := getattr(report, name))]
        if of_ranks:
            rows[f"{unit} in all"] = str(of_ranks[0][-1].step)
            for number, _, what in _LIMITS:
                rows[f"{what} per 10,000 {unit}, each rank"] = ", ".join(
                    f"{per_10k(each, number):+.0f}" for each in of_ranks
                )
            counts = (tuple(getattr(each[-1], count) for count in COUNTS) for each in of_ranks)
            rows[f"{', '.join(COUNTS)} after all {unit}"] = ", ".join(map(str, counts))
    return rows


def main() -> int:
    """Run the soak; the exit status."""
    args = from_command_line(Args, __doc__, {"ranks": 2, "shufflers": 0, "episode": 0})
    started = time.monotonic()
    try:
        shufflers = args.shufflers if args.episode is None else 0
        reports = run(args.steps, args.ranks, args.seed, shufflers, episode=args.episode)
    except RankFailure as failure:
        sys.stderr.write(f"{failure}\n")
        return 1
    print_summary(f"soak, seed {args.seed}", summary(reports, time.monotonic() - started))
    problems = problems_of(reports)
    for problem in problems:
        print_error(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
