"""Checkpoints of another model, and on a disk that a rank does not see, are refused and not called damaged."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from commons.distributed.batch_shuffler import IdentityBalancedBatchShuffler
from commons.trainer import TrainerArgs
from commons.trainer.checkpoint.checkpoints import Checkpointer, TrainProgress
from commons.trainer.checkpoint.folder import STATE_FILE, state_text
from commons.trainer.sharding import dense_parameters, shard_model
from tests.helpers.models.torchrec_model import KEYS, ShardableModel
from tests.helpers.pipelines.trainer_loops import Parts
from tests.helpers.ranks.faults import error_of, logged
from tests.helpers.ranks.on_ranks import of_all, on_two_ranks


def checkpointer(model, folder, order=(), **changes):
    optimizer = torch.optim.SGD(dense_parameters(model).values(), lr=0.1)
    args = TrainerArgs(1, 1, **{"ckpt_save_dir": str(folder), "ckpt_load_dir": str(folder)} | changes)
    return Checkpointer(
        Parts(args, model, optimizer, (), None), model, optimizer, IdentityBalancedBatchShuffler(), dict(order)
    )


@on_two_ranks
def test_another_order_matters_only_within_an_epoch(tmp_path):
    """The last checkpoint of most runs is at the end of an epoch: no row of it is left, also if users were added."""
    for rows, num_rows, warns in ((5, 9, True), (9, 9, False), (9, 11, False), (9, 7, False)):
        folder = tmp_path / f"{rows} {num_rows}"
        saved = checkpointer(torch.nn.Linear(4, 2), folder, {"num_rows": 9, "seed": 1})
        saved.save(TrainProgress(1, rows_in_epoch=rows))
        with logged() as messages:
            found, _ = checkpointer(torch.nn.Linear(4, 2), folder, {"num_rows": num_rows, "seed": 2}).resume()
        assert (found.epoch, found.rows_in_epoch) == ((0, 5) if warns else (1, 0))
        assert any("is within an epoch" in each for each in messages) == (warns and dist.get_rank() == 0), messages


@on_two_ranks
def test_checkpoints_of_another_model_are_not_called_damaged(tmp_path):
    """The error was that all 2 checkpoints are damaged."""
    first = checkpointer(torch.nn.Linear(4, 2), tmp_path)
    for step in (1, 2):
        first.save(TrainProgress(step))
    for model, message in (
        (torch.nn.Linear(4, 3), "has model/weight of shape (2, 4), this model has (3, 4); a checkpoint fits only the"),
        (torch.nn.Linear(4, 2, bias=False), "has model/bias (and 0 more), which this model lacks; a checkpoint fits"),
        (torch.nn.Sequential(torch.nn.Linear(4, 2)), "lacks model/0.bias (and 1 more); a checkpoint fits only the"),
    ):
        error = error_of(checkpointer(model, tmp_path).resume)
        assert error.startswith("ValueError: ") and f"step_00000002 {message}" in error, error
        assert error.endswith("only the model that wrote it, as in that release: use both, or another checkpoint")
        assert len(set(of_all([error]))) == 1


@on_two_ranks
def test_the_state_of_the_tables_optimizer_is_not_left_out(tmp_path):
    """As with another kind of optimizer, or tables that are data_parallel now."""

    def of_tables(optimizer, folder=""):
        cpu, tables = torch.device("cpu"), [f"t_{key}" for key in KEYS]
        model = shard_model(ShardableModel(), tables, device=cpu, embedding_optimizer=optimizer)
        return checkpointer(model, tmp_path / folder)

    of_tables("rowwise_adagrad").save(TrainProgress(1))
    error = error_of(of_tables("sgd").resume)
    assert "has tables_optimizer/embedding.embeddings.t_action.weight/t_action.momentum1 (and 1 more), which " in error
    assert of_tables("rowwise_adagrad").resume()[0].step == 1
    model = ShardableModel().to_empty(device="cpu")  # every rank has every table, as with data_parallel
    for each in model.parameters():
        torch.nn.init.ones_(each)
    parallel, weight = checkpointer(model, tmp_path / "parallel"), model.embedding.embeddings["t_item"].weight
    parallel._optimizer.state[weight]["momentum_buffer"] = torch.ones_like(weight)
    parallel.save(TrainProgress(1))
    error = error_of(of_tables("sgd", "parallel").resume)
    assert "has dense_optimizer/embedding.embeddings.t_item.weight/momentum_buffer (and 0 more), which this" in error


@on_two_ranks
def test_checkpoints_that_a_rank_does_not_see_are_not_called_damaged(tmp_path):
    """The error was that all 2 checkpoints are damaged, and to start without one."""
    saved = checkpointer(torch.nn.Linear(4, 2), tmp_path / "checkpoints")
    for step in (1, 2):
        saved.save(TrainProgress(step))
    (tmp_path / "another").mkdir(exist_ok=True)
    if dist.get_rank() == 1:  # a copy of another run's checkpoints: rank 1 trained with its weights
        copy = shutil.copytree(tmp_path / "checkpoints", tmp_path / "copy" / "checkpoints")
        for file in copy.glob(f"*/{STATE_FILE}"):
            file.write_text(state_text(json.loads(file.read_text()) | {"world_size": 1}))
    for folder, problem in (("another", "rank 0 has found it"), ("copy", "is another one than that")):
        for path in ("checkpoints", "checkpoints/step_00000001"):
            with pytest.MonkeyPatch.context() as patch:
                patch.chdir(tmp_path / folder if dist.get_rank() == 1 else tmp_path)
                error = error_of(checkpointer(torch.nn.Linear(4, 2), path).resume)
            assert error.startswith("ValueError: rank 1: checkpoints/step_0000000") and problem in error, error
            assert "; all ranks load from one folder on a shared disk: mount" in error
            assert len(set(of_all([error]))) == 1


@on_two_ranks
def test_a_folder_for_checkpoints_that_a_rank_cannot_use_is_refused_at_the_start(tmp_path):
    """The run trained to its end, and saved none of its checkpoints."""
    new_run = {"ckpt_save_interval": 1, "ckpt_load_dir": ""}
    (tmp_path / "another").mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path / "another" if dist.get_rank() == 1 else tmp_path)
        error = error_of(checkpointer(torch.nn.Linear(4, 2), "checkpoints", **new_run).resume)
    assert error.startswith("ValueError: rank 1: ckpt_save_dir checkpoints on "), error
    assert "is another folder than that of rank 0; all ranks write to one folder on a shared disk: mount" in error
    assert len(set(of_all([error]))) == 1 and not any((tmp_path / "checkpoints").iterdir())
    assert checkpointer(torch.nn.Linear(4, 2), tmp_path / "checkpoints", **new_run).resume()[1] == ""
    read_only = mock.patch.object(os, "access", return_value=False)
    with read_only if dist.get_rank() == 1 else contextlib.nullcontext():
        error = error_of(checkpointer(torch.nn.Linear(4, 2), tmp_path / "checkpoints", **new_run).resume)
    assert error.startswith(f"ValueError: rank 1: ckpt_save_dir {tmp_path / 'checkpoints'} cannot be written on "), (
        error
    )
    assert len(set(of_all([error]))) == 1 and not any((tmp_path / "checkpoints").iterdir())
