"""Random histories: as long as asked for, in chunks of whole users."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.raw_data.histories import draw_histories, lengths_with


def test_nobody_has_an_item_twice():
    rng = np.random.default_rng(0)
    (rows,) = draw_histories(5_000, np.full(500, 100), rng, distinct=True)
    assert rows.users.tolist() == np.repeat(np.arange(500), 100).tolist()
    assert all(len(set(own)) == 100 for own in rows.items.reshape(500, 100).tolist())
    assert np.bincount(rows.items)[:50].mean() > 5 * np.bincount(rows.items)[-500:].mean()


def test_chunks_hold_whole_users():
    rng = np.random.default_rng(0)
    lengths = np.array([700_000, 0, 700_000, 5])
    chunks = list(draw_histories(100, lengths, rng, distinct=False))
    assert [len(chunk.users) for chunk in chunks] == [700_000, 700_005]
    assert np.bincount(np.concatenate([chunk.users for chunk in chunks]), minlength=4).tolist() == lengths.tolist()


@pytest.mark.parametrize("num_users", [1, 7, 1000])
def test_lengths_have_the_mean_and_stay_within_bounds(num_users):
    lengths = lengths_with(num_users, {0.0: 5, 0.5: 20, 0.9995: 900}, 40.0)
    assert lengths.mean() == pytest.approx(40, abs=1)
    assert lengths.min() >= 5
    assert lengths.max() <= 900
    assert (np.diff(lengths) >= 0).all()
