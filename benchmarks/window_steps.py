"""How much faster are training steps, measured, if load is balanced over several batches?

Gloo ranks of one thread each train a small HSTU on user-like histories. Every variant has a replica of the model and
trains the same rows in the same order of windows. The variants alternate by rounds of steps, and a round ends when all
threads of the variant are idle, so that no cost hides in another variant's round. A step includes its reading, planning
and exchange.

Variants: batches as they are loaded; each batch balanced by the shuffler; a window of four batches in front of a stock
pipeline; the sampler, which has all lengths beforehand, with windows of four; and the sampler of steps of constant
cost.

Each ratio is printed with the prediction of the loads, from a cost of rows, tokens and pairs that is fitted to steps in
which all ranks have equal rows. The time with a core per rank is estimated from the processor time of the costliest
rank of every step, which other programs on the machine hardly change.
"""

from __future__ import annotations

import os
import time
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from scipy.optimize import nnls

from benchmarks.shared.command_line import Quick, from_command_line
from benchmarks.shared.report import Page, interleaved_on_ranks, run_ranks, slowest_ms, with_interval
from benchmarks.shared.small_hstu import DESCRIPTION, LONGEST, SIZES, TASK, Replica, draw_users, make_batch, make_model
from commons.datasets import BalancedBatchSampler, BudgetBatchSampler
from commons.datasets.hstu_batch import HSTUBatch
from commons.pipeline import windowed_iter
from hstu import HSTUBalancedBatchShuffler

VARIANTS = ("as loaded", "per batch", "window", "sampler", "budget")
WINDOW = 4
ROUND = 2 * WINDOW  # steps; of the two windows that begin in a round, one is waited for in the same round
MIXES, REPEATS = 24, 3  # batches to which the cost is fitted, and measurements of each
WARMUP = 1  # rounds
# Indices of a `step_size`: 1, rows, tokens, pairs.
_ROWS, _TOKENS = 1, 2


class Variant(Replica):
    """One of `VARIANTS`.

    `users` is int64 `(n,)`, items of all users, in the order in which they are trained; `rows` is a rank's batch.
    """

    def __init__(self, name: str, users: np.ndarray, rows: int, rank: int) -> None:
        batches: Any = (make_batch(users[own]) for own in numbers_of_batches(name, users, rows, rank))
        self._of_windows = HSTUBalancedBatchShuffler(*SIZES) if name == "window" else None
        self._windows = None if self._of_windows is None else windowed_iter(batches, self._of_windows, WINDOW)
        super().__init__(self._windows or batches, HSTUBalancedBatchShuffler(*SIZES) if name == "per batch" else None)
        # Of each step that this rank has trained, 1, rows, tokens and pairs; and its processor time.
        self.trained: list[np.ndarray] = []
        self.processor_ms: list[float] = []
        self.done: list[int] = []  # rows of all ranks, by the end of each round
        self.first: list[int] = []  # the step that each round begins with
        self.waits: list[float] = []  # of the windows that were begun in the round they were waited for
        self.model.register_forward_pre_hook(lambda _, arguments: self.trained.append(size_of_batch(arguments[0])))

    def train_round(self, rows: int) -> None:
        """Train to the end of the next round; a round has at least this number of rows over all ranks."""
        end, done = (len(self.done) + 1) * rows, self.done[-1] if self.done else 0
        self.first.append(len(self.trained))
        busy = time.process_time()
        while done < end:
            seen = self._last_window()
            self.pipeline.progress(self.batches)
            trained = torch.tensor(int(self.trained[-1][_ROWS]))
            dist.all_reduce(trained)  # a barrier, too
            done += int(trained)
            self.processor_ms.append((time.process_time() - busy) * 1e3)
            busy = time.process_time()
            last = self._last_window()
            # The wait for a window begun in the previous round belongs to the end of that round.
            if len(self.done) >= WARMUP and last is not None and last != seen and done == end:
                self.waits.append(last[1])
        self.settle()
        self.processor_ms[-1] += (time.process_time() - busy) * 1e3
        self.done.append(done)

    def _last_window(self) -> tuple[int, float] | None:
        """The number of the latest window, and how long the pipeline has waited for it."""
        last = None if self._windows is None else self._windows.last_window
        return None if last is None else (last.window, last.wait_ms)

    def settle(self) -> None:
        """Wait until all threads of the variant are idle."""
        super().settle()
        if self._of_windows is not None:
            self._of_windows.drain()

    def close(self) -> None:
        self.settle()
        super().close()
        if self._windows is not None and self._of_windows is not None:
            self._windows.close()
            self._of_windows.close()


