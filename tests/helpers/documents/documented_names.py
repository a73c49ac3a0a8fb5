"""What the text around a documented block has introduced, and what the block then has to have done; on every rank."""

from __future__ import annotations

import abc
import contextlib
import importlib
import json
import re
import sys
import tempfile
import types
from collections.abc import Generator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import evenrank
from commons.distributed.errors import capture_error
from commons.pipeline import TrainPipelineFactory
from commons.trainer.config.load import load_config
from commons.trainer.run import run_training
from hstu.train_config import TrainConfig
from tests.helpers.cuda.pretended_streams import pretended_streams
from tests.helpers.jobs.training_configs import TINY
from tests.helpers.models import torchrec_model as models
from tests.helpers.models.hstu_models import random_batch
from tests.helpers.pipelines.shuffled_pipelines import CubicShuffler
from tests.helpers.pipelines.trainer_loops import Output
from tests.helpers.ranks.on_ranks import of_all

# Yields the names that the text has introduced, is sent those after the block, and looks at what it did; on every rank.
Run: TypeAlias = Generator[dict[str, Any], dict[str, Any], None]
_SIZES = [6, 2, 3, 1]


def torchrec_script() -> dict[str, Any]:
    """A sharded model, its optimizer and a dataloader whose ranks end at different steps."""
    model, optimizer = models.build_sharded()
    batches = list(models.rank_batches(dist.get_rank(), 4 + dist.get_rank(), _SIZES))
    return {"model": model, "optimizer": optimizer, "device": torch.device("cpu"), "dataloader": batches}


def all_rows_were_trained() -> Run:
    """Every row of every rank was trained once, and the steps that were printed were evened out."""
    names = yield torchrec_script()
    assert _trained(names) == _rows(names["dataloader"])
    steps = re.findall(r"imbalance ([\d.]+)% → ([\d.]+)%", names["printed"])
    assert len(steps) in (0, 5) and (steps or dist.get_rank())  # every rank prints, or rank 0 alone
    assert not steps or any(float(after) < float(before) for before, after in steps)


def _trained(names: dict[str, Any]) -> list[int]:
    """Ids of the rows that the model has seen, on all ranks."""
    return sorted(of_all([row for step in models.head_of(names["model"]).seen for row in step]))


def _rows(batches: list[Any]) -> list[int]:
    """Ids of the real rows of all ranks."""
    return sorted(of_all([row for batch in batches for row in batch.sample_id[: batch.actual_batch_size].tolist()]))


def segments_were_evaluated() -> Run:
    """A script whose pipeline trains, and what it evaluates on."""
    names = torchrec_script()
    parts = {name: names[name] for name in ("model", "optimizer", "device")}
    shuffler = evenrank.TokensBalancedBatchShuffler()
    pipeline = TrainPipelineFactory.create("native", batch_shuffler=shuffler, **parts)
    batches = models.rank_batches(10 + dist.get_rank(), 2 + dist.get_rank(), [3, 1])
    names = yield names | {"shuffler": shuffler, "pipeline": pipeline, "eval_dataloader": list(batches)}
    # One segment, all of whose rows were trained; then an evaluation of all rows, which left the weights alone.
    assert _trained(names) == sorted(_rows(names["dataloader"]) + _rows(names["eval_dataloader"]))
    assert names["losses"] == [] and len(names["outputs"]) == 3  # the rank with fewer batches goes on, too
    assert names["model"].training


def pipeline_trains() -> Run:
    """The pipeline that the block has made trains a batch."""
    names = yield torchrec_script()
    names["pipeline"].progress(iter(names["dataloader"]))
    assert names["pipeline"].last_stats.num_rows == sum(of_all([names["dataloader"][0].actual_batch_size]))


def _items(batch: Any) -> list[int]:
    return batch.features["item"].values().tolist()


def windows_hold_every_row() -> Run:
    """A dataloader of HSTU batches, one more on the first rank, and what trains them."""
    rank = dist.get_rank()
    batches = [random_batch(4, longest=4 + 40 * (step % 3 == rank), most=44, seed=step) for step in range(11 - rank)]
    trained: list[int] = []
    names = yield {"dataloader": batches, "trained": trained, "train_step": lambda batch: trained.extend(_items(batch))}
    # The items of all ranks have been trained, in as many steps on both, whose loads are nearly even.
    own = [item for batch in names["dataloader"] for item in _items(batch)]
    assert sorted(of_all(names["trained"])) == sorted(of_all(own))
    window = names["batches"].last_window
    assert (window.window, window.steps) == (1, 3) and window.imbalance_after < window.imbalance_before
    assert names["stats"].window == 3


