"""Retrieval and ranking of several tasks on several ranks: the same numbers on any of them, training from a config."""

from __future__ import annotations

import functools
import math
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import Dataset

from benchmarks.raw_data.movielens import generate_movielens
from commons.datasets.hstu_batch import FeatureConfig, HSTUBatch, padded_kjt
from commons.datasets.loader.resumable import ResumableLoader
from commons.datasets.public.movielens import preprocess_movielens
from commons.datasets.samplers.epoch import ShardedBatchSampler
from commons.distributed.batch_shuffler import IdentityBalancedBatchShuffler
from commons.trainer import TrainerArgs
from commons.trainer.config.load import load_config
from commons.trainer.evaluation import Evaluation
from commons.trainer.optimize.loss_scaling import LossScaler
from commons.trainer.run import run_training
from hstu import HSTUBalancedBatchShuffler, recipe
from hstu.metrics import RankingMetrics
from hstu.model import HSTUConfig, RankingConfig, RetrievalConfig
from hstu.model.gathered_rows import gather_rows
from hstu.negatives import sample_negatives
from hstu.recipe import HSTURecipe
from hstu.retrieval_metrics import RetrievalMetrics
from hstu.sharding import build_distributed_model
from hstu.train_config import TrainConfig
from tests.helpers.jobs.run_folders import lines
from tests.helpers.models.hstu_models import model_of
from tests.helpers.pipelines.trainer_loops import Parts
from tests.helpers.ranks.faults import raised_by

CPU = torch.device("cpu")
NUM_ROWS, NUM_ITEMS = 45, 37
TABLES = {"user": 20, "item": NUM_ITEMS, "action": 4}
HSTU = HSTUConfig(hidden_size=8, num_layers=2, num_attention_heads=2, kv_channels=4, max_sequence_length=64)
CONFIGS = {
    "ranking": RankingConfig(HSTU, TABLES, (8, 2), 2),
    "retrieval": RetrievalConfig(HSTU, TABLES, "item", num_negatives=5, embedding_dims={"item": 4}),
}


class Rows(Dataset[HSTUBatch]):
    """The same users for every number of ranks; an item is the batch of the rows asked for, padded."""

    def __init__(self, batch_size: int) -> None:
        self._batch_size = batch_size
        self._everything = HSTUBatch.random(
            NUM_ROWS,
            [FeatureConfig(["user"], [20], 1, False), FeatureConfig(["item", "action"], [NUM_ITEMS, 4], 15, True)],
            "item",
            ["user"],
            "action",
            num_tasks=2,
            device="cpu",
            generator=torch.Generator().manual_seed(0),
        )

    def __getitem__(self, rows: list[int]) -> HSTUBatch:
        chosen = self._everything.index_select(rows)

        def pad(kjt):
            parts = kjt.to_dict()
            values = {key: part.values() for key, part in parts.items()}
            return padded_kjt(values, {key: part.lengths() for key, part in parts.items()}, self._batch_size)

        fields = vars(chosen) | {"features": pad(chosen.features), "labels": pad(chosen.labels)}
        return HSTUBatch(**fields | {"batch_size": self._batch_size, "actual_batch_size": len(rows)})


def fill(model) -> None:
    """The same weights however the tables are cut; two items with equal embeddings."""
    with torch.no_grad():
        for name, value in sorted(model.state_dict().items()):
            shards = value.local_shards() if hasattr(value, "local_shards") else None
            for first, part in (
                [(s.metadata.shard_offsets[0], s.tensor) for s in shards] if shards is not None else [(0, value)]
            ):
                if not part.is_floating_point():
                    continue
                rows = torch.arange(first, first + part.shape[0]) if part.dim() else torch.zeros(())
                if name.endswith("item.weight"):
                    rows = torch.where(rows == 11, 3, rows)
                columns = torch.arange(part[0].numel()) if part.dim() > 1 else torch.zeros(1)
                whole = torch.sin(1.7 * rows[:, None] + 2.3 * columns + len(name)) if part.dim() else torch.ones(1, 1)
                part.copy_(whole.view(part.shape))


