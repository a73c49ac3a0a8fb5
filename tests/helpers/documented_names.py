"""What the text around a documented block has introduced, and what the block then has to have done; on every rank."""

from __future__ import annotations

import abc
import contextlib
import importlib
import json
import os
import re
import shutil
import sys
import tempfile
import threading
import types
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import evenrank
from commons.distributed.errors import attempt
from commons.trainer.config.load import load_config
from commons.trainer.run import run_training
from hstu.train_config import TrainConfig
from tests.helpers import models
from tests.helpers.hstu_jobs import TINY

_SIZES = [6, 2, 3, 1]


def torchrec_script() -> dict[str, Any]:
    """A sharded model, its optimizer and a dataloader whose ranks end at different steps."""
    model, optimizer = models.build_sharded()
    batches = list(models.rank_batches(dist.get_rank(), 4 + dist.get_rank(), _SIZES))
    return {"model": model, "optimizer": optimizer, "device": torch.device("cpu"), "dataloader": batches}


def all_rows_were_trained(names: dict[str, Any]) -> None:
    """Every row of every rank, once."""
    seen = [row for step in models.head_of(names["model"]).seen for row in step]
    own = [row for batch in names["dataloader"] for row in batch.sample_id[: batch.actual_batch_size].tolist()]
    assert sorted(of_all(seen)) == sorted(of_all(own))
    steps = re.findall(r"imbalance ([\d.]+)% → ([\d.]+)%", names["printed"])
    assert len(steps) == (5 if dist.get_rank() == 0 else 0)
    assert dist.get_rank() or any(float(after) < float(before) for before, after in steps)


def pipeline_trains(names: dict[str, Any]) -> None:
    """The pipeline that the block has made trains a batch."""
    names["pipeline"].progress(iter(names["dataloader"]))
    assert names["pipeline"].last_stats.num_rows == sum(of_all([names["dataloader"][0].actual_batch_size]))


def hstu_batches() -> dict[str, Any]:
    """A dataloader of HSTU batches, one more on the first rank, and what trains them."""
    features = [
        evenrank.FeatureConfig(
            ["item", "action"], [50, 5], 40, True, evenrank.RandomDistribution("zipf", 1, 40, alpha=1.2)
        )
    ]
    generator = torch.Generator().manual_seed(dist.get_rank())
    batches = [
        evenrank.HSTUBatch.random(
            4, features, "item", action_feature_name="action", device=torch.device("cpu"), generator=generator
        )
        for _ in range(11 - dist.get_rank())
    ]
    trained: list[int] = []
    return {"dataloader": batches, "trained": trained, "train_step": lambda batch: trained.extend(_items(batch))}


def _items(batch: Any) -> list[int]:
    return batch.features["item"].values().tolist()


def windows_hold_every_row(names: dict[str, Any]) -> None:
    """The items of all ranks have been trained, in as many steps on both, whose loads are nearly even."""
    own = [item for batch in names["dataloader"] for item in _items(batch)]
    assert sorted(of_all(names["trained"])) == sorted(of_all(own))
    window = names["batches"].last_window
    assert (window.window, window.steps) == (1, 3) and window.imbalance_after < window.imbalance_before
    assert names["stats"].window == 3


def rows_of_known_length() -> dict[str, Any]:
    """A map-style data set that knows the lengths of its rows."""
    lengths = (torch.arange(40) * 7 % 40 + 1).tolist()
    return {"lengths": lengths, "dataset": list(range(40)), "dist": dist}


def every_row_is_read_once(names: dict[str, Any]) -> None:
    """The ranks read every row once, in steps of equal cost."""
    steps = [batch.tolist() for batch in names["loader"]]
    assert sorted(of_all([row for batch in steps for row in batch])) == list(range(40))
    work = [sum(int(names["workloads"][row]) for row in batch) for batch in steps]
    both = of_all(work)
    assert all(abs(a - b) <= 0.02 * a for a, b in zip(both[: len(work)], both[len(work) :]))


