"""How good are the plans, how long do they take, and what do they cost the threads beside them?

Plans are measured against their own lower bound and against the plain Karmarkar-Karp that most training code ships: a
heap of states in pure Python (plain_karmarkar_karp.py). One thread; times are medians.

Examples:
    python -m benchmarks.planner
    python -m benchmarks.planner --quick
    python -m benchmarks.planner --seeds 10 --repeats 50
"""

from __future__ import annotations

import hashlib
import itertools
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from benchmarks.command_line import from_command_line
from benchmarks.plain_karmarkar_karp import plain_karmarkar_karp
from benchmarks.report import Page, milliseconds, share, table
from commons.perf_model.partitioner import core, partition

COSTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "tokens": lambda lengths: lengths,
    "HSTU": lambda lengths: 5120 * lengths + lengths**2,
    "L²": lambda lengths: lengths**2,
}
LENGTHS = ("zipf", "lognormal", "bimodal", "user-like")
TIMED = ((8, 32), (64, 32), (1024, 32))
NODE = 8
HASHING = "beside hashing"


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
    gaps: dict[tuple[str, str, bool, str], list[tuple[int, float]]] = {}
    cells = list(itertools.product(shapes, LENGTHS, COSTS))
    for (num_parts, rows), lengths, cost in tqdm(cells, desc="balance"):
        for seed in range(seeds):
            workloads = COSTS[cost](draw(lengths, num_parts * rows, seed))
            for equal_size, method in itertools.product((True, False), ("refined", "karmarkar_karp")):
                plan = partition(workloads, num_parts, method=method, equal_size=equal_size)
                gaps.setdefault((lengths, cost, equal_size, method), []).append((num_parts * rows, plan.optimality_gap))
    body = []
    for lengths, cost in itertools.product(LENGTHS, COSTS):
        row = [lengths, cost]
        for equal_size, method in itertools.product((True, False), ("karmarkar_karp", "refined")):
            values = [gap for _, gap in gaps[lengths, cost, equal_size, method]]
            row.append(f"{1 + np.mean(values):.5f} / {1 + max(values):.4f}")
        body.append(row)
    page.section(
        "Balance",
        f"Largest load ÷ lower bound, mean / worst over ranks × rows per rank in {shapes} and {seeds} seeds. The "
        "optimum lies between the bound and the plan, so the ratio is the most that a plan can lose. The ratios above "
        "1.001 belong to batches whose load is in a few rows per rank, where exchanges of two or three rows at once "
        "seldom find more.",
        table(["lengths", "cost", "equal, KK", "equal, refined", "free, KK", "free, refined"], body),
    )
    large = [
        gap for (*_, equal, how), all_ in gaps.items() if equal and how == "refined" for n, gap in all_ if n >= 256
    ]
    small = [gap for (*_, equal, how), all_ in gaps.items() if equal and how == "refined" for n, gap in all_ if n < 256]
    free = [gap for (*_, equal, how), all_ in gaps.items() if not equal and how == "refined" for _, gap in all_]
    for what, values, limit in (
        ("balance, equal counts, 256 samples or more", large, 0.001),
        ("balance, equal counts, 8 × 8", small, 0.002),
        ("balance, free counts", free, 0.0002),
    ):
        met = [gap <= limit for gap in values]
        reached = f"mean {1 + np.mean(values):.5f}, worst {1 + max(values):.4f}, {share(met)} cases"
        page.target(what, f"≤ {1 + limit:.4f} × bound", reached, all(met))


