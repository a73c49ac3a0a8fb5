"""HSTU from a config on the job's devices: both tasks, in every dtype, compiled or not, train and are evaluated."""

from __future__ import annotations

import functools
import math
from unittest import mock

import pytest
import torch

from commons.trainer.config.load import load_config
from commons.trainer.run import run_training
from hstu.recipe import HSTURecipe
from hstu.train_config import TrainConfig
from tests.helpers.models.torchrec_model import rank_device

RUN = [
    *("--trainer.train-batch-size", "6", "--trainer.eval-batch-size", "6", "--trainer.enable-balanced-shuffler"),
    *("--trainer.log-interval", "4", "--trainer.eval-metrics", "HR@10", "NDCG@10", "--trainer.sinks"),
    *("--dataset.dataset-name", "random", "--dataset.num-batches", "8", "--dataset.max-history-seqlen", "40"),
    *("--model.hidden-size", "32", "--model.num-layers", "2", "--model.num-attention-heads", "2"),
    *("--model.kv-channels", "16", "--optimizer.sharding", "row_wise"),
]


def run(device, run_dir, *flags, loss_scale=2.0**16):
    config = load_config(TrainConfig, [*RUN, "--trainer.run-dir", str(run_dir), *flags])
    scaler = functools.partial(torch.amp.GradScaler, init_scale=loss_scale)
    with mock.patch.object(torch.amp, "GradScaler", scaler):
        return run_training(HSTURecipe(config, rank_device(device)))


@pytest.mark.parametrize("task", ["ranking", "retrieval"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_narrow_dtypes_train_like_float32(device, tmp_path, task, dtype):
    # A scale so low that no step overflows: one that is left out would make the runs differ.
    flags = ["--task", task, "--model.num-negatives", "20", "--model.compute-dtype"]
    exact, narrow = (run(device, tmp_path, *flags, name, loss_scale=64.0) for name in ("fp32", dtype))
    assert exact.steps == narrow.steps == 8
    assert narrow.loss == pytest.approx(exact.loss, rel=0.05)


@pytest.mark.parametrize("task", ["ranking", "retrieval"])
def test_compiled_layers_train_alike(device, tmp_path, task):
    if device != "cuda":
        pytest.skip("needs CUDA: that is where layers are compiled")
    plain, compiled = (run(device, tmp_path, "--task", task, "--model.compile", asked) for asked in ("False", "None"))
    assert compiled.steps == plain.steps == 8
    assert compiled.loss == pytest.approx(plain.loss, rel=1e-3)


def test_every_option_of_the_layers(device, tmp_path):
    flags = ["--model.contextual-mask", "--model.position-bias", "bucketed", "--model.time-bias"]
    flags += ["--model.dropout", "0.1", "--model.activation-checkpointing", "--dataset.max-num-candidates", "4"]
    flags += ["--model.item-embedding-dim", "16", "--model.contextual-embedding-dim", "8"]
    summary = run(device, tmp_path, *flags)
    assert summary.steps == 8 and math.isfinite(summary.loss) and summary.shuffle
