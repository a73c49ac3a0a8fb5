"""First-fit decreasing in plain Python, as training code would write it: what the allocators are compared with."""

from __future__ import annotations


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
