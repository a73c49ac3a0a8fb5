"""Histories from a small latent model, as many as wanted: what the generators of large archives draw from.

- Items belong to groups; within its group an item is drawn with a probability that falls with its rank.
- A user has three favourite groups at the start and three at the end, and drifts from the first to the last: a
  recommender that sees the latest items can tell what comes next. One item in five comes from anywhere.
- How an item pleases is its quality + the user's opinion of its group + mildness + noise: a recommender that sees what
  a user made of past items can tell what will be liked.

Lengths follow published quantiles. Users are drawn in chunks; memory does not grow with their number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

_NUM_GROUPS, _NUM_FAVOURITES = 64, 3
_FAVOURITE_SHARE = 0.8
_RANK_EXPONENT = 0.8
_QUALITY_SCALE, _OPINION_SCALE, _MILDNESS_SCALE, _NOISE_SCALE = 0.6, 1.0, 0.4, 0.6
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
class LatentItems:
    """Items, those of a group together.

    Attributes:
        quality: float32 `(num_items,)`.
        groups: int16 `(num_items,)`, ascending.
        cumulated: float64 `(num_items + 1,)`, weights in the choice of an item, summed up.
        starts: int64 `(num_groups + 1,)`, the first item of each group.

    """

    quality: np.ndarray
    groups: np.ndarray
    cumulated: np.ndarray
    starts: np.ndarray

    @classmethod
    def draw(cls, num_items: int, rng: np.random.Generator) -> LatentItems:
        """Items whose groups differ in size."""
        shares = rng.gamma(2.0, size=_NUM_GROUPS)
        groups = np.sort(rng.choice(_NUM_GROUPS, num_items, p=shares / shares.sum())).astype(np.int16)
        starts = np.searchsorted(groups, np.arange(_NUM_GROUPS + 1))
        rank = np.arange(num_items) - starts[groups]
        weights = (rank + 10.0) ** -_RANK_EXPONENT
        cumulated = np.concatenate([[0.0], np.cumsum(weights)])
        return cls(rng.standard_normal(num_items, dtype=np.float32), groups, cumulated, starts)


@dataclass(frozen=True)
class LatentRows:
    """Interactions of consecutive users, user after user, oldest first.

    Attributes:
        users: int64 `(num_rows,)`.
        items: int64 `(num_rows,)`, places in LatentItems.
        utility: float32 `(num_rows,)`, how much the item pleased.
        progress: float64 `(num_rows,)`, in [0, 1): how much of the history lies before.

    """

    users: np.ndarray
    items: np.ndarray
    utility: np.ndarray
    progress: np.ndarray


def draw_histories(
    items: LatentItems, lengths: np.ndarray, rng: np.random.Generator, *, distinct: bool
) -> Iterator[LatentRows]:
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


def _draw_chunk(
    items: LatentItems, lengths: np.ndarray, first: int, rng: np.random.Generator, distinct: bool
) -> LatentRows:
    num_users, num_rows = len(lengths), int(lengths.sum())
    user = np.repeat(np.arange(num_users), lengths)
    place = np.arange(num_rows) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    progress = place / lengths[user]
    favourites = _draw_favourites(items, (num_users, 2, _NUM_FAVOURITES), rng)
    is_late = (rng.random(num_rows) < progress).astype(np.int64)
    group = favourites[user, is_late, rng.integers(_NUM_FAVOURITES, size=num_rows)]
    chosen = _draw_items(items, group, rng)
    if distinct:
        _redraw_repeated(items, user, chosen, rng)
    opinion = rng.standard_normal((num_users, _NUM_GROUPS), dtype=np.float32)
    mildness = rng.standard_normal(num_users, dtype=np.float32)
    utility = (
        np.float32(_QUALITY_SCALE) * items.quality[chosen]
        + np.float32(_OPINION_SCALE) * opinion[user, items.groups[chosen]]
        + np.float32(_MILDNESS_SCALE) * mildness[user]
        + np.float32(_NOISE_SCALE) * rng.standard_normal(num_rows, dtype=np.float32)
    )
    return LatentRows(user + first, chosen, utility, progress)


def _draw_favourites(items: LatentItems, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Groups that have items, each as likely as its items are."""
    weights = items.cumulated[items.starts[1:]] - items.cumulated[items.starts[:-1]]
    return rng.choice(_NUM_GROUPS, shape, p=weights / weights.sum())


def _draw_items(items: LatentItems, group: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Items of the given groups, or of any for one in five."""
    anywhere = rng.random(len(group)) >= _FAVOURITE_SHARE
    low = np.where(anywhere, 0.0, items.cumulated[items.starts[group]])
    high = np.where(anywhere, items.cumulated[-1], items.cumulated[items.starts[group + 1]])
    drawn = low + rng.random(len(group)) * (high - low)
    return np.minimum(np.searchsorted(items.cumulated, drawn, side="right") - 1, len(items.quality) - 1)


def _redraw_repeated(items: LatentItems, user: np.ndarray, chosen: np.ndarray, rng: np.random.Generator) -> None:
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
