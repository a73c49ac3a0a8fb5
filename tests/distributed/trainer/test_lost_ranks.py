"""A collective of the model or of the trainer that fails names the ranks that have not noticed, and waits no longer."""

from __future__ import annotations

import functools
import re
import signal
import tempfile
import threading
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from commons.distributed.channel.absence import POLL_SECONDS, FailedChannel, RankMissingError
from commons.distributed.options import ShufflerOptions
from commons.trainer import DatasetArgs, TrainerArgs
from commons.trainer.loop import TrainingLoop
from commons.trainer.optimize.updates import FiniteLossGuard
from commons.trainer.ranks import collectives
from commons.trainer.ranks.collectives import gather_texts, limit_collectives, missing_ranks_named
from commons.trainer.ranks.stop import StopSignal
from sid_gr.megatron_core import parallel_state
from sid_gr.recipe import SIDGRRecipe
from sid_gr.train_config import TrainConfig
from tests.helpers.models import torchrec_model as models
from tests.helpers.pipelines.trainer_loops import CubicShuffler, Parts, StatedHead
from tests.helpers.ranks.faults import error_of, limit_waits, meet, missed, my_batch
from tests.helpers.ranks.on_ranks import on, on_ranks, on_two_ranks
from tests.helpers.ranks.stopped_ranks import fault, run_with_fault


def _all_reduce(group=None):
    with missing_ranks_named(lambda: 7):
        dist.all_reduce(torch.ones(1), group=group)


def _of_the_model():
    dist.barrier()
    limit_collectives(0.5)
    return _all_reduce


def _of_the_decoder():
    args = TrainerArgs(1, 1, shuffler=ShufflerOptions(timeout=0.5), eval_metrics=())
    SIDGRRecipe(TrainConfig(args, DatasetArgs("sid-random", 4)), torch.device("cpu")).prepare_ranks()
    dist.barrier()
    of_the_loss = parallel_state.get_data_parallel_group(with_context_parallel=True)
    groups = parallel_state.get_tensor_model_parallel_group(), parallel_state.get_data_parallel_group(), of_the_loss
    # `missed` limits all groups.
    assert {group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups} == {1.0}
    return functools.partial(_all_reduce, of_the_loss)


def _of_the_trainer():
    dist.barrier()
    limit_collectives(0.5)
    return functools.partial(gather_texts, "", torch.device("cpu"))


def _of_the_end_of_a_step():
    stop = StopSignal()
    stop.after_step()
    stop.after_step()

    def end_a_step_and_the_run():
        with stop:
            stop.after_step()

    return end_a_step_and_the_run


@pytest.mark.parametrize(
    ("begin", "said"),
    [
        (_of_the_model, "a collective of the model failed in step 7 on rank 0; rank 1 did not report the failure"),
        (_of_the_decoder, "a collective of the model failed in step 7 on rank 0; rank 1 did not report the failure"),
        (_of_the_trainer, r"rank 1 did not take part in the gather of texts .* or raise trainer\.shuffler\.timeout"),
        (
            _of_the_end_of_a_step,
            r"rank 1 did not take part in the agreement to stop of step 2.* raise trainer\.shuffler\.timeout",
        ),
    ],
)
@on("own_two_ranks", timeout=100)
def test_a_rank_that_stays_away_from_a_collective_is_named(begin, said):
    with mock.patch.object(collectives, "_GRACE_SECONDS", 0.5):
        collective = begin()
    text = missed(lambda: None, collective)
    assert re.match(f"RankMissingError: {said}" if dist.get_rank() == 0 else "$", text), text


@on_two_ranks
def test_other_errors_stay_as_they_are():
    with pytest.raises(RuntimeError, match=r"^shapes differ$") as error, missing_ranks_named(lambda: 7):
        raise RuntimeError("shapes differ")
    assert not isinstance(error.value, RankMissingError)


@on("own_two_ranks", timeout=100)
def test_an_error_of_an_earlier_run_in_the_same_process_group_is_not_raised_again():
    cpu = torch.device("cpu")
    gather_texts("of settings, before the run", cpu)
    with pytest.raises(ValueError, match="no data"), missing_ranks_named(lambda: 1):
        raise ValueError("no data")  # on all ranks
    meet("both have failed")
    if dist.get_rank() == 1:
        time.sleep(2 * POLL_SECONDS)  # meanwhile rank 0 checks for failures
    assert gather_texts("again", cpu) == ["again", "again"]


