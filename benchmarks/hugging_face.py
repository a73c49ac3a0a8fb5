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
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.command_line import from_command_line
from benchmarks.report import heading, table, write_page
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


@dataclass(frozen=True)
class Planned:
    """How even the steps of one strategy are; means over the steps."""

    peak: float  # the costliest micro-batch ÷ that of the best groups of the step's rows
    imbalance: float  # what ranks wait for in the micro-batches ÷ the mean of the ranks
    slowest: float  # what ranks wait for in the micro-batches ÷ the same of ours, for the same rows in each step
    milliseconds: float  # of planning, per step, of one rank


def measure(strategy: str, lengths: np.ndarray, ranks: int) -> Planned:
    """Plan an epoch and look at it."""
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
    return Planned(statistics.fmean(peaks), slowest / means, slowest / ours, took * 1e3)


@dataclass
class HuggingFace:
    """Compare strategies of dealing rows."""

    ranks: int = 8
    """Ranks that are planned for; two are trained."""

    quick: bool = False
    """Few rows and steps, and no page."""

    def run(self) -> None:
        """Plan, train, print, and write benchmarks/results/hugging_face.md."""
        per_step = self.ranks * BATCH * ACCUMULATED
        pages = [self._plans(name, per_step * (8 if self.quick else 40)) for name in ("lognormal", "cut")]
        pages.append(self._training())
        print("\n\n".join(pages))
        if not self.quick:
            write_page("hugging_face", "\n\n".join([_head(self.ranks), *pages, _READING]))

    def _plans(self, name: str, num_rows: int) -> str:
        lengths = draw(name, num_rows, 0)
        found = {strategy: measure(strategy, lengths, self.ranks) for strategy in STRATEGIES}
        rows = [
            [strategy, *(f"{value:.3f}" for value in (each.peak, each.imbalance, each.slowest, each.milliseconds))]
            for strategy, each in found.items()
        ]
        head = (
            "strategy",
            "peak ÷ optimum",
            "max ÷ mean",
            "padded work of the slowest ÷ ours",
            "planning, ms per step",
        )
        return f"{name} lengths, {self.ranks} ranks:\n\n{table(head, rows)}"

    def _training(self) -> str:
        """Steps of a tiny Llama on two ranks, by the Trainer itself."""
        with tempfile.TemporaryDirectory() as folder:
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
            program = ["-m", "benchmarks.hugging_face_trainer", "--folder", folder]
            command = [*torchrun, *program, "--rounds", "1" if self.quick else "5"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-2000:]}")
            rounds = json.loads(Path(folder, "seconds.json").read_text())
        names = list(rounds[0])
        ratios = {name: sorted(each[name] / each["balanced"] for each in rounds) for name in names}
        rows = [
            [
                *(name, f"{statistics.median(each[name] for each in rounds) * 1e3:.0f}"),
                f"{statistics.median(ratios[name]):.2f} ({ratios[name][0]:.2f} to {ratios[name][-1]:.2f})",
            ]
            for name in names
        ]
        return f"Trained, two CPU ranks, lognormal lengths:\n\n{table(('strategy', 'ms per step', '÷ ours'), rows)}"


def _head(ranks: int) -> str:
    return heading("Hugging Face's Trainer", "python -m benchmarks.hugging_face") + (
        f"\nPadded micro-batches: {ranks} ranks × {ACCUMULATED} accumulated micro-batches of {BATCH} rows on average, "
        "an epoch of 40 steps. Costs as transformers' BatchRebalanceSampler counts them, for all of them."
    )


_READING = (
    "*Peak ÷ optimum*: the costliest micro-batch of a step beside the best that its rows allow, in groups that follow "
    "one another in the order of their lengths. *Max ÷ mean*: ranks wait for each other in every micro-batch. *Padded "
    "work of the slowest*: summed over an epoch, beside `balanced(trainer)`. Training: a Llama of two layers of width "
    "64, an epoch of eight steps, five rounds, interleaved, after a round that is not counted."
)


if __name__ == "__main__":
    from_command_line(HuggingFace, __doc__).run()