def options_are_those_of_the_shuffler(names: dict[str, Any]) -> None:
    """The shuffler has the options, and works."""
    shuffler = names["shuffler"]
    assert (shuffler.options.slack, shuffler.options.min_gain) == (0.05, 0.02)
    batch = models.make_batch([1 + dist.get_rank(), 3], 2)
    assert sorted(of_all(shuffler.shuffle(batch).sample_id.tolist())) == sorted(of_all(batch.sample_id.tolist()))


def mine_is_registered(names: dict[str, Any]) -> None:
    """The block's shuffler is there under its name, and moves rows by its workloads."""
    (name,) = (each for each in evenrank.BatchShufflerFactory.list_available() if each.startswith("mine"))
    try:
        shuffler = evenrank.BatchShufflerFactory.create(name, options=evenrank.ShufflerOptions(verify=True))
    finally:
        evenrank.BatchShufflerFactory.unregister(name)
    ids = [[3, 4, 5], [1000, 2000, 3000]][dist.get_rank()]
    batch = models.make_batch(ids, 3, longest=40)
    workloads = shuffler.get_workloads(batch)
    lengths = batch.features["item"].lengths()
    assert workloads.dtype == torch.int64 and workloads.shape == (3,)
    assert workloads.argsort().tolist() == lengths.argsort().tolist()
    try:
        rows = shuffler.shuffle(batch).sample_id.tolist()
        assert sorted(of_all(rows)) == sorted(of_all(ids))
    finally:
        shuffler.close()


@dataclass
class _Output:
    loss_sum: torch.Tensor
    num_loss_tokens: int


class _ItemModel(nn.Module):
    """Tells the first label of every row from the mean of its items."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.items = nn.EmbeddingBag(100, hidden_size, mode="mean")
        self.head = nn.Linear(hidden_size, 1)

    def forward(self, batch: Any) -> tuple[torch.Tensor, _Output]:
        rows, items = batch.actual_batch_size, batch.features[batch.item_feature_name]
        scores = self.head(self.items(items.values().long() % 100, items.offsets()[:-1].long()))[:rows, 0]
        loss_sum = (scores - 1).square().sum()
        return evenrank.global_mean_loss(loss_sum, rows), _Output(loss_sum.detach(), rows)


def a_model() -> dict[str, Any]:
    """A model of the user's own."""
    return {"MyModel": _ItemModel}


def recipe_trains(names: dict[str, Any]) -> None:
    """The recipe of the block is trained, evaluated and simulated."""
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


def a_step_was_balanced() -> dict[str, Any]:
    """A step of a pipeline, and a folder for what is written."""
    folder = Path(tempfile.mkdtemp())
    with contextlib.closing(_RowsShuffler()) as shuffler:
        shuffler.shuffle(models.make_batch([dist.get_rank() + 1], 1))
    return {"Path": lambda name: folder / name, "pipeline": SimpleNamespace(last_stats=shuffler.last_stats)}


def its_stats_are_in_the_file(names: dict[str, Any]) -> None:
    """A line of them."""
    path = names["Path"]("shuffle.jsonl")
    (line,) = path.read_text(encoding="utf-8").splitlines()
    assert json.loads(line) == json.loads(json.dumps(names["pipeline"].last_stats.to_dict()))
    shutil.rmtree(path.parent)


def a_step_was_timed() -> dict[str, Any]:
    """A balanced step, and how long the rank's own work on it took."""
    shuffler = _RowsShuffler()
    shuffler.shuffle(models.make_batch([dist.get_rank() + 1], 1))
    pipeline = SimpleNamespace(last_stats=shuffler.last_stats)
    return {"shuffler": shuffler, "pipeline": pipeline, "milliseconds": 0.5 * (1 + dist.get_rank())}


def speeds_are_known(names: dict[str, Any]) -> None:
    """With the next batch, those of all ranks."""
    names["shuffler"].shuffle(models.make_batch([dist.get_rank() + 1], 1))
    assert names["shuffler"].last_stats.rank_speeds == (2.0, 1.0)


class _RowsShuffler(evenrank.BaseTaskBalancedBatchShuffler):
    """A row is a row."""

    def get_workloads(self, batch: Any) -> torch.Tensor:
        return torch.ones(batch.batch_size, dtype=torch.int64)


@dataclass
class _UserBatch(evenrank.BaseBatch):
    user_id: torch.Tensor = field(kw_only=True)