def measure_speed(page: Page, repeats: int, quick: bool) -> None:
    """Time of the native call and of `partition`."""
    limits = {8: 0.03, 64: 0.5, 1024: 20.0}
    body = []
    worst: dict[tuple[int, str], float] = {}
    for (num_parts, rows), lengths in tqdm(list(itertools.product(TIMED[: 2 if quick else 3], LENGTHS)), desc="speed"):
        workloads = COSTS["HSTU"](draw(lengths, num_parts * rows, 0))
        row: list[str] = [f"{num_parts} × {rows}", lengths]
        few = max(3, repeats // 10) if num_parts > 64 else repeats
        for equal_size in (True, False):
            arguments = core.PlanArguments(workloads, num_parts, equal_size=equal_size)
            times = {
                "native": milliseconds(partial(core.make_plan, arguments), few),
                "partition()": milliseconds(partial(partition, workloads, num_parts, equal_size=equal_size), few),
            }
            row += [f"{value:.3f}" for value in times.values()]
            if equal_size:
                kind = "bimodal" if lengths == "bimodal" else "others"
                for name, value in times.items():
                    key = (num_parts, f"{name}, {kind}")
                    worst[key] = max(worst.get(key, 0.0), value)
        body.append(row)
    columns = [f"{counts}, {name}" for counts in ("equal", "free") for name in ("native", "partition()")]
    page.section(
        "Speed",
        "Milliseconds per plan, cost HSTU: the native call, and `partition()` from Python with all checks. The first "
        "plan of a process:",
        cold_start(),
        table(["ranks × rows", "lengths", *columns], body),
    )
    for num_parts, native_limit in limits.items():
        if (num_parts, "native, others") not in worst:
            continue
        bimodal_limit = 60.0 if num_parts == 1024 else native_limit
        for name, limit in (("native, others", native_limit), ("native, bimodal", bimodal_limit)):
            value = worst[num_parts, name]
            page.target(f"planning, {name}, {num_parts} × 32", f"≤ {limit} ms", f"{value:.3f} ms", value <= limit)
        if num_parts == 8:
            value = max(worst[8, "partition(), others"], worst[8, "partition(), bimodal"])
            page.target("`partition()` from Python, 8 × 32", "≤ 0.1 ms", f"{value:.3f} ms", value <= 0.1)


def cold_start() -> str:
    """What importing the planner and its first plan take in a fresh process that has numpy."""
    program = (
        "import time, numpy as np; w = np.arange(256); a = time.perf_counter();"
        "from commons.perf_model.partitioner import partition; b = time.perf_counter();"
        "partition(w, 8); c = time.perf_counter(); print((b - a) * 1e3, (c - b) * 1e3)"
    )
    runs = [
        [
            float(part)
            for part in subprocess.run(
                [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120
            ).stdout.split()
        ]
        for _ in range(5)
    ]
    imported, planned = (statistics.median(column) for column in zip(*runs, strict=True))
    return f"import {imported:.1f} ms, first plan (8 × 32) {planned:.2f} ms."


def measure_peers(page: Page, repeats: int, quick: bool) -> None:
    """Time and balance against the plain pure-Python Karmarkar-Karp."""
    body = []
    cases = [(8, 32, True), (8, 32, False), (64, 32, True), (64, 32, False), (1024, 32, True)]
    ratios: dict[tuple[int, bool, str], list[float]] = {}
    for (num_parts, rows, equal_size), lengths in tqdm(
        list(itertools.product(cases[: 3 if quick else 5], LENGTHS)), desc="against plain Python"
    ):
        workloads = COSTS["HSTU"](draw(lengths, num_parts * rows, 0))
        listed = workloads.tolist()
        groups = plain_karmarkar_karp(listed, num_parts, equal_size)
        assert sorted(itertools.chain(*groups)) == list(range(len(listed)))
        largest = max(sum(listed[index] for index in group) for group in groups)
        plan = partition(workloads, num_parts, equal_size=equal_size)
        few = max(5, repeats // 2)
        plain = milliseconds(partial(plain_karmarkar_karp, listed, num_parts, equal_size), 3 if num_parts > 8 else few)
        row = [f"{num_parts} × {rows}", "equal" if equal_size else "free", lengths, f"{plain:.2f}"]
        for method in ("karmarkar_karp", "refined"):
            plans = partial(partition, workloads, num_parts, method=method, equal_size=equal_size)
            time_taken = milliseconds(plans, few)
            ratios.setdefault((num_parts, equal_size, method), []).append(plain / time_taken)
            row += [f"{time_taken:.3f}", f"{plain / time_taken:.0f}×"]
        body.append([*row, f"{largest / plan.lower_bound:.4f}", f"{1 + plan.optimality_gap:.5f}"])
    head = ["ranks × rows", "counts", "lengths", "plain KK ms", "our KK ms", "faster", "refined ms", "faster"]
    page.section(
        "Against a plain Karmarkar-Karp in Python",
        "Milliseconds per plan, cost HSTU; ours through `partition()`, all checks and the lower bound included. "
        "Balance is largest load ÷ lower bound.",
        table([*head, "plain KK ÷ bound", "refined ÷ bound"], body),
    )
    for method, equal_size, limit in (
        ("karmarkar_karp", True, 40),
        ("refined", True, 6),
        ("karmarkar_karp", False, 1000),
        ("refined", False, 1000),
    ):
        values = ratios.get((64, equal_size, method))
        if values:
            what = f"{method} against plain KK, 64 × 32 {'equal' if equal_size else 'free'}"
            page.target(what, f"≥ {limit}×", f"{min(values):.0f}–{max(values):.0f}×", min(values) >= limit)


def measure_home(page: Page, seeds: int, repeats: int, quick: bool) -> None:
    """Tokens that leave their rank and their node of eight, and what that costs in balance and time."""
    body = []
    found: dict[str, list[tuple[float, float, float]]] = {}
    for num_parts, lengths in tqdm(
        list(itertools.product((8, 64) if quick else (8, 64, 256, 1024), LENGTHS)), desc="home"
    ):
        moved, crossed, must_cross, extra, times = [], [], [], [], []
        for seed in range(seeds):
            tokens = draw(lengths, num_parts * 32, seed)
            workloads = COSTS["HSTU"](tokens)
            home = np.arange(len(tokens)) // 32
            plans = partial(partition, workloads, num_parts, tokens=tokens, home=home, ranks_per_node=NODE, slack=0.01)
            plan = plans()
            best = partition(workloads, num_parts)
            moved.append(tokens[plan.assignment != home].sum() / tokens.sum())
            crossed.append(tokens[plan.assignment // NODE != home // NODE].sum() / tokens.sum())
            # Whatever a node holds above that load at home has to leave it.
            node_loads = workloads.reshape(-1, NODE * 32).sum(1)
            must_cross.append((node_loads - NODE * plan.loads.max()).clip(min=0).sum() / workloads.sum())
            extra.append(plan.loads.max() / best.loads.max())
            times.append(milliseconds(plans, max(3, repeats // 10)))
        found.setdefault(lengths, []).append((statistics.median(moved), statistics.median(crossed), max(times)))
        body.append(
            [
                num_parts,
                lengths,
                f"{statistics.median(moved):.3f} / {max(moved):.3f}",
                f"{statistics.median(crossed):.3f} / {max(crossed):.3f}",
                f"{statistics.median(must_cross):.3f} / {max(must_cross):.3f}",
                f"{max(extra):.4f}",
                f"{statistics.median(times):.2f}",
            ]
        )
    head = ["ranks", "lengths", "tokens that leave their rank", "their node", "load that must leave its node"]
    page.section(
        "Rows kept home",
        f"32 rows per rank, cost HSTU, slack 1 %, nodes of {NODE}; shares, median / worst of {seeds} seeds.",
        table([*head, "worst load ÷ refined", "ms"], body),
    )
    for what, names, at, limit in (
        ("tokens moved, lognormal and user-like, 64 × 32", ("lognormal", "user-like"), 0, 0.10),
        ("tokens moved, Zipf 1.2, 64 × 32", ("zipf",), 0, 0.17),
        ("tokens across nodes of 8, lognormal and user-like, 64 × 32", ("lognormal", "user-like"), 1, 0.03),
        ("tokens across nodes of 8, Zipf 1.2, 64 × 32", ("zipf",), 1, 0.03),
    ):
        value = max(found[name][1][at] for name in names)
        page.target(what, f"≤ {limit:.0%}", f"{value:.1%} (median)", value <= limit)
    slowest = max(cases[1][2] for cases in found.values())
    page.target("planning with home, 64 × 32", "≤ 10 ms", f"{slowest:.2f} ms", slowest <= 10)


def measure_memory(page: Page, seeds: int, repeats: int, quick: bool) -> None:
    """What a cap of 1.03 × the mean tokens costs in load."""
    body = []
    undominated: list[float] = []
    for (num_parts, rows), lengths, cost in tqdm(
        list(itertools.product([(8, 32), (64, 32)] if quick else TIMED, LENGTHS, ("HSTU", "L²"))), desc="memory"
    ):
        before, after, extra, times, dominated = [], [], [], [], 0
        for seed in range(seeds):
            tokens = draw(lengths, num_parts * rows, seed)
            workloads = COSTS[cost](tokens)
            mean = tokens.sum() / num_parts
            free = partition(workloads, num_parts)
            plans = partial(
                partition, workloads, num_parts, tokens=tokens, max_tokens=int(1.03 * mean), best_effort=True
            )
            plan = plans()
            before.append(_largest(tokens, free.assignment, num_parts) / mean)
            after.append(_largest(tokens, plan.assignment, num_parts) / mean)
            extra.append(plan.loads.max() / free.loads.max())
            times.append(milliseconds(plans, max(2, repeats // 20)))
            # One sample is most of what a rank should carry: then tokens and load cannot both be even.
            dominates = workloads.max() > 0.5 * workloads.sum() / num_parts
            dominated += dominates
            if not dominates:
                undominated.append(float(extra[-1]) if after[-1] <= 1.03 else float("inf"))
        body.append(
            [
                f"{num_parts} × {rows}",
                lengths,
                cost,
                f"{max(before):.3f}",
                f"{max(after):.3f}",
                f"{max(extra):.4f}",
                f"{dominated} of {seeds}",
                f"{statistics.median(times):.2f}",
            ]
        )
    page.section(
        "Memory",
        f"Cap of 1.03 × the mean tokens per rank, worst of {seeds} seeds. A seed is dominated where one sample is more "
        "than half of the mean load.",
        table(
            [
                "ranks × rows",
                "lengths",
                "cost",
                "tokens ÷ mean, no cap",
                "with cap",
                "load ÷ load without cap",
                "dominated",
                "ms",
            ],
            body,
        ),
    )
    met = [value <= 1.01 for value in undominated]
    page.target(
        "tokens ≤ 1.03 × mean where no sample dominates",
        "≤ 1 % more load",
        f"worst {max(undominated):.4f}, {share(met)} cases",
        all(met),
    )


def _largest(values: np.ndarray, assignment: np.ndarray, num_parts: int) -> float:
    return float(np.bincount(assignment, weights=values, minlength=num_parts).max())


@contextmanager
def beside(work: Callable[[], Any] | None) -> Iterator[None]:
    """Run `work` again and again in a thread."""
    stop = threading.Event()

    def loop() -> None:
        while work is not None and not stop.is_set():
            work()

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def measure_lock(page: Page, windows: int) -> None:
    """Does a planning thread slow a thread that launches small operations?"""
    tokens = draw("lognormal", 1024 * 32, 0)
    workloads = COSTS["HSTU"](tokens)
    home = np.arange(len(tokens)) // 32
    block = bytes(64 << 20)
    works: dict[str, Callable[[], Any] | None] = {
        "alone": None,
        HASHING: lambda: hashlib.sha256(block).digest(),
        "beside planning 1024 × 32": lambda: partition(workloads, 1024),
        "beside planning 1024 × 32 with home": lambda: partition(
            workloads, 1024, tokens=tokens, home=home, ranks_per_node=NODE, slack=0.01
        ),
    }
    times: dict[str, list[float]] = {name: [] for name in works}
    small = torch.zeros(16)
    for _ in tqdm(range(windows), desc="lock"):
        # In turn, so that a drifting machine slows all of them alike.
        for name, work in works.items():
            with beside(work):
                started = time.perf_counter()
                operations = 0
                while time.perf_counter() - started < 0.025:
                    for _ in range(100):
                        small.add_(1.0)
                    operations += 100
                times[name].append((time.perf_counter() - started) / operations * 1e6)
    fastest = {name: float(np.percentile(values, 10)) for name, values in times.items()}
    body = []
    for name, values in times.items():
        ratios = [f"{fastest[name] / fastest[control]:.3f}" for control in ("alone", HASHING)]
        body.append([name, f"{fastest[name]:.2f}", *ratios, f"{statistics.median(values):.2f}"])
    page.section(
        "Beside other threads",
        "Microseconds per small in-place torch operation on the main thread, the fastest tenth of "
        f"{windows} windows of 25 ms per row, taken in turn. Other programs share these cores, so any second "
        "busy thread may slow the main one; the hashing thread, which never takes the interpreter lock, shows "
        "by how much. What planning adds to that is its price.",
        table(["main thread", "fastest tenth", "÷ alone", "÷ beside hashing", "median"], body),
    )
    for what in ("beside planning 1024 × 32", "beside planning 1024 × 32 with home"):
        slower = fastest[what] / fastest[HASHING] - 1
        page.target(f"main thread {what}, against beside hashing", "≤ 5 % slower", f"{slower:+.1%}", slower <= 0.05)


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
    measure_lock(page, 40 if quick else 400)
    page.finish(quick=quick)


if __name__ == "__main__":
    from_command_line(main, __doc__)
