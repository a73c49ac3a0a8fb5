"""Workloads that were measured: the same on every rank, or an error on all of them."""

from __future__ import annotations

import dataclasses
from contextlib import closing

import pytest
import torch
import torch.distributed as dist

from commons.distributed.batch_shuffler import BaseTaskBalancedBatchShuffler
from commons.distributed.options import ShufflerOptions
from commons.perf_model.calibration import CalibratedTask
from tests.helpers.models.calibrations import MeasuredShuffler, write_calibration
from tests.helpers.models.sid_models import model_parallel
from tests.helpers.ranks.faults import my_batch, raised_by
from tests.helpers.ranks.rank_pool import RankPool


class UnawareShuffler(MeasuredShuffler):
    """Never asks for the calibration."""

    def __init__(self, options=None, pg_group=None):
        BaseTaskBalancedBatchShuffler.__init__(self, options, pg_group)
        self.cost = self.task


def _calibrated(path):
    with closing(MeasuredShuffler(ShufflerOptions(calibration=path))) as shuffler:
        batch = my_batch()
        expected = 0.25 + 0.5 * batch.features.lengths().view(-1, 6)[0].double()
        times = shuffler.get_workloads(batch) / shuffler.cost.units_per_ms
        result, workloads = shuffler.shuffle(batch, return_workloads=True)
        stats = shuffler.last_stats
        own = float(workloads.sum()) / shuffler.cost.units_per_ms
    assert isinstance(shuffler.cost, CalibratedTask) and stats.moved
    saved = (max(stats.loads_before) - max(stats.loads_after)) / shuffler.cost.units_per_ms
    assert torch.allclose(times.double(), expected, rtol=1e-3)
    return own, saved, stats.predicted_saving_ms


def test_workloads_are_the_measured_times(ranks, tmp_path):
    answers = ranks.run(_calibrated, write_calibration(tmp_path / "c.toml"))
    times = [own for own, _, _ in answers]
    assert max(times) <= 1.1 * sum(times) / len(times)
    for _, saved, predicted in answers:
        assert predicted == pytest.approx(saved) and predicted > 0.5


def _gated(path, min_gain):
    """Nobody moves, and no row crosses, when the gain is below the gate."""
    sent = []
    original = dist.all_to_all_single
    options = ShufflerOptions(calibration=path, min_gain=min_gain, transport="all_to_all")
    with closing(MeasuredShuffler(options)) as shuffler:
        dist.all_to_all_single = lambda *args, **kwargs: sent.append(1) or original(*args, **kwargs)
        try:
            batch = my_batch()
            result = shuffler.shuffle(batch)
        finally:
            dist.all_to_all_single = original
        return shuffler.last_stats.gated, shuffler.last_stats.predicted_saving, len(sent), result is batch


def test_the_gate_is_of_measured_times(ranks, tmp_path):
    path = write_calibration(tmp_path / "c.toml")
    (_, gain, _, _), *_ = ranks.run(_gated, path, 0.0)
    assert all(answer == (True, 0.0, 0, True) for answer in ranks.run(_gated, path, gain * 1.01))
    assert all(answer[:3] == (False, gain, 1) for answer in ranks.run(_gated, path, gain * 0.99))


def _shuffles(path, kind=MeasuredShuffler):
    """What the first shuffle raises."""
    with closing(kind(ShufflerOptions(calibration=path))) as shuffler:
        return raised_by(lambda: shuffler.shuffle(my_batch()))


def _another_file_on_rank_1(good, bad):
    return _shuffles(bad if dist.get_rank() == 1 else good)


def _rank_1_reads(path, damage):
    """Rank 1 finds something else at the same path, as on another machine."""
    import commons.distributed.gather.row_costs as module

    original = module.load_calibration
    if dist.get_rank() == 1:
        module.load_calibration = lambda name: damage(original, name)
    try:
        return _shuffles(path)
    finally:
        module.load_calibration = original


def _missing(load, name):
    return load(name + ".gone")


def _slower(load, name):
    return dataclasses.replace(load(name), per_token=0.75)


def test_ranks_with_other_calibrations_stop(ranks, tmp_path):
    good = write_calibration(tmp_path / "c.toml")
    for text in ranks.run(_rank_1_reads, good, _missing):
        assert "rank 1: calibration" in text and "does not exist" in text
    for text in ranks.run(_rank_1_reads, good, _slower):
        assert "calibrations differ" in text and "0.75" in text and "per_token" in text and "per_row" not in text
    for text in ranks.run(_another_file_on_rank_1, good, write_calibration(tmp_path / "d.toml")):
        assert "options differ" in text and "d.toml" in text


def test_a_calibration_that_does_not_fit_is_refused(two_ranks, tmp_path):
    other_model = write_calibration(tmp_path / "m.toml", task=dataclasses.replace(MeasuredShuffler.task, num_layers=3))
    other_device = write_calibration(tmp_path / "d.toml", name="another processor")
    fitting = write_calibration(tmp_path / "c.toml")
    for text in two_ranks.run(_shuffles, other_model):
        assert "model.num_layers = 3, here it is 2" in text and "m.toml" in text
    for text in two_ranks.run(_shuffles, other_device):
        assert "device.name = 'another processor'" in text
    for text in two_ranks.run(_shuffles, fitting, UnawareShuffler):
        assert "UnawareShuffler does not compute its workloads with self.calibrated(task)" in text


def _tensor_parallel(path, damage):
    """DP 2 × TP 2, where rank 1 reads other numbers than its tensor-parallel peer, rank 0."""
    with model_parallel(2):
        return _rank_1_reads(path, damage)


def _unchanged(load, name):
    return load(name)


@pytest.mark.slow
def test_tensor_parallel_peers_need_the_same_calibration(tmp_path):
    path = write_calibration(tmp_path / "c.toml")
    with RankPool(4) as pool:
        assert pool.run(_tensor_parallel, path, _unchanged) == ["no error"] * 4
        # Ranks 0 and 2, and 1 and 3, share batches; 0 and 1 are peers.
        texts = pool.run(_tensor_parallel, path, _slower)
        assert all("calibrations differ: rank 0 has {'per_token'" in text for text in texts[:2])
        assert all("in shuffle of tensor-parallel peers; all ranks pass the same" in text for text in texts)
        texts = pool.run(_tensor_parallel, path, _missing)
        assert all("rank 1: calibration" in text and "does not exist" in text for text in texts)