def rows_of_users() -> dict[str, Any]:
    """A shuffler of one's own."""
    return {"MyBatchShuffler": _RowsShuffler, "ShufflerOptions": evenrank.ShufflerOptions}


def users_are_together(names: dict[str, Any]) -> None:
    """Rows of a user, which lie on both ranks, end on one of them."""
    batch = models.make_batch([1, 2, 3, 4], 4)
    users = {name: value for name, value in vars(batch).items() if name not in ("sample_id", "target")}
    result = names["shuffler"].shuffle(_UserBatch(**users, user_id=torch.tensor([7, 8, 7, 9])))
    own = result.user_id[: result.actual_batch_size].tolist()
    assert sorted(of_all(sorted(set(own)))) == [7, 8, 9] and sorted(of_all(own)) == [7, 7, 7, 7, 8, 8, 9, 9]


@dataclass(frozen=True)
class _Ranks:
    """The fixture `ranks`, as seen from the ranks."""

    world_size: int

    def run(self, function: Any) -> list[Any]:
        return of_all([function()])


def ranks_add_up(names: dict[str, Any]) -> None:
    """The test passes, and would fail for another sum."""
    names["test_all_ranks_add_up"](_Ranks(dist.get_world_size()))
    assert names["_sum_of_ranks"]() == 1


def token_rows(lengths: list[int], seed: int) -> dict[str, torch.Tensor]:
    """Token ids padded on the right to the longest row, and their mask."""
    mask = torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(1)
    ids = torch.randint(1, 5, mask.shape, generator=torch.Generator().manual_seed(seed)) * mask
    return {"input_ids": ids, "attention_mask": mask.long()}


def score_rows(rows: dict[str, torch.Tensor]) -> torch.Tensor:
    """A number per row that does not depend on its padding, and differs between rows."""
    places = torch.arange(1, rows["input_ids"].shape[1] + 1)
    return (rows["input_ids"] * places * rows["attention_mask"]).sum(1)


def with_labels(rows: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The rows with labels as a collator of Hugging Face makes them: -100 where there is padding."""
    return rows | {"labels": torch.where(rows["attention_mask"] != 0, rows["input_ids"], -100)}


def same_loss(dealt: list[dict[str, torch.Tensor]], plain: list[dict[str, torch.Tensor]]) -> None:
    """Hugging Face's loss of what the ranks were dealt, over as many labels, is that of the rows as they were."""

    def loss_and_labels(rows: dict[str, torch.Tensor]) -> tuple[float, int]:
        logits = torch.rand(5, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)[rows["input_ids"]]
        labels = rows["labels"][:, 1:].flatten()
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), labels, ignore_index=-100, reduction="sum")
        return float(loss), int((rows["labels"] != -100).sum())

    (losses, labels), (of_plain, labels_of_plain) = (
        map(sum, zip(*of_all([loss_and_labels(rows) for rows in each]))) for each in (dealt, plain)
    )
    assert labels == labels_of_plain > 0 and abs(losses - of_plain) < 1e-9 * of_plain


def padded_rows() -> dict[str, Any]:
    """A batch of padded rows, and a model that scores them."""
    return {"batch": token_rows([3, 40, 5, 7, 30, 2, 9, 12, 1, 25, 8, 6], seed=1), "model": score_rows}


def predictions_in_order(names: dict[str, Any]) -> None:
    """One prediction per row, in the order of the batch."""
    assert names["predictions"].tolist() == score_rows(names["batch"]).tolist()
    assert len(names["chunks"]) == 8 and names["chunks"].imbalance < 2


def rows_of_ranks() -> dict[str, Any]:
    """A batch on rank 0, and rollouts that every rank has padded to its own longest."""
    rank = dist.get_rank()
    whole = {"batch": with_labels(padded_rows()["batch"])}
    task = evenrank.SelfAttentionTask(hidden_size=64, num_heads=4, head_dim=16)
    lengths = [[90, 80, 70, 60, 50], [3, 2, 4]][rank]
    return {
        "task": task,
        "model": score_rows,
        "batch_or_none": whole["batch"] if rank == 0 else None,
        "workloads_or_none": task.get_workloads(whole["batch"]["attention_mask"].sum(1)) if rank == 0 else None,
        "rollouts": with_labels(token_rows(lengths, seed=2 + rank)),
    }


