"""A checkpoint of another model is refused as such, also if the recipe defines no fingerprint of its model."""

from __future__ import annotations

import torch

from commons.distributed.batch_shuffler import IdentityBalancedBatchShuffler
from commons.trainer import TrainerArgs
from commons.trainer.checkpoint.checkpoints import Checkpointer, TrainProgress
from tests.helpers.pipelines.trainer_loops import Parts
from tests.helpers.ranks.faults import error_of
from tests.helpers.ranks.on_ranks import of_all, on_two_ranks


def checkpointer(model, folder):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    args = TrainerArgs(1, 1, ckpt_save_dir=str(folder), ckpt_load_dir=str(folder))
    return Checkpointer(Parts(args, model, optimizer, (), None), model, optimizer, IdentityBalancedBatchShuffler(), {})


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
        assert len(set(of_all([error]))) == 1
