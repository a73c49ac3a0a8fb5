"""How much do plans gain that give a slow rank less work, and what do they cost if all ranks are equally fast?

Gloo ranks of one thread train a small HSTU on user-like histories, each pinned to a core. If ranks share a core, a
quota gives each of them an equal part, so that no rank becomes faster while another one waits. After some steps one
rank is limited to half of its former processor time; later the limit is lifted. The quotas are set by control groups
(cgroup), which this program must have the right to create. A step is measured from a barrier to a barrier, with the
shuffler's worker idle at its end, so that it includes gather, planning, exchange and reports.

The variants have a replica of the model each, train the same batches and alternate in every step: speeds "equal";
"measured"; and "known", the best case, whose plans use the limit from the step at which it is set.

Then the cost of "measured" on equal ranks, the time of an evaluation of the speeds at many ranks, and, in simulated
times, the gain at up to 1,024 ranks of which some are slow at random. docs/speeds.md explains the results.

Examples:
    python -m benchmarks.speeds
    python -m benchmarks.speeds --quick
    python -m benchmarks.speeds --ranks 2 4 --steps 60 --equal-steps 200
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from benchmarks.shared.command_line import Quick, from_command_line
from benchmarks.shared.pictures import picture
from benchmarks.shared.report import (
    Page,
    every,
    interleaved_on_ranks,
    measured,
    median_with_interval,
    run_ranks,
    slowest_ms,
)
from benchmarks.shared.small_hstu import CPU, DESCRIPTION, SIZES, Replica, draw_users, make_batch
from benchmarks.shared.speeds_simulated import SLOW_RANKS, measure_evaluation, measure_gain
from commons.distributed.options import ShufflerOptions
from commons.perf_model.speed_control import FASTEST
from commons.trainer.observe.times import ForwardTimer
from hstu import HSTUBalancedBatchShuffler
from hstu.model.layer import HSTUEncoder

OPTIONS = {"equal": "equal", "measured": "measured", "known": "equal"}
SLOW = 1  # the rank that is limited
SHARE = 0.5  # the part of its processor time that it keeps
PERIOD_US = 10_000
QUOTAS = 0.9  # total part of a core that its ranks get
# The first steps of a phase, in which speeds change; later steps are settled.
SETTLING = 75
PICTURE = Path(__file__).parents[1] / "docs" / "speeds.svg"


@contextmanager
def control_group() -> Iterator[Callable[[float], None]]:
    """Put this process into a control group; yields a function that limits it to a number of cores."""
    root = Path("/sys/fs/cgroup")
    is_first_version = (root / "cpu").is_dir()
    folder = (root / "cpu" if is_first_version else root) / f"evenrank-speeds-{os.getpid()}"

    def limit(cores: float) -> None:
        quota = round(cores * PERIOD_US)
        if is_first_version:
            (folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (folder / "cpu.cfs_quota_us").write_text(str(quota))
        else:
            (folder / "cpu.max").write_text(f"{quota} {PERIOD_US}")

    try:
        folder.mkdir()
        (folder / "cgroup.procs").write_text(str(os.getpid()))
    except OSError as error:
        raise RuntimeError(
            f"{folder} cannot be made ({error}); the quota of a slow rank needs a control group: run this as root, or "
            "in a container that may make one"
        ) from None
    try:
        yield limit
    finally:
        (folder.parent / "cgroup.procs").write_text(str(os.getpid()))
        folder.rmdir()


@contextmanager
def pinned(rank: int, is_limited: bool) -> Iterator[Callable[[bool], None]]:
    """Pin this process to a core; yields a function that halves its processor time, or lifts that limit."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    sharing = -(-dist.get_world_size() // len(cores))
    if sharing == 1 and not is_limited:
        yield lambda is_slow: None
        return
    own = 1.0 if sharing == 1 else QUOTAS / sharing
    with control_group() as limit:
        limit(own)
        yield lambda is_slow: limit(own * SHARE if is_slow and is_limited else own)


