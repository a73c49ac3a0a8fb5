"""Retrieval and ranking of several tasks on several ranks: the same numbers on any of them, training from a config."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from benchmarks.raw_data.movielens import generate_movielens
from commons.datasets.public.movielens import preprocess_movielens
from commons.distributed.process_group import resolve_process_group
from commons.trainer.config.load import load_config
from commons.trainer.run import run_training
from hstu.metrics import RankingMetrics
from hstu.model import RetrievalConfig
from hstu.model.gathered_rows import gather_rows
from hstu.recipe import HSTURecipe
from hstu.retrieval_metrics import RetrievalMetrics
from hstu.sharding import build_distributed_model
from hstu.train_config import TrainConfig
from tests.distributed.hstu.test_model import CONFIG, HSTU, share
from tests.helpers.jobs.run_folders import lines
from tests.helpers.models.hstu_models import TABLES, model_of, random_batch
from tests.helpers.models.sid_models import model_parallel
from tests.helpers.ranks.faults import error_of
from tests.helpers.ranks.on_ranks import on_ranks, on_two_ranks

CPU = torch.device("cpu")
CONFIGS = {"ranking": CONFIG, "retrieval": RetrievalConfig(HSTU, TABLES, "item", embedding_dims={"item": 4})}


def evaluate_rows(task, sharding):
    """Metrics over three batches, of which each rank has a share, the last now and then none; two items are alike."""
    config, group = CONFIGS[task], resolve_process_group()
    ranks = 1 if group is None else dist.get_world_size(group)
    torch.manual_seed(0)
    model = model_of(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(torch.randn_like(weight))
            if name.endswith("embeddings.item.weight"):
                weight[11] = weight[3]
    if sharding is not None:
        model = build_distributed_model(model, device=CPU, sharding=sharding, local_world_size=dist.get_world_size())
    popularity = torch.arange(TABLES["item"]) % 7
    if task == "ranking":
        metrics = RankingMetrics(2, popularity=popularity)
    else:
        names = ["HR@3", "NDCG@3", "NDCG@20"]
        metrics = RetrievalMetrics(model, "item", names, temperature=0.1, popularity=popularity)
    model.eval()
    for seed in range(3):
        batch = random_batch(15, longest=20, seed=seed)
        batch = batch if task == "ranking" else dataclasses.replace(batch, labels=None)
        if dist.is_initialized():
            batch = share(batch, empty_rank=ranks - 1 if seed == 1 else None)
        with torch.no_grad():
            metrics.update(model(batch)[1])
    return metrics.compute()


def evaluate_with_peers(tensor_parallel_size, *arguments):
    """As `evaluate_rows`; tensor-parallel peers evaluate the same rows, and share the tables."""
    with model_parallel(tensor_parallel_size) if tensor_parallel_size > 1 else contextlib.nullcontext():
        return evaluate_rows(*arguments)


@pytest.mark.parametrize(
    ("task", "sharding", "tensor_parallel_size"),
    [
        ("ranking", "row_wise", 1),
        ("retrieval", None, 1),
        ("retrieval", "row_wise", 1),
        ("retrieval", "table_wise", 1),
        ("ranking", "row_wise", 2),
        ("retrieval", None, 2),
        ("retrieval", "row_wise", 2),
    ],
)
def test_metrics_do_not_depend_on_the_number_of_ranks(ranks, task, sharding, tensor_parallel_size):
    alone = evaluate_rows(task, None)
    assert all(0 < value < 1 for name, value in alone.items() if name != "loss")
    for results in ranks.run(evaluate_with_peers, tensor_parallel_size, task, sharding):
        assert results == pytest.approx(alone, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("counts", [[3, 0, 1, 2], [0, 0, 0, 0]])
@on_ranks
def test_gathered_rows_have_the_gradients_of_all_ranks(counts):
    size, of_ranks = dist.get_world_size(), [torch.arange(n * 2.0).view(-1, 2) + 100 * r for r, n in enumerate(counts)]
    values = of_ranks[dist.get_rank()].clone().requires_grad_()
    everything = gather_rows(values)
    (everything * (dist.get_rank() + 1)).sum().backward()
    assert torch.equal(everything, torch.cat(of_ranks[:size]))
    assert torch.equal(values.grad, torch.full_like(values, size * (size + 1) / 2))


RUN = (
    "--trainer.train-batch-size 5 --trainer.eval-batch-size 3 --trainer.device cpu --trainer.enable-balanced-shuffler "
    "--trainer.log-interval 4 --trainer.eval-interval 4 --trainer.max-eval-iters 2 --trainer.sinks "
    "--trainer.eval-metrics HR@10 NDCG@10 --popularity-baseline --dataset.dataset-name random --dataset.num-batches 8 "
    "--dataset.max-history-seqlen 12 --model.hidden-size 8 --model.num-layers 1 --model.num-attention-heads 2 "
    "--model.kv-channels 4 --model.item-embedding-dim 4 --model.contextual-embedding-dim 12 "
    "--optimizer.sharding row_wise --table-sharding age table_wise"
)


def run_config(flags, run_dir, loss_scale=2.0**16):
    config = load_config(TrainConfig, [*RUN.split(), "--trainer.run-dir", str(run_dir), *flags])
    scaler = functools.partial(torch.amp.GradScaler, init_scale=loss_scale)
    with mock.patch.object(torch.amp, "GradScaler", scaler):
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
    evaluated, first, _ = lines(tmp_path / "resumed")  # its log lacked the evaluation of the checkpoint's step
    assert evaluated in lines(tmp_path) and evaluated["step"] == 4 and first["step"] == 8
    scales = {line["step"]: line["loss_scale"] for line in lines(tmp_path) if "loss_scale" in line}
    assert (compute_dtype == "fp32" and not scales) or scales[8] == first["loss_scale"] < scales[4] < scale


@on_two_ranks
def test_mistakes_are_named_on_every_rank(tmp_path):
    retrieval = ["--task", "retrieval"]
    cases = {
        "task is 'retrieval' and max_num_candidates is 2": [*retrieval, "--dataset.max-num-candidates", "2"],
        "is_causal is False and batches have actions": ["--model.no-is-causal"],
        "contextual_mask is True and batches have no candidates": ["--model.contextual-mask"],
        "prediction_head_arch is [64, 1], num_tasks is 2": ["--dataset.num-tasks", "2"],
        "kernel_backend is 'triton' and the device is 'cpu'": ["--model.kernel-backend", "triton"],
        "the table of 'item_id' is 6 wide": ["--model.item-embedding-dim", "6"],
    }
    for said, flags in cases.items():
        text = error_of(run_config, flags, tmp_path)
        assert said in text and "\n" not in text, text
        assert not list(tmp_path.rglob("log.jsonl"))  # training has not started, and removed no earlier run


@on_two_ranks
def test_times_and_negatives_are_no_tokens_to_balance():
    flags = ["--model.time-bias", "--task", "retrieval", "--model.num-negatives", "7"]
    for name in ("tokens", "hstu"):
        recipe = HSTURecipe(load_config(TrainConfig, [*RUN.split(), *flags, "--shuffler-type", name]), CPU)
        shuffler = recipe.build_shuffler(balances=True)
        shuffler.close()
        counted, loaded = shuffler.token_feature_names, recipe.loaders[0].dataset.dataset[0].features.keys()
        assert set(loaded) - set(counted) == {"timestamp"} and len(counted) == len(loaded) - 1


@pytest.mark.slow
def test_ranking_on_generated_movielens_beats_popularity(two_ranks, tmp_path):
    raw = generate_movielens(tmp_path / "raw", num_users=500, seed=1).path
    preprocess_movielens(raw, tmp_path / "data", test_fraction=0.2)
    flags = ["--dataset.dataset-name", "ml-1m", "--dataset.dataset-path", str(tmp_path / "data")]
    flags += ["--dataset.shuffle", "--trainer.train-batch-size", "16", "--trainer.num-epochs", "3"]
    flags += ["--dataset.max-history-seqlen", "64", "--model.hidden-size", "32", "--model.kv-channels", "16"]
    flags += ["--trainer.eval-interval", "1000", "--optimizer.dense-lr", "2e-3", "--optimizer.embedding-lr", "0.05"]
    _, _, metrics = two_ranks.run(run_config, flags, tmp_path / "run")[0]
    assert metrics["eval_auc_task_0"] > 0.05 + metrics["eval_popularity_auc_task_0"] > 0.5
