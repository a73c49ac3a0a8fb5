"""Which rank is slow, told from simulated times: slow hardware within 50 steps, uneven data never."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from commons.distributed.rank_speeds import RankSpeeds, StepTimes, over_explained

SLOWER = 1.5


def steps_of(rng, ranks, balanced, steps):
    """Loads of every step, lognormal lengths; shared out evenly, or as they come."""
    for _ in range(steps):
        lengths = np.minimum(rng.lognormal(4.5, 1.0, size=(ranks, 16)), 2000)
        loads = (512 * lengths + lengths**2).sum(axis=1)
        yield (np.full(ranks, loads.mean()) * rng.uniform(0.995, 1.0, ranks) if balanced else loads).astype(np.int64)


def times_of(rng, loads, slow):
    """Nanoseconds: a fixed part, the load, and noise of a few percent with a long tail."""
    times = (2e6 + 50 * loads) * rng.gamma(200, 1 / 200, len(loads)) + rng.exponential(1e5, len(loads))
    times[slow] *= SLOWER
    return times.astype(np.int64)


def named_in(caplog):
    return [(record.args[0], record.args[1]) for record in caplog.records]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("ranks", [2, 8])
def test_skewed_lengths_alone_name_nobody(caplog, seed, ranks):
    rng, speeds = np.random.default_rng(seed), RankSpeeds(range(ranks), warns=True)
    favoured = rng.uniform(0.3, 3.0, ranks)  # ranks whose users are longer in every step
    for step, loads in enumerate(steps_of(rng, ranks, balanced=False, steps=300)):
        loads = (loads * favoured).astype(np.int64)
        speeds.look(step, times_of(rng, loads, slow=[]), loads)
    assert not caplog.records


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("ranks", [2, 4, 64])
def test_a_slow_rank_is_named_once_and_within_fifty_steps(caplog, seed, ranks):
    rng, speeds = np.random.default_rng(seed), RankSpeeds(range(100, 100 + ranks), warns=True)
    began, slow = int(rng.integers(0, 60)), int(rng.integers(ranks))
    for step, loads in enumerate(steps_of(rng, ranks, balanced=True, steps=200)):
        told = speeds.look(step, times_of(rng, loads, slow=[slow] if step >= began else []), loads)
    ((rank, at),) = named_in(caplog)
    assert rank == 100 + slow and began <= at < began + 50
    assert told[slow] < 0.9 * np.median([speed for each, speed in enumerate(told) if each != slow])


def test_an_episode_ends_and_another_one_is_named_again(caplog):
    rng, speeds = np.random.default_rng(0), RankSpeeds(range(4), warns=True)
    for step, loads in enumerate(steps_of(rng, 4, balanced=True, steps=300)):
        speeds.look(step, times_of(rng, loads, slow=[2] if step < 100 or step >= 200 else []), loads)
    assert [rank for rank, _ in named_in(caplog)] == [2, 2]
    assert "rank 2 is slow: at step" in caplog.text and "times what its load explains" in caplog.text


def test_who_has_not_said_is_not_known(caplog):
    caplog.set_level(logging.WARNING)
    speeds = RankSpeeds(range(3), warns=True)
    assert speeds.look(0, np.zeros(3, np.int64), np.zeros(3, np.int64)) == (None, None, None)
    assert speeds.look(1, np.array([1_000_000, 0, 4_000_000]), np.array([10, 0, 20])) == (10.0, None, 5.0)
    for step in range(2, 60):  # the second rank never says; the third did for a few steps
        known = int(step < 12)
        speeds.look(step, np.array([1_000_000, 0, 9_000_000 * known]), np.array([10, 0, 10 * known]))
    assert not caplog.records


def test_times_of_several_steps_are_told_as_their_mean():
    times = StepTimes()
    assert times.take() == (0, 0)
    times.add(1.0, 10)
    times.add(2.0, 21)
    assert times.take() == (1_500_000, 15) and times.take() == (0, 0)


def test_a_larger_load_explains_a_longer_time():
    time, load = np.array([10.0, 30.0, 12.0]), np.array([1.0, 3.0, 1.0])
    assert over_explained(time, load, np.array([True, True, True])).max() < 1.25
    assert np.isnan(over_explained(time, load, np.array([True, False, True]))).tolist() == [False, True, False]
