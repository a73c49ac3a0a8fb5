"""Packing where rows must nearly fill every group: fill the groups one by one, then some of them anew, again and again.

Filling is minimum bin slack: Gupta and Ho, "A new heuristic algorithm for the one-dimensional bin-packing problem",
Production Planning & Control 10 (1999), in the form of Fleszar and Hindi, "New heuristics for one-dimensional
bin-packing", Computers & Operations Research 29 (2002): the heaviest row left begins each group. Repeating it for some
groups is a large neighborhood search: Shaw, "Using constraint programming and local search methods to solve vehicle
routing problems", CP (1998).

The lists are short, so they are Python's: a call of numpy would take longer than what it does.
"""

from __future__ import annotations

import itertools
import random
from bisect import bisect_left

# Fillings that the search for one group's best looks at, in turn: a longer search fills the groups better, and leaves
# fewer of the light rows that the last groups need.
SEARCHES = (10, 20, 40)
# Groups that are filled anew at a time, in turn, at most half of them: the heaviest, so many of the lightest, and any.
NEIGHBORHOODS = (6, 12)
LIGHTEST = 3
# Times that this is done, and at most four times for each group.
MOST_REPACKS = 150


def pack_under(
    values: list[int], num_groups: int, capacity: int, started: list[list[int]] | None = None
) -> tuple[list[list[int]], bool]:
    """Pack rows into so many groups by minimum bin slack and repacking; says whether all keep the capacity.

    `values` descend, none above the capacity; `started` is what this came to with fewer groups, to go on from.
    """
    if started is None:
        started = fill_groups(values, range(len(values)), num_groups, capacity, SEARCHES[0])
    groups = repack(values, started + [[] for _ in range(len(started), num_groups)], capacity)
    return groups, all(sum(values[row] for row in rows) <= capacity for rows in groups)


def repack(values: list[int], groups: list[list[int]], capacity: int) -> list[list[int]]:
    """Lower the sum of what groups hold above the capacity by filling a few of them anew."""
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
        # Equal is taken too, to come to other rows.
        if _excess(new_loads, capacity) <= _excess([loads[group] for group in picked], capacity):
            for group, each, load in zip(picked, refilled, new_loads):
                groups[group], loads[group] = each, load
    return groups


def fill_groups(
    values: list[int], rows: range | list[int], num_groups: int, capacity: int, search: int
) -> list[list[int]]:
    """Deal rows, ascending, to groups, each filled as well as a bounded search can. O(rows · (groups + search)).

    The search for a group ends at a filling that leaves no more room than is left on average: a better one would only
    take the light rows that later groups need. Rows that fit nowhere in the end go to the lightest groups, which then
    are above the capacity. `search` is the number of fillings that it looks at.
    """
    left = [row for row in rows if values[row]]
    minus = [-values[row] for row in left]
    spare = capacity * num_groups + sum(minus)
    groups: list[list[int]] = []
    room: list[int] = []
    while len(groups) < num_groups:
        if not left:
            groups.append([])
            room.append(capacity)
            continue
        group, free = [left.pop(0)], capacity + minus.pop(0)
        chosen = best_filling(minus, free, max(0, spare) // (num_groups - len(groups)), search)
        for at in reversed(chosen):
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
    """Which of the rows leave the least room, ascending; of equal fillings the first in lexicographic order.

    `minus` are the rows' weights, negative so that they ascend and can be searched; the search ends at `enough` room,
    or after so many fillings.
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
        # No row fits, or only one, of which the heaviest is best: give up the last one chosen, and those of its weight.
        if not chosen:
            break
        last = chosen.pop()
        room -= minus[last]
        at = bisect_left(minus, minus[last] + 1, last)
    return best


def _excess(loads: list[int], capacity: int) -> int:
    return sum(load - capacity for load in loads if load > capacity)