class Variant(Replica):
    """A replica whose shuffler follows the speeds of the ranks, or not."""

    def __init__(self, option: str, users: np.ndarray, rows: int, rank: int) -> None:
        in_order = np.arange(len(users)).reshape(-1, dist.get_world_size(), rows)[:, rank]
        shuffler = HSTUBalancedBatchShuffler(*SIZES, options=ShufflerOptions(speeds=option))  # type: ignore[arg-type]
        super().__init__((make_batch(users[own]) for own in in_order), shuffler)
        self._shuffler = shuffler
        encoder = next(module for module in self.model.modules() if isinstance(module, HSTUEncoder))
        self._timer = ForwardTimer(encoder, CPU)
        self.speed: list[float] = []  # speed of the slow rank ÷ the fastest rank's

    def settle(self) -> None:
        """Report the time of the step, and wait until the worker is idle."""
        stats = self.pipeline.last_stats
        self._timer.step(stats)
        for milliseconds, of_batch in self._timer.take():
            self._shuffler.report_step_time(milliseconds, of_batch)
        super().settle()
        self.speed.append(stats.speeds[SLOW] / max(stats.speeds) if stats.speeds else 1.0)

    def plan_with(self, speeds: np.ndarray | None) -> None:
        """Set the speeds for later steps, independent of times; for a variant with "equal" speeds."""
        for session in self._shuffler.engine._sessions.values():
            session._speeds.to_plan_with = speeds


def train(rank: int, names: tuple[str, ...], rows: int, phases: tuple[int, ...], warmup: int) -> dict[str, Any]:
    """Train every variant on one rank: `phases[0]` steps, then limited, then not; returns milliseconds by variant."""
    num_ranks = dist.get_world_size()
    users = draw_users((warmup + sum(phases) + 4) * num_ranks * rows, seed=num_ranks)
    variants = {name: Variant(OPTIONS[name], users, rows, rank) for name in names}
    known = np.full(num_ranks, FASTEST)
    known[SLOW] *= SHARE
    of_phases, load = [], []
    with pinned(rank, rank == SLOW and len(phases) > 1) as set_slow:
        for phase, steps in enumerate(phases):
            set_slow(phase == 1)
            if "known" in variants:
                variants["known"].plan_with(known if phase == 1 else None)
            calls = {name: variant.step for name, variant in variants.items()}
            of_phases.append(interleaved_on_ranks(calls, steps, warmup=0 if phase else warmup))
            load.append(os.getloadavg()[0])
        for variant in variants.values():
            variant.close()
    return {
        "ms": {name: np.concatenate([ms[name] for ms in of_phases]) for name in names},
        "speed": {name: variant.speed[warmup:] for name, variant in variants.items()},
        "load": float(np.mean(load)),
    }


