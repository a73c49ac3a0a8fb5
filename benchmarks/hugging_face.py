"""Hugging Face's strategies of batching compared with `balanced(trainer)`, on the same lengths.

    python -m benchmarks.hugging_face            # a minute
    python -m benchmarks.hugging_face --quick    # few rows: shows that it runs

Needs `pip install "transformers>=5.23" accelerate`. All strategies use the cost of transformers' BatchRebalanceSampler:
rows × (longest + 0.001 · longest²).
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.shared.command_line import Quick, from_command_line
from benchmarks.shared.lengths import described, draw
from benchmarks.shared.report import Page, every, measured, milliseconds
from commons.datasets import BalancedBatchSampler
from commons.perf_model.partitioner import padded_groups

BATCH, ACCUMULATED = 8, 4
STRATEGIES = ("group_by_length", "batch_rebalance", "balanced", "balanced, window 4")


def cost_of(lengths: np.ndarray) -> np.ndarray:
    """int64 `(n,)`: 1,000 × the cost of a row of a micro-batch in BatchRebalanceSampler."""
    return 1000 * lengths + lengths * lengths


def read_by_rank(strategy: str, lengths: np.ndarray, ranks: int, rank: int | None) -> list[list[int]]:
    """An epoch's batches of one rank, or of all ranks in turn, made by the strategy's own code."""
    from transformers.trainer_pt_utils import BatchRebalanceSampler, LengthGroupedSampler

    if strategy == "group_by_length":  # then Accelerate gives every W-th batch to each of W ranks
        generator = torch.Generator().manual_seed(1)
        order = list(LengthGroupedSampler(BATCH * ACCUMULATED, lengths=lengths.tolist(), generator=generator))
        return [order[at : at + BATCH] for at in range(0, len(order), BATCH)]
    if strategy == "batch_rebalance":
        own = range(ranks) if rank is None else [rank]
        per_step = ranks * BATCH * ACCUMULATED
        samplers = [BatchRebalanceSampler(lengths.tolist(), per_step, ranks, ACCUMULATED, rank=each) for each in own]
        return [batch for batches in zip(*samplers) for batch in batches]
    window = ACCUMULATED * (4 if "window" in strategy else 1)
    options: dict[str, Any] = {
        "num_ranks": ranks,
        "rank": rank,
        "window": window,
        "seed": 1,
        "padded": True,
        "drop_last": True,
    }
    return list(BalancedBatchSampler(cost_of(lengths), BATCH, **options))


def measure_epoch(lengths: str, strategy: str, *, ranks: int, num_steps: int) -> dict[str, float]:
    """Plan an epoch; the page explains each column."""
    of_step = ranks * ACCUMULATED
    drawn = draw(lengths, of_step * BATCH * num_steps, 0)
    costs, batches = cost_of(drawn), read_by_rank(strategy, drawn, ranks, None)
    found = []
    for at in range(0, len(batches) - of_step + 1, of_step):
        step = batches[at : at + of_step]
        work = np.array([len(rows) * int(costs[rows].max()) for rows in step]).reshape(ACCUMULATED, ranks)
        sorted_costs = np.sort(costs[np.concatenate(step)])[::-1]
        groups = padded_groups(sorted_costs, num_groups=of_step, steps=ACCUMULATED)
        starts = np.searchsorted(groups, np.arange(of_step))
        best = (np.bincount(groups) * sorted_costs[starts]).reshape(ACCUMULATED, ranks)
        found.append(
            [work.max() / best.max(), *(each.max(axis=1).sum() for each in (work, best)), work.mean(axis=1).sum()]
        )
    peaks, slowest, ours, means = np.array(found).T
    planning = milliseconds(partial(read_by_rank, strategy, drawn, ranks, 0), 9, clock=time.process_time, of=min)
    return {
        "peak ÷ optimum": peaks.mean(),
        "max ÷ mean": slowest.sum() / means.sum(),
        "padded work of the slowest ÷ ours": slowest.sum() / ours.sum(),
        "planning, ms per step": planning / len(found),
    }


def main(ranks: int = 8, quick: Quick = False) -> None:
    """Plan, print, and write benchmarks/results/hugging_face.md.

    Args:
        ranks: number of ranks to plan for.
    """
    num_steps = 8 if quick else 40
    page = Page(
        "Hugging Face's Trainer",
        f"Padded micro-batches: {ranks} ranks × {ACCUMULATED} accumulated micro-batches of {BATCH} rows on average, "
        f"an epoch of {num_steps} steps. For all strategies, costs are those of transformers' BatchRebalanceSampler. "
        f"{described(('texts', 'cut texts'))}",
    )
    cases = every(lengths=("texts", "cut texts"), strategy=STRATEGIES)
    page.section("", measured(measure_epoch, cases, ranks=ranks, num_steps=num_steps), _READING)
    page.finish(quick=quick)


_READING = (
    "*Peak ÷ optimum*: the costliest micro-batch of a step ÷ the optimum for its rows, among contiguous groups of the "
    "rows sorted by length. *Max ÷ mean*: of the ranks' costs, because ranks wait for each other in every micro-batch. "
    "*Padded work of the slowest*: summed over an epoch, ÷ that of `balanced(trainer)` for the rows of the same steps. "
    "*Planning*: CPU time of one rank for its own batches, the least of nine epochs. `group_by_length` only sorts rows "
    "and ignores costs; a plan of all ranks' rows takes longer than a sort, and is hidden behind a step if the loader "
    "has a worker process."
)


if __name__ == "__main__":
    from_command_line(main, __doc__, needs=("transformers", "accelerate"))