@on_two_ranks
def test_an_error_is_posted_in_all_channels_at_once():
    """The rank that hosts the store waits in each post: one after another, the others would learn it seconds later."""
    gather_texts("", torch.device("cpu"))  # makes the second channel
    posts = threading.Barrier(2)
    post = mock.patch.object(FailedChannel, "post", lambda channel, text: posts.wait(20))
    with post, pytest.raises(OverflowError, match="too wide"), missing_ranks_named(lambda: 1):
        raise OverflowError("too wide")
    assert not posts.broken and posts.n_waiting == 0


class OfOneRank(Parts):
    """Fails in one method on rank 1; the other rank then waits for it in a collective of the trainer or the model."""

    failing = ""

    def __getattribute__(self, name):
        if name == "failing" or name != self.failing or dist.get_rank() == 0:
            return super().__getattribute__(name)
        raise OverflowError("too wide")


class FailingHead(StatedHead):
    def forward(self, embeddings, batch):
        if dist.get_rank() == 1:
            raise OverflowError("too wide")
        return super().forward(embeddings, batch)


def _fails_on_rank_1(run_dir, failing):
    model, optimizer = models.build_sharded()
    models.head_of(model).__class__ = FailingHead if failing == "forward" else StatedHead
    loader = DataLoader(list(models.rank_batches(dist.get_rank(), 2, [6])), batch_size=None)
    args = TrainerArgs(6, 6, run_dir=run_dir, pipeline_type="none", sinks=(), max_train_iters=2)
    recipe = OfOneRank(args, model, optimizer, [CubicShuffler()], loader)
    recipe.failing = failing
    dist.barrier()
    with mock.patch.object(collectives, "_GRACE_SECONDS", 0.5):
        limit_collectives(50.0 if failing != "forward" else 2.0)
    return TrainingLoop(recipe).run().steps


@pytest.mark.parametrize(
    "failing", ["build_model", "build_optimizer", "build_shuffler", "fingerprint", "layers", "forward"]
)
@on("own_two_ranks", timeout=100)
def test_an_error_of_one_rank_is_raised_on_the_other(failing):
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        said = error_of(_fails_on_rank_1, folder, failing)
    assert time.monotonic() - began < 30
    if dist.get_rank() == 1:
        assert said == "OverflowError: too wide"
    else:
        assert "rank 1" in said and "OverflowError: too wide" in said, said
    meet("both have failed")


def _in_the_trainer_s():
    guard = FiniteLossGuard(torch.device("cpu"))
    guard.record(7, torch.ones(()))
    guard.check()


def _in_the_model_s():
    dist.all_reduce(torch.ones(1))


def _waits_elsewhere(folder, collective, group_timeout):
    """The worker thread learns that a rank stands still while the main thread waits for it in another collective."""
    shuffler = CubicShuffler()
    shuffler.shuffle(my_batch())
    dist.barrier()
    limit_waits(2.0)
    limit_collectives(group_timeout)
    if dist.get_rank() == 1:
        fault(folder, signal.SIGSTOP)
    shuffler.start_shuffle(my_batch(1))
    with missing_ranks_named(lambda: 7, [shuffler]):
        collective()


@pytest.mark.slow
@pytest.mark.parametrize("collective, group_timeout", [(_in_the_trainer_s, 600.0), (_in_the_model_s, 4.0)])
def test_the_main_thread_says_what_the_worker_knows(tmp_path, collective, group_timeout):
    work = run_with_fault(
        tmp_path, _waits_elsewhere, collective, group_timeout, waits_for=[0], limit=60.0, world_size=2
    )
    assert work[0].status == 1, work[0]
    assert work[0].error.startswith("RankMissingError: rank 1 did not take part in the gather of step 1 (ranks [0, 1])")


@pytest.mark.parametrize("signalled", [[1], []])
@on_ranks
def test_all_ranks_stop_after_the_same_step(signalled):
    with StopSignal() as stop:
        for step in range(4):
            if step == 1 and dist.get_rank() in signalled:
                stop._handle(15, None)
            stop.after_step()
            assert stop.agreed == (bool(signalled) and step >= 2)


def _agrees_alone():
    with StopSignal() as stop:
        stop._handle(15, None)
        stop.after_step()
    return stop.agreed


def test_a_single_rank_stops_after_its_step(rank_pools):
    assert rank_pools[1].run(_agrees_alone) == [True]
