"""Hugging Face's Accelerate on two ranks: a prepared loader of our samplers reads every row once, or is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

pytestmark = [pytest.mark.extra("accelerate"), pytest.mark.timeout(300)]
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("accelerate")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run(
        [*torchrun, "-m", "tests.extras.accelerated_rows", str(folder)],
        cwd=ROOT,
        env=os.environ | {"ACCELERATE_USE_CPU": "true"},  # Accelerate's own; else one process without a GPU
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("name", ["documented", "no window", "one row", "budget"])
def test_every_row_is_read_once_by_one_rank(of_ranks, name):
    epochs = [rank["read"][name] for rank in of_ranks]  # by rank, epoch and batch
    for first, second in zip(*epochs):
        assert len(first) == len(second) and all(first) and all(second)
        assert Counter(row for batch in first + second for row in batch) == Counter(range(257))
    assert epochs[0][0] != epochs[0][1]


def test_each_rank_reads_its_own_part_of_the_plan(of_ranks):
    for rank in of_ranks:
        assert rank["read"]["documented"] == rank["own"]
        assert rank["length"] == len(rank["own"][0]) == 33


def test_a_prepared_loader_sets_the_epoch(of_ranks):
    for rank in of_ranks:
        assert rank["epoch 3"] == rank["own epoch 3"] and rank["epoch 3"] not in rank["read"]["documented"]


def test_a_sampler_of_one_rank_is_refused(of_ranks):
    for rank, told in enumerate(of_ranks):
        for name, remedy, message in zip(
            ("BalancedBatchSampler", "BudgetBatchSampler", "ShardedBatchSampler"),
            ("make it with rank=None", "make it with rank=None", "use torch's BatchSampler"),
            told["refused"],
        ):
            assert message.startswith(f"this {name} has the batches of rank {rank} of 2 alone")
            assert message.endswith(f"which leaves rows out: {remedy}, or do not prepare the loader")
