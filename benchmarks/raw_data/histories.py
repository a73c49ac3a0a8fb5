"""Random histories, as many as wanted: what the writers of large archives draw from.

Lengths follow published quantiles; items are drawn by a popularity that falls with their rank. How an item pleases is
its quality, the user's mildness and noise. Users are drawn in chunks: memory does not grow with their number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

_RANK_EXPONENT = 0.8
_QUALITY_SCALE, _MILDNESS_SCALE, _NOISE_SCALE = 0.6, 0.4, 1.2
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


@dataclass(frozen=True)
class Items:
    """Items, the most popular first.

    Attributes:
        quality: float32 `(num_items,)`.
        cumulated: float64 `(num_items,)`, weights in the choice of an item, summed up.

    """

    quality: np.ndarray
    cumulated: np.ndarray

    @classmethod
    def draw(cls, num_items: int, rng: np.random.Generator) -> Items:
        """Items of random quality."""
        weights = (np.arange(num_items) + 10.0) ** -_RANK_EXPONENT
        return cls(rng.standard_normal(num_items, dtype=np.float32), np.cumsum(weights))


@dataclass(frozen=True)
class Rows:
    """Interactions of consecutive users, user after user, oldest first.

    Attributes:
        users: int64 `(num_rows,)`.
        items: int64 `(num_rows,)`, places in Items.
        utility: float32 `(num_rows,)`, how much the item pleased.
        progress: float64 `(num_rows,)`, in [0, 1): how much of the history lies before.

    """

    users: np.ndarray
    items: np.ndarray
    utility: np.ndarray
    progress: np.ndarray


def draw_histories(items: Items, lengths: np.ndarray, rng: np.random.Generator, *, distinct: bool) -> Iterator[Rows]:
    """Histories of all users, chunk by chunk.

    Args:
        items: to choose from; more than the longest history if `distinct`.
        lengths: int64 `(num_users,)`.
        rng: source of randomness.
        distinct: no user has an item twice.

    """
    ends = np.cumsum(lengths)
    first = 0
    while first < len(lengths):
        before = ends[first - 1] if first else 0
        last = max(int(np.searchsorted(ends, before + _ROWS_PER_CHUNK, side="right")), first + 1)
        yield _draw_chunk(items, lengths[first:last], first, rng, distinct)
        first = last


def _draw_chunk(items: Items, lengths: np.ndarray, first: int, rng: np.random.Generator, distinct: bool) -> Rows:
    num_users, num_rows = len(lengths), int(lengths.sum())
    user = np.repeat(np.arange(num_users), lengths)
    place = np.arange(num_rows) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    drawn = rng.random(num_rows) * items.cumulated[-1]
    chosen = np.minimum(np.searchsorted(items.cumulated, drawn, side="right"), len(items.quality) - 1)
    if distinct:
        _redraw_repeated(items, user, chosen, rng)
    mildness = rng.standard_normal(num_users, dtype=np.float32)
    utility = (
        np.float32(_QUALITY_SCALE) * items.quality[chosen]
        + np.float32(_MILDNESS_SCALE) * mildness[user]
        + np.float32(_NOISE_SCALE) * rng.standard_normal(num_rows, dtype=np.float32)
    )
    return Rows(user + first, chosen, utility, place / lengths[user])


def _redraw_repeated(items: Items, user: np.ndarray, chosen: np.ndarray, rng: np.random.Generator) -> None:
    """Replace the second and further draws of an item by a user, in place."""
    num_items = len(items.quality)
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
