"""Training a decoder: the same with the shuffler on and off, and on any ranks; resumed exactly; the demo as typed."""

from __future__ import annotations

import ast
import contextlib
import io
import re
import shutil
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist

from commons.datasets.sids.map import random_sid_map
from commons.distributed.process_group import resolve_process_group
from commons.run_log.reading import read_runs
from commons.trainer import DatasetArgs, TrainerArgs
from commons.trainer.optimize.optimizers import OptimizerArgs
from commons.trainer.run import run_training
from sid_gr.recipe import SIDGRRecipe
from sid_gr.train_config import ModelArgs, SIDArgs, TrainConfig
from tests.helpers.jobs.programs import ROOT, run_program
from tests.helpers.models.sid_models import CPU, build_sharded, heavy_tailed_batches, make_pipeline, model_parallel
from tests.helpers.models.torchrec_model import weights_of
from tests.helpers.pipelines.shuffled_pipelines import train_steps


def _train(folder, tensor_parallel_size, **changes):
    """Losses by step, metrics and weights of a run with dropout, with the shuffler on."""
    with model_parallel(tensor_parallel_size):
        trainer = TrainerArgs(
            4,
            3,
            run_dir=f"{folder}/run{dist.get_rank()}",
            log_interval=1,
            eval_interval=5,
            max_eval_iters=2,
            max_train_iters=8,
            ckpt_save_dir=f"{folder}/checkpoints",
            top_k_for_generation=5,
            eval_metrics=("HitRate@5", "NDCG@2"),
            sinks=(),
            enable_balanced_shuffler=True,
            **changes,
        )
        config = TrainConfig(
            trainer,
            DatasetArgs("sid-random", 12, max_num_candidates=2, num_batches=6, shuffle=True),
            SIDArgs(codebook_sizes=(6, 6, 6), num_random_items=50),
            ModelArgs(16, 2, dropout=0.2, tensor_model_parallel_size=tensor_parallel_size),
            OptimizerArgs(sharding="row_wise"),
        )
        models = []

        class Kept(SIDGRRecipe):
            def build_model(self):
                models.append(super().build_model())
                return models[0]

        summary = run_training(Kept(config, CPU))
        rows = 2 * 3 * dist.get_world_size(resolve_process_group())
        assert summary.metrics["eval_rows"] == rows  # tensor-parallel peers count the same users
        return summary.loss, summary.metrics, weights_of(models[0])


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "tensor_parallel_size"), [(2, 1), (2, 2), (4, 2)])
def test_a_resumed_run_is_the_run_that_was_never_stopped(rank_pools, tmp_path, world_size, tensor_parallel_size):
    ranks = rank_pools[world_size]
    whole = ranks.run(_train, str(tmp_path / "whole"), tensor_parallel_size, ckpt_save_interval=3)
    folder = tmp_path / "whole" / "checkpoints"
    for later in ("step_00000006", "step_00000008"):
        shutil.rmtree(folder / later)
    resumed = ranks.run(_train, str(tmp_path / "resumed"), tensor_parallel_size, ckpt_load_dir=str(folder))
    for (loss, metrics, weights), (same_loss, same_metrics, same_weights) in zip(whole, resumed):
        assert (loss, metrics) == (same_loss, same_metrics)
        assert weights.keys() == same_weights.keys()
        assert all(torch.equal(value, same_weights[name]) for name, value in weights.items())
        # What all ranks have alike stays alike: tensor-parallel peers drop the same elements.
        shared = [name for name in weights if "layers" not in name]
        assert len(shared) == 6 and all(torch.equal(weights[name], whole[0][2][name]) for name in shared)


@pytest.mark.slow
def test_a_checkpoint_of_another_tensor_parallel_size_is_refused(rank_pools, tmp_path):
    ranks = rank_pools[2]
    ranks.run(_train, str(tmp_path), 2, ckpt_save_interval=8)
    with pytest.raises(AssertionError, match="tensor_model_parallel_size = 2, this run has 1"):
        ranks.run(_train, str(tmp_path), 1, ckpt_load_dir=str(tmp_path / "checkpoints"))