def staged_batches_hold_every_row() -> Run:
    """A dataloader of HSTU batches, one more on the first rank, and what trains them; CUDA's streams are pretended."""
    batches = [random_batch(4, longest=44, seed=step) for step in range(5 - dist.get_rank())]
    trained: list[int] = []
    given = {"dataloader": batches, "device": torch.device("cpu")}
    with pretended_streams():
        names = yield given | {"train_step": lambda batch: trained.extend(_items(batch))}
    own = [item for batch in batches for item in _items(batch)]
    assert sorted(of_all(trained)) == sorted(of_all(own))
    assert names["shuffler"].last_stats.moved


def every_row_is_read_once() -> Run:
    """A map-style data set that knows the lengths of its rows."""
    lengths = (torch.arange(40) * 7 % 40 + 1).tolist()
    names = yield {"lengths": lengths, "dataset": list(range(40))}
    # The ranks read every row once, in steps of equal cost.
    steps = [batch.tolist() for batch in names["loader"]]
    assert sorted(of_all([row for batch in steps for row in batch])) == list(range(40))
    work = [sum(int(names["workloads"][row]) for row in batch) for batch in steps]
    both = of_all(work)
    assert all(abs(a - b) <= 0.02 * a for a, b in zip(both[: len(work)], both[len(work) :]))


def options_are_those_of_the_shuffler() -> Run:
    """The shuffler has the options, and works."""
    names = yield {}
    shuffler = names["shuffler"]
    assert (shuffler.options.slack, shuffler.options.min_gain) == (0.05, 0.02)
    batch = models.make_batch([1 + dist.get_rank(), 3], 2)
    assert sorted(of_all(shuffler.shuffle(batch).sample_id.tolist())) == sorted(of_all(batch.sample_id.tolist()))


def mine_is_registered() -> Run:
    """The block's shuffler is there under its name, and moves rows by its workloads."""
    yield {}
    (name,) = (each for each in evenrank.BatchShufflerFactory.list_available() if each.startswith("mine"))
    try:
        _moves_long_rows(evenrank.BatchShufflerFactory.create, name)
    finally:
        evenrank.BatchShufflerFactory.unregister(name)


def costs_are_those_of_a_transformer() -> Run:
    """The class of the block says what rows cost, and moves them by it."""
    names = yield {}
    _moves_long_rows(names["MyBatchShuffler"])


def _moves_long_rows(make: Any, *args: Any) -> None:
    """Longer rows cost more, and no row is lost."""
    batch = models.make_batch([[3, 4, 5], [1000, 2000, 3000]][dist.get_rank()], 3, longest=40)
    with contextlib.closing(make(*args, options=evenrank.ShufflerOptions(verify=True))) as shuffler:
        workloads = shuffler.get_workloads(batch)
        assert workloads.dtype == torch.int64 and workloads.shape == (3,)
        assert workloads.argsort().tolist() == batch.features["item"].lengths().argsort().tolist()
        assert sorted(of_all(shuffler.shuffle(batch).sample_id.tolist())) == [3, 4, 5, 1000, 2000, 3000]


class _ItemModel(nn.Module):
    """Tells the first label of every row from the mean of its items."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.items = nn.EmbeddingBag(100, hidden_size, mode="mean")
        self.head = nn.Linear(hidden_size, 1)

    def forward(self, batch: Any) -> tuple[torch.Tensor, Output]:
        rows, items = batch.actual_batch_size, batch.features[batch.item_feature_name]
        scores = self.head(self.items(items.values().long() % 100, items.offsets()[:-1].long()))[:rows, 0]
        loss_sum = (scores - 1).square().sum()
        return evenrank.global_mean_loss(loss_sum, rows), Output(loss_sum.detach(), rows, [])


def recipe_trains() -> Run:
    """A model of the user's own. The recipe of the block is trained, evaluated and simulated."""
    names = yield {"MyModel": _ItemModel}
    device = torch.device("cpu")
    with tempfile.TemporaryDirectory() as folder:
        trainer = evenrank.TrainerArgs(
            4, 4, run_dir=folder, pipeline_type="none", enable_balanced_shuffler=True, sinks=()
        )
        dataset = evenrank.DatasetArgs("random", 12, num_batches=3)
        recipe = names["RECIPE"](names["MyConfig"](trainer, dataset, shuffler_type="tokens"), device)
        summary = run_training(recipe)
    assert summary.steps == 3 and summary.metrics["eval_rows"] == 24 and summary.shuffle["rows_moved"] > 0
    batch = next(recipe.host_batches())
    assert recipe.task.get_workloads(*recipe.row_tokens(batch)).shape == (4,)


def _shuffle_a_row(shuffler: evenrank.BaseTaskBalancedBatchShuffler) -> Any:
    """Of each rank, all of them alike; returns the stats."""
    shuffler.shuffle(models.make_batch([1], 1))
    return shuffler.last_stats


