"""A checkpoint keeps the speeds of the ranks; a run of another number of ranks begins anew."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch

from commons.distributed.options import ShufflerOptions
from commons.trainer import TrainerArgs
from commons.trainer.checkpoint.checkpoints import Checkpointer, TrainProgress
from hstu.sharding import dense_parameters
from tests.helpers.batches.square_shuffler import SquareShuffler, my_batch
from tests.helpers.models.torchrec_model import build_sharded
from tests.helpers.pipelines.trainer_loops import Parts


def _resume(folder, begin=None):
    """The speeds of a batch after loading a checkpoint, or saving one of these speeds."""
    model = build_sharded()[0]
    with closing(SquareShuffler(ShufflerOptions(speeds="measured"))) as shuffler:
        optimizer = torch.optim.SGD(dense_parameters(model).values(), lr=0.1)
        args = TrainerArgs(1, 1, ckpt_save_dir=folder, ckpt_load_dir="" if begin else folder)
        checkpoints = Checkpointer(Parts(args, model, optimizer, (), None), model, optimizer, shuffler, {})
        if begin:
            shuffler.load_state_dict({"speeds": begin})
            checkpoints.save(TrainProgress(1))
        else:
            checkpoints.resume()
        shuffler.shuffle(my_batch(0, [4] * 4))
        return shuffler.last_stats.speeds


def test_speeds_are_kept_over_a_resume(two_ranks, tmp_path):
    assert two_ranks.run(_resume, str(tmp_path), [1024, 700]) == [(1024, 700)] * 2
    assert two_ranks.run(_resume, str(tmp_path)) == [(1024, 700)] * 2


@pytest.mark.slow
def test_other_ranks_begin_anew(rank_pools, tmp_path):
    rank_pools[2].run(_resume, str(tmp_path), [1024, 700])
    assert rank_pools[4].run(_resume, str(tmp_path)) == [(1024,) * 4] * 4
