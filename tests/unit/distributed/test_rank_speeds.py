"""Which rank is slow, told from simulated times: slow hardware within 50 steps, uneven data never."""

import logging
from contextlib import closing

import numpy as np
import pytest

from commons.distributed.gather.rank_speeds import RankSpeeds, StepTimes
from commons.distributed.tokens_shuffler import TokensBalancedBatchShuffler
from commons.perf_model.speed_control import LOOK_STEPS

SLOWER = 1.5
SEEDS = [*range(5), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(5, 20))]


def equal(num_ranks, first=0):
    """Speeds of ranks that are not measured, as the first of them sees them."""
    return RankSpeeds(range(first, first + num_ranks), 0, StepTimes())


def look(speeds, step, busy_ns, loads):
    return speeds.look(step, np.stack([busy_ns, loads, np.zeros(len(loads), np.int64)], axis=1))["rank_speeds"]


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


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("ranks", [2, 8])
def test_skewed_lengths_alone_name_nobody(caplog, seed, ranks):
    rng, speeds = np.random.default_rng(seed), equal(ranks)
    favoured = rng.uniform(0.3, 3.0, ranks)  # ranks whose users are longer in every step
    for step, loads in enumerate(steps_of(rng, ranks, balanced=False, steps=300)):
        loads = (loads * favoured).astype(np.int64)
        look(speeds, step, times_of(rng, loads, slow=[]), loads)
    assert not caplog.records


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("ranks", [2, 4, 64])
def test_a_slow_rank_is_named_once_and_within_fifty_steps(caplog, seed, ranks):
    rng, speeds = np.random.default_rng(seed), equal(ranks, first=100)
    began, slow = int(rng.integers(0, 60)), int(rng.integers(ranks))
    for step, loads in enumerate(steps_of(rng, ranks, balanced=True, steps=200)):
        told = look(speeds, step, times_of(rng, loads, slow=[slow] if step >= began else []), loads)
    ((rank, at),) = named_in(caplog)
    assert rank == 100 + slow and began <= at < began + 50
    assert told[slow] < 0.9 * np.median([speed for each, speed in enumerate(told) if each != slow])


def test_an_episode_ends_and_another_one_is_named_again(caplog):
    rng, speeds, of_another_rank = np.random.default_rng(0), equal(4), RankSpeeds(range(4), 1, StepTimes())
    for step, loads in enumerate(steps_of(rng, 4, balanced=True, steps=300)):
        times = times_of(rng, loads, slow=[2] if step < 100 or step >= 200 else [])
        assert look(speeds, step, times, loads) == look(of_another_rank, step, times, loads)  # which warns of nothing
    assert [rank for rank, _ in named_in(caplog)] == [2, 2]
    assert "rank 2 is slow: at step" in caplog.text and "times what its load explains" in caplog.text


def test_who_has_not_said_is_not_known(caplog):
    caplog.set_level(logging.WARNING)
    speeds = equal(4)
    assert look(speeds, 0, [0, 0, 0, 0], [0, 0, 0, 0]) == (None,) * 4
    assert look(speeds, 1, [1_000_000, 0, 4_000_000, 1_000], [10, 0, 20, 0]) == (10.0, None, 5.0, None)
    for step in range(2, 60):  # the second rank never says; the third did for a few steps
        known = int(step < 12)
        look(speeds, step, [1_000_000, 0, 9_000_000 * known, 1_000_000], [10, 0, 10 * known, 10])
    assert not caplog.records


def test_times_of_several_steps_are_told_as_their_mean():
    times = StepTimes()
    assert times.take() == (0, 0)
    times.add(1.0, 10)
    times.add(2.0, 21)
    assert times.take() == (1_500_000, 15) and times.take() == (0, 0)


