"""Speeds from simulated times, in a closed loop: what they become, when they stay, and that they never oscillate."""

import itertools

import numpy as np
import pytest

from commons.perf_model.speed_control import FASTEST, LOOK_STEPS, SLOWEST, SpeedControl, _slope, _sums_of_differences

FIXED = 0.2  # of the time of a mean load
SLOW = 1


def slow_between(first, last, factor=1.5):
    """The factor of every rank's time: one is slower in some steps."""
    return lambda step, ranks: np.where((np.arange(ranks) == SLOW) & (first <= step < last), factor, 1.0)


ALWAYS_EQUAL = slow_between(0, 0)


def by_load(rng, factors, loads):
    """Times that follow loads, with noise, a tail and pauses."""
    times = factors * (FIXED + (1 - FIXED) * loads) * rng.gamma(1000, 1 / 1000, len(loads))
    return (times + rng.exponential(0.02, len(loads))) * np.where(rng.random(len(loads)) < 0.005, 8.0, 1.0)


def run(ranks, steps, factors, seed=0, times=by_load, begin=(), reports=lambda step, ranks: np.full(ranks, True)):
    """Speeds after every step, `(steps, ranks)`, and the longest time of each; plans follow the speeds nearly."""
    rng, control, speeds, longest = np.random.default_rng(seed), SpeedControl(ranks, begin), [], []
    for step in range(steps):
        total = ranks * max(0.2, 1 + 0.15 * rng.standard_normal())
        loads = total * control.speeds / control.speeds.sum() * rng.uniform(0.99, 1.0, ranks)
        took = times(rng, factors(step, ranks), loads)
        control.take(np.rint(took * 1e7 * reports(step, ranks)).astype(np.int64), np.rint(loads * 1e9).astype(np.int64))
        speeds.append(control.speeds)
        longest.append(took.max())
    return np.array(speeds), np.array(longest)


def changes_of(speeds):
    return int((np.diff(speeds, axis=0) != 0).sum())


@pytest.mark.parametrize("ranks", [2, 4, 32])
def test_a_slow_rank_gets_less_and_all_of_it_again_when_it_recovers(ranks):
    speeds, longest = run(ranks, 500, slow_between(100, 300))
    assert (np.delete(speeds, SLOW, axis=1) == FASTEST).all()
    assert (speeds[:105, SLOW] == FASTEST).all() and (speeds[-100:, SLOW] == FASTEST).all()
    # Of two ranks 1.5 · (0.2 + 0.8 x) = 0.2 + 0.8 · (2 − x): x = 0.75, and 1.25 for the other. Of many, 1.5 · (…) = 1.
    ideal = FASTEST * {2: 0.75 / 1.25, 4: 0.594, 32: 0.585}[ranks]
    assert np.abs(speeds[200:300, SLOW] / ideal - 1).max() < 0.06
    before, at_first, settled = (np.median(longest[part]) for part in (slice(100), slice(100, 110), slice(200, 300)))
    assert at_first > 1.4 * before and settled < before * (1.35 if ranks == 2 else 1.2)


@pytest.mark.parametrize("ranks", [2, 8, 64])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_equal_ranks_never_change_in_two_thousand_steps(ranks, seed):
    assert changes_of(run(ranks, 2000, ALWAYS_EQUAL, seed)[0]) == 0


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_nothing_oscillates_in_two_thousand_steps_with_a_slow_rank(ranks):
    speeds, _ = run(ranks, 2000, slow_between(0, 2000))
    assert changes_of(speeds[:100]) > 3 and changes_of(speeds[150:]) <= 4
    assert np.ptp(speeds[150:, SLOW]) < 0.12 * FASTEST