def numbers_of_batches(name: str, users: np.ndarray, rows: int, rank: int) -> Any:
    """The numbers of the users in each of a rank's batches."""
    num_ranks, workloads = dist.get_world_size(), TASK.get_workloads(users)
    share: dict[str, Any] = {"num_ranks": num_ranks, "rank": rank, "shuffle": False}
    if name == "sampler":
        return BalancedBatchSampler(workloads, rows, window=WINDOW, **share)
    if name == "budget":
        budget = max(int(workloads.max()), int(workloads.mean() * rows))
        return BudgetBatchSampler(workloads, budget_per_rank=budget, **share)
    return np.arange(len(users) // (rows * num_ranks) * rows * num_ranks).reshape(-1, num_ranks, rows)[:, rank]


def step_size(histories: np.ndarray) -> np.ndarray:
    """int64 `(4,)`: 1, rows, tokens and pairs of a batch."""
    tokens, pairs = TASK.tokens_and_pairs(torch.from_numpy(histories))
    return np.array([1, len(histories), int(tokens.sum()), int(pairs.sum())])


def size_of_batch(batch: HSTUBatch) -> np.ndarray:
    """The `step_size` of the batch's real rows."""
    return step_size(batch.features.lengths()[: batch.actual_batch_size].to(torch.int64).numpy())


def fit_cost(rows: int) -> np.ndarray:
    """float64 `(4,)`: milliseconds per `step_size` of steps in which all ranks have the same rows."""
    model, optimizer = make_model()
    generator = np.random.default_rng(0)
    mixes = [draw_users(int(generator.integers(1, 2 * rows + 1)), 100 + mix) for mix in range(MIXES)]

    def step(batch: HSTUBatch) -> None:
        optimizer.zero_grad()
        model(batch)[0].sum().backward()
        optimizer.step()

    steps = {mix: partial(step, make_batch(histories)) for mix, histories in enumerate(mixes)}
    milliseconds = np.median(list(interleaved_on_ranks(steps, REPEATS).values()), axis=1)
    sizes = np.array([step_size(histories) for histories in mixes], dtype=np.float64)
    return nnls(sizes / milliseconds[:, None], np.ones(MIXES))[0]


def measure(rank: int, rows: int, rounds: int) -> dict[str, Any]:
    cost = fit_cost(rows)
    per_round = ROUND * rows * dist.get_world_size()
    users = draw_users((WARMUP + rounds + 3) * per_round, seed=rows)  # more, so that no pipeline reaches the end
    variants = {name: Variant(name, users, rows, rank) for name in VARIANTS}
    calls = {name: partial(variant.train_round, per_round) for name, variant in variants.items()}
    ms = interleaved_on_ranks(calls, rounds, warmup=WARMUP)
    for variant in variants.values():
        variant.close()
    first = {name: variant.first[WARMUP] for name, variant in variants.items()}
    return {
        "cost": cost,
        "waits": variants["window"].waits,
        "ms": ms,
        "rows": {name: np.diff(variant.done[WARMUP - 1 :]) for name, variant in variants.items()},
        "processor_ms": {name: np.array(variant.processor_ms[first[name] :]) for name, variant in variants.items()},
        "sizes": {name: np.array(variant.trained[first[name] :]) for name, variant in variants.items()},
    }


def report_case(measured: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines of the table for one number of ranks and rows."""
    lines: list[dict[str, Any]] = []
    cost = np.mean([each["cost"] for each in measured], axis=0)
    flops = np.array([TASK.forward_flops(1, 0), TASK.forward_flops(0, 1)], dtype=np.float64)
    rounds, rows = slowest_ms(measured), measured[0]["rows"]
    rates: dict[str, tuple[float, float]] = {}  # rows per millisecond of the costliest ranks: measured, predicted
    for name, ms in rounds.items():
        sizes = np.array([each["sizes"][name] for each in measured])  # (ranks, steps, 4)
        num_rows, loads = float(sizes[..., _ROWS].sum()), sizes[..., _TOKENS:] @ flops
        processor_ms = np.max([each["processor_ms"][name] for each in measured], axis=0).sum()
        rates[name] = num_rows / processor_ms, num_rows / (sizes @ cost).max(axis=0).sum()
        processor, predicted = np.divide(rates[name], rates["as loaded"]).tolist()

        def ratio(chosen: np.ndarray, name: str = name) -> np.ndarray:
            """Rows per second of these rounds ÷ those as loaded."""
            own, loaded = (
                rows[each][chosen].sum(axis=-1) / rounds[each][chosen].sum(axis=-1) for each in (name, "as loaded")
            )
            return own / loaded

        lines.append(
            {
                "variant": name,
                "rows per step": num_rows / sizes.shape[1],
                "step ms": float(ms.sum()) / sizes.shape[1],
                "largest ÷ mean": float(loads.max(axis=0).sum() / loads.mean(axis=0).sum()),
                "ratio": with_interval(ratio, len(ms))[1],
                "ratio, a core each": processor,
                "predicted": f"{predicted:.3f} ({100 * (processor / predicted - 1):+.1f} %)",
            }
        )
    return lines


def main(quick: Quick = False) -> None:
    cores, rounds = len(os.sched_getaffinity(0)), 3 if quick else 16
    lines, waits = [], []
    for num_ranks, rows in [(2, 4)] if quick else [(2, 4), (2, 8), (4, 4), (4, 8)]:
        measured = run_ranks(measure, num_ranks, rows, rounds, timeout=3600)
        case = {"ranks × rows": f"{num_ranks} × {rows}"}
        lines += [case | line for line in report_case(measured)]
        of_windows = np.concatenate([each["waits"] for each in measured])
        median, high = np.percentile(of_windows, [50, 95])
        waits.append(case | {"ms, median": float(median), "ms, 95th percentile": float(high)})
    page = Page(
        "Windows: measured steps",
        f"Ranks on {cores} cores (gloo). {DESCRIPTION}; histories of 20 + lognormal items, "
        f"median 130, sigma 1.4, to {LONGEST}; windows of {WINDOW}; {rounds} rounds of {ROUND} steps, the variants "
        "alternating.",
    )
    page.section(
        "",
        "Rows per second ÷ those as loaded, with the 95 % bootstrap interval over rounds. Largest ÷ mean: sums over "
        "the steps, of operations. If there are more ranks than cores, uneven loads have less effect; the last two "
        "columns assume a core per rank: from the processor time of the costliest rank, and the prediction of the "
        "loads, from a cost fitted to steps of equal ranks, with the measured ratio's deviation from it in brackets.",
        lines,
    )
    page.section(
        "How long the pipeline waited for a window",
        waits,
        "With the budget, each rank of a step gets rows up to the heaviest row's cost: steps are fewer and larger, so "
        "fixed costs occur less often.",
    )
    page.finish(quick=quick)


if __name__ == "__main__":
    from_command_line(main, __doc__)
