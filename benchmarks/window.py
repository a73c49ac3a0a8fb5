"""How even are the plans of windows of several batches, how long does planning take, and how many tokens change rank?

Ranks wait for each other in every step, so the measure is the sum over the steps of the largest load. It is compared
with the mean load, which no plan can go below, and with the plan's lower bound. These are loads, not times:
benchmarks/window_steps.py trains, and benchmarks/scale.py has windows of more ranks.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.shared.command_line import Quick, from_command_line
from benchmarks.shared.lengths import COSTS, NODE, described, draw
from benchmarks.shared.report import Page, every, interleaved_medians, measured, query, values
from commons.datasets import BalancedBatchSampler, BudgetBatchSampler
from commons.perf_model.partitioner import partition, partition_grid

# By lengths, ranks and rows per rank: the goals of windows of 2, 4 and 8, sum of the largest loads ÷ mean.
GOALS = {
    ("user-like", 64, 8): (2.99, 1.88, 1.35),
    ("user-like", 64, 32): (1.19, 1.08, 1.02),
    ("user-like", 1024, 32): (1.21, 1.09, 1.03),
    ("zipf", 64, 8): (1.09, 1.05, 1.03),
}
OTHERS = [("zipf", 64, 32), ("lognormal", 64, 32), ("zipf", 1024, 32), ("lognormal", 1024, 32)]
_TABLE = """
    SELECT lengths, ranks, rows, "window", avg(loaded) AS "as loaded", avg(alone) AS "each batch",
        avg(planned) AS planned, max(bound) AS "÷ bound, worst", avg(near) AS "near home",
        median(moved) AS "tokens that change rank", median(crossed) AS node,
        median(rows_ms) AS "ms, only rows", median(known_ms) AS "with batches", median(near_ms) AS "near home, ms"
    FROM found GROUP BY ALL ORDER BY min(number)
