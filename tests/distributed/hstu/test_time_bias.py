"""A bias by time, end to end: from the data set's column to a loss that no shuffle changes, for both tasks."""

from __future__ import annotations

import pytest
import torch

from benchmarks.raw_data.kuairand import generate_kuairand
from commons.datasets.public.kuairand import VERSIONS, preprocess_kuairand
from commons.trainer.config.load import load_config
from commons.trainer.run import run_training
from hstu.recipe import HSTURecipe
from hstu.train_config import TrainConfig
from tests.helpers.run_folders import lines

VERSION = VERSIONS["kuairand-pure"]
RUN = [
    *("--trainer.train-batch-size", "4", "--trainer.eval-batch-size", "3", "--trainer.device", "cpu"),
    *("--trainer.log-interval", "1", "--trainer.max-train-iters", "6", "--trainer.eval-interval", "6"),
    *("--trainer.sinks", "--dataset.max-history-seqlen", "40", "--dataset.shuffle"),
    *("--model.hidden-size", "8", "--model.num-layers", "1", "--model.num-attention-heads", "2"),
    *("--model.kv-channels", "4", "--model.prediction-head-arch", "1", "--optimizer.sharding", "row_wise"),
]
TASKS = {
    "ranking": ["--dataset.max-num-candidates", "3"],
    "retrieval": ["--task", "retrieval", "--model.num-negatives", "7"],
}


@pytest.fixture(scope="module")
def datasets(tmp_path_factory):
    """Flags of data in milliseconds, and of random data."""
    folder = tmp_path_factory.mktemp("data")
    archive = generate_kuairand(VERSION, folder / "raw", num_users=60, seed=1)
    preprocess_kuairand(VERSION, archive.path, folder, test_fraction=0.1)
    return {
        "kuairand-pure": ["--dataset.dataset-name", "kuairand-pure", "--dataset.dataset-path", str(folder)],
        "random": ["--dataset.dataset-name", "random", "--dataset.num-batches", "6"],
    }


def run(flags, run_dir):
    config = load_config(TrainConfig, [*RUN, *flags, "--trainer.run-dir", str(run_dir)])
    return run_training(HSTURecipe(config, torch.device("cpu"))).metrics["eval_loss"]


def losses(run_dir):
    logged = lines(run_dir)
    return [line["loss"] for line in logged if "loss" in line], sum(line.get("rows_moved", 0) for line in logged)


@pytest.mark.parametrize(
    ("task", "data"), [("ranking", "kuairand-pure"), ("retrieval", "kuairand-pure"), ("retrieval", "random")]
)
def test_balanced_and_not(two_ranks, datasets, tmp_path, task, data):
    flags = [*TASKS[task], *datasets[data], "--model.time-bias"]
    evaluated = two_ranks.run(run, flags, tmp_path / "off")
    balanced = two_ranks.run(run, [*flags, "--trainer.enable-balanced-shuffler"], tmp_path / "on")
    (expected, _), (found, moved) = losses(tmp_path / "off"), losses(tmp_path / "on")
    assert len(expected) == 6 and moved > 3
    assert found == pytest.approx(expected, rel=1e-5)
    assert balanced == pytest.approx(evaluated, rel=1e-4)


def counted_features():
    flags = ["--dataset.dataset-name", "random", "--shuffler-type", "tokens", "--model.time-bias", *TASKS["retrieval"]]
    recipe = HSTURecipe(load_config(TrainConfig, [*RUN, *flags]), torch.device("cpu"))
    shuffler = recipe.build_shuffler(balances=True)
    shuffler.close()
    return shuffler.feature_names, recipe.loaders[0].dataset.dataset[0].features.keys()


def test_times_and_negatives_are_no_tokens_to_balance(two_ranks):
    (counted, loaded), _ = two_ranks.run(counted_features)
    assert set(loaded) - set(counted) == {"timestamp"} and len(counted) == len(loaded) - 1
