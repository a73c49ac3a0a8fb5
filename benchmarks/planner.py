"""How good are the plans, and how long do they take?

Plans are compared with their lower bound and with the plain Karmarkar-Karp of most training code: a heap of states in
pure Python (plain.py). One thread; times are medians. benchmarks/exchange.py measures how much planning slows other
threads.
"""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from functools import partial
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from benchmarks.shared.command_line import Quick, from_command_line
from benchmarks.shared.lengths import COSTS, NODE, described, draw
from benchmarks.shared.plain import plain_karmarkar_karp
from benchmarks.shared.report import Page, each_column, interleaved_medians, milliseconds
from commons.perf_model.partitioner import core, partition
from commons.perf_model.partitioner.arguments import CheckedArguments

LENGTHS = ("zipf", "lognormal", "bimodal", "user-like")
TIMED = ((8, 32), (64, 32), (1024, 32))
Row = dict[str, Any]


def hstu_work(lengths: str, shape: tuple[int, int], seed: int = 0) -> np.ndarray:
    """Workloads of a batch of ranks × rows, cost HSTU."""
    return COSTS["HSTU"](draw(lengths, shape[0] * shape[1], seed))


def measure_balance(page: Page, seeds: int, quick: bool) -> None:
    """Largest load ÷ lower bound over lengths, costs, ranks and rows per rank."""
    shapes = [(8, 8), (8, 32), (64, 32)] if quick else list(itertools.product((8, 64, 256, 1024), (8, 32, 128)))
    # By lengths, cost, equal counts and method: rows of the batch, and the gap.
    gaps: defaultdict[tuple[Any, ...], list[tuple[int, float]]] = defaultdict(list)
    for (num_parts, rows), lengths, cost in tqdm(list(itertools.product(shapes, LENGTHS, COSTS)), desc="balance"):
        for seed in range(seeds):
            workloads = COSTS[cost](draw(lengths, num_parts * rows, seed))
            for equal_size, method in itertools.product((True, False), ("karmarkar_karp", "refined")):
                plan = partition(workloads, num_parts, method=method, equal_size=equal_size)
                gaps[lengths, cost, equal_size, method].append((num_parts * rows, plan.optimality_gap))
    body: defaultdict[tuple[str, str], Row] = defaultdict(dict)
    for (lengths, cost, equal_size, method), found in gaps.items():
        ratios = [1 + gap for _, gap in found]
        column = f"{'equal' if equal_size else 'free'}, {'KK' if method == 'karmarkar_karp' else method}"
        body[lengths, cost][column] = f"{np.mean(ratios):.5f} / {max(ratios):.4f}"
    page.section(
        "Balance",
        f"Largest load ÷ lower bound, mean / worst over ranks × rows per rank in {shapes} and {seeds} seeds. The "
        "optimum lies between the bound and the plan, so the ratio limits the loss of a plan. Ratios above 1.001 occur "
        "in batches whose load is in a few rows per rank; there, exchanges of two or three rows rarely improve a plan.",
        [{"lengths": lengths, "cost": cost} | row for (lengths, cost), row in body.items()],
    )
    for what, equal_size, sizes, limit in (
        ("balance, equal counts, 256 samples or more", True, range(256, 10**6), 1.001),
        ("balance, equal counts, 8 × 8", True, range(256), 1.002),
        ("balance, free counts", False, range(10**6), 1.0002),
    ):
        of_refined = [found for key, found in gaps.items() if key[2:] == (equal_size, "refined")]
        values = [1 + gap for found in of_refined for count, gap in found if count in sizes]
        page.target_of_cases(what, limit, values, " × bound")


