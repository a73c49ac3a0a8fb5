"""A recipe that says only what it has to, the rows that its sampler deals, and the options and data of a demo."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from commons.cli import recipes
from commons.datasets import BalancedBatchSampler, BudgetBatchSampler
from commons.datasets.public.movielens import preprocess_movielens
from commons.datasets.samplers.epoch import Place
from commons.distributed.options import ShufflerOptions
from commons.perf_model.measurement import RowTokens
from commons.perf_model.task_estimator import AttentionTask, SelfAttentionTask, training_flops
from commons.trainer import DatasetArgs, TrainerArgs
from commons.trainer.data import RowsInTurn
from commons.trainer.demo import DemoOptions, choose_ranks, prepare_data
from commons.trainer.optimize.optimizers import OptimizerArgs, build_optimizer
from commons.trainer.recipe import Recipe
from tests.helpers.datasets.movielens import write_zip

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


def test_a_recipe_of_four_members_can_be_simulated(config, told):
    shown = told("simulate", "--config", str(config), "--ranks", "2", "--steps", "3")
    assert "2 ranks × 4 rows, 3 steps" in " ".join(shown.split())


class OwnTask(AttentionTask):
    def _pairs(self, seqlen, num_targets, num_contextual):
        return seqlen

    def forward_flops(self, tokens, pairs):
        return tokens + pairs


@pytest.mark.parametrize(("task", "kind"), [(SelfAttentionTask, "transformer"), (OwnTask, "OwnTask")])
def test_the_cost_of_a_row_has_the_name_of_its_task(config, monkeypatch, task, kind):
    config.write_text('shuffler_type = "identity"\n' + CONFIG)
    monkeypatch.setattr(Least, "task", task(8, 1, 8))
    source = recipes.read_config_rows(config, None, ShufflerOptions(), (2,), 1)
    assert source.task == f"{kind}, hidden 8, 1 layers, 1 heads × 8"


def test_a_recipe_that_cannot_be_calibrated_is_named_with_what_it_lacks(config, tmp_path, mistake):
    said = mistake("calibrate", "--config", str(config), "--output", str(tmp_path / "c.toml"))
    assert "Least has no make_batch; measurements train its batches: define it" in said
    with pytest.raises(ValueError, match="Least has no single_process_model; measurements train this model: define it"):
        Least.load(config, torch.device("cpu")).train_step(None)


def test_operations_and_tokens_of_a_batch_follow_from_the_tokens_of_its_rows(config):
    recipe = Least.load(config, torch.device("cpu"))
    batch = next(recipe.host_batches())
    lengths = batch.features[batch.item_feature_name].lengths()
    assert recipe.flops(batch) == training_flops(int(recipe.task.get_workloads(lengths).sum()))
    assert recipe.num_tokens(batch) == batch.features.values().numel()
    assert (recipe.batch_size, recipe.max_length, recipe.fingerprint().keys()) == (4, 12, {"optimizer"})


@pytest.mark.parametrize("kind", ["balanced", "budget"])
@given(rows=st.integers(4, 40), ranks=st.integers(1, 4), data=st.data(), drop_last=st.booleans())
def test_each_step_is_that_of_the_plan(kind, rows, ranks, data, drop_last):
    workloads = np.array(data.draw(st.lists(st.integers(1, 50), min_size=rows, max_size=rows)))
    place = Place(data.draw(st.integers(0, rows)))  # also where fewer rows than ranks are left
    options = {"num_ranks": ranks, "rank": 0, "drop_last": drop_last}
    if kind == "balanced":
        sampler = BalancedBatchSampler(workloads, 3, window=2, **options)
    else:
        sampler = BudgetBatchSampler(workloads, budget_per_rank=80, **options)
    in_turn = list(RowsInTurn(sampler, workloads, ranks).loads(1, place))
    planned = list(sampler.plan(1, place))
    assert len(in_turn) == len(planned)
    assert sum(int(each.sum()) for each in in_turn) == sum(int(workloads[step.rows].sum()) for step in planned)
    if kind == "budget":  # its steps are parts of the order
        assert [int(each.sum()) for each in in_turn] == [int(workloads[step.rows].sum()) for step in planned]


def test_options_of_a_demo_are_checked():
    assert DemoOptions(quick=True).steps < DemoOptions().steps
    with pytest.raises(ValueError, match="batch_size is 0"):
        DemoOptions(batch_size=0)
    assert choose_ranks("cpu") == (2, "device cpu: two ranks on the CPU (gloo, one thread each)")


def test_the_demo_replaces_no_data_of_ones_own(tmp_path):
    options = DemoOptions(run_dir=tmp_path)
    options.data_dir.mkdir()
    preprocess_movielens(write_zip(tmp_path / "ml-1m.zip"), options.data_dir)
    before = {path: path.stat().st_mtime_ns for path in options.data_dir.rglob("*")}
    with pytest.raises(FileExistsError, match="contains data that were not generated; .*: choose another --run-dir"):
        prepare_data(options)
    assert {path: path.stat().st_mtime_ns for path in options.data_dir.rglob("*")} == before


def test_the_optimizer_is_that_of_the_settings():
    model, settings = torch.nn.Linear(1, 1), {"dense_lr": 0.5, "adam_betas": (0.8, 0.9), "adam_eps": 1e-6}
    adam, sgd = (build_optimizer(model, OptimizerArgs(kind, **settings)) for kind in ("adam", "sgd"))
    assert isinstance(adam, torch.optim.Adam) and isinstance(sgd, torch.optim.SGD)
    assert {"lr": 0.5, "betas": (0.8, 0.9), "eps": 1e-6}.items() <= adam.defaults.items() and sgd.defaults["lr"] == 0.5
