"""What was measured, the same on every rank or an error on all: costs by a calibration, speeds by times of steps."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from contextlib import closing
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from commons.distributed.engine import engine, shuffle_session
from commons.distributed.gather import local_rows
from commons.distributed.gather.peers import Peers
from commons.distributed.options import ShufflerOptions
from commons.perf_model.calibration import CalibratedTask
from commons.pipeline import windowed_iter
from tests.helpers.batches.random_batches import rows_as_values
from tests.helpers.batches.square_shuffler import SquareShuffler
from tests.helpers.batches.square_shuffler import my_batch as rich_batch
from tests.helpers.models.calibrations import MeasuredShuffler, write_calibration
from tests.helpers.models.sid_models import model_parallel
from tests.helpers.ranks.faults import error_of, my_batch, on_rank
from tests.helpers.ranks.on_ranks import of_all, on, on_ranks, on_two_ranks


class UnawareShuffler(MeasuredShuffler):
    """Never asks for the calibration."""

    def calibrated(self, task):
        return task


@pytest.fixture
def calibration(tmp_path):
    """The path of a file."""
    return write_calibration(tmp_path / "c.toml")


@on_ranks
def test_workloads_are_the_measured_times(calibration):
    with closing(MeasuredShuffler(ShufflerOptions(calibration=calibration))) as shuffler:
        batch, units = my_batch(), shuffler.cost.units_per_ms
        expected = 0.25 + 0.5 * batch.features.lengths().view(-1, 6)[0].double()
        times = shuffler.get_workloads(batch) / units
        _, workloads = shuffler.shuffle(batch, return_workloads=True)
        stats = shuffler.last_stats
    assert isinstance(shuffler.cost, CalibratedTask) and stats.moved
    assert torch.allclose(times.double(), expected, rtol=1e-3)
    loads = stats.loads_after
    assert int(workloads.sum()) == loads[dist.get_rank()] and max(loads) <= 1.1 * sum(loads) / len(loads)
    assert stats.predicted_saving_ms == pytest.approx((max(stats.loads_before) - max(loads)) / units)
    assert stats.predicted_saving_ms > 0.5


@on_ranks
def test_the_gate_is_of_measured_times(calibration):
    """Nobody moves, and no row crosses, when the gain is below the gate."""
    gain = 0.0
    for share in (0.0, 1.01, 0.99):
        options = ShufflerOptions(calibration=calibration, min_gain=gain * share, transport="all_to_all")
        with closing(MeasuredShuffler(options)) as shuffler:
            with mock.patch.object(dist, "all_to_all_single", side_effect=dist.all_to_all_single) as sent:
                result = shuffler.shuffle(batch := my_batch())
            stats, gated = shuffler.last_stats, share > 1
            gain = gain or stats.predicted_saving
            assert gain > 0 and stats.gated == (result is batch) == gated and sent.call_count == (not gated)
            assert stats.predicted_saving == (0.0 if gated else gain)


def _shuffles(path, kind=MeasuredShuffler):
    """What the first shuffle raises."""
    with closing(kind(ShufflerOptions(calibration=path))) as shuffler:
        return error_of(shuffler.shuffle, my_batch())


def _rank_1_reads(path, damage):
    """Rank 1 finds something else at the same path, as on another machine."""
    damaged = functools.partial(damage, local_rows.load_calibration)
    with on_rank(1, mock.patch.object(local_rows, "load_calibration", damaged)):
        return _shuffles(path)


def _missing(load, name):
    return load(name + ".gone")


def _slower(load, name):
    return dataclasses.replace(load(name), per_token=0.75)


@on_ranks
def test_ranks_with_other_calibrations_stop(calibration, tmp_path):
    text = _rank_1_reads(calibration, _missing)
    assert "rank 1: calibration" in text and "does not exist" in text
    text = _rank_1_reads(calibration, _slower)
    assert "calibrations are" in text and "0.75" in text and "per_token" in text and "per_row" not in text
    text = _shuffles(write_calibration(tmp_path / "d.toml") if dist.get_rank() == 1 else calibration)
    assert "options are" in text and "d.toml" in text


@on_two_ranks
def test_a_calibration_that_does_not_fit_is_refused(calibration, tmp_path):
    model = dataclasses.replace(MeasuredShuffler.task, num_layers=3)
    text = _shuffles(write_calibration(tmp_path / "m.toml", task=model))
    assert "model.num_layers = 3, here it is 2" in text and "m.toml" in text
    text = _shuffles(write_calibration(tmp_path / "d.toml", name="another processor"))
    assert "device.name = 'another processor'" in text
    text = _shuffles(calibration, UnawareShuffler)
    assert "UnawareShuffler does not compute its workloads with self.calibrated(task)" in text


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [4])
@on("own_ranks")
def test_tensor_parallel_peers_need_the_same_calibration(calibration):
    """DP 2 × TP 2, where rank 1 reads other numbers than rank 0, its peer; ranks 0 and 2 share batches, and 1 and 3."""

    def text_of(damage):
        with model_parallel(2):
            return _rank_1_reads(calibration, damage)

    assert text_of(lambda load, name: load(name)) == "no error"
    text = text_of(_slower)
    assert dist.get_rank() > 1 or "calibrations are {'per_token'" in text
    assert "in shuffle of model-parallel peers in the group " in text and "; all ranks pass the same" in text
    text = text_of(_missing)
    assert "rank 1: calibration" in text and "does not exist" in text


@contextlib.contextmanager
def _each_alone():
    """Every rank is a data-parallel group of its own; all ranks are model-parallel peers."""
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    with contextlib.ExitStack() as mocks:
        for module in (engine, shuffle_session):
            mocks.enter_context(mock.patch.object(module, "model_parallel_group", lambda: dist.group.WORLD))
        yield alone


@on_two_ranks
def test_peers_without_rows_say_that_a_calibration_is_missing(calibration):
    options = ShufflerOptions(calibration=calibration + ".gone" if dist.get_rank() == 1 else calibration)
    with _each_alone() as group, closing(MeasuredShuffler(options, group)) as shuffler:
        text = error_of(next, windowed_iter(iter([]), shuffler, 2, group))
    assert text.startswith("ValueError: rank 1: calibration") and "does not exist" in text


@on_two_ranks
def test_peers_with_a_calibration_alone_wait_for_one_another_once(calibration):
    settles = mock.patch.object(Peers, "settle", autospec=True, side_effect=Peers.settle)
    makes = mock.patch.object(engine, "ControlChannel", side_effect=engine.ControlChannel)
    options = ShufflerOptions(calibration=calibration)
    with settles as settle, makes as make, _each_alone() as own, closing(MeasuredShuffler(options, own)) as shuffler:
        for _ in range(11):
            shuffler.shuffle(my_batch())
    assert [call.args[1] for call in settle.call_args_list] == [0]
    # A missing peer is reported before the ranks of the data-parallel group give up on the rank that waits for it.
    assert [call.args for call in make.call_args_list] == [
        (own, options.timeout),
        (dist.group.WORLD, options.timeout / 2),
    ]


class _Failing(SquareShuffler):
    """Fails in some steps."""

    fails: tuple[int, ...] = ()
    step = -1

    def get_workloads(self, batch):
        self.step += 1
        if self.step in self.fails:
            raise OSError("a disk of this rank alone")
        return super().get_workloads(batch)


def _texts_of_steps(fails, steps=12):
    """The error of every step, if any, and the speeds in its plan."""
    with _each_alone() as group, closing(_Failing(ShufflerOptions(speeds="measured"), group)) as shuffler:
        shuffler.fails = fails
        shuffler.load_state_dict({"speeds": [700 if dist.get_rank() == 1 else FASTEST]})
        return [
            (error_of(shuffler.shuffle, my_batch()), shuffler.last_stats and shuffler.last_stats.speeds)
            for _ in range(steps)
        ]


@on_two_ranks
def test_peers_settle_their_speeds_at_the_same_steps_whatever_fails_on_both():
    found = _texts_of_steps(fails=(0, 2, 5, 6))
    assert ["disk" in text for text, _ in found] == [step in (0, 2, 5, 6) for step in range(12)]
    assert [speeds for _, speeds in found] == [None] + [(700,)] * 11


@pytest.mark.parametrize("step", [0, 3])
@on_two_ranks
def test_peers_stop_when_a_step_failed_on_one_of_them(step):
    found = _texts_of_steps(fails=(step,) if dist.get_rank() == 1 else ())
    assert [text == "no error" for text, _ in found] == [
        each < 5 and not (each == step and dist.get_rank() == 1) for each in range(12)
    ]
    for text, _ in found[5:]:
        others = [each for each in range(5) if each != step]
        assert f"before step 5 rank 0 has planned steps [0, 1, 2, 3, 4], and rank 1 {others}; model-parallel" in text


@on_two_ranks
def test_an_error_in_the_group_of_one_peer_is_logged_at_once():
    """The other peer trains on, so the model's collectives may wait, and the error never reach the main thread."""
    is_failing = dist.get_rank() == 1
    logs = mock.patch.object(shuffle_session.logger, "error")
    with logs as log, _each_alone() as group, closing(_Failing(pg_group=group)) as shuffler:
        shuffler.fails = (1,) if is_failing else ()
        shuffler.shuffle(my_batch())
        handle = shuffler.start_shuffle(my_batch())
        assert handle.failed_elsewhere() is False  # waits for the worker thread, and raises nothing
        texts = [call.args[0] % call.args[1:] for call in log.call_args_list]
        assert texts == ["rank 1: rank 1: OSError: a disk of this rank alone"] * is_failing
        assert ("disk" in error_of(handle.has_ended)) == is_failing


