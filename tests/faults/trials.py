"""What a trial is, and how trials are drawn: each from the seed and its number alone."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

from tests.faults.kinds import CONSTRUCTION, KINDS, Kind

StoreHost = Literal["agent", "rank0"]
# What every rank loads.
BATCHES, ROWS = 8, 6


def own_ids(rank: int) -> list[list[int]]:
    """The rows that a rank loads, by batch."""
    return [[1 + 1000 * rank + 100 * step + row for row in range(ROWS)] for step in range(BATCHES)]


@dataclass(frozen=True)
class Trial:
    """One fault in one job."""

    number: int  # of the trial
    kind: str  # name of the kind of fault
    place: str  # where it happens
    call: int  # at the place's call of this number, from 0
    use: str  # how the shuffler is used
    world_size: int  # ranks
    rank: int  # the one that the fault is put into
    store: StoreHost  # who hosts the store: a process beside the ranks, as under torchrun, or rank 0
    timeout: float  # `ShufflerOptions.timeout` in seconds

    @property
    def of_kind(self) -> Kind:
        return KINDS[self.kind]

    @property
    def hosts_store(self) -> bool:
        """Whether the faulty rank hosts the store."""
        return self.store == "rank0" and self.rank == 0

    def describe(self) -> str:
        return (
            f"{self.number}: {self.kind} at '{self.place}' (call {self.call}) of rank {self.rank} of "
            f"{self.world_size}, {self.use}, store of {self.store}"
        )


def draw(seed: int, number: int, store: Literal["agent", "rank0", "both"], timeout: float, kinds: list[str]) -> Trial:
    """The trial of a number: kinds take turns, in another order in every round; the rest is drawn."""
    which, round_of_kinds = number % len(kinds), number // len(kinds)
    order = random.Random(f"{seed}/{round_of_kinds}").sample(kinds, len(kinds))
    kind = KINDS[order[which]]
    rng = random.Random(f"{seed}/{number}/{kind.name}")
    hosts = [host for host in kind.stores if store in ("both", host)]
    use = rng.choice(kind.uses)
    place = rng.choice(kind.places)
    world_size = rng.choice((2, 3, 4))
    rank = 0 if kind.rank_0 else rng.randrange(world_size)
    return Trial(
        number=number,
        kind=kind.name,
        place=place,
        call=0 if place == CONSTRUCTION else rng.choice(kind.calls),
        use=use,
        world_size=world_size,
        rank=rank,
        store=rng.choice(hosts),
        timeout=timeout,
    )


def kinds_for(store: str) -> list[str]:
    """Names of the kinds that a store host has."""
    return [name for name, kind in KINDS.items() if store == "both" or store in kind.stores]
