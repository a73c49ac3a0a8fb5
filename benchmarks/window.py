"""How even are the plans of windows of several batches, how long does planning take, and how many tokens change rank?

Ranks wait for each other in every step, so the measure is the sum over the steps of the largest load. It is compared
with the mean load, which no plan can go below, and with the plan's lower bound. These are loads, not times:
benchmarks/window_steps.py trains.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from tqdm import tqdm

from benchmarks.shared.command_line import Quick, from_command_line
from benchmarks.shared.lengths import COSTS, NODE, described, draw
from benchmarks.shared.report import Page, each_column, milliseconds, share
from commons.datasets import BalancedBatchSampler, BudgetBatchSampler
from commons.perf_model.partitioner import Grid, partition, partition_grid

WINDOWS = (2, 4, 8)
# CPU times of this process, without other programs.
cpu_milliseconds = partial(milliseconds, clock=time.process_time)


class Case(NamedTuple):
    """Lengths, ranks and rows per rank, and the goal of each of `WINDOWS`: sum of the largest loads ÷ mean."""

    lengths: str
    ranks: int
    rows: int
    goals: tuple[float, ...]

    def __str__(self) -> str:
        return f"{self.lengths}, {self.ranks} × {self.rows}"


CASES = (
    Case("user-like", 64, 8, (2.99, 1.88, 1.35)),
    Case("user-like", 64, 32, (1.19, 1.08, 1.02)),
    Case("user-like", 1024, 32, (1.21, 1.09, 1.03)),
    Case("zipf", 64, 8, (1.09, 1.05, 1.03)),
)
# Cases to time, planned without and with a home.
TIMED = tuple(Case(lengths, ranks, 32, ()) for ranks in (64, 1024) for lengths in ("user-like", "zipf", "lognormal"))


class Batches(NamedTuple):
    """Rows of `steps` batches in the order in which they are loaded; arrays are int64 `(n,)`."""

    tokens: np.ndarray
    workloads: np.ndarray  # cost HSTU
    home: np.ndarray  # the rank that loads each row
    home_step: np.ndarray  # the batch that has each row
    ranks: int
    steps: int

    @classmethod
    def draw(cls, case: Case, steps: int, seed: int) -> Batches:
        batch = case.ranks * case.rows
        tokens = draw(case.lengths, batch * steps, seed)
        rows = np.arange(batch * steps)
        return cls(tokens, COSTS["HSTU"](tokens), rows % batch // case.rows, rows // batch, case.ranks, steps)

    def plan(self, **keywords: Any) -> Grid:
        """The grid of these batches, planned with the batch and rank of each row."""
        return partition_grid(self.workloads, self.ranks, self.steps, home_step=self.home_step, **keywords)

    def plan_near_home(self) -> Grid:
        """The same with few tokens that change rank: slack 1 %, nodes of eight."""
        return self.plan(tokens=self.tokens, home=self.home, ranks_per_node=NODE, slack=0.01)

    def over_mean(self, total: float) -> float:
        """A sum of largest loads ÷ the sum of the mean loads."""
        return total * self.ranks / float(self.workloads.sum())

    def as_loaded(self) -> float:
        """Σ largest load ÷ Σ mean load of the batches as loaded."""
        cell = self.home_step * self.ranks + self.home
        loads = np.bincount(cell, weights=self.workloads, minlength=self.steps * self.ranks)
        return self.over_mean(loads.reshape(self.steps, self.ranks).max(axis=1).sum())

    def each_alone(self) -> float:
        """Σ largest load ÷ Σ mean load if every batch is balanced separately."""
        batches = [self.workloads[self.home_step == step] for step in range(self.steps)]
        return self.over_mean(sum(int(partition(batch, self.ranks).loads.max()) for batch in batches))


def measure_balance(page: Page, seeds: int, quick: bool) -> None:
    """Sum over the steps of the largest load ÷ mean, and ÷ its lower bound."""
    body = []
    gaps: list[float] = []
    for case in tqdm([case for case in CASES if case.ranks == 64 or not quick], desc="balance"):
        drawn = [Batches.draw(case, max(WINDOWS), seed) for seed in range(seeds)]
        row = {"lengths": case.lengths, "ranks × rows": f"{case.ranks} × {case.rows}"}
        row["as loaded"] = f"{np.mean([each.as_loaded() for each in drawn]):.2f}"
        row["each batch"] = f"{np.mean([each.each_alone() for each in drawn]):.2f}"
        for window, goal in zip(WINDOWS, case.goals, strict=True):
            found = []
            for seed in range(seeds):
                batches = Batches.draw(case, window, seed)
                grid = batches.plan()
                found.append((batches.over_mean(grid.sum_of_largest), grid.optimality_gap))
            mean, gap = np.mean([total for total, _ in found]), max(gap for _, gap in found)
            gaps += [gap for _, gap in found]
            row[f"window of {window}"] = f"{mean:.3f} / {1 + gap:.4f}"
            page.target(f"{case}, window of {window}", f"≤ {goal}", f"{mean:.3f}", bool(round(float(mean), 3) <= goal))
        body.append(row)
    page.section(
        "Balance",
        f"Sum over the steps of the largest load ÷ the mean, mean of {seeds} seeds, equal counts; for windows also the "
        "sum of the largest loads ÷ its lower bound, worst seed. The optimum lies between the bound and the plan. "
        f"{share(gap <= 0.002 for gap in gaps)} windows are within two thousandths of the bound.",
        body,
    )


def measure_speed(page: Page, repeats: int, quick: bool) -> None:
    """Time of `partition_grid` from Python."""
    body = []
    cases = [case for case in TIMED if case.ranks == 64 or not quick]
    for case, window in tqdm(list(itertools.product(cases, WINDOWS)), desc="speed"):
        batches = Batches.draw(case, window, 0)
        few = repeats if case.ranks == 64 else max(3, repeats // 10)
        free = cpu_milliseconds(partial(partition_grid, batches.workloads, case.ranks, window), few)
        known, near = cpu_milliseconds(batches.plan, few), cpu_milliseconds(batches.plan_near_home, max(3, few // 4))
        times = {"only rows": free, "with batches": known, "near home": near}
        body.append({"lengths, ranks × rows": str(case), "window": window} | times)
        if case.lengths == "user-like" and window == 8:
            limit = 3.0 if case.ranks == 64 else 80.0
            page.target(f"planning, {case}, window of 8", f"≤ {limit} ms", f"{free:.2f} ms", free <= limit)
        if case.ranks == 64 and window == 8:
            page.target(f"planning near home, {case}, window of 8", "≤ 30 ms", f"{near:.1f} ms", near <= 30)
    page.section(
        "Speed",
        "Milliseconds of CPU per plan of a whole window, `partition_grid()` from Python with all checks, one thread, "
        "the GIL released: only rows; with the batch of each row, which adds every batch's own plan unless the bound "
        "makes it unnecessary; near home.",
        body,
    )


def measure_traffic(page: Page, seeds: int, quick: bool) -> None:
    """Tokens that change their rank, and the load that must change it."""
    body = []
    cases = [*CASES[:2], Case("lognormal", 64, 32, ()), Case("zipf", 64, 32, ()), *([] if quick else [CASES[2]])]
    for case, window in tqdm(list(itertools.product(cases, (1, *WINDOWS))), desc="traffic"):
        found = []
        for seed in range(seeds if case.ranks == 64 else 1):
            batches = Batches.draw(case, window, seed)
            grid, total = batches.plan_near_home(), float(batches.tokens.sum())
            moved, crossed = grid.assignment != batches.home, grid.assignment // NODE != batches.home // NODE
            # A rank's load above the sum of the largest loads has to leave it.
            loaded = np.bincount(batches.home, weights=batches.workloads, minlength=case.ranks)
            found.append(
                {
                    "tokens that change rank": batches.tokens[moved].sum() / total,
                    "node": batches.tokens[crossed].sum() / total,
                    "load that must": (loaded - grid.sum_of_largest).clip(min=0).sum() / loaded.sum(),
                    "sum ÷ mean": batches.over_mean(grid.sum_of_largest),
                }
            )
        body.append({"lengths, ranks × rows": str(case), "window": window} | each_column(found))
    page.section(
        "Rows kept on their rank",
        f"Slack 1 %, nodes of {NODE}, shares, median of {seeds} seeds (one at 1024 ranks). A row may go to any step of "
        "its rank at no cost. A window of 1 is a plan of `partition`. If a window has little freedom, as with few rows "
        "per rank, most rows move for the last percent of balance; a larger slack keeps more rows.",
        body,
    )


def measure_samplers(page: Page, quick: bool) -> None:
    """Balance and memory of the samplers' steps, and their planning time."""
    ranks, rows = 64, 32
    tokens = draw("user-like", ranks * rows * (16 if quick else 64), 0)
    work = COSTS["HSTU"](tokens)
    shared: dict[str, Any] = {"num_ranks": ranks, "rank": 0, "shuffle": False}
    heaviest, average = int(work.max()), round(rows * float(work.mean()))
    of_heaviest = f"budget of the heaviest row ({heaviest / work.mean():.0f} average rows)"
    samplers = {
        "balanced, window of 1": BalancedBatchSampler(work, rows, **shared),
        "balanced, window of 8": BalancedBatchSampler(work, rows, window=8, **shared),
        of_heaviest: BudgetBatchSampler(work, budget_per_rank=heaviest, **shared),
        f"budget of {rows} average rows": BudgetBatchSampler(work, budget_per_rank=average, **shared),
    }
    in_order = np.arange(len(tokens)).reshape(-1, ranks * rows)
    body = [_spreads("as loaded", [(each, np.arange(ranks * rows) // rows) for each in in_order], tokens, work, ranks)]
    for name, sampler in tqdm(samplers.items(), desc="samplers"):
        started = time.process_time()
        steps = list(sampler.plan(0))
        per_step = (time.process_time() - started) / len(steps) * 1e3
        # The last step has the remaining rows.
        body.append(_spreads(name, steps[:-1], tokens, work, ranks) | {"ms per step": f"{per_step:.1f}"})
    page.section(
        "Samplers: balance and memory",
        f"User-like lengths, {ranks} ranks, {rows} rows per rank if the number is fixed. The sum over the steps of the "
        "largest load ÷ the mean; the tokens of the fullest rank of any step ÷ the mean, with which memory grows; the "
        "rows of a step, over all ranks; milliseconds of CPU per step for the plan. A row above the budget gets its "
        "own rank and makes its step longer.",
        body,
    )


def _spreads(name: str, steps: Sequence[Any], tokens: np.ndarray, work: np.ndarray, ranks: int) -> dict[str, str]:
    """Balance, peak tokens and rows of steps; a step is given by its rows and their ranks."""
    of_tokens, loads = (
        np.array([np.bincount(rank, each[rows], ranks) for rows, rank in steps]) for each in (tokens, work)
    )
    sizes = [len(rows) for rows, _ in steps]
    return {
        "": name,
        "sum ÷ mean": f"{loads.max(axis=1).sum() / loads.mean(axis=1).sum():.3f}",
        "most tokens ÷ mean": f"{of_tokens.max() / of_tokens.mean():.2f}",
        "rows of a step": f"{min(sizes):,} to {max(sizes):,}" if min(sizes) < max(sizes) else f"{sizes[0]:,}",
        "ms per step": "–",
    }


def main(quick: Quick = False) -> None:
    torch.set_num_threads(1)
    seeds, repeats = (2, 6) if quick else (5, 30)
    page = Page(
        "Windows: several batches share the load",
        f"{described(('user-like', 'zipf', 'lognormal'))} Cost HSTU: 5120·L + L². Ranks × rows per rank.",
    )
    measure_balance(page, seeds, quick)
    measure_speed(page, repeats, quick)
    measure_traffic(page, seeds, quick)
    measure_samplers(page, quick)
    page.finish(quick=quick)


if __name__ == "__main__":
    from_command_line(main, __doc__)
