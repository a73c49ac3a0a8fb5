"""Plain Python as training code has it: what the planner and the allocators are compared with."""

from __future__ import annotations

import heapq


class PlainSet:
    """A set of samples with its sum."""

    def __init__(self, samples: list[tuple[int, int]]) -> None:
        self.samples = samples
        self.total = sum(workload for _, workload in samples)

    def merge(self, other: PlainSet) -> None:
        self.samples += other.samples
        self.total += other.total

    def __lt__(self, other: PlainSet) -> bool:
        return self.total < other.total


class PlainState:
    """A distribution of samples to `k` sets, the heaviest first."""

    def __init__(self, samples: list[tuple[int, int]], num_parts: int) -> None:
        self.sets = [PlainSet([sample]) for sample in samples]
        self.sets += [PlainSet([]) for _ in range(num_parts - len(samples))]

    @property
    def spread(self) -> int:
        return self.sets[0].total - self.sets[-1].total

    def merge(self, other: PlainState) -> None:
        for one, two in zip(self.sets, reversed(other.sets), strict=True):
            one.merge(two)
        self.sets.sort(reverse=True)

    def __lt__(self, other: PlainState) -> bool:
        return self.spread > other.spread


def plain_karmarkar_karp(workloads: list[int], num_parts: int, equal_size: bool) -> list[list[int]]:
    """The textbook's largest differencing, as in training code: a heap of states with their sets."""
    samples = sorted(enumerate(workloads), key=lambda sample: -sample[1])
    rows = num_parts if equal_size else 1
    heap = [PlainState(samples[first : first + rows], num_parts) for first in range(0, len(samples), rows)]
    heapq.heapify(heap)
    while len(heap) > 1:
        state = heapq.heappop(heap)
        state.merge(heapq.heappop(heap))
        heapq.heappush(heap, state)
    return [[index for index, _ in one.samples] for one in heap[0].sets]


def plain_first_fit(values: list[int], capacity: int, min_groups: int = 1, divisor: int = 1) -> list[list[int]]:
    """Indices of `values` in groups that hold at most `capacity`: the first group with room takes the next value.

    The first `min_groups` values open a group each. Where the number of groups is no multiple of `divisor`, all is
    done again with more groups to begin with.
    """
    largest_first = sorted(range(len(values)), key=values.__getitem__, reverse=True)
    while True:
        groups: list[list[int]] = []
        sums: list[int] = []
        for index in largest_first:
            value = values[index]
            if value > capacity:
                raise ValueError(f"{value} is above the capacity {capacity}")
            place = -1
            if len(groups) >= min_groups:
                for group, total in enumerate(sums):
                    if total + value <= capacity:
                        place = group
                        break
            if place < 0:
                groups.append([index])
                sums.append(value)
            else:
                groups[place].append(index)
                sums[place] += value
        if len(groups) % divisor == 0:
            return groups
        min_groups = -(-len(groups) // divisor) * divisor
        if min_groups > len(values):
            raise ValueError(f"{len(values)} values do not fill {min_groups} groups")
