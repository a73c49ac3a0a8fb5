"""HSTU on parquet files of one's own, from the example config: what decides an action is learnt."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from commons.cli.main import main
from commons.trainer.config.load import load_config
from commons.trainer.run import run_training
from hstu.recipe import HSTURecipe
from hstu.train_config import TrainConfig
from tests.helpers.jobs.programs import ROOT
from tests.helpers.ranks.faults import error_of

CONFIG = ROOT / "hstu" / "configs" / "parquet.toml"
SMALL = [
    *("--trainer.device", "cpu", "--trainer.sinks", "--trainer.train-batch-size", "4"),
    *("--trainer.num-epochs", "5", "--dataset.max-history-seqlen", "24"),
    *("--model.hidden-size", "16", "--model.num-layers", "1", "--model.num-attention-heads", "2"),
]


def write_log(folder: Path, first_item: int = -3) -> None:
    """Events in two files, in no order; a click tells by the item, a like by the user's gender."""
    rng = np.random.default_rng(0)
    folder.mkdir(exist_ok=True)
    for number in range(2):
        users, items = 1 + (rng.pareto(1.2, 1_000) * 5).astype(int) % 60, rng.integers(0, 40, 1_000)
        columns = {
            "uid": [f"user-{user}" for user in users],
            "iid": items * 10**9 + first_item,
            "ts": pa.array(rng.integers(0, 10**9, 1_000), pa.timestamp("s")),
            "click": items % 2 == 0,
            "like": (users % 3 == 0).astype(np.int8),
            "gender": [[None, "f", "m"][user % 3] for user in users],
        }
        pq.write_table(pa.table(columns), folder / f"{number}.parquet")


class Kept(HSTURecipe):
    """Keeps the model."""

    def build_model(self):
        self.model = super().build_model()
        return self.model


def train(tmp_path: Path, *flags: str) -> tuple[int, dict[str, float], list[str]]:
    """Steps, metrics, and the features that have a table."""
    arguments = ["--config", str(CONFIG), "--dataset.dataset-path", str(tmp_path / "data"), *SMALL, *flags]
    config = load_config(TrainConfig, [*arguments, "--trainer.run-dir", str(tmp_path / f"run-{len(flags)}")])
    recipe = Kept(config, torch.device("cpu"))
    summary = run_training(recipe)
    tables = sorted({name.split(".")[-2] for name in recipe.model.state_dict() if "embeddings" in name})
    return summary.steps, summary.metrics, tables


@pytest.mark.slow
def test_ranking_and_retrieval(two_ranks, tmp_path):
    write_log(tmp_path / "log")
    arguments = ["--config", str(CONFIG), "--source", str(tmp_path / "log"), "--output", str(tmp_path / "data")]
    assert main(["preprocess", "parquet", *arguments, "--test-fraction", "0.3"]) == 0
    steps, metrics, tables = two_ranks.run(train, tmp_path)[0]
    assert steps > 10 and tables == ["actions", "gender", "iid"]
    assert metrics["eval_auc_task_0"] > 0.9 and metrics["eval_auc_task_1"] > 0.9
    # Without actions: no table for them, and nothing to rank by.
    retrieval = ["--task", "retrieval", "--trainer.eval-metrics", "HR@10", "--trainer.max-train-iters", "3"]
    steps, metrics, tables = two_ranks.run(train, tmp_path, *retrieval, "--dataset.columns.actions")[0]
    assert steps == 3 and 0 < metrics["eval_HR@10"] <= 1 and tables == ["gender", "iid"]
    (error,) = set(two_ranks.run(error_of, train, tmp_path, "--dataset.columns.actions"))
    said = "task is 'ranking' and the data have no actions; ranking predicts them: set dataset.columns"
    assert error.startswith("ValueError: ") and said in error


@pytest.mark.slow
def test_a_checkpoint_fits_only_data_with_the_same_ids(two_ranks, tmp_path):
    """Data made again with other items or actions, equally many: an id would have the weights of another one."""
    preprocess = ["preprocess", "parquet", "--source", str(tmp_path / "log"), "--output", str(tmp_path / "data")]
    columns = "--columns.user uid --columns.item iid --columns.time ts --columns.context gender --columns.actions"

    def make_data(first_item: int, *actions: str) -> None:
        write_log(tmp_path / "log", first_item)
        assert main([*preprocess, "--test-fraction", "0.3", *columns.split(), *(actions or ("click", "like"))]) == 0

    saves = ["--trainer.ckpt-save-interval", "2", "--trainer.ckpt-save-dir", str(tmp_path / "checkpoints")]
    make_data(-3)
    assert two_ranks.run(train, tmp_path, *saves, "--trainer.max-train-iters", "2")[0][0] == 2
    resumes = [*saves, "--trainer.ckpt-load-dir", str(tmp_path / "checkpoints"), "--trainer.max-train-iters"]
    make_data(-2)
    (error,) = set(two_ranks.run(error_of, train, tmp_path, *resumes, "4"))
    assert "was written with vocabulary_digests.iid = " in error and "a checkpoint fits only" in error
    make_data(-3)
    swapped = ["--dataset.columns.actions", "like", "click"]
    (error,) = set(two_ranks.run(error_of, train, tmp_path, *resumes, "4", *swapped))
    assert "was written with vocabulary_digests.labels = 'click, like', this run has 'like, click'" in error
    make_data(-3, "like", "click")
    (error,) = set(two_ranks.run(error_of, train, tmp_path, *resumes, "4"))
    assert "was written with vocabulary_digests.actions = 'click, like', this run has 'like, click'" in error
    make_data(-3)
    assert two_ranks.run(train, tmp_path, *resumes, "4")[0][0] == 4