def measure_speed(page: Page, repeats: int, quick: bool) -> None:
    """Time of the native call and of `partition`."""
    body: list[Row] = []
    worst: defaultdict[tuple[int, str, str], float] = defaultdict(float)
    for shape, lengths in tqdm(list(itertools.product(TIMED[: 2 if quick else 3], LENGTHS)), desc="speed"):
        workloads, times = hstu_work(lengths, shape), {}
        few = max(3, repeats // 10) if shape[0] > 64 else repeats
        for counts, equal_size in (("equal", True), ("free", False)):
            arguments = CheckedArguments(workloads, shape[0], equal_size=equal_size)
            times[f"{counts}, native"] = milliseconds(partial(core.make_plan, arguments), few)
            plan = partial(partition, workloads, shape[0], equal_size=equal_size)
            times[f"{counts}, partition()"] = milliseconds(plan, few)
        body.append({"ranks × rows": f"{shape[0]} × {shape[1]}", "lengths": lengths} | times)
        for name in ("native", "partition()"):
            key = shape[0], name, "bimodal" if lengths == "bimodal" else "others"
            worst[key] = max(worst[key], times[f"equal, {name}"])
    page.section(
        "Speed",
        "Milliseconds per plan, cost HSTU: the native call, and `partition()` from Python with all checks.",
        body,
    )
    for (num_parts, name, kind), value in sorted(worst.items()):
        native = {8: 0.03, 64: 0.5, 1024: 60.0 if kind == "bimodal" else 20.0}[num_parts]
        limit = native if name == "native" else 0.1
        if name == "native" or num_parts == 8:
            page.target(f"{name}, {kind}, {num_parts} × 32", f"≤ {limit} ms", f"{value:.3f} ms", value <= limit)


def measure_peers(page: Page, repeats: int, quick: bool) -> None:
    """Time and balance against the plain pure-Python Karmarkar-Karp."""
    body: list[Row] = []
    cases = [((8, 32), True), ((8, 32), False), ((64, 32), True), ((64, 32), False), ((1024, 32), True)]
    faster: defaultdict[tuple[int, bool, str], list[float]] = defaultdict(list)
    for (shape, equal_size), lengths in tqdm(list(itertools.product(cases[: 3 if quick else 5], LENGTHS)), desc="KK"):
        workloads, few = hstu_work(lengths, shape), max(5, repeats // 2)
        listed = workloads.tolist()
        plain = partial(plain_karmarkar_karp, listed, shape[0], equal_size)
        largest = max(sum(listed[index] for index in group) for group in plain())
        plain_ms = milliseconds(plain, 3 if shape[0] > 8 else few)
        case = {"ranks × rows": f"{shape[0]} × {shape[1]}", "counts": "equal" if equal_size else "free"}
        row = case | {"lengths": lengths, "plain KK ms": plain_ms}
        for method, column in (("karmarkar_karp", "our KK"), ("refined", "refined")):
            taken = milliseconds(partial(partition, workloads, shape[0], method=method, equal_size=equal_size), few)
            faster[shape[0], equal_size, method].append(plain_ms / taken)
            row |= {f"{column} ms": taken, f"{column} faster": f"{plain_ms / taken:.0f}×"}
        plan = partition(workloads, shape[0], equal_size=equal_size)
        balance = {"plain KK ÷ bound": largest / plan.lower_bound, "refined ÷ bound": 1 + plan.optimality_gap}
        body.append(row | balance)
    page.section(
        "Against a plain Karmarkar-Karp in Python",
        "Milliseconds per plan, cost HSTU; ours through `partition()`, all checks and the lower bound included. "
        "Balance is largest load ÷ lower bound.",
        body,
    )
    for (num_parts, equal_size, method), values in faster.items():
        if num_parts == 64:
            limit = 1000 if not equal_size else 40 if method == "karmarkar_karp" else 6
            what = f"{method} against plain KK, 64 × 32 {'equal' if equal_size else 'free'}"
            page.target(what, f"≥ {limit}×", f"{min(values):.0f}–{max(values):.0f}×", min(values) >= limit)


def measure_home(page: Page, seeds: int, repeats: int, quick: bool) -> None:
    """Tokens that leave their rank and their node of eight, and the cost of locality in balance and time."""
    body: list[Row] = []
    medians: dict[tuple[int, str], Row] = {}
    sizes = (8, 64) if quick else (8, 64, 256, 1024)
    for num_parts, lengths in tqdm(list(itertools.product(sizes, LENGTHS)), desc="home"):
        found = []
        for seed in range(seeds):
            tokens = draw(lengths, num_parts * 32, seed)
            workloads, home = COSTS["HSTU"](tokens), np.arange(len(tokens)) // 32
            plans = partial(partition, workloads, num_parts, tokens=tokens, home=home, ranks_per_node=NODE, slack=0.01)
            plan, total = plans(), tokens.sum()
            # A node's load above that limit at home has to leave the node.
            beyond = (workloads.reshape(-1, NODE * 32).sum(1) - NODE * plan.loads.max()).clip(min=0).sum()
            found.append(
                {
                    "tokens that leave their rank": tokens[plan.assignment != home].sum() / total,
                    "their node": tokens[plan.assignment // NODE != home // NODE].sum() / total,
                    "load that must leave its node": beyond / workloads.sum(),
                    "load ÷ refined": plan.loads.max() / partition(workloads, num_parts).loads.max(),
                    "ms": milliseconds(plans, max(3, repeats // 10)),
                }
            )
        medians[num_parts, lengths] = each_column(found)
        shares = each_column(found, lambda values: f"{statistics.median(values):.3f} / {max(values):.3f}")
        body.append({"ranks": num_parts, "lengths": lengths} | shares)
    page.section(
        "Rows kept home",
        f"32 rows per rank, cost HSTU, slack 1 %, nodes of {NODE}; median / worst of {seeds} seeds.",
        body,
    )
    for what, names, column, limit in (
        ("tokens moved, lognormal and user-like", ("lognormal", "user-like"), "tokens that leave their rank", 0.10),
        ("tokens moved, Zipf 1.2", ("zipf",), "tokens that leave their rank", 0.17),
        ("tokens across nodes of 8, lognormal and user-like", ("lognormal", "user-like"), "their node", 0.03),
        ("tokens across nodes of 8, Zipf 1.2", ("zipf",), "their node", 0.03),
    ):
        value = max(medians[64, name][column] for name in names)
        page.target(f"{what}, 64 × 32", f"≤ {limit:.0%}", f"{value:.1%} (median)", value <= limit)
    slowest = max(medians[64, name]["ms"] for name in LENGTHS)
    page.target("planning with home, 64 × 32", "≤ 10 ms", f"{slowest:.2f} ms", slowest <= 10)


def measure_memory(page: Page, seeds: int, repeats: int, quick: bool) -> None:
    """The load with a cap of 1.03 × the mean tokens."""
    body: list[Row] = []
    undominated: list[float] = []
    cases = itertools.product(TIMED[: 2 if quick else 3], LENGTHS, ("HSTU", "L²"))
    for (num_parts, rows), lengths, cost in tqdm(list(cases), desc="memory"):
        found, dominated = [], 0
        for seed in range(seeds):
            tokens = draw(lengths, num_parts * rows, seed)
            workloads, mean = COSTS[cost](tokens), tokens.sum() / num_parts
            cap: Row = {"tokens": tokens, "max_tokens": int(1.03 * mean), "best_effort": True}
            free, plan = partition(workloads, num_parts), partition(workloads, num_parts, **cap)
            most, with_cap = (float(np.bincount(each.assignment, weights=tokens).max() / mean) for each in (free, plan))
            load = float(plan.loads.max() / free.loads.max())
            ms = milliseconds(partial(partition, workloads, num_parts, **cap), max(2, repeats // 20))
            found.append(
                {"tokens ÷ mean, no cap": most, "with cap": with_cap, "load ÷ load without cap": load, "ms": ms}
            )
            # One sample is most of a rank's share, so tokens and load cannot both be even.
            if workloads.max() > 0.5 * workloads.sum() / num_parts:
                dominated += 1
            else:
                undominated.append(load if with_cap <= 1.03 else float("inf"))
        case = {"ranks × rows": f"{num_parts} × {rows}", "lengths": lengths, "cost": cost}
        body.append(case | each_column(found, max) | {"dominated": f"{dominated} of {seeds}"})
    page.section(
        "Memory",
        f"Cap of 1.03 × the mean tokens per rank, worst of {seeds} seeds. A seed is dominated if one sample is more "
        "than half of the mean load.",
        body,
    )
    what = "load ÷ load without the cap, tokens ≤ 1.03 × mean, where no sample dominates"
    page.target_of_cases(what, 1.01, undominated)


def measure_speeds(page: Page, seeds: int, repeats: int, quick: bool) -> None:
    """Balance and time of plans for ranks of different speeds, compared with plans without speeds."""
    body: list[Row] = []
    for shape, lengths in tqdm(list(itertools.product(TIMED[: 2 if quick else 3], LENGTHS)), desc="speeds"):
        for equal_size in (True, False):
            found = []
            for seed in range(seeds):
                speeds = np.random.default_rng(seed).integers(500, 1001, shape[0])
                plans = partial(partition, hstu_work(lengths, shape, seed), shape[0], equal_size=equal_size)
                calls = {"without": plans, "with": partial(plans, speeds=speeds)}
                times = interleaved_medians(calls, max(3, repeats // 10) if shape[0] > 64 else repeats, show=False)
                gap, ms = calls["with"]().optimality_gap, times["with"] * 1e3
                found.append({"gap": gap, "ms": ms, "÷ ms without speeds": times["with"] / times["without"]})
            case = {"ranks × rows": f"{shape[0]} × {shape[1]}", "counts": "equal" if equal_size else "free"}
            worst = 1 + max(each.pop("gap") for each in found)
            body.append(case | {"lengths": lengths, "time ÷ bound, worst": worst} | each_column(found))
    page.section(
        "Ranks of different speeds",
        f"Speeds are drawn between 0.5 and 1 for each of {seeds} seeds; cost HSTU. Time is load ÷ speed of the "
        "slowest rank. Plans with and without speeds are made alternately.",
        body,
    )
    page.target_of_cases("largest load ÷ speed", 1.002, [row["time ÷ bound, worst"] for row in body], " × bound")
    page.target_of_cases("time of a plan with speeds ÷ without", 1.3, [row["÷ ms without speeds"] for row in body])


def main(quick: Quick = False) -> None:
    torch.set_num_threads(1)
    seeds, repeats = (2, 10) if quick else (5, 50)
    page = Page(
        "Planner: balance, speed, locality, memory",
        f"{described(LENGTHS)} Cost HSTU: 5120·L + L².",
    )
    measure_balance(page, seeds, quick)
    measure_speed(page, repeats, quick)
    measure_peers(page, repeats, quick)
    measure_home(page, seeds, repeats, quick)
    measure_memory(page, seeds, repeats, quick)
    measure_speeds(page, seeds, repeats, quick)
    page.finish(quick=quick)


if __name__ == "__main__":
    from_command_line(main, __doc__)
