"""The trainer's epochs: which loaders and samplers they take, and in which order rows are read."""

from __future__ import annotations

import contextlib
from itertools import chain
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

from commons.datasets import BalancedBatchSampler, BudgetBatchSampler
from commons.datasets.samplers.epoch import EPOCH_START, ShardedBatchSampler
from commons.dispatch import SingleRankLoader
from commons.distributed.options import ShufflerOptions
from commons.distributed.tokens_shuffler import TokensBalancedBatchShuffler
from commons.trainer import TrainerArgs
from commons.trainer import epochs as trainer_epochs
from commons.trainer.epochs import Epochs
from tests.helpers.models.sid_models import model_parallel
from tests.helpers.pipelines.trainer_loops import Parts
from tests.helpers.ranks.faults import error_of
from tests.helpers.ranks.on_ranks import of_all, on_two_ranks


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(12))


def epochs_of(loader, by=None, **args):
    return Epochs(loader, Parts(TrainerArgs(2, 2, **args), None, None, (), loader), by)


def _open(workloads, **changes):
    """By a sampler of every rank's workloads, or of none."""
    rows, sampler = TensorDataset(torch.arange(12)), None
    if workloads is not None:
        rank = dist.get_rank()
        work = workloads[rank] if isinstance(workloads[0], list) else workloads
        sampler = BalancedBatchSampler(work, 2, num_ranks=2, rank=rank, **changes)
    epochs = epochs_of(DataLoader(rows, batch_sampler=sampler), schedule_in="rows")
    return epochs.rows_of_epoch(0), [batch.tolist() for (batch,) in epochs.open(0, EPOCH_START)]


@on_two_ranks
def test_a_loader_of_the_users_own():
    num_rows, batches = _open(list(range(12)), window=2)
    assert num_rows == 12 and sorted(of_all(chain.from_iterable(batches))) == list(range(12))
    for workloads, said in (
        (list(range(11)), "workloads has 11 entries, the data set has 12 rows"),
        ([list(range(12)), list(range(1, 13))], "ValueError: ranks plan with different settings or workloads"),
        (None, "ValueError: schedule_in is 'rows' and the sampl"),  # which needs a sampler that knows them
    ):
        assert said in error_of(_open, workloads)
    assert "define __len__ of the data set" in error_of(epochs_of, DataLoader(Stream()))
    # A checkpoint between the ends of both windows would train rows of the sampler's window a second time.
    sampler = BalancedBatchSampler(range(12), 2, num_ranks=2, rank=dist.get_rank(), window=3)
    loader = DataLoader(TensorDataset(torch.arange(12)), batch_sampler=sampler)
    with contextlib.closing(TokensBalancedBatchShuffler()) as shuffler:
        error = error_of(epochs_of, loader, shuffler, enable_balanced_shuffler=True, shuffle_window=2)
    assert "shuffle_window is 2, and the loader's BalancedBatchSampler has a window of 3" in error


