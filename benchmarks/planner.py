"""How good are the plans, and how long do they take?

Plans are measured against their own lower bound and against the plain Karmarkar-Karp that most training code ships: a
heap of states in pure Python (plain_karmarkar_karp.py). One thread; times are medians. What planning costs the threads
beside it is measured by benchmarks/exchange.py.

Examples:
    python -m benchmarks.planner
    python -m benchmarks.planner --quick
    python -m benchmarks.planner --seeds 10 --repeats 50
"""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from benchmarks.command_line import from_command_line
from benchmarks.plain_karmarkar_karp import plain_karmarkar_karp
from benchmarks.report import Page, milliseconds, rows_table, share
from commons.perf_model.partitioner import core, partition

COSTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "tokens": lambda lengths: lengths,
    "HSTU": lambda lengths: 5120 * lengths + lengths**2,
    "L²": lambda lengths: lengths**2,
}
LENGTHS = ("zipf", "lognormal", "bimodal", "user-like")
TIMED = ((8, 32), (64, 32), (1024, 32))
NODE = 8


def draw(name: str, count: int, seed: int) -> np.ndarray:
    """Sequence lengths, int64 `(count,)`.

    "zipf" 1.2 to 4096, "lognormal" of mean and deviation 512 to 4096, "bimodal" 80 % near 128 and 20 % near 4096,
    "user-like" 20 and a lognormal of median 130 and sigma 1.4, to 8192.
    """
    rng = np.random.default_rng(seed)
    if name == "zipf":
        lengths = rng.zipf(1.2, count).clip(1, 4096)
    elif name == "lognormal":
        lengths = rng.lognormal(np.log(512) - np.log(2) / 2, np.sqrt(np.log(2)), count).clip(1, 4096)
    elif name == "bimodal":
        short = rng.normal(128, 32, count).clip(1)
        lengths = np.where(rng.random(count) < 0.2, 4096 - np.abs(rng.normal(0, 256, count)), short)
    else:
        lengths = (20 + rng.lognormal(np.log(130), 1.4, count)).clip(20, 8192)
    return lengths.astype(np.int64)


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
    body: defaultdict[tuple[str, str], dict[str, str]] = defaultdict(dict)
    for (lengths, cost, equal_size, method), found in gaps.items():
        column = f"{'equal' if equal_size else 'free'}, {'KK' if method == 'karmarkar_karp' else method}"
        ratios = [1 + gap for _, gap in found]
        body[lengths, cost][column] = f"{np.mean(ratios):.5f} / {max(ratios):.4f}"
    page.section(
        "Balance",
        f"Largest load ÷ lower bound, mean / worst over ranks × rows per rank in {shapes} and {seeds} seeds. The "
        "optimum lies between the bound and the plan, so the ratio is the most that a plan can lose. The ratios above "
        "1.001 belong to batches whose load is in a few rows per rank, where exchanges of two or three rows at once "
        "seldom find more.",
        rows_table([{"lengths": lengths, "cost": cost} | row for (lengths, cost), row in body.items()]),
    )
    for what, equal_size, sizes, limit in (
        ("balance, equal counts, 256 samples or more", True, range(256, 10**6), 0.001),
        ("balance, equal counts, 8 × 8", True, range(256), 0.002),
        ("balance, free counts", False, range(10**6), 0.0002),
    ):
        of_refined = [found for key, found in gaps.items() if key[2:] == (equal_size, "refined")]
        values = [gap for found in of_refined for count, gap in found if count in sizes]
        met = [gap <= limit for gap in values]
        reached = f"mean {1 + np.mean(values):.5f}, worst {1 + max(values):.4f}, {share(met)} cases"
        page.target(what, f"≤ {1 + limit:.4f} × bound", reached, all(met))


