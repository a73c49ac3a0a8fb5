"""What the text around the blocks on training has introduced, and what these then have done; on every rank."""

from __future__ import annotations

import re
from typing import Any

import torch
import torch.distributed as dist

import evenrank
from commons.pipeline import TrainPipelineFactory
from tests.helpers import documented_names as given
from tests.helpers import models


def every_step_was_evened_out(names: dict[str, Any]) -> None:
    """Every row of every rank was trained once, and each rank printed what each step was like."""
    assert _trained(names) == _rows(names["dataloader"])
    steps = re.findall(r"imbalance ([\d.]+)% → ([\d.]+)%", names["printed"])
    assert len(steps) == 5 and any(float(after) < float(before) for before, after in steps)


def script_with_evaluation() -> dict[str, Any]:
    """A script whose pipeline trains, and what it evaluates on."""
    names = given.torchrec_script()
    parts = {name: names[name] for name in ("model", "optimizer", "device")}
    shuffler = evenrank.TokensBalancedBatchShuffler()
    pipeline = TrainPipelineFactory.create("native", batch_shuffler=shuffler, **parts)
    batches = models.rank_batches(10 + dist.get_rank(), 2 + dist.get_rank(), [3, 1])
    return names | {"shuffler": shuffler, "pipeline": pipeline, "eval_dataloader": list(batches)}


def segments_were_evaluated(names: dict[str, Any]) -> None:
    """One segment, all of whose rows were trained; then an evaluation of all rows, which left the weights alone."""
    assert _trained(names) == sorted(_rows(names["dataloader"]) + _rows(names["eval_dataloader"]))
    assert names["losses"] == [] and len(names["outputs"]) == 3  # the rank with fewer batches goes on, too
    assert names["model"].training


def costs_are_those_of_a_transformer(names: dict[str, Any]) -> None:
    """The class of the block says what rows cost, and moves them by it."""
    rank = dist.get_rank()
    shuffler = names["MyBatchShuffler"](options=evenrank.ShufflerOptions(verify=True))
    batch = models.make_batch([[3, 4, 5], [1000, 2000, 3000]][rank], 3, longest=40)
    workloads = shuffler.get_workloads(batch)
    assert workloads.dtype == torch.int64 and workloads.shape == (3,)
    assert workloads.argsort().tolist() == batch.features["item"].lengths().argsort().tolist()
    try:
        assert _sorted_of_all(shuffler.shuffle(batch).sample_id.tolist()) == [3, 4, 5, 1000, 2000, 3000]
    finally:
        shuffler.close()


def _trained(names: dict[str, Any]) -> list[int]:
    """Ids of the rows that the model has seen, on all ranks."""
    return _sorted_of_all([row for step in models.head_of(names["model"]).seen for row in step])


def _rows(batches: list[Any]) -> list[int]:
    """Ids of the real rows of all ranks."""
    return _sorted_of_all([row for batch in batches for row in batch.sample_id[: batch.actual_batch_size].tolist()])


def _sorted_of_all(items: list[int]) -> list[int]:
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, items)
    return sorted(item for part in gathered for item in part)