@on_two_ranks
def test_groups_change_the_order_of_the_rows_and_costs_and_speeds_do_not():
    """A checkpoint within an epoch warns of another order."""

    def order(**changes):
        options = {"workloads": range(1, 13), "window": 1} | changes
        sampler = BalancedBatchSampler(**options, batch_size=2, num_ranks=2, rank=dist.get_rank())
        return epochs_of(DataLoader(TensorDataset(torch.arange(12)), batch_sampler=sampler)).order()

    for changes in ({"workloads": [1] * 12}, {"window": 3}, {"padded": True}, {"speeds": [1, 2]}):
        assert order(**changes) == order()
    assert order(groups=[row // 2 for row in range(12)]) != order(groups=[row % 6 for row in range(12)]) != order()


@on_two_ranks
def test_every_sampler_reads_the_rows_in_the_same_order():
    """So a resumed run that reads the rest of an epoch by another sampler need not warn of it."""
    rows, options = TensorDataset(torch.arange(12)), {"seed": 3, "shuffle": True, "rank": dist.get_rank()}
    planned = {"workloads": range(1, 13), "num_ranks": 2, **options}
    samplers = (
        ShardedBatchSampler(12, 2, world_size=2, **options),
        BalancedBatchSampler(batch_size=2, window=3, **planned),
        BudgetBatchSampler(budget_per_rank=20, speeds=[2, 1], **planned),
    )
    orders = [epochs_of(DataLoader(rows, batch_sampler=sampler)).order() for sampler in samplers]
    assert all(order == orders[0] for order in orders) and orders[0].keys() >= {"seed", "shuffle", "num_rows"}
    assert all((sampler.order(12, 1) == samplers[0].order(12, 1)).all() for sampler in samplers)


def _distributed_by_rank_0(options):
    """This rank's rows of a batch whose rows are their workloads, and the timeout."""
    loader, shuffler = DataLoader(torch.tensor([100] + [1] * 7), batch_size=8), TokensBalancedBatchShuffler()
    shuffler.get_workloads = lambda batch: batch
    with mock.patch.object(trainer_epochs, "SingleRankLoader", wraps=SingleRankLoader) as made:
        epochs = epochs_of(loader, shuffler, single_rank_load=True, balance_batch=True, shuffler=options)
    with contextlib.closing(epochs):
        return next(epochs.open(0, EPOCH_START)).tolist(), made.call_args.kwargs["timeout"]


def test_rank_0_follows_the_options_of_the_shuffler(two_ranks):
    options = ShufflerOptions(equal_size=False, timeout=70.0)
    assert two_ranks.run(_distributed_by_rank_0, options) == [([100], 70.0), ([1] * 7, 70.0)]


@on_two_ranks
def test_a_single_rank_that_loads_reads_the_rows_of_all():
    """With a sampler of one rank's rows, those of the other ranks would be lost without a message."""
    rows, rank = TensorDataset(torch.arange(12)), dist.get_rank()
    for loader in (
        DataLoader(rows, batch_sampler=ShardedBatchSampler(12, 2, rank=rank, world_size=2)),
        DataLoader(rows, 2, sampler=DistributedSampler(rows, 2, rank)),
    ):
        error = error_of(epochs_of, loader, single_rank_load=True)
        assert "reads the rows of one of 2 ranks; only rank 0 loads" in error and "read all rows" in error
    whole = DataLoader(rows, batch_sampler=ShardedBatchSampler(12, 4))
    with contextlib.closing(epochs_of(whole, TokensBalancedBatchShuffler(), single_rank_load=True)) as epochs:
        own = [row for (batch,) in epochs.open(0, EPOCH_START) for row in batch.tolist()]
        assert sorted(of_all(own)) == list(range(12))


@on_two_ranks
def test_a_calibration_may_be_replaced_during_a_run(tmp_path):
    """A window is still that of the calibration that the shuffler has read."""
    file = tmp_path / f"{dist.get_rank()}.toml"
    file.write_text("before")
    with contextlib.closing(TokensBalancedBatchShuffler(options=ShufflerOptions(calibration=str(file)))) as shuffler:
        changes = {"enable_balanced_shuffler": True, "shuffle_window": 2}
        first = epochs_of(DataLoader(range(4)), shuffler, **changes)
        window_of = first.window_of()
        file.write_text("after")
        assert first.window_of() == window_of != epochs_of(DataLoader(range(4)), shuffler, **changes).window_of()


@on_two_ranks
def test_tensor_parallel_peers_draw_the_same_batches():
    for tensor_parallel_size in (2, 1):
        with model_parallel(tensor_parallel_size):
            epochs = epochs_of(DataLoader(range(4), batch_size=None))
            seeds = of_all([epochs.open(epoch, EPOCH_START)._base_seed for epoch in (0, 1)])
        assert len(set(seeds)) == 4 // tensor_parallel_size
