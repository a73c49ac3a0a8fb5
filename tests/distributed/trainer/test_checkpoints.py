"""A run that is stopped and resumed is the run that was never stopped, on as many ranks or on others."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import signal
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemWriter

from commons.distributed.batch_shuffler import IdentityBalancedBatchShuffler
from commons.distributed.options import ShufflerOptions
from commons.trainer import TrainerArgs
from commons.trainer.checkpoint import folder
from commons.trainer.checkpoint.checkpoints import Checkpointer, TrainProgress
from commons.trainer.checkpoint.folder import list_checkpoints
from commons.trainer.checkpoint.state import _fused_tables
from commons.trainer.config.args import OptimizationArgs
from commons.trainer.run import run_training
from commons.trainer.sharding import dense_parameters
from tests.helpers.batches.square_shuffler import SquareShuffler, my_batch
from tests.helpers.datasets.stored_users import copy_of_another_split
from tests.helpers.jobs.movielens_runs import Noted, movielens_config
from tests.helpers.jobs.run_folders import lines, losses
from tests.helpers.models.torchrec_model import build_sharded, head_of, weights_of
from tests.helpers.pipelines.trainer_loops import Parts
from tests.helpers.ranks.faults import error_of, logged
from tests.helpers.ranks.on_ranks import of_all, on_two_ranks

CPU = torch.device("cpu")
SAVE_AT = 4  # at an evaluation, too
STEPS = 12  # an epoch has 8: the run goes into its second


class OddLoader:
    """Draws in every iteration another number of random numbers, as loaders with worker processes do.

    Rank 1 is asked to end when it reads the batch number `killed_at`.
    """

    def __init__(self, loader, killed_at=None):
        self._loader, self._killed_at, self._iterations = loader, killed_at, 0
        self.dataset, self.sampler = loader.dataset, loader.sampler

    def __len__(self):
        return len(self._loader)

    def __iter__(self):
        self._iterations += 1
        torch.rand(self._iterations)
        return self._batches(iter(self._loader))

    def _batches(self, batches):
        for number, batch in enumerate(batches):
            if number == self._killed_at and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            yield batch


class Odd(Noted):
    """With such loaders."""

    killed_at: int | None = None
    killed_in_evaluation = False

    def open_loaders(self):
        train, test = super().open_loaders()
        return OddLoader(train, self.killed_at), OddLoader(test, 0 if self.killed_in_evaluation else None)


def fail(self, *arguments):
    raise OSError(28, "No space left on device")


def train(
    data,
    run_dir,
    *,
    sharding="row_wise",
    disk_full=False,
    global_batch=8,
    loaders=None,
    model=(),
    **changes,
):
    """Steps of one run, on the ranks of a pool, and its recipe."""
    given = {"log_interval": 1, "eval_interval": 4, "sinks": (), "enable_balanced_shuffler": True} | changes
    args = TrainerArgs(global_batch // dist.get_world_size(), 4, run_dir=run_dir, **given)
    model = {"dropout": 0.2, "num_attention_heads": 2} | dict(model)
    config = movielens_config(data, args, optimizer={"dense_lr": 0.01, "sharding": sharding}, **model)
    recipe = Odd(config, CPU)
    vars(recipe).update(loaders or {})
    is_full = disk_full and dist.get_rank() == 1
    with mock.patch.object(FileSystemWriter, "write_data", fail) if is_full else contextlib.nullcontext():
        return run_training(recipe).steps, recipe


def run(*args, **kwargs):
    steps, recipe = train(*args, **kwargs)
    tables = _fused_tables(recipe.model.fused_optimizer)  # evaluations are no steps of theirs
    assert {int(count) for each in tables for count in (each.iter, each.iter_cpu)} <= {0, steps}
    return steps, [row.tolist() for row in weights_of(recipe.model).values()]


def evaluations(run_dir):
    return {line["step"]: line for line in lines(run_dir) if "eval_loss" in line}


def settings(folder, **changes):
    return {"max_train_iters": STEPS, "ckpt_save_dir": str(folder), **changes}


@pytest.fixture(scope="module")
def whole(rank_pools, data, tmp_path_factory):
    """A run that was never stopped: its steps and weights, and its folder."""
    folder = tmp_path_factory.mktemp("whole")
    return rank_pools[2].run(run, data, str(folder), max_train_iters=STEPS), folder


def test_a_resumed_run_is_the_run_that_was_never_stopped(two_ranks, data, tmp_path, whole):
    parts = settings(tmp_path / "checkpoints")
    two_ranks.run(run, data, str(tmp_path / "parts"), **parts | {"max_train_iters": 7, "ckpt_save_interval": SAVE_AT})
    assert [path.name for path in list_checkpoints(tmp_path / "checkpoints")] == ["step_00000004", "step_00000007"]
    shutil.rmtree(tmp_path / "checkpoints" / "step_00000007")
    resumed = two_ranks.run(run, data, str(tmp_path / "parts"), **parts | {"ckpt_load_dir": parts["ckpt_save_dir"]})
    assert resumed == whole[0]
    assert list(losses(tmp_path / "parts")) == list(range(1, STEPS + 1))
    assert losses(tmp_path / "parts") == losses(whole[1])
    after, expected = (
        [line for step, line in evaluations(folder).items() if step > SAVE_AT]
        for folder in (tmp_path / "parts", whole[1])
    )
    assert after == expected


@pytest.mark.parametrize(
    "num_ranks, sharding, model",
    [
        (1, "row_wise", {}),
        pytest.param(4, "row_wise", {}, marks=pytest.mark.slow),
        pytest.param(4, "table_wise", {}, marks=pytest.mark.slow),
        # Negatives of the rank's own batch, the default, depend on the number of ranks: docs/launch.md has these two.
        pytest.param(1, "row_wise", {"task": "retrieval", "in_batch_pool": "global"}, marks=pytest.mark.slow),
        pytest.param(1, "row_wise", {"task": "retrieval", "num_negatives": 9}, marks=pytest.mark.slow),
    ],
)
def test_a_run_goes_on_with_other_ranks(rank_pools, data, tmp_path, num_ranks, sharding, model):
    changes = settings(tmp_path / "checkpoints", model={"dropout": 0.0} | model)
    rank_pools[2].run(run, data, str(tmp_path / "whole"), **changes)
    saving = changes | {"max_train_iters": SAVE_AT, "ckpt_save_interval": 100}
    rank_pools[2].run(run, data, str(tmp_path / "parts"), **saving)
    loading = changes | {"ckpt_load_dir": changes["ckpt_save_dir"], "sharding": sharding}
    rank_pools[num_ranks].run(run, data, str(tmp_path / "parts"), **loading)
    expected, found = losses(tmp_path / "whole"), losses(tmp_path / "parts")
    assert list(found) == list(expected)
    assert [found[step] for step in found] == pytest.approx(list(expected.values()), rel=2e-4)
    # The same weights, evaluated by two ranks and by others.
    rank_pools[num_ranks].run(run, data, str(tmp_path / "same"), **loading | {"max_train_iters": SAVE_AT})
    by_two, by_others = evaluations(tmp_path / "whole")[SAVE_AT], evaluations(tmp_path / "same")[SAVE_AT]
    assert by_others.pop("eval_loss") == pytest.approx(by_two.pop("eval_loss"), rel=1e-6)
    assert by_others == by_two


def _rates(*args, **kwargs):
    steps, recipe = train(*args, **kwargs)
    return steps, recipe.rates


@pytest.mark.slow
def test_the_schedule_ends_with_a_run_of_other_steps(two_ranks, data, tmp_path):
    """Steps of twice as many rows, as other ranks may make: half as many of an epoch."""
    changes = {"ckpt_save_interval": 100, "ckpt_save_dir": str(tmp_path / "checkpoints")}
    schedule = OptimizationArgs(lr_schedule="cosine")
    parts = str(tmp_path / "parts")
    two_ranks.run(run, data, parts, max_train_iters=12, optimization=schedule, **changes)  # 8 + 4 steps of 8 rows
    loading = {"ckpt_load_dir": changes["ckpt_save_dir"], "num_epochs": 2, "global_batch": 16}
    steps, rates = two_ranks.run(_rates, data, parts, optimization=schedule, **loading)[0]
    assert steps == 14  # 2 more, of 16 rows
    assert rates == pytest.approx([0.01 * (1 + math.cos(math.pi * step / 14)) / 2 for step in (12, 13)])


@pytest.mark.slow
def test_sigterm_on_one_rank_saves_and_ends_all(two_ranks, data, tmp_path, whole):
    changes = settings(tmp_path / "checkpoints", ckpt_save_interval=100)
    killed = two_ranks.run(run, data, str(tmp_path / "parts"), loaders={"killed_at": 3}, **changes)
    (stopped_at, _), (also_at, _) = killed
    assert stopped_at == also_at < STEPS - 2
    assert [path.name for path in list_checkpoints(tmp_path / "checkpoints")] == [f"step_{stopped_at:08d}"]
    assert json.loads((tmp_path / "parts" / "summary.json").read_text())["steps"] == stopped_at
    resumed = two_ranks.run(run, data, str(tmp_path / "parts"), **changes, ckpt_load_dir=str(tmp_path / "checkpoints"))
    assert resumed == whole[0]


@pytest.mark.parametrize("in_rows", [False, True])
def test_sigterm_ends_an_evaluation_which_the_next_run_makes_up(two_ranks, data, tmp_path, in_rows):
    limits = {"schedule_in": "rows", "eval_interval": 32, "max_train_iters": 64} if in_rows else {"max_train_iters": 8}
    changes = settings(tmp_path / "checkpoints", ckpt_save_interval=100) | limits
    two_ranks.run(run, data, str(tmp_path / "run"), loaders={"killed_in_evaluation": True}, **changes)
    assert list(losses(tmp_path / "run")) == [1, 2, 3, 4] and not evaluations(tmp_path / "run")
    resumed = two_ranks.run(run, data, str(tmp_path / "run"), **changes, ckpt_load_dir=changes["ckpt_save_dir"])
    assert resumed == two_ranks.run(run, data, str(tmp_path / "whole"), **limits)
    assert evaluations(tmp_path / "run") == evaluations(tmp_path / "whole")


def _warnings(*args, **kwargs):
    """Steps of a run, and what it warned of; an error at its end comes last."""
    with logged() as messages:
        try:
            return run(*args, **kwargs)[0], messages
        except RuntimeError as error:
            return None, [*messages, str(error)]


@pytest.fixture(scope="module")
def first_checkpoints(rank_pools, data, tmp_path_factory):
    """Checkpoints of steps 2 and 4, and the losses of the six steps of that run."""
    folder = tmp_path_factory.mktemp("first")
    changes = settings(folder / "checkpoints", max_train_iters=4, ckpt_save_interval=2)
    rank_pools[2].run(run, data, str(folder / "run"), **changes)
    rank_pools[2].run(run, data, str(folder / "whole"), max_train_iters=6)
    return folder / "checkpoints", losses(folder / "whole")


@pytest.fixture
def saved(first_checkpoints, tmp_path):
    """Checkpoints of steps 2 and 4, for this test alone."""
    return Path(shutil.copytree(first_checkpoints[0], tmp_path / "checkpoints"))


def test_what_a_checkpoint_is_refused_for(two_ranks, data, tmp_path, saved):
    changes = settings(saved, max_train_iters=6, ckpt_load_dir=str(saved))
    (_, said), _ = two_ranks.run(_warnings, data, str(tmp_path / "other"), seed=2, profile=True, **changes)
    assert any("is within an epoch that was read with seed = 1234, this run has 2; " in text for text in said)
    other = copy_of_another_split(data, tmp_path / "other.parquet")
    (_, of_split), _ = two_ranks.run(_warnings, str(other), str(tmp_path / "split"), **changes)
    assert any("is within an epoch that was read with split_seed = 0, this run has 7; " in text for text in of_split)
    assert any("no trace was recorded: this run has trained none of the steps from 100 to 199" in text for text in said)
    for error in two_ranks.run(
        error_of, run, data, str(tmp_path / "heads"), model={"num_attention_heads": 4}, **changes
    ):
        assert "hstu.num_attention_heads = 2, this run has 4" in error
    nowhere = changes | {"ckpt_save_interval": 2, "ckpt_load_dir": str(tmp_path / "nowhere")}
    for error in two_ranks.run(error_of, run, data, str(tmp_path / "none"), **nowhere):
        assert "nowhere does not exist; it must be a checkpoint or" in error
    earlier = changes | {"ckpt_save_interval": 2, "ckpt_load_dir": str(saved / "step_00000002")}
    for error in two_ranks.run(error_of, run, data, str(tmp_path / "run"), **earlier):
        assert error.startswith("ValueError: ") and "contains step_00000004, and this run starts" in error
    assert [path.name for path in list_checkpoints(saved)] == ["step_00000002", "step_00000004"]
    _zero_block(saved / "step_00000004" / "__1_0.distcp")  # another is taken only where none is named
    named = changes | {"ckpt_load_dir": str(saved / "step_00000004")}
    for error in two_ranks.run(error_of, run, data, str(tmp_path / "named"), **named):
        assert "step_00000004 is damaged (__1_0.distcp has another digest)" in error
    for checkpoint in list_checkpoints(saved):
        (checkpoint / ".metadata").unlink()
    for error in two_ranks.run(error_of, run, data, str(tmp_path / "none"), **changes):
        assert re.search("all 2 checkpoints of .* are damaged", error)


def _zero_block(path):
    """4 KiB of zeros in the middle, as a disk may give them back; nothing of the size says so."""
    content = bytearray(path.read_bytes())
    begin = max(0, len(content) // 2 - 2048)
    content[begin : begin + 4096] = bytes(min(4096, len(content) - begin))
    path.write_bytes(content)


def _zero(path):
    path.write_bytes(bytes(path.stat().st_size))


def _vouch_for(checkpoint, name):
    """As if the file had been written like this: by a torch whose files this one cannot read."""
    path = checkpoint / "state.json"
    state = json.loads(path.read_text())
    state["digests"] |= folder.digests_of(checkpoint, [name], rank=0, ranks=1)
    path.write_text(folder.state_text(state))


@pytest.mark.parametrize(
    ("name", "damage", "is_vouched_for", "said"),
    [
        ("__1_0.distcp", _zero_block, False, "is damaged (__1_0.distcp has another digest)"),
        pytest.param("state.json", _zero, False, "is damaged (state.json: ", marks=pytest.mark.slow),
        pytest.param("__0_0.distcp", _zero, True, "cannot be read (rank ", marks=pytest.mark.slow),
        pytest.param(".metadata", _zero, True, "cannot be read (.metadata: ", marks=pytest.mark.slow),
    ],
)
def test_what_the_disk_has_spoilt_is_passed_over(
    two_ranks, data, tmp_path, first_checkpoints, saved, name, damage, is_vouched_for, said
):
    """The run goes on from the checkpoint before, saves to the same folder, and is the run that never stopped."""
    damage(saved / "step_00000004" / name)
    if is_vouched_for:
        _vouch_for(saved / "step_00000004", name)
    changes = settings(saved, max_train_iters=6, ckpt_load_dir=str(saved), ckpt_save_interval=2)
    (steps, warned), (also, silent) = two_ranks.run(_warnings, data, str(tmp_path / "run"), **changes)
    assert steps == also == 6 and not silent
    assert [text for text in warned if "step_00000004" in text and said in text and "the checkpoint before it" in text]
    whole = first_checkpoints[1]
    assert losses(tmp_path / "run") == {step: whole[step] for step in range(3, 7)}
    assert [path.name for path in list_checkpoints(saved)] == [f"step_0000000{step}" for step in (2, 4, 6)]


def _checkpointer(shuffler=None, loss_scaler=None, **saving):
    """Of a sharded model, and the model."""
    model = build_sharded()[0]
    optimizer = torch.optim.SGD(dense_parameters(model).values(), lr=0.1, momentum=0.9)
    recipe = Parts(TrainerArgs(1, 1, **saving), model, optimizer, (), None, loss_scaler=loss_scaler)
    return Checkpointer(recipe, model, optimizer, shuffler or IdentityBalancedBatchShuffler(), {}), model


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@on_two_ranks
def test_spoilt_weights_replace_no_checkpoint(tmp_path, value):
    checkpoints, model = _checkpointer(ckpt_save_dir=str(tmp_path), ckpt_keep=1)
    head_of(model).register_buffer("mask", torch.tensor([-math.inf, 0.0]))  # a buffer, not a weight
    checkpoints.save(TrainProgress(1))
    if dist.get_rank() == 1:
        tables = (table for table in model.state_dict().values() if hasattr(table, "local_shards"))
        next(shard for table in tables for shard in table.local_shards()).tensor.data[0, 0] = value
    said = error_of(checkpoints.save, TrainProgress(2))
    assert said.startswith("ArithmeticError: embedding.embeddings.t_")
    assert "of rank 1 is not finite after step 2; " in said and len(set(of_all([said]))) == 1
    dist.barrier()
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]


@on_two_ranks
def test_the_step_of_the_tables_optimizers_is_kept(tmp_path):
    """fbgemm's Adam, which needs a GPU, corrects its means by it."""
    checkpoints, model = _checkpointer(ckpt_save_dir=str(tmp_path))
    model.fused_optimizer.set_optimizer_step(7)
    checkpoints.save(TrainProgress(1))
    checkpoints, model = _checkpointer(ckpt_save_dir=str(tmp_path), ckpt_load_dir=str(tmp_path))
    checkpoints.resume()
    assert set(of_all(int(tables.iter) for tables in _fused_tables(model.fused_optimizer))) == {7}