@on_two_ranks
def test_peers_whose_data_end_at_different_steps_stop():
    with _each_alone() as group, closing(SquareShuffler(ShufflerOptions(speeds="measured"), group)) as shuffler:
        for step in range(5):
            ends = step == 3 and dist.get_rank() == 1
            assert shuffler.start_shuffle(None if ends else my_batch()).has_ended() == ends
        text = error_of(shuffler.shuffle, my_batch())
    assert "rank 0 has planned steps [0, 1, 2, 3, 4], and rank 1 [0, 1, 2, 4]; model-parallel peers" in text


# --------------------------------------------------------------------------------------------------------------- speeds


SLOW = 1
FASTEST = 1024


def report(shuffler, stats, factor, slow=SLOW):
    """A time that follows the load, longer on the slow rank."""
    load = stats.loads_after[dist.get_rank(shuffler.engine._group(None))]
    shuffler.report_step_time(load / 100 * (factor if dist.get_rank() == slow else 1.0), stats)


def _steps(factors):
    """Stats of a step for each factor of the slow rank's times; no row is lost or doubled."""
    taken = []
    with closing(SquareShuffler(ShufflerOptions(speeds="measured", slack=0.0))) as shuffler:
        for step, factor in enumerate(factors):
            batch = rich_batch(step, [16] * 4, max_length=20)
            result = shuffler.shuffle(batch)
            report(shuffler, shuffler.last_stats, factor)
            taken.append(shuffler.last_stats)
            if step % 120 == 0:
                before, after = (sorted(of_all(rows_as_values(each))) for each in (batch, result))
                assert before == after
    return taken


