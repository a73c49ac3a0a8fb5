"""Rows dealt to ranks and micro-batches: Hugging Face's strategies beside `balanced(trainer)`, on the same lengths.

    python -m benchmarks.hugging_face            # a minute of plans, and ten of training on two ranks
    python -m benchmarks.hugging_face --quick    # few rows and steps: shows that it runs

Needs `pip install "transformers>=5.23" accelerate`. Costs are those of transformers' own BatchRebalanceSampler, which
ours is given too: rows × (longest + 0.001 · longest²).
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.command_line import from_command_line
from benchmarks.report import Page, rows_table, run_program
from commons.datasets import BalancedBatchSampler
from commons.perf_model.partitioner import padded_groups

BATCH, ACCUMULATED = 8, 4
STRATEGIES = ("group_by_length", "batch_rebalance", "balanced", "balanced, window 4")
Steps = Iterator[list[list[list[int]]]]  # by step, micro-batch and rank, the rows


def cost_of(lengths: np.ndarray) -> np.ndarray:
    """int64 `(n,)`: 1,000 times what BatchRebalanceSampler takes a row of a micro-batch to cost."""
    return 1000 * lengths + lengths * lengths


def draw(name: str, count: int, seed: int) -> np.ndarray:
    """int64 `(count,)`: "lognormal" of median 300 to 4,096, or "cut": 2 % at 4,096, the others 20 to 300."""
    rng = np.random.default_rng(seed)
    if name == "lognormal":
        return np.clip(rng.lognormal(np.log(300), 1, count), 8, 4096).astype(np.int64)
    return np.where(rng.random(count) < 0.02, 4096, rng.integers(20, 300, count)).astype(np.int64)


def steps_of(strategy: str, lengths: np.ndarray, ranks: int) -> Steps:
    """Plan an epoch, step by step."""
    from transformers.trainer_pt_utils import BatchRebalanceSampler, LengthGroupedSampler

    per_step, generator = ranks * BATCH * ACCUMULATED, torch.Generator().manual_seed(1)
    if strategy == "group_by_length":  # then Accelerate deals every W-th batch to each of W ranks
        order = list(LengthGroupedSampler(BATCH * ACCUMULATED, lengths=lengths.tolist(), generator=generator))
        for first in range(0, len(order) - per_step + 1, per_step):
            batches = [order[at : at + BATCH] for at in range(first, first + per_step, BATCH)]
            yield [batches[at : at + ranks] for at in range(0, len(batches), ranks)]
        return
    if strategy == "batch_rebalance":
        samplers = [
            BatchRebalanceSampler(lengths.tolist(), per_step, ranks, ACCUMULATED, rank=rank) for rank in range(ranks)
        ]
        batches_of_ranks = zip(*samplers)
    else:
        window = ACCUMULATED * (4 if "window" in strategy else 1)
        options = {"num_ranks": ranks, "window": window, "seed": 1, "padded": True, "drop_last": True}
        sampler = BalancedBatchSampler(cost_of(lengths), BATCH, rank=None, **options)
        every = iter(sampler)
        batches_of_ranks = zip(*[every] * ranks)
    while micro_batches := [list(batches) for batches in itertools.islice(batches_of_ranks, ACCUMULATED)]:
        yield micro_batches


def measure(strategy: str, lengths: np.ndarray, ranks: int) -> dict[str, Any]:
    """Plan an epoch; the page says what each column means."""
    costs = cost_of(lengths)
    list(steps_of(strategy, lengths[: 4 * ranks * BATCH * ACCUMULATED], ranks))  # imports, and warms up
    started = time.perf_counter()
    steps = list(steps_of(strategy, lengths, ranks))
    took = (time.perf_counter() - started) / len(steps) / (ranks if strategy == "batch_rebalance" else 1)
    peaks, slowest, ours, means = [], 0, 0, 0.0
    for step in steps:
        work = [[len(rows) * int(costs[rows].max()) for rows in batches] for batches in step]
        sorted_costs = np.sort(costs[np.concatenate([rows for batches in step for rows in batches])])[::-1]
        groups = padded_groups(sorted_costs, num_groups=ranks * len(step), steps=len(step))
        starts = np.searchsorted(groups, np.arange(ranks * len(step)))
        best = (np.bincount(groups) * sorted_costs[starts]).reshape(len(step), ranks)
        peaks.append(max(map(max, work)) / int(best.max()))
        slowest += sum(map(max, work))
        ours += int(best.max(axis=1).sum())
        means += sum(statistics.fmean(batches) for batches in work)
    return {
        "strategy": strategy,
        "peak ÷ optimum": statistics.fmean(peaks),
        "max ÷ mean": slowest / means,
        "padded work of the slowest ÷ ours": slowest / ours,
        "planning, ms per step": took * 1e3,
    }


def training(rounds: int) -> str:
    """Steps of a tiny Llama on two ranks, by the Trainer itself."""
    with tempfile.TemporaryDirectory() as folder:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
        program = ["-m", "benchmarks.hugging_face_trainer", "--folder", folder, "--rounds", str(rounds)]
        run_program([*torchrun, *program])
        found = json.loads(Path(folder, "seconds.json").read_text())
    rows = []
    for name in found[0]:
        ratios = sorted(each[name] / each["balanced"] for each in found)
        rows.append(
            {
                "strategy": name,
                "ms per step": statistics.median(each[name] for each in found) * 1e3,
                "÷ ours": f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})",
            }
        )
    return rows_table(rows)


def main(ranks: int = 8, quick: bool = False) -> None:
    """Plan, train, print, and write benchmarks/results/hugging_face.md.

    Args:
        ranks: that are planned for; two are trained.
        quick: few rows and steps, and no page.
    """
    page = Page(
        "hugging_face",
        "Hugging Face's Trainer",
        "python -m benchmarks.hugging_face",
        f"Padded micro-batches: {ranks} ranks × {ACCUMULATED} accumulated micro-batches of {BATCH} rows on average, "
        "an epoch of 40 steps. Costs as transformers' BatchRebalanceSampler counts them, for all of them.",
    )
    for name in ("lognormal", "cut"):
        num_rows = ranks * BATCH * ACCUMULATED * (8 if quick else 40)
        lengths = draw(name, num_rows, 0)
        planned = rows_table([measure(strategy, lengths, ranks) for strategy in STRATEGIES])
        page.section("", f"{name} lengths, {ranks} ranks:", planned)
    page.section("", "Trained, two CPU ranks, lognormal lengths:", training(1 if quick else 5), _READING)
    page.finish(quick=quick)


_READING = (
    "*Peak ÷ optimum*: the costliest micro-batch of a step beside the best that its rows allow, in groups that follow "
    "one another in the order of their lengths. *Max ÷ mean*: ranks wait for each other in every micro-batch. *Padded "
    "work of the slowest*: summed over an epoch, beside `balanced(trainer)`. Training: a Llama of two layers of width "
    "64, an epoch of eight steps, five rounds, interleaved, after a round that is not counted."
)


if __name__ == "__main__":
    from_command_line(main, __doc__)