def test_a_full_disk_leaves_the_last_checkpoint(two_ranks, data, tmp_path, saved):
    changes = settings(saved, max_train_iters=8, ckpt_load_dir=str(saved), ckpt_save_interval=2)
    (_, said), (_, said_too) = two_ranks.run(_warnings, data, str(tmp_path / "again"), disk_full=True, **changes)
    assert list(losses(tmp_path / "again")) == [5, 6, 7, 8]  # the run goes on, and its end says that it is not kept
    assert [path.name for path in sorted(saved.iterdir())] == ["step_00000002", "step_00000004"]
    assert "no checkpoint of step 6" in said[0] and "No space left on device" in said[0]
    assert said[-1] == said_too[-1] and said[-1].startswith("the state after step 8 could not be saved")


@on_two_ranks
def test_two_runs_do_not_mix_their_checkpoints(tmp_path):
    """Both begin while the folder is empty."""
    saving = {"ckpt_save_interval": 2, "ckpt_save_dir": str(tmp_path), "ckpt_keep": 1}
    first, second = (_checkpointer(**saving)[0] for _ in range(2))
    for each in (first, second):
        each.resume()
    for step in (2, 4):
        first.save(TrainProgress(step))
    said = error_of(second.save, TrainProgress(2))
    assert "contains step_00000004, and this run has saved none after step 0; " in said
    assert len(set(of_all([said]))) == 1
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_00000004"]


