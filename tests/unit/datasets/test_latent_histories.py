"""Generated histories: as long as asked for, and with something to learn."""

from __future__ import annotations

import numpy as np
import pytest

from commons.datasets.latent_histories import LatentItems, draw_histories, lengths_with


@pytest.fixture(scope="module")
def histories():
    """Groups of the items and utilities, `(500 users, 100 items)`, and the items."""
    rng = np.random.default_rng(0)
    items = LatentItems.draw(5_000, rng)
    (rows,) = draw_histories(items, np.full(500, 100), rng, distinct=True)
    assert rows.users.tolist() == np.repeat(np.arange(500), 100).tolist()
    return items.groups[rows.items].reshape(500, 100), rows.utility.reshape(500, 100), rows.items.reshape(500, 100)


def test_nobody_has_an_item_twice(histories):
    assert all(len(set(own)) == 100 for own in histories[2].tolist())


def test_the_latest_items_tell_what_comes_next(histories):
    groups, _, _ = histories
    future = groups[:, 90:]

    def share_within(past):
        return np.mean([np.isin(own, seen).mean() for own, seen in zip(future, past)])

    latest, first, of_others = (
        share_within(past) for past in (groups[:, 80:90], groups[:, :10], np.roll(groups[:, 80:90], 1, axis=0))
    )
    assert latest > first + 0.2
    assert first > of_others - 0.05
    assert latest > of_others + 0.3


def test_past_opinions_tell_what_will_be_liked(histories):
    groups, utility, _ = histories
    seen, coming = [], []
    for own_groups, own_utility in zip(groups, utility):
        for group in np.intersect1d(own_groups[:60], own_groups[60:]):
            seen.append(own_utility[:60][own_groups[:60] == group].mean())
            coming.append(own_utility[60:][own_groups[60:] == group].mean())
    assert np.corrcoef(seen, coming)[0, 1] > 0.5


def test_chunks_hold_whole_users():
    rng = np.random.default_rng(0)
    items = LatentItems.draw(100, rng)
    lengths = np.array([700_000, 0, 700_000, 5])
    chunks = list(draw_histories(items, lengths, rng, distinct=False))
    assert [len(chunk.users) for chunk in chunks] == [700_000, 700_005]
    assert np.bincount(np.concatenate([chunk.users for chunk in chunks]), minlength=4).tolist() == lengths.tolist()


def test_too_few_items():
    rng = np.random.default_rng(0)
    with pytest.raises(ValueError, match="histories of up to 30 items .* without repeats from 20 items"):
        list(draw_histories(LatentItems.draw(20, rng), np.array([30]), rng, distinct=True))


@pytest.mark.parametrize("num_users", [1, 7, 1000])
def test_lengths_have_the_mean_and_stay_within_bounds(num_users):
    lengths = lengths_with(num_users, {0.0: 5, 0.5: 20, 0.9995: 900}, 40.0)
    assert lengths.mean() == pytest.approx(40, abs=1)
    assert lengths.min() >= 5
    assert lengths.max() <= 900
    assert (np.diff(lengths) >= 0).all()