def results_came_home(names: dict[str, Any]) -> None:
    """Scores are back where their rows come from, and no share is wider than its longest row."""
    if names["batch_or_none"] is None:
        assert names["results"] is None
    else:
        assert names["results"].tolist() == score_rows(names["batch_or_none"]).tolist()
    assert names["rewards"].tolist() == score_rows(names["rollouts"]).tolist()
    assert names["moved"].num_moved > 0
    for batch in (names["share"].batch, names["moved"].batch):
        assert batch["input_ids"].shape[1] == int(batch["attention_mask"].sum(1).max())
    same_loss([names["share"].batch], [] if names["batch_or_none"] is None else [names["batch_or_none"]])
    same_loss([names["moved"].batch], [names["rollouts"]])


def images_and_texts() -> dict[str, Any]:
    """Images of this rank with what they cost, and a model of two parts."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    encoder, decoder = nn.Linear(3, 2).double(), nn.Linear(4, 1).double()
    images, texts = (torch.randn(4, width, dtype=torch.float64) * (rank + 1) for width in (3, 2))

    def decode(features: torch.Tensor, texts: torch.Tensor) -> torch.Tensor:
        return decoder(torch.cat([features, texts], dim=1)).sin().sum()

    return {"images": images, "image_cost": [9 * rank + 1] * 4, "encoder": encoder, "decoder": decode, "texts": texts}


def gradients_are_those_of_rows_that_stay(names: dict[str, Any]) -> None:
    """Summed over the ranks, of the encoder; and rows have moved."""
    encoder, stays = names["encoder"], nn.Linear(3, 2).double()
    stays.load_state_dict(encoder.state_dict())
    names["decoder"](stays(names["images"]), names["texts"]).backward()
    assert names["moved"].num_moved > 0
    for found, expected in zip(encoder.parameters(), stays.parameters()):
        for gradient in (found.grad, expected.grad):
            dist.all_reduce(gradient)
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-10, atol=1e-12)


class _LanguageModel(nn.Module):
    """Logits of every place, `(rows, width, 5)`."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(5, 5, dtype=torch.float64)

    def forward(self, rows: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.tokens(rows["input_ids"])


def language_model() -> dict[str, Any]:
    """A model, and rows of which the longest fills a micro-batch and has no label."""
    torch.manual_seed(0)
    batch = token_rows([16000, 3000, 5000, 200][dist.get_rank() :], seed=dist.get_rank())
    batch = with_labels(batch)
    batch["labels"][0] = -100
    return {"model": _LanguageModel(), "batch": batch}


def whole_gradient(names: dict[str, Any]) -> None:
    """The averaged gradient is that of one process over the rows of all ranks, of which one had no label."""
    assert dist.get_rank() == 1 or 0 in names["micro_batches"].loss_tokens
    _gradient_is_of_all_rows(names)


def rows_to_pack() -> dict[str, Any]:
    """What the block before has made, and what a row costs."""
    given = language_model()
    lengths = given["batch"]["attention_mask"].sum(1)

    def loss_sum(model: nn.Module, rows: dict[str, torch.Tensor]) -> torch.Tensor:
        logits, labels = model(rows)[:, :-1], rows["labels"][:, 1:]
        return cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")

    return given | {
        "task": evenrank.SelfAttentionTask(hidden_size=64, num_heads=4, head_dim=16),
        "spec": evenrank.MicroBatchSpec(max_tokens_per_mb=16384, packing_algorithm="refined"),
        "lengths": lengths,
        "terms": evenrank.count_loss_tokens(given["batch"]["labels"]),
        "loss_sum": loss_sum,
        "score": score_rows,
    }


def padded_groups_hold_every_row(names: dict[str, Any]) -> None:
    """Every row is in one group; no group exceeds its cost, and rows dealt in turn would cost as much or more."""
    lengths, work = names["lengths"].tolist(), names["task"].get_workloads(names["lengths"]).tolist()
    for groups in (names["groups"], names["work"]):
        assert sorted(row for group in groups for row in group) == list(range(len(lengths)))
    assert max(len(group) * max(lengths[row] for row in group) for group in names["groups"]) <= 16384
    costliest = max(len(group) * max(work[row] for row in group) for group in names["work"])
    in_turn = [work[begin::2] for begin in range(2)]
    assert len(names["work"]) == 2 and costliest <= max(len(rows) * max(rows) for rows in in_turn)


def even_by_index(names: dict[str, Any]) -> None:
    """The gradient is that of all rows, scores are back where their rows are, and both ranks know how even it was."""
    _gradient_is_of_all_rows(names)
    same_loss(list(names["micro_batches"]), [names["batch"]])
    assert names["scores"].tolist() == score_rows(names["batch"]).tolist()
    assert max(names["micro_batches"].num_tokens) <= 16384
    assert len(names["evenness"]) == len(names["micro_batches"]) and min(names["evenness"]) >= 1


def _gradient_is_of_all_rows(names: dict[str, Any]) -> None:
    model = names["model"]
    reached = model.tokens.weight.grad.clone()
    dist.all_reduce(reached)
    reached /= dist.get_world_size()
    model.zero_grad()
    losses = []
    for rows in of_all([names["batch"]]):
        labels = rows["labels"][:, 1:].flatten()
        losses.append(cross_entropy(model(rows)[:, :-1].flatten(0, 1), labels, ignore_index=-100, reduction="none"))
    terms = sum(int((rows["labels"][:, 1:] != -100).sum()) for rows in of_all([names["batch"]]))
    (torch.cat(losses).sum() / terms).backward()
    assert bool(reached.isfinite().all()) and float(model.tokens.weight.grad.abs().max()) > 1e-3
    assert float((reached - model.tokens.weight.grad).abs().max()) < 1e-12


def resiliency_extension() -> dict[str, Any]:
    """Its module with the one class that the text derives from: the package itself is for GPUs."""
    name = "nvidia_resiliency_ext"
    for part in (name, f"{name}.inprocess", f"{name}.inprocess.abort"):
        sys.modules[part] = types.ModuleType(part)
    sys.modules[f"{name}.inprocess.abort"].Abort = type("Abort", (abc.ABC,), {})  # type: ignore[attr-defined]
    return {}


def abort_ends_a_wait(names: dict[str, Any]) -> None:
    """A rank that waits for the other one comes home, and the groups serve a new shuffler."""
    for part in [each for each in sys.modules if each.startswith("nvidia_resiliency_ext")]:
        del sys.modules[part]
    aborts, state = names["AbortShuffler"](), object()
    assert aborts(state) is state  # before there is a shuffler
    options = evenrank.ShufflerOptions(timeout=60.0)
    aborts.shuffler = evenrank.BatchShufflerFactory.create("tokens", options=options)
    if dist.get_rank() == 0:
        handle = aborts.shuffler.start_shuffle(models.make_batch([1], 1))
        threading.Timer(0.2, aborts, [state]).start()
        _, error = attempt(lambda: handle.has_ended())
        assert isinstance(error, evenrank.ShufflerAbortedError)
    dist.barrier()
    aborts(state)
    again = evenrank.BatchShufflerFactory.create("tokens", options=options)
    assert again.shuffle(models.make_batch([1], 1)).actual_batch_size == 1
    again.close()


def tiny_config() -> dict[str, Any]:
    """Settings of a run of six steps, as a config file holds them."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    flags = [*TINY, "--trainer.enable-balanced-shuffler", "--trainer.run-dir", folder[0]]
    return {"config": asdict(load_config(TrainConfig, flags))}


def one_rank_trained(names: dict[str, Any]) -> None:
    """And the process group is still there."""
    assert names["summary"].steps == 6 and dist.is_initialized()


def train_in(folder: str, script: str, arguments: list[str]) -> None:
    """A training script of ours on this rank, as torchrun starts it, but in the process group that there is."""
    module = importlib.import_module(script)
    before = Path.cwd()
    os.chdir(folder)
    try:
        module.train(load_config(module.TrainConfig, arguments, prog=script))
    finally:
        os.chdir(before)


def of_all(items: list[Any]) -> list[Any]:
    """The items of all ranks, in the order of the ranks."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, items)
    return [item for part in gathered for item in part]
