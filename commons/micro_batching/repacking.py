"""Packing for rows that must nearly fill every group: fill groups one by one, then repeatedly repack a few of them.

Filling is minimum bin slack: Gupta and Ho, "A new heuristic algorithm for the one-dimensional bin-packing problem",
Production Planning & Control 10 (1999), in the form of Fleszar and Hindi, "New heuristics for one-dimensional
bin-packing", Computers & Operations Research 29 (2002): the heaviest row left begins each group. Repeating it for some
groups is a large neighborhood search: Shaw, "Using constraint programming and local search methods to solve vehicle
routing problems", CP (1998).

The lists are short, so they are Python lists: the overhead of a numpy call would exceed its work.
"""

from __future__ import annotations

import itertools
import random
from bisect import bisect_left

# Limits of fillings tried for one group, used in turn: a longer search fills the groups better, but leaves fewer light
# rows, which the last groups need.
SEARCHES = (10, 20, 40)
# Numbers of groups repacked at a time, used in turn, at most half of all groups: the heaviest, LIGHTEST of the
# lightest, the others at random.
NEIGHBORHOODS = (6, 12)
LIGHTEST = 3
# Most repackings; also at most four per group.
MOST_REPACKS = 150


def pack_under(
    values: list[int], num_groups: int, capacity: int, started: list[list[int]] | None = None
) -> tuple[list[list[int]], bool]:
    """Pack rows into `num_groups` groups by minimum bin slack and repacking; returns whether all keep the capacity too.

    `values` descend, none is above the capacity; `started` is the result with fewer groups, as the start.
    """
    if started is None:
        started = fill_groups(values, range(len(values)), num_groups, capacity, SEARCHES[0])
    groups = repack(values, started + [[] for _ in range(len(started), num_groups)], capacity)
    return groups, all(sum(values[row] for row in rows) <= capacity for rows in groups)


def repack(values: list[int], groups: list[list[int]], capacity: int) -> list[list[int]]:
    """Lower the sum of the groups' excesses over the capacity by repacking a few groups at a time."""
    num_groups = len(groups)
    loads = [sum(values[row] for row in rows) for rows in groups]
    turns = itertools.cycle(itertools.product(NEIGHBORHOODS, SEARCHES))
    generator = random.Random(0)  # noqa: S311 - a seeded search: the same groups for the same rows
    for _ in range(min(MOST_REPACKS, 4 * num_groups) if num_groups > 2 else 0):
        ranked = sorted(range(num_groups), key=loads.__getitem__)
        if loads[ranked[-1]] <= capacity:
            break
        neighborhood, search = next(turns)
        size = min(neighborhood, (num_groups + 1) // 2)
        picked = [ranked[-1], *ranked[: min(LIGHTEST, size - 1)]]
        picked += generator.sample(ranked[LIGHTEST:-1], size - len(picked))
        rows = sorted(row for group in picked for row in groups[group])
        refilled = fill_groups(values, rows, size, capacity, search)
        new_loads = [sum([values[row] for row in each]) for each in refilled]
        # Accept an equal excess too, so that later repackings start from other groups.
        if _excess(new_loads, capacity) <= _excess([loads[group] for group in picked], capacity):
            for group, each, load in zip(picked, refilled, new_loads):
                groups[group], loads[group] = each, load
    return groups


def fill_groups(
    values: list[int], rows: range | list[int], num_groups: int, capacity: int, search: int
) -> list[list[int]]:
    """Assign `rows`, ascending, to groups, each filled by a bounded search. O(rows · (groups + search)).

    The search for a group ends at a filling that leaves no more room than the average: a better filling would only take
    light rows that later groups need. Rows that fit into no group go to the lightest groups, which then exceed the
    capacity. `search` is the limit of fillings tried per group.
    """
    left = [row for row in rows if values[row]]
    minus = [-values[row] for row in left]
    spare = capacity * num_groups + sum(minus)
    groups: list[list[int]] = []
    room: list[int] = []
    for index in range(num_groups):
        group, free = [], capacity
        if left:
            group, free = [left.pop(0)], capacity + minus.pop(0)
            for at in reversed(best_filling(minus, free, max(0, spare) // (num_groups - index), search)):
                group.append(left.pop(at))
                free += minus.pop(at)
        spare -= free
        groups.append(group)
        room.append(free)
    for row in (*left, *(row for row in rows if not values[row])):
        lightest = room.index(max(room))
        groups[lightest].append(row)
        room[lightest] -= values[row]
    return groups


def best_filling(minus: list[int], room: int, enough: int, search: int) -> list[int]:
    """The rows that leave the least of `room`, ascending; ties: the first filling in lexicographic order.

    `minus` are the rows' negated weights, ascending for the bisection; the search ends when at most `enough` room is
    left, or after `search` fillings.
    """
    best: list[int] = []
    least = room
    chosen: list[int] = []
    lightest_two = -sum(minus[-2:])
    at = looked_at = 0
    while least > enough and looked_at < search:
        # Depth first: the heaviest row that fits comes next.
        at = bisect_left(minus, -room, at)
        if at < len(minus):
            looked_at += 1
            if room + minus[at] < least:
                best, least = [*chosen, at], room + minus[at]
            if room >= lightest_two:
                chosen.append(at)
                room += minus[at]
                at += 1
                continue
        # No row fits, or only one more, and it has been tried: drop the last chosen row, and skip those of its weight.
        if not chosen:
            break
        last = chosen.pop()
        room -= minus[last]
        at = bisect_left(minus, minus[last] + 1, last)
    return best


def _excess(loads: list[int], capacity: int) -> int:
    return sum(load - capacity for load in loads if load > capacity)
