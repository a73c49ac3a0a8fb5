"""A plain Karmarkar-Karp in pure Python, as training code ships it: the stand-in that the planner is compared with."""

from __future__ import annotations

import heapq


class PlainSet:
    """A set of samples with its sum."""

    def __init__(self, samples: list[tuple[int, int]]) -> None:
        self.samples = samples
        self.total = sum(workload for _, workload in samples)

    def merge(self, other: PlainSet) -> None:
        """Take all samples of `other`."""
        self.samples += other.samples
        self.total += other.total

    def __lt__(self, other: PlainSet) -> bool:
        return self.total < other.total


class PlainState:
    """Samples dealt to `k` sets, the heaviest first."""

    def __init__(self, samples: list[tuple[int, int]], num_parts: int) -> None:
        self.sets = [PlainSet([sample]) for sample in samples]
        self.sets += [PlainSet([]) for _ in range(num_parts - len(samples))]

    @property
    def spread(self) -> int:
        """Largest sum − smallest sum."""
        return self.sets[0].total - self.sets[-1].total

    def merge(self, other: PlainState) -> None:
        """Join the heaviest set of one with the lightest of the other, and so on."""
        for one, two in zip(self.sets, reversed(other.sets), strict=True):
            one.merge(two)
        self.sets.sort(reverse=True)

    def __lt__(self, other: PlainState) -> bool:
        return self.spread > other.spread


def plain_karmarkar_karp(workloads: list[int], num_parts: int, equal_size: bool) -> list[list[int]]:
    """The textbook's largest differencing, as training code ships it: a heap of states with their sets."""
    samples = sorted(enumerate(workloads), key=lambda sample: -sample[1])
    rows = num_parts if equal_size else 1
    heap = [PlainState(samples[first : first + rows], num_parts) for first in range(0, len(samples), rows)]
    heapq.heapify(heap)
    while len(heap) > 1:
        state = heapq.heappop(heap)
        state.merge(heapq.heappop(heap))
        heapq.heappush(heap, state)
    return [[index for index, _ in one.samples] for one in heap[0].sets]