def test_a_look_changes_a_speed_by_five_percent_at_most_and_two_looks_confirm():
    speeds, _ = run(4, 400, slow_between(100, 250, factor=4.0))
    steps = np.flatnonzero(np.diff(speeds[:, SLOW]))
    ratio = speeds[1:, SLOW] / speeds[:-1, SLOW]
    assert ratio.min() >= 0.95 and ratio.max() <= 1.05
    assert (np.diff(steps) % LOOK_STEPS == 0).all()
    # The median of twenty steps shows it after ten at the earliest, and the next look confirms it.
    assert 109 + LOOK_STEPS <= steps[0] <= 109 + 2 * LOOK_STEPS


def test_speeds_stay_between_half_and_all_of_the_fastest():
    speeds, _ = run(8, 400, slow_between(50, 400, factor=10.0))
    assert speeds.min() == speeds[-1, SLOW] == SLOWEST and speeds.max() == FASTEST


@pytest.mark.parametrize("factors", [slow_between(0, 600, 1.04), slow_between(100, 108, 3.0)])
def test_small_differences_and_short_disturbances_change_nothing(factors):
    assert changes_of(run(4, 600, factors)[0]) == 0


@pytest.mark.parametrize("factor", [1.1, 1.12, 1.15])
@pytest.mark.parametrize("seed", range(3))
def test_all_work_comes_back_after_a_small_difference_too(factor, seed):
    speeds, _ = run(4, 600, slow_between(0, 300, factor), seed)
    assert (speeds[-1] == FASTEST).all()


def communication(rng, factors, loads):
    """A slow network: times that no load explains."""
    return factors * rng.gamma(400, 1 / 400, len(loads))


def starved(rng, factors, loads):
    """Ranks wait for their loaders, one of them longer."""
    return 0.2 * loads + factors * rng.exponential(1.0, len(loads))


def whole_step(rng, factors, loads):
    """Ranks wait for one another in what they time."""
    return np.full(len(loads), by_load(rng, factors, loads).max()) * rng.gamma(1e4, 1e-4, len(loads))


def shared_network(rng, factors, loads):
    """One network slows all ranks at once, and loads differ little from step to step."""
    return factors * (1 + 0.01 * loads) * rng.gamma(25, 1 / 25) * rng.gamma(1e4, 1e-4, len(loads))


@pytest.mark.parametrize("ranks", [2, 8, 256])
@pytest.mark.parametrize("times", [communication, starved, whole_step, shared_network])
def test_times_that_do_not_follow_loads_change_nothing(ranks, times):
    assert changes_of(run(ranks, 600, slow_between(0, 600, 1.8), times=times)[0]) == 0


def test_speeds_go_back_when_times_stop_to_follow_loads():
    def then_starved(rng, factors, loads):
        return (by_load if then_starved.step < 200 else communication)(rng, factors, loads)

    def factors(step, ranks):
        then_starved.step = step
        return slow_between(0, 800)(step, ranks)

    speeds, _ = run(4, 800, factors, times=then_starved)
    assert speeds[199, SLOW] < 0.65 * FASTEST and speeds[-1, SLOW] == FASTEST


def test_an_earlier_run_is_continued_and_another_number_of_ranks_begins_anew():
    settled = run(4, 300, slow_between(0, 300))[0][-1]
    again, _ = run(4, 300, slow_between(0, 300), seed=1, begin=settled.tolist())
    assert again[0].tolist() == settled.tolist() and changes_of(again) <= 4
    assert SpeedControl(3, settled.tolist()).speeds.tolist() == [FASTEST] * 3
    assert SpeedControl(2, [7, 9000]).speeds.tolist() == [SLOWEST, FASTEST]


