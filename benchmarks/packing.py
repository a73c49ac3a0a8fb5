"""How many groups do the allocators make, how even are the groups, and how long does packing take?

Four allocators pack the same values under the same capacity: plain first-fit decreasing as in training code (plain.py),
and "ffd", "kk" and "refined" of commons.micro_batching. One thread; the algorithms alternate, so that a change of the
machine's speed affects all equally; times are medians. Groups are compared with the Martello–Toth L2 bound.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from benchmarks.shared.command_line import Quick, from_command_line
from benchmarks.shared.lengths import COSTS, described, draw
from benchmarks.shared.plain import plain_first_fit
from benchmarks.shared.report import Page, each_column, interleaved_medians, milliseconds, share
from commons.micro_batching import ffd_allocate, kk_allocate, packing_metrics, padded_allocate, refined_allocate

ROWS = (64, 256, 1024)
LENGTHS = ("zipf", "lognormal", "bimodal", "gsm8k-like")
CAPACITIES = (1, 2, 3, 4)
DIVISORS = (1, 4, 8)
ALGORITHMS: dict[str, Callable[..., list[list[int]]]] = {
    "plain": plain_first_fit,
    "ffd": ffd_allocate,
    "kk": kk_allocate,
    "refined": refined_allocate,
}


@dataclass
class Case:
    """One batch, packed by all algorithms."""

    num_rows: int
    lengths: str
    capacity: int  # in multiples of the longest row
    divisor: int
    seed: int
    fewest: int  # lower bound of the number of groups, rounded up to the divisor
    metrics: dict[str, dict[str, Any]]  # by algorithm, and so are the times
    milliseconds: dict[str, float]

    def groups(self, name: str) -> int:
        return self.metrics[name]["n_groups"]


def pack(num_rows: int, lengths: str, factor: int, divisor: int, seed: int, repeats: int) -> Case:
    """Pack one batch by all algorithms; checks every packing."""
    values = draw(lengths, num_rows, seed).tolist()
    capacity = factor * max(values)
    calls = {name: partial(allocate, values, capacity, 1, divisor) for name, allocate in ALGORITHMS.items()}
    metrics: dict[str, dict[str, Any]] = {}
    for name, call in calls.items():
        groups = call()
        metrics[name] = packing_metrics(values, groups, capacity)
        assert metrics[name]["max_load"] <= capacity and len(groups) % divisor == 0 and all(groups)
    seconds = interleaved_medians(calls, repeats, show=False)
    fewest = -(-metrics["refined"]["lower_bound"] // divisor) * divisor
    of_case = num_rows, lengths, factor, divisor, seed, fewest
    return Case(*of_case, metrics, {name: each * 1e3 for name, each in seconds.items()})


def by(cases: list[Case], *names: str) -> dict[tuple[Any, ...], list[Case]]:
    """Cases by fields, in the order in which they come."""
    found: defaultdict[tuple[Any, ...], list[Case]] = defaultdict(list)
    for case in cases:
        found[tuple(getattr(case, name) for name in names)].append(case)
    return found


def mean_median(values: Iterable[float]) -> str:
    values = list(values)
    return f"{np.mean(values):.4f} / {np.median(values):.4f}"


def _spreads(cases: list[Case], prefix: str = "") -> dict[str, str]:
    return {
        f"{prefix}{name}": mean_median(case.metrics[name]["imbalance_ratio"] for case in cases) for name in ALGORITHMS
    }


def report_groups(page: Page, cases: list[Case]) -> None:
    """Groups, spread and utilisation by lengths and capacity; spread by divisor; every case above the bound."""
    body = []
    for (lengths, capacity), some in by(cases, "lengths", "capacity").items():
        bound = sum(case.fewest for case in some)
        used = each_column(
            [{f"used, {name}": case.metrics[name]["utilization"] for name in ALGORITHMS} for case in some], np.mean
        )
        body.append(
            {"lengths": lengths, "capacity": f"{capacity} ×", "bound": bound}
            | {f"+ {name}": sum(case.groups(name) for case in some) - bound for name in ALGORITHMS}
            | _spreads(some, "spread, ")
            | used
        )
    page.section(
        "Groups, spread, utilisation",
        f"All row counts {ROWS}, divisors {DIVISORS} and seeds together. Groups: the bound in total, and how many more "
        "each algorithm makes. Spread: (largest − smallest load) ÷ mean, mean / median; if one row fills a group, no "
        "packing has a small spread. Used: values ÷ (groups · capacity).",
        body,
    )
    missed = [
        {"rows": case.num_rows, "lengths": case.lengths, "capacity": f"{case.capacity} ×", "divisor": case.divisor}
        | {"seed": case.seed, "bound": case.fewest}
        | {name: case.groups(name) for name in ALGORITHMS}
        | {"room used at the bound": case.metrics["refined"]["utilization"] * case.groups("refined") / case.fewest}
        for case in cases
        if case.groups("refined") > case.fewest
    ]
    page.section(
        "Above the bound",
        "Cases in which refined makes more groups than the bound. It is not known whether the bound can be reached "
        "there; the last column is the part of the room that would be used at the bound.",
        missed or "None.",
    )
    fewer = [case.groups("refined") <= min(map(case.groups, ALGORITHMS)) for case in cases]
    page.target("groups, refined against all others", "never more", f"{share(fewer)} cases", all(fewer))
    reached = {name: [case.groups(name) == case.fewest for case in cases] for name in ALGORITHMS}
    others = ", ".join(f"{name} {np.mean(met):.1%}" for name, met in reached.items() if name != "refined")
    met = float(np.mean(reached["refined"]))
    reached_text = f"{share(reached['refined'])}, {met:.2%} ({others})"
    page.target("cases at the L2 bound, refined", "≥ 99 %", reached_text, met >= 0.99)


def report_time(page: Page, cases: list[Case]) -> None:
    body = []
    for (num_rows, lengths), some in by(cases, "num_rows", "lengths").items():
        cells = by(some, "capacity", "divisor").values()
        medians = [
            {name: statistics.median(case.milliseconds[name] for case in cell) for name in ALGORITHMS} for cell in cells
        ]
        ratios = [times["plain"] / times["refined"] for times in medians]
        body.append(
            {"rows": num_rows, "lengths": lengths}
            | {name: statistics.median(times[name] for times in medians) for name in ALGORITHMS}
            | {"plain ÷ refined": f"{min(ratios):.1f}–{max(ratios):.1f}×"}
            | {"slowest refined": max(case.milliseconds["refined"] for case in some)}
        )
    page.section(
        "Time",
        "Milliseconds of CPU from a Python list to a list of lists, checks included: median over capacities and "
        "divisors of the medians over seeds. Then the speed-up of refined over plain first fit, in the worst and best "
        "of these cells, and the slowest case of refined.",
        body,
    )
    if large := [case.milliseconds["refined"] for case in cases if case.num_rows == 1024]:
        median, slowest = statistics.median(large), max(large)
        reached = f"median {median:.3f} ms, slowest case {slowest:.3f} ms"
        met = median <= 4 and slowest <= 30
        page.target("time, refined, 1024 rows", "median ≤ 4 ms, slowest ≤ 30 ms", reached, met)


def measure_padded(page: Page, repeats: int) -> None:
    """Time of `padded_allocate`; tests/unit/perf_model/partitioner tests that its groups are optimal."""
    body = []
    for num_rows, lengths in itertools.product((256, 2048), LENGTHS):
        tokens = draw(lengths, num_rows, 0)
        call = partial(padded_allocate, tokens, cost=COSTS["HSTU"])
        limit = max(len(group) * int(COSTS["HSTU"](tokens[group]).max()) for group in call(num_groups=num_rows // 8))
        timed = {
            "ms, number of groups": {"num_groups": num_rows // 8},
            "ms, most that a group costs": {"max_cost": limit},
        }
        times = {
            name: milliseconds(partial(call, **given), 3 * repeats, clock=time.process_time)
            for name, given in timed.items()
        }
        body.append({"rows": num_rows, "lengths": lengths, "groups": num_rows // 8} | times)
    slowest = max(max(value for name, value in row.items() if name.startswith("ms")) for row in body)
    page.target("padded_allocate, 2,048 rows", "≤ 5 ms", f"slowest {slowest:.2f} ms", slowest <= 5)
    page.section(
        "Padded",
        "`padded_allocate`: a group costs its number of rows × the cost of its longest row, cost HSTU. Milliseconds of "
        "CPU from an array to lists, checks included: for a given number of groups, and for a limit on the cost of a "
        "group, which is the cost of the costliest of those groups.",
        body,
    )


def main(quick: Quick = False) -> None:
    torch.set_num_threads(1)
    seeds, repeats = (2, 3) if quick else (10, 7)
    page = Page(
        "Packing: groups, spread, time",
        f"{described(LENGTHS)} Capacity in multiples of the longest row; plain: first-fit decreasing in Python.",
    )
    cells = itertools.product(ROWS[: 2 if quick else 3], LENGTHS, CAPACITIES, DIVISORS, range(seeds))
    cases = [pack(*cell, repeats) for cell in tqdm(list(cells), desc="packing")]
    report_groups(page, cases)
    report_time(page, cases)
    measure_padded(page, repeats)
    page.finish(quick=quick)


if __name__ == "__main__":
    from_command_line(main, __doc__)