@on_ranks
def test_a_slow_rank_gets_less_and_all_of_it_again():
    size = dist.get_world_size()
    stats = _steps([1.0] * 30 + [1.5] * 100 + [1.0] * 120)
    of_ranks = of_all([[(each.speeds, each.loads_after) for each in stats]])
    assert of_ranks == of_ranks[:1] * size
    speeds, loads = (np.array([getattr(each, name) for each in stats]) for name in ("speeds", "loads_after"))
    assert (speeds[:40] == FASTEST).all() and (speeds[-1] == FASTEST).all()
    # The times have no fixed part, so that a rank of factor 1.5 gets 1 ÷ 1.5 of what the others get.
    assert speeds[125].tolist() == [683 if rank == SLOW else FASTEST for rank in range(size)]
    saved = 1 - 1 / (1.5 * np.mean([1 / 1.5] + [1.0] * (size - 1)))
    assert stats[125].speed_saving == pytest.approx(saved, abs=2e-3)
    share = loads[121:130, SLOW].sum() / loads[121:130].sum()
    assert share == pytest.approx((1 / 1.5) / (size - 1 + 1 / 1.5), rel=0.03)
    assert loads[-20:, SLOW].sum() / loads[-20:].sum() == pytest.approx(1 / size, rel=0.03)
    # What stats call the largest load is the longest time, by the speeds that the plan was made with.
    for step in (125, 128):
        times = [-(-load * FASTEST // speed) for load, speed in zip(loads[step].tolist(), speeds[step - 1].tolist())]
        assert stats[step].largest_load_after == max(times) >= stats[step].lower_bound
        mean = loads[step].sum() / (speeds[step - 1].sum() / FASTEST)
        assert stats[step].imbalance_after == pytest.approx(max(times) / mean - 1)


@on_two_ranks
def test_windows_find_speeds_by_their_own_reports_and_plan_with_them():
    rows, taken = 0, []
    with closing(SquareShuffler(ShufflerOptions(speeds="measured", slack=0.0))) as shuffler:
        batches = windowed_iter((rich_batch(step, [8] * 4, max_length=20) for step in range(180)), shuffler, 2)
        for batch in batches:
            rows += batch.actual_batch_size
            stats = batches.take_stats()
            taken.append(stats)
            report(shuffler, stats, 1.5)
    assert sum(of_all([rows])) == 180 * 16 and stats.speeds == (1024, 683) and batches.speeds == [1024, 683]
    loads = np.array([each.loads_after for each in taken])
    for steps, share in ((loads[:40], 0.5), (loads[-40:], 0.4)):
        assert steps[:, SLOW].sum() / steps.sum() == pytest.approx(share, rel=0.03)
    # An imbalance is that of times: the largest of each step, and the mean if every rank ended together.
    largest = np.ceil(loads[-2:] * [1, 1024 / 683]).max(axis=1).sum()
    mean = loads[-2:].sum() / (1 + 683 / 1024)
    assert batches.last_window.imbalance_after == pytest.approx(largest / mean - 1)


@on_two_ranks
def test_a_time_is_of_the_group_of_its_shuffle():
    own, *_ = dist.new_subgroups(1)
    with closing(SquareShuffler()) as shuffler:
        shuffler.report_step_time(1.0, shuffler.last_stats, own)  # without stats, which is no mistake
        shuffler.shuffle(rich_batch(0, [2] * 4), own)
        shuffler.report_step_time(1.0, shuffler.last_stats, own)
        said = error_of(shuffler.report_step_time, 1.0, shuffler.last_stats)
        no_number = error_of(shuffler.report_step_time, "1.0", shuffler.last_stats, own)
        no_stats = error_of(shuffler.report_step_time, 1.0, shuffler.last_stats.to_dict(), own)
    assert said.startswith("ValueError: the stats have the loads of 1 ranks, and pg_group has 2 ranks; ")
    assert no_number.startswith("ValueError: milliseconds is a str; it must be a number")
    assert no_stats.startswith("TypeError: stats is a dict; they are a ShuffleStats: ")


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [4])
@pytest.mark.parametrize("kind", ["tensor_model", "pipeline_model", "context"])
@on("own_ranks")
def test_model_parallel_peers_count_as_the_slowest_of_them(kind):
    """DP 2 × TP 2, DP 2 × PP 2 and DP 2 × CP 2: the speeds that each rank sees."""
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(**{f"{kind}_parallel_size": 2})
    try:
        with closing(SquareShuffler(ShufflerOptions(speeds="measured", slack=0.0))) as shuffler:
            place = parallel_state.get_data_parallel_rank()
            for step in range(90):
                shuffler.shuffle(rich_batch(step * 7 + place, [16] * 4, max_length=20))
                report(shuffler, shuffler.last_stats, 1.5, slow=3)
            assert shuffler.last_stats.speeds == (1024, 683)
    finally:
        parallel_state.destroy_model_parallel()
