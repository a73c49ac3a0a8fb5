"""A rank leaves out `finish_shuffle` of a shuffle that it has started, or finishes shuffles in another order."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from commons.distributed.options import ShufflerOptions
from tests.helpers.batches.random_batches import rows_as_values
from tests.helpers.pipelines.shuffled_pipelines import CubicShuffler
from tests.helpers.ranks.faults import error_of, limit_waits, my_batch
from tests.helpers.ranks.on_ranks import of_all, on

# Survivors learn of the mistake long before the timeout.
PATIENT = 600.0


@on("own_two_ranks", timeout=100)
def test_ranks_that_wait_in_different_collectives_say_so():
    """Rank 1 starts the next shuffle and never finishes this one, as after a failed step of its model."""
    rank, places = dist.get_rank(), ["exchange of step 0", "gather of step 1"]
    shuffler = CubicShuffler(ShufflerOptions(timeout=PATIENT))
    handle = shuffler.start_shuffle(batch := my_batch())
    handle.prepared()
    dist.barrier()
    limit_waits(4.0)
    following = shuffler.start_shuffle(my_batch(1)).prepared if rank == 1 else None
    text = error_of(following or (lambda: shuffler.finish_shuffle(batch, handle)))
    said = f"rank {1 - rank} waited in the {places[1 - rank]}, not in the {places[rank]} (ranks [0, 1]); every"
    assert text.startswith(f"RankMissingError: {said} rank must call the shuffler for every step"), text


def _started(shuffler, steps):
    """Batches whose rows move, with their shuffles, all started and planned."""
    started = [(batch := my_batch(), shuffler.start_shuffle(batch)) for _ in range(steps)]
    assert all(handle.prepared().exchange.moves for _, handle in started)
    return started


@pytest.mark.parametrize(
    ("passed", "finished", "places"),
    [
        ((), (0, 1), ("exchange of step 0", "exchange (step 0 was skipped) of step 1")),
        # As with two pipelines on one shuffler: the batch that one has read ahead is finished after those of the other.
        ((1,), (0, 2), ("exchange (step 1 came before) of step 0", "exchange of step 2")),
    ],
)
@on("own_two_ranks", timeout=100)
def test_a_rank_that_skips_an_exchange_takes_part_in_no_other_one(passed, finished, places):
    """With the rows of another step, gloo would end the process, or the batch would have them."""
    rank = dist.get_rank()
    shuffler = CubicShuffler(ShufflerOptions(timeout=PATIENT))
    started = _started(shuffler, 4)
    for step in passed:
        shuffler.finish_shuffle(*started[step])
    dist.barrier()
    limit_waits(4.0)
    text = error_of(shuffler.finish_shuffle, *started[finished[rank]])
    assert text.startswith(f"RankMissingError: rank {1 - rank} waited in the {places[1 - rank]}, not in"), text


@on("ranks", timeout=100)
def test_shuffles_that_all_ranks_drop_or_finish_in_another_order_are_no_skip():
    shuffler = CubicShuffler(ShufflerOptions(timeout=PATIENT))
    started = _started(shuffler, 6)
    for step in (1, 0, 3, 4):  # 2 and 5 are dropped
        batch, handle = started[step]
        result = shuffler.finish_shuffle(batch, handle)
        before, after = (sorted(of_all(rows_as_values(each))) for each in (batch, result))
        assert before == after
    shuffler.shuffle(my_batch(7))
    shuffler.close()


@on("own_two_ranks", timeout=100)
def test_ranks_that_skip_different_exchanges_say_so():
    shuffler = CubicShuffler(ShufflerOptions(timeout=PATIENT))
    started = _started(shuffler, 3)
    text = error_of(shuffler.finish_shuffle, *started[1 + dist.get_rank()])
    said = "ValueError: ranks finish the shuffles of steps [1, 2] (ranks [0, 1]); every rank must finish the same"
    assert text.startswith(said), text