def measure_speed(page: Page, repeats: int, quick: bool) -> None:
    """Time of the native call and of `partition`."""
    body = []
    worst: defaultdict[tuple[int, str, str], float] = defaultdict(float)
    for (num_parts, rows), lengths in tqdm(list(itertools.product(TIMED[: 2 if quick else 3], LENGTHS)), desc="speed"):
        workloads = COSTS["HSTU"](draw(lengths, num_parts * rows, 0))
        times: dict[str, float] = {}
        few = max(3, repeats // 10) if num_parts > 64 else repeats
        for counts, equal_size in (("equal", True), ("free", False)):
            arguments = core.PlanArguments(workloads, num_parts, equal_size=equal_size)
            times[f"{counts}, native"] = milliseconds(partial(core.make_plan, arguments), few)
            plan = partial(partition, workloads, num_parts, equal_size=equal_size)
            times[f"{counts}, partition()"] = milliseconds(plan, few)
        body.append({"ranks × rows": f"{num_parts} × {rows}", "lengths": lengths} | times)
        for name in ("native", "partition()"):
            key = num_parts, name, "bimodal" if lengths == "bimodal" else "others"
            worst[key] = max(worst[key], times[f"equal, {name}"])
    page.section(
        "Speed",
        "Milliseconds per plan, cost HSTU: the native call, and `partition()` from Python with all checks.",
        rows_table(body),
    )
    for (num_parts, name, kind), value in sorted(worst.items()):
        limit = {8: 0.03, 64: 0.5, 1024: 60.0 if kind == "bimodal" else 20.0}[num_parts]
        if name == "native":
            page.target(
                f"planning, native, {kind}, {num_parts} × 32", f"≤ {limit} ms", f"{value:.3f} ms", value <= limit
            )
        elif num_parts == 8:
            page.target(f"`partition()` from Python, {kind}, 8 × 32", "≤ 0.1 ms", f"{value:.3f} ms", value <= 0.1)


def measure_peers(page: Page, repeats: int, quick: bool) -> None:
    """Time and balance against the plain pure-Python Karmarkar-Karp."""
    body = []
    cases = [(8, 32, True), (8, 32, False), (64, 32, True), (64, 32, False), (1024, 32, True)][: 3 if quick else 5]
    faster: defaultdict[tuple[int, bool, str], list[float]] = defaultdict(list)
    for (num_parts, rows, equal_size), lengths in tqdm(list(itertools.product(cases, LENGTHS)), desc="plain Python"):
        workloads = COSTS["HSTU"](draw(lengths, num_parts * rows, 0))
        listed, few = workloads.tolist(), max(5, repeats // 2)
        plain = partial(plain_karmarkar_karp, listed, num_parts, equal_size)
        largest = max(sum(listed[index] for index in group) for group in plain())
        plain_ms = milliseconds(plain, 3 if num_parts > 8 else few)
        counts = "equal" if equal_size else "free"
        row = {"ranks × rows": f"{num_parts} × {rows}", "counts": counts, "lengths": lengths, "plain KK ms": plain_ms}
        for method, column in (("karmarkar_karp", "our KK"), ("refined", "refined")):
            taken = milliseconds(partial(partition, workloads, num_parts, method=method, equal_size=equal_size), few)
            faster[num_parts, equal_size, method].append(plain_ms / taken)
            row |= {f"{column} ms": taken, f"{column} faster": f"{plain_ms / taken:.0f}×"}
        plan = partition(workloads, num_parts, equal_size=equal_size)
        balance = {"plain KK ÷ bound": largest / plan.lower_bound, "refined ÷ bound": 1 + plan.optimality_gap}
        body.append(row | balance)
    page.section(
        "Against a plain Karmarkar-Karp in Python",
        "Milliseconds per plan, cost HSTU; ours through `partition()`, all checks and the lower bound included. "
        "Balance is largest load ÷ lower bound.",
        rows_table(body),
    )
    for method, equal_size, limit in (
        ("karmarkar_karp", True, 40),
        ("refined", True, 6),
        ("karmarkar_karp", False, 1000),
        ("refined", False, 1000),
    ):
        if values := faster.get((64, equal_size, method)):
            what = f"{method} against plain KK, 64 × 32 {'equal' if equal_size else 'free'}"
            page.target(what, f"≥ {limit}×", f"{min(values):.0f}–{max(values):.0f}×", min(values) >= limit)


def measure_home(page: Page, seeds: int, repeats: int, quick: bool) -> None:
    """Tokens that leave their rank and their node of eight, and what that costs in balance and time."""
    body, medians = [], {}
    sizes = (8, 64) if quick else (8, 64, 256, 1024)
    for num_parts, lengths in tqdm(list(itertools.product(sizes, LENGTHS)), desc="home"):
        found: defaultdict[str, list[float]] = defaultdict(list)
        for seed in range(seeds):
            tokens = draw(lengths, num_parts * 32, seed)
            workloads, home = COSTS["HSTU"](tokens), np.arange(len(tokens)) // 32
            plans = partial(partition, workloads, num_parts, tokens=tokens, home=home, ranks_per_node=NODE, slack=0.01)
            plan, total = plans(), tokens.sum()
            found["tokens that leave their rank"].append(tokens[plan.assignment != home].sum() / total)
            found["their node"].append(tokens[plan.assignment // NODE != home // NODE].sum() / total)
            # Whatever a node holds above that load at home has to leave it.
            beyond = (workloads.reshape(-1, NODE * 32).sum(1) - NODE * plan.loads.max()).clip(min=0).sum()
            found["load that must leave its node"].append(beyond / workloads.sum())
            found["load ÷ refined"].append(plan.loads.max() / partition(workloads, num_parts).loads.max())
            found["ms"].append(milliseconds(plans, max(3, repeats // 10)))
        medians[num_parts, lengths] = {name: statistics.median(values) for name, values in found.items()}
        shares = {name: f"{statistics.median(values):.3f} / {max(values):.3f}" for name, values in found.items()}
        body.append({"ranks": num_parts, "lengths": lengths} | shares)
    page.section(
        "Rows kept home",
        f"32 rows per rank, cost HSTU, slack 1 %, nodes of {NODE}; median / worst of {seeds} seeds.",
        rows_table(body),
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
    """What a cap of 1.03 × the mean tokens costs in load."""
    body = []
    undominated: list[float] = []
    cases = itertools.product(TIMED[: 2 if quick else 3], LENGTHS, ("HSTU", "L²"))
    for (num_parts, rows), lengths, cost in tqdm(list(cases), desc="memory"):
        found: defaultdict[str, list[float]] = defaultdict(list)
        for seed in range(seeds):
            tokens = draw(lengths, num_parts * rows, seed)
            workloads, mean = COSTS[cost](tokens), tokens.sum() / num_parts
            free = partition(workloads, num_parts)
            cap: dict[str, Any] = {"tokens": tokens, "max_tokens": int(1.03 * mean), "best_effort": True}
            plan = partition(workloads, num_parts, **cap)
            for name, each in (("tokens ÷ mean, no cap", free), ("with cap", plan)):
                found[name].append(np.bincount(each.assignment, weights=tokens).max() / mean)
            found["load ÷ load without cap"].append(plan.loads.max() / free.loads.max())
            found["ms"].append(milliseconds(partial(partition, workloads, num_parts, **cap), max(2, repeats // 20)))
            # One sample is most of what a rank should carry: then tokens and load cannot both be even.
            found["dominated"].append(workloads.max() > 0.5 * workloads.sum() / num_parts)
            if not found["dominated"][-1]:
                is_kept = found["with cap"][-1] <= 1.03
                undominated.append(float(found["load ÷ load without cap"][-1]) if is_kept else float("inf"))
        row = {name: float(max(values)) for name, values in found.items()}
        row |= {"dominated": f"{sum(found['dominated'])} of {seeds}", "ms": statistics.median(found["ms"])}
        body.append({"ranks × rows": f"{num_parts} × {rows}", "lengths": lengths, "cost": cost} | row)
    page.section(
        "Memory",
        f"Cap of 1.03 × the mean tokens per rank, worst of {seeds} seeds. A seed is dominated where one sample is more "
        "than half of the mean load.",
        rows_table(body),
    )
    met = [value <= 1.01 for value in undominated]
    reached = f"worst {max(undominated):.4f}, {share(met)} cases"
    page.target("tokens ≤ 1.03 × mean where no sample dominates", "≤ 1 % more load", reached, all(met))


def main(seeds: int = 5, repeats: int = 50, quick: bool = False) -> None:
    """Measure and write benchmarks/results/planner.md.

    Args:
        seeds: batches drawn per case.
        repeats: times every plan is timed.
        quick: fewer cases, for a look; writes nothing.
    """
    torch.set_num_threads(1)
    if quick:
        seeds, repeats = min(seeds, 2), min(repeats, 10)
    page = Page(
        "planner",
        "Planner: balance, speed, locality, memory",
        f"python -m benchmarks.planner --seeds {seeds} --repeats {repeats}",
        "Lengths: Zipf 1.2 to 4096; lognormal, mean and deviation 512, to 4096; bimodal, 80 % near 128 and 20 % near "
        "4096; user-like, 20 and a lognormal of median 130 and sigma 1.4, to 8192. Cost HSTU: 5120·L + L².",
    )
    measure_balance(page, seeds, quick)
    measure_speed(page, repeats, quick)
    measure_peers(page, repeats, quick)
    measure_home(page, seeds, repeats, quick)
    measure_memory(page, seeds, repeats, quick)
    page.finish(quick=quick)


if __name__ == "__main__":
    from_command_line(main, __doc__)
