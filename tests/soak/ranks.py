"""What the ranks of a soak run: episodes until so many steps are trained, then shufflers made and closed."""

from __future__ import annotations

import logging
import sys
import warnings
from dataclasses import dataclass

import torch.distributed as dist
from tqdm import tqdm

from commons.distributed.channel.store import call_store
from commons.distributed.options import ShufflerOptions
from commons.pipeline import windowed_iter
from tests.helpers.batches.square_shuffler import SquareShuffler
from tests.helpers.ranks.rank_pool import RankPool
from tests.soak.accounts import Steps, most_steps, require_equal
from tests.soak.episodes import Episode, Soak, Totals
from tests.soak.footprint import Footprint
from tests.soak.streams import Stream

# A look at the process takes a garbage collection: one for so many steps, and for so many shufflers.
_STEPS_PER_LOOK = 100
_SHUFFLERS_PER_LOOK = 5


@dataclass(frozen=True)
class RankReport:
    """What one rank has seen."""

    totals: Totals
    looks: list[Footprint]  # at the process between episodes, by steps
    shuffler_looks: list[Footprint]  # between shufflers that were made and closed, by their number


def run(steps: int, ranks: int, seed: int, shufflers: int, *, episode: int | None = None) -> list[RankReport]:
    """Start ranks, soak them, end them; the reports by rank. See `Args` of the program.

    Raises:
        RankFailure: a row was lost, doubled or changed, or a rank hung, died or raised.
    """
    with RankPool(ranks) as pool:
        # What hangs is reported by the shuffler's own timeout, long before.
        return pool.run(_soak, steps, seed, shufflers, episode, timeout=600 + 2.0 * (steps + shufflers))


def _soak(steps: int, seed: int, shufflers: int, episode: int | None) -> RankReport:
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)  # caps that no plan can keep are part of it
    # The thread that asks the store begins with the first collective that is late, and stays: no growth.
    call_store(lambda store: store.check(["soak"]))
    soak = Soak(seed)
    looks: list[Footprint] = []
    with _progress(steps, "steps") as bar:
        number = episode or 0
        while soak.totals.steps < steps:
            soak.run(number)
            bar.update(soak.totals.steps - bar.n)
            if not looks or soak.totals.steps >= looks[-1].step + _STEPS_PER_LOOK:
                looks.append(Footprint.now(soak.totals.steps))
            if episode is not None:
                break
            number += 1
    shuffler_looks = []
    with _progress(shufflers, "shufflers") as bar:
        for index in range(shufflers):
            make_use_and_close(seed, index)
            bar.update()
            if (index + 1) % _SHUFFLERS_PER_LOOK == 0:
                shuffler_looks.append(Footprint.now(index + 1))
    dist.barrier()
    return RankReport(soak.totals, looks, shuffler_looks)


def make_use_and_close(seed: int, index: int) -> None:
    """One shuffler: made, given three batches and, of every other one, a window, and closed; a collective call."""
    options = Episode.drawn(seed, index, dist.get_world_size()).options
    shuffler = SquareShuffler(ShufflerOptions(**options))
    stream = Stream("rich", index, dist.get_rank(), 3)
    brought, trained = Steps(), Steps()
    try:
        for batch in brought.noted(stream.batches()):
            trained.add(shuffler.shuffle(batch))
        if index % 2:
            windows = windowed_iter(brought.noted(stream.batches()), shuffler, 3)
            for batch in windows:
                trained.add(batch)
            windows.close()
    finally:
        shuffler.close()
    sums = [each.over_ranks(most_steps(each), 3) for each in (brought, trained)]
    require_equal(*sums, f"shuffler {index}")


def _progress(total: int, what: str) -> tqdm:
    """A bar that rank 0 shows; a line every minute where there is no terminal."""
    every = 0.1 if sys.stderr.isatty() else 60.0
    return tqdm(total=total, desc=what, disable=dist.get_rank() != 0, leave=False, mininterval=every, delay=every)