@on_two_ranks
def test_a_state_loaded_from_another_folder_has_yet_to_be_saved(tmp_path):
    saving = {"ckpt_save_interval": 2, "ckpt_load_dir": str(tmp_path / "first")}
    _checkpointer(**saving, ckpt_save_dir=str(tmp_path / "first"))[0].save(TrainProgress(2))
    scaler = torch.amp.GradScaler("cpu")  # the run that saved had another dtype, and no scaler
    for name, is_saved in (("first", True), ("second", False)):
        checkpoints, _ = _checkpointer(loss_scaler=scaler, **saving, ckpt_save_dir=str(tmp_path / name))
        checkpoints.resume()
        assert checkpoints.has_saved(2) is is_saved


def _speeds_after_resuming(folder, begin=None):
    """The speeds of a batch after loading a checkpoint, or saving one of these speeds."""
    with contextlib.closing(SquareShuffler(ShufflerOptions(speeds="measured"))) as shuffler:
        checkpoints, _ = _checkpointer(shuffler, ckpt_save_dir=folder, ckpt_load_dir="" if begin else folder)
        if begin:
            shuffler.load_state_dict({"speeds": begin})
            checkpoints.save(TrainProgress(1))
        else:
            checkpoints.resume()
        shuffler.shuffle(my_batch(0, [4] * 4))
        return shuffler.last_stats.speeds


@pytest.mark.parametrize("num_ranks, speeds", [(2, (1024, 700)), pytest.param(4, (1024,) * 4, marks=pytest.mark.slow)])
def test_speeds_are_kept_over_a_resume_on_as_many_ranks(rank_pools, tmp_path, num_ranks, speeds):
    assert rank_pools[2].run(_speeds_after_resuming, str(tmp_path), [1024, 700]) == [(1024, 700)] * 2
    assert rank_pools[num_ranks].run(_speeds_after_resuming, str(tmp_path)) == [speeds] * num_ranks
