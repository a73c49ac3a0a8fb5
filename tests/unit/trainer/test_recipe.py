"""A recipe that says only what it has to."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch

from commons.cli import recipes
from commons.cli.main import main
from commons.perf_model.measurement import RowTokens
from commons.perf_model.task_estimator import SelfAttentionTask, training_flops
from commons.trainer import DatasetArgs, TrainerArgs
from commons.trainer.optimize.optimizers import OptimizerArgs
from commons.trainer.recipe import Recipe

CONFIG = """
[trainer]
train_batch_size = 4
eval_batch_size = 4
[dataset]
dataset_name = "random"
max_history_seqlen = 12
num_batches = 2
"""


@dataclass
class Config:
    trainer: TrainerArgs
    dataset: DatasetArgs
    optimizer: OptimizerArgs = field(default_factory=OptimizerArgs)
    shuffler_type: str = "tokens"


class Least(Recipe):
    config_class = Config
    task = SelfAttentionTask(8, 1, 8)

    def row_tokens(self, batch):
        return RowTokens(batch.features[batch.item_feature_name].lengths()[: batch.actual_batch_size])

    def build_model(self):
        raise NotImplementedError  # costs alone are asked of it


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.setattr(recipes, "import_user_module", lambda name: SimpleNamespace(RECIPE=Least))
    (tmp_path / "run.toml").write_text(CONFIG)
    return tmp_path / "run.toml"


def test_it_is_simulated(config, capsys):
    assert main(["simulate", "--config", str(config), "--ranks", "2", "--steps", "3"]) == 0
    assert "2 ranks × 4 rows, 3 steps" in " ".join(capsys.readouterr().out.split())


def test_calibrating_says_what_is_missing(config, tmp_path, capsys):
    assert main(["calibrate", "--config", str(config), "--output", str(tmp_path / "c.toml")]) == 2
    assert "Least has no make_batch, of which measured batches are made: define it" in capsys.readouterr().err
    with pytest.raises(ValueError, match="Least has no single_process_model, which is what is measured: define it"):
        Least.load(config, torch.device("cpu")).train_step(None)


def test_what_follows_from_its_tokens(config):
    recipe = Least.load(config, torch.device("cpu"))
    batch = next(recipe.host_batches())
    lengths = batch.features[batch.item_feature_name].lengths()
    assert recipe.flops(batch) == training_flops(int(recipe.task.get_workloads(lengths).sum()))
    assert recipe.num_tokens(batch) == batch.features.values().numel()
    assert (recipe.batch_size, recipe.max_length, recipe.fingerprint().keys()) == (4, 12, {"optimizer"})