def evaluate_rows(task, sharding, balanced=False):
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    config = CONFIGS[task]
    model = model_of(config, plain_embeddings=sharding is None)
    if sharding is not None:
        model = build_distributed_model(model, device=CPU, sharding=sharding, local_world_size=world_size)
    fill(model)
    popularity = torch.arange(NUM_ITEMS) % 7
    if task == "ranking":
        metrics = RankingMetrics(2, popularity=popularity)
    else:
        names = ["HR@3", "NDCG@3", "NDCG@20"]
        metrics = RetrievalMetrics(model, "item", names, temperature=0.1, popularity=popularity)
    sampler = ShardedBatchSampler(NUM_ROWS, 4, rank=rank, world_size=world_size)
    loader = ResumableLoader(Rows(4), sampler)
    if task == "retrieval":
        loader = sample_negatives(loader, config.negatives_feature_name, 0, NUM_ITEMS, seed=0)
    if not dist.is_initialized():
        model.eval()
        for batch in loader:
            with torch.no_grad():
                metrics.update(model(batch)[1])
        return metrics.compute()
    shuffler = HSTUBalancedBatchShuffler(8, 2, 4, 2) if balanced else IdentityBalancedBatchShuffler()
    recipe = Parts(TrainerArgs(1, 1), model, None, (), None, metrics=metrics)
    results = Evaluation(recipe, model, loader, shuffler).run()
    shuffler.close()
    assert results.pop("rows") == NUM_ROWS
    if task == "ranking":
        results.pop("loss")
    return results


@pytest.mark.parametrize(
    ("task", "sharding", "balanced"),
    [
        ("ranking", "row_wise", True),
        ("retrieval", None, False),
        ("retrieval", "row_wise", True),
        ("retrieval", "table_wise", False),
    ],
)
def test_metrics_do_not_depend_on_the_number_of_ranks(ranks, task, sharding, balanced):
    alone = evaluate_rows(task, None)
    assert all(0 < value < 1 for name, value in alone.items() if name != "loss")
    for results in ranks.run(evaluate_rows, task, sharding, balanced):
        assert results == pytest.approx(alone, rel=1e-6, abs=1e-9)


def gather_and_use(counts):
    rank = dist.get_rank()
    values = (torch.arange(counts[rank] * 2.0).view(-1, 2) + 100 * rank).requires_grad_()
    everything = gather_rows(values)
    (everything * (rank + 1)).sum().backward()
    return everything.detach(), values.grad


@pytest.mark.parametrize("counts", [[3, 0, 1, 2], [0, 0, 0, 0]])
def test_gathered_rows_have_the_gradients_of_all_ranks(ranks, counts):
    answers = ranks.run(gather_and_use, counts)
    world_size = ranks.world_size
    expected = [torch.arange(counts[rank] * 2.0).view(-1, 2) + 100 * rank for rank in range(world_size)]
    for rank, (everything, grad) in enumerate(answers):
        assert torch.equal(everything, torch.cat(expected))
        assert torch.equal(grad, torch.full((counts[rank], 2), world_size * (world_size + 1) / 2))


# ---------------------------------------------------------------------------------------------------------- learning


