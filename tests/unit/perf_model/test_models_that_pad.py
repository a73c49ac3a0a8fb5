"""What balancing gains a model that pads its rows, in counted operations: the table of docs/own_shuffler.md."""

import functools
import re

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from commons.datasets import BalancedBatchSampler
from commons.perf_model.partitioner import partition
from commons.perf_model.task_estimator import SelfAttentionTask
from tests.helpers.documents.documented import ROOT

RANKS, ROWS, STEPS, HIDDEN, HEADS = 8, 16, 10, 64, 2
TASK = SelfAttentionTask(HIDDEN, HEADS, HIDDEN // HEADS, causal=False)
LAYER = torch.nn.TransformerEncoderLayer(HIDDEN, HEADS, 4 * HIDDEN, batch_first=True, device="meta")


@functools.cache
def operations(rows, longest):
    """Of padded rows, counted on the meta device, which computes nothing."""
    with FlopCounterMode(display=False) as counter:
        LAYER(torch.empty(rows, longest, HIDDEN, device="meta"))
    return counter.get_total_flops()


def counted(groups):
    """Operations of a rank that computes groups of rows, each padded to its own longest."""
    return sum(operations(len(lengths), int(lengths.max())) for lengths in groups)


WAYS = {
    "pads to its longest row": lambda lengths: [lengths],
    "pads in 4 groups of similar length": lambda lengths: np.array_split(np.sort(lengths), 4),
    "packs its rows": lambda lengths: [lengths[row : row + 1] for row in range(len(lengths))],
}

SAMPLER = "pads, and a sampler assigns rows with `padded=True`"


def measured(steps):
    """Of the stats and of each way, as loaded and balanced: the slowest rank's work, summed over steps.

    The last way is that of a sampler with `padded=True`, which deals the same rows of a step.
    """
    rng = np.random.default_rng(0)
    found = {name: np.zeros(2) for name in ("according to the stats", *WAYS, SAMPLER)}
    for _ in range(steps):
        lengths = np.clip(np.exp(rng.normal(4.0, 1.0, RANKS * ROWS)).astype(np.int64), 1, 1024)
        work = TASK.get_workloads(lengths)
        dealt = np.arange(RANKS * ROWS) % RANKS, partition(work, RANKS).assignment
        for when, ranks in enumerate(dealt):
            of_ranks = [lengths[ranks == rank] for rank in range(RANKS)]
            found["according to the stats"][when] += max(int(TASK.get_workloads(each).sum()) for each in of_ranks)
            for name, groups in WAYS.items():
                found[name][when] += max(counted(groups(each)) for each in of_ranks)
        (step,) = BalancedBatchSampler(work, ROWS, num_ranks=RANKS, rank=0, padded=True).plan(0)
        padded = [lengths[step.rows[step.ranks == rank]] for rank in range(RANKS)]
        loaded = [lengths[dealt[0] == rank] for rank in range(RANKS)]
        found[SAMPLER] += [max(counted([each]) for each in ranks) for ranks in (loaded, padded)]
    return found


@pytest.mark.slow
def test_the_documented_table_is_what_torch_counts():
    page = (ROOT / "docs/own_shuffler.md").read_text(encoding="utf-8")
    section = page.split("## A model that pads")[1].split("\n## ")[0]
    shown = dict(re.findall(r"^\| ([^|]+?) \| (.*) \|$", section, re.MULTILINE))
    for name, (before, after) in measured(STEPS).items():
        assert shown[name] == f"{before / 1e6:,.0f} | {after / 1e6:,.0f} | {before / after:.2f}×"
