"""Random events of users, as many as wanted: what the writers of large archives put into their formats.

Lengths follow published quantiles; items are drawn by a popularity that falls with their rank. Users are drawn in
chunks: memory does not grow with their number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

_RANK_EXPONENT = 0.8
_ROWS_PER_CHUNK = 1_000_000
_MOST_REDRAWS = 64


def lengths_with(num_users: int, quantiles: Mapping[float, int], mean: float) -> np.ndarray:
    """Lengths of histories, ascending, that follow published statistics.

    Between two quantiles the logarithm of the length is linear in −log(1 − p), as in a Pareto distribution; then what
    exceeds the shortest is scaled, so that the mean is right for any number of users.

    Args:
        num_users: how many.
        quantiles: the length at each probability p, from 0, the shortest, to almost 1, the longest.
        mean: of the result, to within one item.

    Returns:
        int64 `(num_users,)`.
    """
    probabilities = (np.arange(num_users) + 0.5) / num_users
    knots = -np.log1p(-np.array(list(quantiles)))
    drawn = np.exp(np.interp(-np.log1p(-probabilities), knots, np.log(list(quantiles.values()))))
    shortest, longest = min(quantiles.values()), max(quantiles.values())

    def scaled(scale: float) -> np.ndarray:
        return np.clip(np.rint(shortest + scale * (drawn - shortest)), shortest, longest).astype(np.int64)

    low, high = 0.0, 16.0
    for _ in range(50):  # bisection of the scale; the mean rises with it
        middle = (low + high) / 2
        low, high = (middle, high) if scaled(middle).mean() < mean else (low, middle)
    return scaled(high)


def spread_evenly(count: int, rng: np.random.Generator) -> np.ndarray:
    """float64 `(count,)` in (0, 1), in random order and evenly spread: shares of them are exact."""
    return (rng.permutation(count) + 0.5) / count


@dataclass(frozen=True)
class Rows:
    """Interactions of consecutive users, user after user, oldest first."""

    users: np.ndarray  # int64 `(num_rows,)`
    items: np.ndarray  # int64 `(num_rows,)`, ranks by popularity
    progress: np.ndarray  # float64 `(num_rows,)`, in [0, 1): how much of the history lies before


def draw_histories(num_items: int, lengths: np.ndarray, rng: np.random.Generator, *, distinct: bool) -> Iterator[Rows]:
    """Histories of all users, chunk by chunk.

    Args:
        num_items: to choose from; more than the longest history if `distinct`.
        lengths: int64 `(num_users,)`.
        rng: source of randomness.
        distinct: no user has an item twice.
    """
    weights = np.cumsum((np.arange(num_items) + 10.0) ** -_RANK_EXPONENT)
    ends, first = np.cumsum(lengths), 0
    while first < len(lengths):
        before = ends[first - 1] if first else 0
        last = max(int(np.searchsorted(ends, before + _ROWS_PER_CHUNK, side="right")), first + 1)
        own = lengths[first:last]
        user, num_rows = np.repeat(np.arange(len(own)), own), int(own.sum())
        place = np.arange(num_rows) - np.repeat(np.cumsum(own) - own, own)
        chosen = np.searchsorted(weights, rng.random(num_rows) * weights[-1], side="right")
        chosen = np.minimum(chosen, num_items - 1)
        if distinct:
            _redraw_repeated(num_items, user, chosen, rng)
        yield Rows(user + first, chosen, place / own[user])
        first = last


def _redraw_repeated(num_items: int, user: np.ndarray, chosen: np.ndarray, rng: np.random.Generator) -> None:
    """Replace the second and further draws of an item by a user, in place."""
    for _ in range(_MOST_REDRAWS):
        keys = user * num_items + chosen
        order = np.argsort(keys, kind="stable")
        repeated = order[1:][keys[order[1:]] == keys[order[:-1]]]
        if not repeated.size:
            return
        # All items alike: a user who has seen the popular ones turns to the rest.
        chosen[repeated] = rng.integers(num_items, size=repeated.size)
    raise ValueError(
        f"histories of up to {np.bincount(user).max()} items cannot be drawn without repeats from {num_items} items: "
        "draw from more"
    )
