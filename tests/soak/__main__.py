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

import contextlib
import io
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import tyro

from commons.console import parser_error, print_error, print_summary
from tests.helpers.rank_pool import RankFailure
from tests.soak.footprint import growth, per_10k
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
    """What to run.

    Attributes:
        steps: trained at least, evaluations included.
        ranks: processes.
        seed: of everything that is drawn.
        shufflers: made, used and closed afterwards.
        episode: run this one alone.
    """

    steps: int = 20_000
    ranks: int = 4
    seed: int = 0
    shufflers: int = 500
    episode: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("ranks", 2), ("seed", 0), ("shufflers", 0), ("episode", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"--{name} is {value}; it is at least {least}: raise it")


def parse(argv: Sequence[str]) -> Args | None:
    """The arguments; None where they ask for help, which is then printed.

    Raises:
        ValueError: unknown ones, or values out of range.
    """
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            return tyro.cli(Args, prog="python -m tests.soak", description=__doc__, args=list(argv))
    except SystemExit as stop:
        if stop.code in (0, None):
            return None
        raise ValueError(parser_error(errors.getvalue())) from None


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
    totals, looks = reports[0].totals, [report.looks for report in reports]
    rows = {
        "steps": f"{totals.steps} on {len(reports)} ranks, in {seconds:.0f} s",
        "rows, each trained once": str(totals.rows),
        "steps in which rows changed rank": str(totals.moved),
        "episodes": ", ".join(f"{count} {name}" for name, count in sorted(totals.episodes.items())),
        "in between": ", ".join(f"{count} {name}" for name, count in sorted(totals.events.items())),
        "memory in use per 10,000 steps, each rank": ", ".join(
            f"{per_10k(each, 'in_use_kib'):+.0f} KiB" for each in looks
        ),
        "Python's blocks per 10,000 steps": ", ".join(f"{per_10k(each, 'blocks'):+.0f}" for each in looks),
        "resident per 10,000 steps, each rank": ", ".join(
            f"{per_10k(each, 'resident_kib'):+.0f} KiB" for each in looks
        ),
        "resident at the end, each rank": ", ".join(f"{each[-1].resident_kib / 1024:.0f} MiB" for each in looks),
        "threads, descriptors, groups at the end": ", ".join(
            f"{each[-1].threads}/{each[-1].descriptors}/{each[-1].groups}" for each in looks
        ),
    }
    shufflers = [report.shuffler_looks for report in reports if report.shuffler_looks]
    if shufflers:
        made = shufflers[0][-1].step
        rows |= {
            "shufflers made and closed": str(made),
            "memory in use per 100 of them": ", ".join(
                f"{per_10k(each, 'in_use_kib') / 100:+.1f} KiB" for each in shufflers
            ),
            "threads, descriptors, groups after them": ", ".join(
                f"{each[-1].threads}/{each[-1].descriptors}/{each[-1].groups}" for each in shufflers
            ),
        }
    return rows


def main(argv: Sequence[str]) -> int:
    """Run the soak; the exit status."""
    try:
        args = parse(argv)
    except ValueError as error:
        print_error(str(error))
        return 2
    if args is None:
        return 0
    started = time.monotonic()
    try:
        reports = run(args.steps, args.ranks, args.seed, args.shufflers, episode=args.episode)
    except RankFailure as failure:
        sys.stderr.write(f"{failure}\n")
        return 1
    print_summary(f"soak, seed {args.seed}", summary(reports, time.monotonic() - started))
    problems = problems_of(reports)
    for problem in problems:
        print_error(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