def its_stats_are_in_the_file() -> Run:
    """A step of a pipeline, and a folder for what is written. A line of them."""
    with contextlib.closing(CubicShuffler()) as shuffler, tempfile.TemporaryDirectory() as folder:
        stats = _shuffle_a_row(shuffler)
        yield {"Path": Path(folder).joinpath, "pipeline": SimpleNamespace(last_stats=stats)}
        (line,) = Path(folder, "shuffle.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(line) == json.loads(json.dumps(stats.to_dict()))


def speeds_are_known() -> Run:
    """A balanced step, and how long the rank's own work on it took. With the next batch, those of all ranks."""
    shuffler = CubicShuffler()
    pipeline = SimpleNamespace(last_stats=_shuffle_a_row(shuffler))
    yield {"shuffler": shuffler, "pipeline": pipeline, "milliseconds": 0.5 * (1 + dist.get_rank())}
    first, second = _shuffle_a_row(shuffler).rank_speeds
    assert first == 2 * second > 0


def speeds_are_measured() -> Run:
    """Stats have them from the first batch on."""
    names = yield {}
    stats = _shuffle_a_row(names["shuffler"])
    assert stats.speeds == (1024, 1024) and stats.speed_saving == 0.0


@dataclass
class _UserBatch(evenrank.BaseBatch):
    user_id: torch.Tensor = field(kw_only=True)


def users_are_together() -> Run:
    """A shuffler of one's own. Rows of a user, which lie on both ranks, end on one of them."""
    names = yield {"MyBatchShuffler": CubicShuffler}
    batch = models.make_batch([1, 2, 3, 4], 4)
    users = {name: value for name, value in vars(batch).items() if name not in ("sample_id", "target")}
    result = names["shuffler"].shuffle(_UserBatch(**users, user_id=torch.tensor([7, 8, 7, 9])))
    own = result.user_id[: result.actual_batch_size].tolist()
    assert sorted(of_all(sorted(set(own)))) == [7, 8, 9] and sorted(of_all(own)) == [7, 7, 7, 7, 8, 8, 9, 9]


def ranks_add_up() -> Run:
    """The test passes with the fixture `ranks` as seen from a rank, and would fail for another sum."""
    names = yield {}
    ranks = SimpleNamespace(world_size=dist.get_world_size(), run=lambda function: of_all([function()]))
    names["test_all_ranks_add_up"](ranks)
    assert names["_sum_of_ranks"]() == 1


def abort_ends_a_wait() -> Run:
    """Its module with the one class that the text derives from: the package itself is for GPUs."""
    names = ["nvidia_resiliency_ext", "nvidia_resiliency_ext.inprocess", "nvidia_resiliency_ext.inprocess.abort"]
    modules = {name: types.ModuleType(name) for name in names}
    modules[names[-1]].Abort = type("Abort", (abc.ABC,), {})  # type: ignore[attr-defined]
    with mock.patch.dict(sys.modules, modules):
        made = yield {}
    # The groups serve a new shuffler. What waits ends: tests/distributed/distributed/test_abort.py.
    aborts, state = made["AbortShuffler"](), object()
    assert aborts(state) is state  # before there is a shuffler
    aborts.shuffler = evenrank.BatchShufflerFactory.create("tokens")
    aborts(state)
    _, error = capture_error(lambda: aborts.shuffler.start_shuffle(models.make_batch([1], 1)))
    assert isinstance(error, evenrank.ShufflerAbortedError)
    with contextlib.closing(evenrank.BatchShufflerFactory.create("tokens")) as again:
        assert again.shuffle(models.make_batch([1], 1)).actual_batch_size == 1


def one_rank_trained() -> Run:
    """Settings of a run of six steps, as a config file holds them. And the process group is still there."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    flags = [*TINY, "--trainer.enable-balanced-shuffler", "--trainer.run-dir", folder[0]]
    names = yield {"config": asdict(load_config(TrainConfig, flags))}
    assert names["summary"].steps == 6 and dist.is_initialized()


def weights_are_those_of_the_checkpoint() -> Run:
    """A run of six steps with a checkpoint at its end, and the block in its folder; torch's own reader has the same."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    train_in(folder[0], "hstu.train", [*TINY, "--trainer.ckpt-save-interval", "6", "--trainer.max-train-iters", "6"])
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder[0])
        names = yield {}
    own = Path(folder[0], f"rank{dist.get_rank()}.pt")
    dcp_to_torch_save(Path(folder[0], "checkpoints", "step_00000006"), own)
    saved = torch.load(own, weights_only=False)
    weights = {f"model/{name}": weight for name, weight in names["model"].state_dict().items()}
    assert weights.keys() == {name for name in saved if name.startswith("model/")}
    assert all(torch.equal(weight, saved[name]) for name, weight in weights.items())
    assert torch.equal(names["logits"], names["model"](names["batch"])[1].logits)


def train_in(folder: str, script: str, arguments: list[str]) -> None:
    """A training script of ours on this rank, as torchrun starts it, but in the process group that there is."""
    module = importlib.import_module(script)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        module.train(load_config(module.TrainConfig, arguments, prog=script))