def slow_rank_rows(found: list[dict[str, Any]], steps: int) -> list[dict[str, Any]]:
    """Median steps by phase, the ratio to "equal", and the best possible ratio."""
    ms, lines = slowest_ms(found), []
    skipped = min(SETTLING, 3 * steps // 2)
    phases = ("before", *(f"{phase}, {part}" for phase in ("limited", "limit lifted") for part in ("first", "then")))
    ends = np.cumsum([0, steps, skipped, 2 * steps - skipped, skipped, 2 * steps - skipped])
    for phase, first, last in zip(phases, ends, ends[1:]):
        of_phase = {name: each[first:last] for name, each in ms.items()}
        line: dict[str, Any] = {"ranks": len(found), "": phase, "steps": int(last - first)}
        line |= {f"{name}, ms": float(np.median(each)) for name, each in of_phase.items()}
        for name in ("measured", "known"):
            line[f"equal ÷ {name}"] = median_with_interval(of_phase["equal"] / of_phase[name])[1]
        lines.append(line | {"speed of the limited rank": np.mean(found[0]["speed"]["measured"][first:last])})
    return lines


def draw_picture(cases: dict[int, list[dict[str, Any]]], steps: int) -> None:
    """Steps and the speed of the slow rank over time, a column for each number of ranks."""
    colours = {"equal": "tab:red", "measured": "tab:blue", "known": "tab:grey"}
    size = (max(7.0, 4.6 * len(cases)), 4.6)
    with picture(PICTURE, (2, len(cases)), size, sharex=True, height_ratios=(2, 1)) as axes:
        for column, (num_ranks, found) in enumerate(cases.items()):
            above, below = axes[:, column]
            for name, each in slowest_ms(found).items():
                label = {"known": "known at once: what is possible"}.get(name, f'speeds "{name}"')
                above.plot(_smoothed(each), color=colours[name], label=label, linewidth=1.3)
            below.plot(found[0]["speed"]["measured"], color=colours["measured"])
            for axis in (above, below):
                axis.axvspan(steps, 3 * steps, color="0.9")
            above.set_ylim(0)
            above.text(2 * steps, 0, "one rank limited to half", ha="center", va="bottom", color="0.4")
            below.set_ylim(0.4, 1.05)
            above.set_title(f"{num_ranks} ranks")
            below.set_xlabel("step")
        axes[0, 0].set_ylabel("step, ms (median of 15)")
        axes[1, 0].set_ylabel("speed of that rank")


def _smoothed(values: np.ndarray, width: int = 15) -> np.ndarray:
    padded = np.pad(values, width // 2, mode="reflect")
    return np.median(np.lib.stride_tricks.sliding_window_view(padded, width), axis=1)


def main(
    ranks: tuple[int, ...] = (2, 4),
    rows: int = 6,
    steps: int = 50,
    equal_steps: int = 80,
    warmup: int = 5,
    quick: Quick = False,
) -> None:
    """Measure and write benchmarks/results/speeds.md and docs/speeds.svg.

    Args:
        ranks: numbers of ranks that train.
        rows: rows of a rank's batch.
        steps: steps before a rank is limited; twice as many while it is limited, and afterwards.
        equal_steps: steps on equally fast ranks.
        warmup: steps before the measurement.
    """
    if quick:
        ranks, steps, equal_steps = ranks[:1], min(steps, 20), min(equal_steps, 20)
    cores = len(os.sched_getaffinity(0))
    names = tuple(OPTIONS)
    phases = (steps, 2 * steps, 2 * steps)
    cases = {each: run_ranks(train, each, names, rows, phases, warmup, timeout=3600) for each in ranks}
    on_equal = run_ranks(train, ranks[0], names[:2], rows, (equal_steps,), warmup, timeout=3600)
    ms = slowest_ms(on_equal)
    ratio, text = median_with_interval(ms["measured"] / ms["equal"])
    changes = int(np.count_nonzero(np.diff(on_equal[0]["speed"]["measured"])))
    load = {each: float(found[0]["load"]) for each, found in cases.items()}
    sizes = ((8, 200),) if quick else ((8, 1000), (64, 400), (1024, 100))
    simulated = [{"ranks": of, "steps": num} | kind for of, num in sizes for kind in every(slow=SLOW_RANKS)]
    page = Page(
        "Speeds: less work for a slow rank",
        f"Ranks pinned to {cores} cores (gloo). {DESCRIPTION}; {rows} rows per rank, 20 + "
        "lognormal items, median 130, sigma 1.4, to 2,048. One rank is limited to half of its former processor time, "
        f"by a quota per {PERIOD_US // 1000} ms; ranks that share a core get {QUOTAS} of it in total, in equal parts. "
        "Load of the machine, the ranks included: "
        + ", ".join(f"{value:.1f} with {each} ranks" for each, value in load.items())
        + f", {on_equal[0]['load']:.1f} on equal ranks.",
    )
    page.target(
        f"cost on equal hardware, {ranks[0]} ranks",
        "≤ 1 % of a step",
        f"{100 * (ratio - 1):+.2f} %, ratio {text}",
        float(text.rpartition("–")[2].rstrip(")")) <= 1.01,
    )
    page.section(
        "A rank that becomes slow, and recovers",
        "Median steps, and the median ratio step by step with its 95 % bootstrap interval. Known: plans that use the "
        "limit at once. The picture is in docs/speeds.md.",
        [row for found in cases.values() for row in slow_rank_rows(found, steps)],
    )
    page.section(
        "Equal ranks",
        f"{equal_steps} steps of {ranks[0]} ranks: measured ÷ equal {text}, median step "
        f"{np.median(ms['equal']):.1f} ms; speeds changed {changes} times.",
        "Processor time of one thread of a rank: it reads the reports of every step, and evaluates every fifth.",
        measured(measure_evaluation, every(ranks=(2, 64) if quick else (2, 8, 64, 1024, 4096))),
    )
    page.section(
        "Simulated: many ranks, some of them slow at random",
        "Plans of the planner, 32 user-like rows per rank; simulated times of 0.2 + 0.8 × load ÷ mean, noise of 3 %, a "
        "tail and pauses. Two in a hundred ranks, at least one, are slower by 1.15 to 2 at any time: always the same "
        "ranks, or each for 500 steps on average and then another rank. The ratio compares sums of the longest times "
        "with equal speeds; possible: plans that use the true speeds at once.",
        measured(measure_gain, simulated),
    )
    page.finish(quick=quick)
    if not quick:
        draw_picture(cases, steps)


if __name__ == "__main__":
    from_command_line(main, __doc__, {"ranks": 2})