@pytest.fixture(scope="module")
def generated_movielens(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ml-1m")
    preprocess_movielens(generate_movielens(folder / "raw", num_users=500, seed=1).path, folder, test_fraction=0.2)
    return folder


@pytest.mark.slow
def test_ranking_on_generated_movielens_beats_popularity(two_ranks, generated_movielens, tmp_path):
    flags = ["--dataset.dataset-name", "ml-1m", "--dataset.dataset-path", str(generated_movielens)]
    flags += ["--dataset.shuffle", "--trainer.train-batch-size", "16", "--trainer.num-epochs", "3"]
    flags += ["--dataset.max-history-seqlen", "64", "--model.hidden-size", "32", "--model.kv-channels", "16"]
    flags += ["--trainer.eval-interval", "1000", "--optimizer.dense-lr", "2e-3", "--optimizer.embedding-lr", "0.05"]
    _, _, metrics = two_ranks.run(run_config, flags, tmp_path)[0]
    assert metrics["eval_auc_task_0"] > 0.05 + metrics["eval_popularity_auc_task_0"] > 0.5


# ------------------------------------------------------------------------------------------------ runs from a config

RUN = [
    *("--trainer.train-batch-size", "5", "--trainer.eval-batch-size", "3", "--trainer.device", "cpu"),
    *("--trainer.log-interval", "4", "--trainer.eval-interval", "4", "--trainer.max-eval-iters", "2"),
    *("--trainer.eval-metrics", "HR@10", "NDCG@10", "--trainer.sinks", "--popularity-baseline"),
    *("--dataset.dataset-name", "random", "--dataset.num-batches", "8", "--dataset.max-history-seqlen", "12"),
    *("--model.hidden-size", "8", "--model.num-layers", "1", "--model.num-attention-heads", "2"),
    *("--model.kv-channels", "4", "--model.item-embedding-dim", "4", "--model.contextual-embedding-dim", "12"),
    *(
        "--trainer.enable-balanced-shuffler",
        "--optimizer.sharding",
        "row_wise",
        "--table-sharding",
        "age",
        "table_wise",
    ),
]


def run_config(flags, run_dir, loss_scale=2.0**16):
    config = load_config(TrainConfig, [*RUN, "--trainer.run-dir", str(run_dir), *flags])
    with mock.patch.object(recipe, "LossScaler", functools.partial(LossScaler, initial_scale=loss_scale)):
        summary = run_training(HSTURecipe(config, CPU))
    return summary.steps, summary.loss, summary.metrics


@pytest.mark.parametrize("compute_dtype", ["fp16", pytest.param("bf16", marks=pytest.mark.slow)])
def test_ranking_of_two_tasks_from_a_config(two_ranks, tmp_path, compute_dtype):
    flags = ["--dataset.num-tasks", "2", "--model.prediction-head-arch", "6", "2", "--dataset.max-num-candidates", "3"]
    flags += ["--model.contextual-mask", "--model.compute-dtype", compute_dtype, "--model.activation-checkpointing"]
    answers = two_ranks.run(run_config, flags, tmp_path)
    steps, loss, metrics = answers[0]
    assert answers[1] == answers[0] and steps == 8 and 0.5 < loss < 1
    names = {f"eval_{kind}auc_task_{task}" for kind in ("", "popularity_") for task in (0, 1)}
    errors = {f"{name}_se" for name in names}
    assert names | errors | {"eval_loss", "eval_rows"} == set(metrics)
    assert all(0 < metrics[f"eval_auc_task_{task}_se"] < 0.5 for task in (0, 1))
    assert all(0 < metrics[name] < 1 for name in names)
    assert metrics["eval_auc_task_0"] != metrics["eval_auc_task_1"]


@pytest.mark.parametrize(
    "negatives, compute_dtype", [("20", "fp16"), pytest.param("-1", "fp32", marks=pytest.mark.slow)]
)
def test_retrieval_from_a_config_and_resumed(two_ranks, tmp_path, negatives, compute_dtype):
    flags = ["--task", "retrieval", "--model.num-negatives", negatives, "--model.compute-dtype", compute_dtype]
    # So high that the first steps overflow: a resumed run has to go on with the scale that was found.
    scale = 2.0**28
    saving = ["--trainer.ckpt-save-interval", "4", "--trainer.ckpt-save-dir", str(tmp_path / "checkpoints")]
    steps, loss, metrics = two_ranks.run(run_config, [*flags, *saving], tmp_path, scale)[0]
    assert steps == 8 and np.isfinite(loss)
    judged = {f"eval_{prefix}{name}" for prefix in ("", "popularity_") for name in ("HR@10", "NDCG@10")}
    assert set(metrics) == judged | {f"{name}_se" for name in judged} | {"eval_loss", "eval_rows"}
    share, users = metrics["eval_HR@10"], metrics["eval_rows"]  # of all ranks together
    assert metrics["eval_HR@10_se"] == pytest.approx(math.sqrt(share * (1 - share) / users), abs=1e-9)
    # Resumed from the middle, the rest is the same: the negatives are those of the same rows.
    half = str(next(path for path in (tmp_path / "checkpoints").iterdir() if path.name.endswith("4")))
    again = two_ranks.run(run_config, [*flags, "--trainer.ckpt-load-dir", half], tmp_path / "resumed", scale)[0]
    assert again == (steps, loss, metrics)
    first = lines(tmp_path / "resumed")[0]
    assert first["step"] == 8
    scales = {line["step"]: line["loss_scale"] for line in lines(tmp_path) if "loss_scale" in line}
    assert (compute_dtype == "fp32" and not scales) or scales[8] == first["loss_scale"] < scales[4] < scale


def messages_of(cases, run_dir):
    return [raised_by(functools.partial(run_config, flags, run_dir)) for flags in cases]


def test_mistakes_are_named_on_every_rank(two_ranks, tmp_path):
    retrieval = ["--task", "retrieval"]
    cases = {
        "task is 'retrieval' and max_num_candidates is 2": [*retrieval, "--dataset.max-num-candidates", "2"],
        "is_causal is False and the batch has actions": ["--model.no-is-causal"],
        "prediction_head_arch is [64, 1], num_tasks is 2": ["--dataset.num-tasks", "2"],
        "compile is True and the device is 'cpu'": ["--model.compile", "True"],
        "the table of 'item_id' is 6 wide": ["--model.item-embedding-dim", "6"],
    }
    for messages in two_ranks.run(messages_of, list(cases.values()), tmp_path):
        for start, message in zip(cases, messages):
            assert start in message and "\n" not in message, (start, message)


def counted_features():
    flags = ["--shuffler-type", "tokens", "--model.time-bias", "--task", "retrieval", "--model.num-negatives", "7"]
    recipe = HSTURecipe(load_config(TrainConfig, [*RUN, *flags]), CPU)
    shuffler = recipe.build_shuffler(balances=True)
    shuffler.close()
    return shuffler.feature_names, recipe.loaders[0].dataset.dataset[0].features.keys()


def test_times_and_negatives_are_no_tokens_to_balance(two_ranks):
    (counted, loaded), _ = two_ranks.run(counted_features)
    assert set(loaded) - set(counted) == {"timestamp"} and len(counted) == len(loaded) - 1