def test_ranks_that_report_seldom_or_never_are_left_as_they_are():
    assert changes_of(run(4, 300, slow_between(0, 300), reports=lambda step, ranks: np.arange(ranks) != SLOW)[0]) == 0
    assert changes_of(run(3, 100, ALWAYS_EQUAL, reports=lambda step, ranks: np.full(ranks, False))[0]) == 0
    # Every seventh report is missing, or all ranks report in every third step alone.
    some, _ = run(4, 400, slow_between(0, 400), reports=lambda step, ranks: (np.arange(ranks) + step) % 7 > 0)
    rare, _ = run(4, 900, slow_between(0, 900), reports=lambda step, ranks: np.full(ranks, step % 3 == 0))
    assert max(some[-1, SLOW], rare[-1, SLOW]) < 0.65 * FASTEST
    assert changes_of(run(1, 60, ALWAYS_EQUAL)[0]) == 0
    # Of a single rank that reports nobody knows whether it is fast.
    alone = run(3, 300, ALWAYS_EQUAL, begin=[1024, 700, 1024], reports=lambda step, ranks: np.arange(ranks) == SLOW)[0]
    assert changes_of(alone) == 0


def test_a_time_without_a_load_counts_as_no_report_and_no_time_grows_faster_than_its_load():
    """A rank had no rows in some steps; all times are proportional, and then quadratic."""
    rng, factors = np.random.default_rng(0), np.array([1.0, 1.5, 1.0])
    for power in (1.0, 2.0):
        with_time, without, proportional = SpeedControl(3), SpeedControl(3), SpeedControl(3)
        for step in range(200):
            loads = 1.0 + 0.1 * rng.random(3)
            times, has_rows = factors * loads**power, np.arange(3) != (0 if step % 7 == 0 else 3)
            with_time.take(np.where(has_rows, times, 1e-3), loads * has_rows)
            without.take(times * has_rows, loads)
            proportional.take(factors * loads, loads)
        assert with_time.speeds.tolist() == without.speeds.tolist() and with_time.follows == without.follows
        assert without.follows == pytest.approx(1.0) and without.follows <= 1.0
        assert np.abs(without.speeds - proportional.speeds).max() < 0.1 * FASTEST
        assert without.speeds[SLOW] == pytest.approx(FASTEST / 1.5, rel=0.1)


def test_the_saving_is_that_of_loads_by_these_speeds():
    control = SpeedControl(2, [1024, 512])
    assert control.saving == pytest.approx(1 / 3)  # from 1 ÷ 0.5 to 2 ÷ 1.5
    assert SpeedControl(2).saving == 0.0


@pytest.mark.parametrize("follows", [-0.9, 0.9])
def test_the_error_counts_what_neighbouring_differences_share(follows):
    """Step by step, by the sums of Newey and West with one lag; neighbours that differ lower no error."""
    rng = np.random.default_rng(1)
    noise = rng.normal(size=101)
    x, y = rng.uniform(1, 2, size=100), noise[1:] + follows * noise[:-1]
    slope, error = _slope(np.array([x * x, x * y]))
    scores = [each_x * (each_y - slope * each_x) for each_x, each_y in zip(x, y)]
    alone = sum(score * score for score in scores)
    shared = sum(2 * before * after for before, after in itertools.pairwise(scores))
    assert abs(shared) > 0.5 * alone and (shared > 0) == (follows > 0)
    assert error == pytest.approx(3 * np.sqrt(alone + max(0, shared)) / (x * x).sum())


def test_the_error_covers_a_disturbance_that_all_ranks_share():
    def off(seed):
        rng = np.random.default_rng(seed)
        loads = 1 + 0.05 * rng.normal(size=(101, 1)) + 0.001 * rng.normal(size=(101, 64))
        times = 1 + 0.5 * (loads - 1) + 0.1 * rng.normal(size=(101, 1))
        slope, error = _slope(_sums_of_differences(times, loads, 100))
        return abs(slope - 0.5) > error

    assert sum(map(off, range(100))) <= 6  # three standard errors; those of independent ranks are off in half the cases


def test_half_of_the_ranks_may_be_of_an_older_kind():
    speeds, _ = run(8, 400, lambda step, ranks: np.where(np.arange(ranks) % 2, 1.6, 1.0))
    assert (speeds[-1, ::2] == FASTEST).all() and np.abs(speeds[-1, 1::2] / FASTEST - 0.575).max() < 0.05
