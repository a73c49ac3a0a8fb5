"""Every way to put a few rows into groups, for comparisons with the best of them."""

from collections.abc import Iterator


def groupings(num_rows: int, most_groups: int | None = None) -> Iterator[list[int]]:
    """The group of each row, without the groups' names, of at most so many groups."""

    def extend(groups: list[int], used: int) -> Iterator[list[int]]:
        if len(groups) == num_rows:
            yield groups
            return
        for group in range(min(used + 1, most_groups or num_rows)):
            yield from extend([*groups, group], max(used, group + 1))

    return extend([], 0)