def _train_on_own_data(folder, **trainer):
    """What is printed, and the metrics."""
    with model_parallel():
        config = TrainConfig(
            TrainerArgs(
                4,
                3,
                run_dir=f"{folder}/run{dist.get_rank()}",
                ckpt_save_interval=6,
                ckpt_save_dir=f"{folder}/checkpoints",
                sinks=(),
                **trainer,
            ),
            DatasetArgs("sid", 5, dataset_path=f"{folder}/histories.parquet", max_num_candidates=1, shuffle=True),
            SIDArgs(f"{folder}/sids.npy", (6, 6, 6), history_column="seen"),
            ModelArgs(16, 1),
            OptimizerArgs(sharding="row_wise"),
        )
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            summary = run_training(SIDGRRecipe(config, CPU))
        return printed.getvalue(), summary.steps, summary.metrics


# As docs/data.md describes it: the trained weights in one process, without a launcher.
EVALUATE = """
from pathlib import Path
import torch
from torch.distributed import checkpoint
from commons.trainer.data import open_loader
from sid_gr.recipe import SIDGRRecipe

recipe = SIDGRRecipe.load(Path("run0/config.json"), torch.device("cpu"))
assert recipe.model_config.max_items == 5 + 1
model = recipe.single_process_model().eval()
weights = {f"model/{name}": weight for name, weight in model.state_dict().items()}
checkpoint.load(weights, checkpoint_id="checkpoints/step_00000006", no_dist=True)
metrics = recipe.metrics(model)
for batch in open_loader("test", recipe.config.dataset, recipe.config.trainer, 3, **recipe.data_options()):
    output = model(batch)[1]
    found = model.generate(batch)
    assert torch.equal(found.leaves, output.generated.leaves)
    for row in recipe.trie.sids[found.leaves].flatten(0, -2).tolist():
        assert row in recipe.sid_map.codes.tolist()
    metrics.update(output)
print(metrics.compute())
"""


