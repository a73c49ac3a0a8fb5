"""GATHER over many ranks: two short rings in the place of a long one.

gloo gathers in a ring: over W ranks W - 1 hops, each of which waits for the one before, and every rank of a group is
connected with all others. Here ranks form a grid. A gather in one's row and then, of what the row has said, in one's
column tells every rank the same as one ring does, in the same order and with the same bytes: in about 2·√W hops, and
with as many connections.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

# Fewest ranks that form a grid: of fewer, one ring is short enough, and one collective is less work than two.
FEWEST_RANKS = 64


def grid_shape(world_size: int) -> tuple[int, int] | None:
    """Rows and columns of the grid: as near to a square as divisors allow, never more rows than columns.

    Args:
        world_size: ranks of the group.

    Returns:
        Their numbers; None where one ring serves, for few ranks or a prime number of them.
    """
    if world_size < FEWEST_RANKS:
        return None
    rows = next(rows for rows in range(math.isqrt(world_size), 0, -1) if world_size % rows == 0)
    return None if rows == 1 else (rows, world_size // rows)


def ring_members(members: Sequence[int], rank: int) -> list[list[int]]:
    """The ranks with whom one gathers, ring after ring: all of them, or those of its row and then of its column.

    A row has neighbours, which often share a node; so that the order of ranks is that of the rows, one after another.

    Args:
        members: global ranks of the group.
        rank: this one's number in it.
    """
    shape = grid_shape(len(members))
    if shape is None:
        return [list(members)]
    _, columns = shape
    row, column = divmod(rank, columns)
    return [list(members[row * columns : (row + 1) * columns]), list(members[column::columns])]