"""


def measure_window(lengths: str, ranks: int, rows: int, window: int, seed: int, repeats: int) -> dict[str, Any]:
    """Σ of the largest loads ÷ Σ of the mean loads, as loaded and planned; tokens that move; and planning times."""
    batch, tokens = ranks * rows, draw(lengths, ranks * rows * window, seed)
    work, numbers = COSTS["HSTU"](tokens), np.arange(ranks * rows * window)
    home, home_step = numbers % batch // rows, numbers // batch
    plan = partial(partition_grid, work, ranks, window)
    known = partial(plan, home_step=home_step)
    near = partial(known, tokens=tokens, home=home, ranks_per_node=NODE, slack=0.01)
    repeats = repeats if ranks == 64 else max(3, repeats // 10)
    seconds = interleaved_medians({"rows": plan, "known": known, "near": near}, repeats, show=False)
    grid, at_home = known(), near()
    mean, moved = float(work.sum()) / ranks, at_home.assignment != home
    return {
        "loaded": work.reshape(window, ranks, rows).sum(axis=2).max(axis=1).sum() / mean,
        "alone": sum(partition(each, ranks).loads.max() for each in work.reshape(window, -1)) / mean,
        "planned": grid.sum_of_largest / mean,
        "bound": 1 + grid.optimality_gap,
        "near": at_home.sum_of_largest / mean,
        "moved": tokens[moved].sum() / tokens.sum(),
        "crossed": tokens[at_home.assignment // NODE != home // NODE].sum() / tokens.sum(),
        **{f"{name}_ms": value * 1e3 for name, value in seconds.items()},
    }


def report_windows(page: Page, found: Sequence[dict[str, Any]], seeds: int) -> None:
    table = query(found, _TABLE)
    page.section(
        "Windows",
        f"Sum over the steps of the largest load ÷ the mean, mean of {seeds} seeds, equal counts, and the sum ÷ its "
        "lower bound: the optimum lies between the bound and the plan. Near home: slack 1 %, nodes of "
        f"{NODE}; a row may go to any step of its rank at no cost. Milliseconds of CPU per plan of a whole window, "
        "`partition_grid()` from Python with all checks, one thread, the GIL released: only rows; with the batch of "
        "each row, which adds every batch's own plan unless the bound makes it unnecessary; near home.",
        table,
    )
    for (lengths, ranks, rows), goals in GOALS.items():
        case = f"lengths = '{lengths}' AND ranks = {ranks} AND rows = {rows}"
        for window, goal in zip((2, 4, 8), goals):
            means = values(table, "round(planned, 3)", f'{case} AND "window" = {window}')
            page.at_most(f"{lengths}, {ranks} × {rows}, window of {window}", goal, means)
    of_eight = 'rows = 32 AND "window" = 8'
    for ranks, limit in ((64, 3), (1024, 80)):
        times = values(table, '"ms, only rows"', f"{of_eight} AND ranks = {ranks} AND lengths = 'user-like'")
        page.at_most(f"planning, ms, user-like, {ranks} × 32, window of 8", limit, times)
    near = values(table, '"near home, ms"', f"{of_eight} AND ranks = 64")
    page.at_most("planning near home, ms, 64 × 32, window of 8", 30, near)


def report_samplers(page: Page, quick: bool) -> None:
    """Balance and memory of the samplers' steps, and their planning time."""
    ranks, rows = 64, 32
    tokens = draw("user-like", ranks * rows * (16 if quick else 64), 0)
    work = COSTS["HSTU"](tokens)
    shared: dict[str, Any] = {"num_ranks": ranks, "rank": 0, "shuffle": False}
    heaviest, average = int(work.max()), round(rows * float(work.mean()))
    samplers: dict[str, Any] = {
        "balanced, window of 1": BalancedBatchSampler(work, rows, **shared),
        "balanced, window of 8": BalancedBatchSampler(work, rows, window=8, **shared),
        "budget of the heaviest row": BudgetBatchSampler(work, budget_per_rank=heaviest, **shared),
        f"budget of {rows} average rows": BudgetBatchSampler(work, budget_per_rank=average, **shared),
    }
    in_order = [(each, np.arange(ranks * rows) // rows) for each in np.arange(len(tokens)).reshape(-1, ranks * rows)]
    body = [{"": "as loaded"} | spreads_of(in_order, tokens, work, ranks) | {"ms per step": "–"}]
    for name, sampler in samplers.items():
        started = time.process_time()
        steps = list(sampler.plan(0))
        per_step = (time.process_time() - started) / len(steps) * 1e3
        # The last step has the remaining rows.
        body.append({"": name} | spreads_of(steps[:-1], tokens, work, ranks) | {"ms per step": per_step})
    page.section(
        "Samplers: balance and memory",
        f"User-like lengths, {ranks} ranks, {rows} rows per rank if the number is fixed; the heaviest row is "
        f"{heaviest / work.mean():.0f} average rows. The sum over the steps of the largest load ÷ the mean; the tokens "
        "of the fullest rank of any step ÷ the mean, with which memory grows; the rows of a step, over all ranks; "
        "milliseconds of CPU per step for the plan. A row above the budget gets its own rank and makes its step "
        "longer.",
        body,
    )


def spreads_of(steps: Iterable[Any], tokens: np.ndarray, work: np.ndarray, ranks: int) -> dict[str, Any]:
    """Balance, peak tokens and rows of steps; a step is given by its rows and their ranks."""
    steps = list(steps)
    of_tokens, loads = (
        np.array([np.bincount(rank, each[rows], ranks) for rows, rank in steps]) for each in (tokens, work)
    )
    sizes = [len(rows) for rows, _ in steps]
    return {
        "sum ÷ mean": loads.max(axis=1).sum() / loads.mean(axis=1).sum(),
        "most tokens ÷ mean": of_tokens.max() / of_tokens.mean(),
        "rows of a step": f"{min(sizes):,} to {max(sizes):,}",
    }


def main(quick: Quick = False) -> None:
    torch.set_num_threads(1)
    seeds, repeats = (2, 6) if quick else (5, 30)
    cases = [dict(zip(("lengths", "ranks", "rows"), case)) for case in (*GOALS, *OTHERS) if case[1] == 64 or not quick]
    windows = [case | each for case in cases for each in every(window=(1, 2, 4, 8), seed=range(seeds))]
    page = Page(
        "Windows: several batches share the load",
        f"{described(('user-like', 'zipf', 'lognormal'))} Cost HSTU: 5120·L + L². Ranks × rows per rank.",
    )
    report_windows(page, measured(measure_window, windows, repeats=repeats), seeds)
    report_samplers(page, quick)
    page.finish(quick=quick)


if __name__ == "__main__":
    from_command_line(main, __doc__)