@pytest.mark.parametrize("single_rank_load", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_own_data_from_end_to_end(two_ranks, tmp_path, single_rank_load):
    users = [[item % 50 for item in range(user, user + 1 + user % 9)] for user in range(21)]
    pq.write_table(pa.table({"seen": users}), tmp_path / "histories.parquet")
    np.save(tmp_path / "sids.npy", random_sid_map(50, (6, 6, 6)).codes)
    options = {"single_rank_load": single_rank_load, "balance_batch": single_rank_load, "num_epochs": 2}
    (shown, steps, metrics), (silent, *same) = two_ranks.run(_train_on_own_data, str(tmp_path), **options)
    # In training a user's last item is left out; three of 21 users have none then.
    assert steps == 2 * 3 and metrics["eval_rows"] == 21
    assert set(metrics) == {"eval_loss", "eval_rows", "eval_HitRate@2", "eval_NDCG@10"} | {
        "eval_HitRate@2_se",
        "eval_NDCG@10_se",
    }
    long = [len(user) - 6 for user in users if len(user) > 6]
    assert f"evaluation: {len(long)} of 21 users have more than 6 items; {sum(long)} of their oldest items" in shown
    assert "cut" not in silent and same == [steps, metrics]
    done = run_program(sys.executable, "-c", EVALUATE, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    found = ast.literal_eval(done.stdout)
    assert len(found) == 4 and found == pytest.approx({name: metrics[f"eval_{name}"] for name in found})


@pytest.mark.slow
def test_the_demo(tmp_path):
    command = [sys.executable, "-m", "sid_gr.demo", "--device", "cpu", "--quick", "--run-dir", str(tmp_path / "demo")]
    command += ["--num-users", "150", "--batch-size", "6", "--max-history-seqlen", "40", "--num-layers", "1"]
    command += ["--codebook-sizes", "16", "16", "16"]
    done = run_program(*command, timeout=300, env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    for part in ("generated data", "3,883 movies, 16 × 16 × 16 codes", "speed-up", "HitRate@10", "most popular"):
        assert part in done.stdout
    assert re.search(r"the ten most popular, for everyone: HitRate@10 0\.\d+ ± 0\.\d+, NDCG@10 0", done.stdout)
    base, other = read_runs([tmp_path / "demo/as-loaded", tmp_path / "demo/balanced"])
    assert len(base.step) == len(other.step) == 7
    assert abs(base.column("loss") - other.column("loss")).max() < 1e-5
    assert other.mean("imbalance_after") < other.mean("imbalance_before")
    assert other.evaluations[0][1]["rows"] > 5 and "HitRate@10_se" in other.evaluations[0][1]
    assert (tmp_path / "demo/report.png").stat().st_size > 10_000


STEPS = 8


def _train_steps(balances, pipeline, sharding, tensor_parallel_size=1):
    """Losses of all steps, the decoder's and the table's weights afterwards, and how often rows moved."""
    with model_parallel(tensor_parallel_size):
        model = build_sharded(sharding, tensor_model_parallel_size=tensor_parallel_size)
        before = weights(model)
        pipeline, shuffler = make_pipeline(pipeline, model, balances)
        losses, moved = train_steps(pipeline, shuffler, iter(heavy_tailed_batches(STEPS)), STEPS)
        return losses, before, weights(model), moved


def weights(model):
    """Every weight by name; layers without the rank that their name has with tensor parallelism."""
    rank = re.compile(r"layers_of_tensor_parallel_rank_\d")
    return {rank.sub("layers", name): value for name, value in weights_of(model).items()}


def assert_equal_training(found, expected):
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    for name, value in expected[2].items():
        if found[2][name].shape == value.shape:  # a tensor-parallel rank has a part
            torch.testing.assert_close(found[2][name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("pipeline", "sharding"), [("native", "row_wise"), pytest.param("none", "table_wise", marks=pytest.mark.slow)]
)
def test_shuffler_on_and_off(ranks, pipeline, sharding):
    on = ranks.run(_train_steps, True, pipeline, sharding)[0]
    off = ranks.run(_train_steps, False, pipeline, sharding)[0]
    assert on[3] > STEPS // 2 and off[3] == 0
    assert_equal_training(on, off)
    assert any(float((value - on[1][name]).abs().max()) > 1e-2 for name, value in on[2].items())  # it did train


@pytest.mark.slow
def test_tensor_parallel_ranks_train_as_the_data_parallel_ones(rank_pools):
    reference = rank_pools[2].run(_train_steps, False, "native", "row_wise")[0]
    for balances in (True, False):
        answers = rank_pools[4].run(_train_steps, balances, "native", "row_wise", 2)
        for answer in answers:
            assert_equal_training(answer, reference)
            assert (answer[3] > STEPS // 2) is balances
        # Every rank has the half of the layers that its peer has not; copies of one half agree to the last bit.
        for first, second in ((0, 2), (1, 3)):
            assert all(torch.equal(answers[first][2][name], value) for name, value in answers[second][2].items())
        halves = [name for name, value in reference[2].items() if answers[0][2][name].shape != value.shape]
        assert len(halves) == 2 * 6  # of two layers: weight and bias of QKV and of the first feed-forward, two weights
        for name in reference[2].keys() - set(halves):  # peers keep what they both have alike
            assert torch.equal(answers[0][2][name], answers[1][2][name])
        for name in halves:
            whole = reference[2][name]
            split = next(axis for axis in range(whole.dim()) if answers[0][2][name].shape[axis] != whole.shape[axis])
            joined = torch.cat([answers[rank][2][name] for rank in (0, 1)], dim=split)
            torch.testing.assert_close(joined, whole, rtol=1e-4, atol=1e-5)