@pytest.mark.parametrize("milliseconds", [0.0, -1.0, float("nan"), float("inf"), 3.6e6])
def test_a_time_that_is_none_is_dropped_with_one_warning(caplog, milliseconds):
    times = StepTimes()
    times.add(milliseconds, 10)
    times.add(2.0, 20)
    times.add(milliseconds, 10)
    assert times.take() == (2_000_000, 20)
    (record,) = caplog.records
    assert f"a step time of {milliseconds} ms is ignored" in record.getMessage()


class Group:
    """Ranks whose numbers are gathered as the shuffler does it, without processes."""

    def __init__(self, num_ranks, option="measured", begin=()):
        self.times = [StepTimes() for _ in range(num_ranks)]
        for each in self.times:
            each.load(list(begin))
        self.ranks = [RankSpeeds(range(num_ranks), r, t, option) for r, t in enumerate(self.times)]
        self.step = 0
        self.rng = np.random.default_rng(0)

    def run(self, steps, slow=None, factor=1.5, reports=True):
        """Steps with loads by the speeds in force; what the first rank's stats have of the last one."""
        for _ in range(steps):
            for each in self.ranks if self.step % LOOK_STEPS == 0 else ():
                each.own = each.found
            table = np.array([each.report() for each in self.ranks])
            found = [each.look(self.step, table) for each in self.ranks]
            speeds = self.ranks[0].to_plan_with
            shares = np.ones(len(self.ranks)) if speeds is None else speeds / speeds.mean()
            loads = shares * 1e6 * self.rng.uniform(0.5, 1.5)
            for rank, (times, load) in enumerate(zip(self.times, loads)):
                if reports:
                    times.add(load / 1e5 * (factor if rank == slow else 1.0), round(load))
            self.step += 1
            assert all(each == found[0] for each in found)
        return found[0]


def test_observed_speeds_are_found_and_plan_nothing():
    group = Group(2, "observe")
    found = group.run(100, slow=1, factor=1.25)
    assert found["speeds"] == (1024, 819) and found["speed_saving"] == pytest.approx(1 - 0.8 / 0.9, abs=2e-3)
    assert group.ranks[0].to_plan_with is None
    assert "speeds" not in Group(2, "equal").run(1)


def test_speeds_of_an_earlier_run_are_in_force_from_the_first_table_on():
    assert Group(2, begin=[1024, 700]).run(1)["speeds"] == (1024, 700)
    assert Group(3, begin=[1024, 700]).run(1)["speeds"] == (1024,) * 3
    times = StepTimes()
    with pytest.raises(ValueError, match="speeds is \\[0.5\\]; they are integers"):
        times.load([0.5])
    RankSpeeds(range(2), 0, times, "measured")
    with pytest.raises(RuntimeError, match="has already shuffled"):
        times.load([1024, 700])


def test_a_checkpoint_in_place_of_a_shuffler_s_state_is_refused():
    """Else the speeds would be lost without a message."""
    with closing(TokensBalancedBatchShuffler()) as shuffler:
        with pytest.raises(ValueError, match=r"has the entries \['model', 'shuffler'\]; .* has 'speeds': load the res"):
            shuffler.load_state_dict({"model": {}, "shuffler": shuffler.state_dict()})
        shuffler.load_state_dict(shuffler.state_dict())


@pytest.mark.parametrize("option", ["measured", "observe"])
def test_a_pipeline_that_reports_no_time_is_warned_of_once(caplog, option):
    Group(2, option).run(50, reports=False)
    assert not caplog.records
    Group(2, option).run(200, reports=False)
    (record,) = caplog.records  # of the first rank alone
    assert f"speeds is {option!r} and no rank has reported a time in 50 steps" in record.getMessage()
    assert "shuffler.report_step_time(milliseconds, pipeline.last_stats)" in record.getMessage()
    Group(2, "equal").run(60, reports=False)
    reported = Group(2, option)
    reported.run(5)
    reported.run(60, reports=False)  # as in an evaluation
    assert len(caplog.records) == 1
