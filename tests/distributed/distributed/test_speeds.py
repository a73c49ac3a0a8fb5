"""Speeds on real ranks: a slow rank gets less work by the numbers that all ranks have, and training stays the same."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torchrec.distributed.train_pipeline.train_pipelines import TrainPipelineBase

from commons.distributed.options import ShufflerOptions
from commons.pipeline import balanced, windowed_iter
from tests.helpers.batches.random_batches import rows_as_values
from tests.helpers.batches.square_shuffler import SquareShuffler, my_batch
from tests.helpers.models import torchrec_model as models
from tests.helpers.models.sid_models import model_parallel
from tests.helpers.models.torchrec_model import rank_batches, weights_of
from tests.helpers.pipelines.shuffled_pipelines import SIZES, CubicShuffler, largest_difference, one_process, steps_of
from tests.helpers.ranks.rank_pool import RankPool

SLOW = 1
FASTEST = 1024


def report(shuffler, stats, factor):
    """A time that follows the load, longer on the slow rank."""
    load = stats.loads_after[dist.get_rank(shuffler.engine._group(None))]
    shuffler.report_step_time(load / 100 * factor, stats)


def _steps(option, factors, state=None, **options):
    """Stats of a step for each factor of the slow rank's times; of every tenth also the rows before and after."""
    taken = []
    with closing(SquareShuffler(ShufflerOptions(speeds=option, slack=0.0, **options))) as shuffler:
        shuffler.load_state_dict(state or {})
        for step, factor in enumerate(factors):
            batch = my_batch(step, [16] * 4, max_length=20)
            result = shuffler.shuffle(batch)
            stats = shuffler.last_stats
            report(shuffler, stats, factor if dist.get_rank() == SLOW else 1.0)
            rows = map(rows_as_values, (batch, result)) if step % 10 == 0 else ((), ())
            taken.append((stats, *rows))
        return taken, shuffler.state_dict()


def _numbers(option, factors, state=None, **options):
    taken, after = _steps(option, factors, state, **options)
    stats = [each for each, _, _ in taken]
    return {
        "speeds": [each.speeds for each in stats],
        "loads": np.array([each.loads_after for each in stats]),
        "largest": [(each.largest_load_before, each.largest_load_after, each.lower_bound) for each in stats],
        "imbalance": [each.imbalance_after for each in stats],
        "saving": [each.speed_saving for each in stats],
        "excess": [each.excess_tokens for each in stats],
        "rows": [(sorted(before), sorted(after)) for _, before, after in taken],
        "state": after,
    }


def test_a_slow_rank_gets_less_and_all_of_it_again(ranks):
    size = ranks.world_size
    answers = ranks.run(_numbers, "measured", [1.0] * 30 + [1.5] * 100 + [1.0] * 120)
    for each in answers[1:]:
        assert each["speeds"] == answers[0]["speeds"] and (each["loads"] == answers[0]["loads"]).all()
    for step in (0, 120, 240):  # no row is lost or doubled
        assert sorted(row for each in answers for row in each["rows"][step][0]) == sorted(
            row for each in answers for row in each["rows"][step][1]
        )
    speeds, loads = np.array(answers[0]["speeds"]), answers[0]["loads"]
    assert (speeds[:40] == FASTEST).all() and (speeds[-1] == FASTEST).all()
    # The times have no fixed part, so that a rank of factor 1.5 gets 1 ÷ 1.5 of what the others get.
    assert speeds[125].tolist() == [683 if rank == SLOW else FASTEST for rank in range(size)]
    saved = 1 - 1 / (1.5 * np.mean([1 / 1.5] + [1.0] * (size - 1)))
    assert answers[0]["saving"][125] == pytest.approx(saved, abs=2e-3)
    share = loads[121:130, SLOW].sum() / loads[121:130].sum()
    assert share == pytest.approx((1 / 1.5) / (size - 1 + 1 / 1.5), rel=0.03)
    assert loads[-20:, SLOW].sum() / loads[-20:].sum() == pytest.approx(1 / size, rel=0.03)
    # What stats call the largest load is the longest time, by the speeds that the plan was made with.
    for step in (125, 128):
        times = [-(-load * FASTEST // speed) for load, speed in zip(loads[step].tolist(), speeds[step - 1].tolist())]
        _, after, bound = answers[0]["largest"][step]
        assert after == max(times) >= bound
        mean = loads[step].sum() / (speeds[step - 1].sum() / FASTEST)
        assert answers[0]["imbalance"][step] == pytest.approx(max(times) / mean - 1)


def test_a_token_cap_is_kept_whatever_the_speeds(two_ranks):
    state = {"speeds": [1024, 512]}
    free = two_ranks.run(_numbers, "measured", [2.0] * 3, state)[0]
    assert free["loads"][-1][0] > 1.8 * free["loads"][-1][1]
    capped = two_ranks.run(_capped, 2.0, state)
    for tokens, cap, excess in capped:
        assert excess == 0 and tokens <= cap


def _capped(factor, state):
    """Tokens of this rank in the third step, with a cap a little above an even share."""
    tokens = torch.tensor(my_batch(2, [16] * 4, max_length=20).features.values().numel())
    dist.all_reduce(tokens)
    cap = int(tokens) // dist.get_world_size() + 40
    shuffler = SquareShuffler(ShufflerOptions(speeds="measured", max_tokens_per_rank=cap))
    shuffler.token_feature_names = list(my_batch(2, [16] * 4).features.keys())
    with closing(shuffler):
        shuffler.load_state_dict(state)
        for _ in range(3):
            result = shuffler.shuffle(my_batch(2, [16] * 4, max_length=20))
            report(shuffler, shuffler.last_stats, factor if dist.get_rank() == SLOW else 1.0)
        return result.features.values().numel(), cap, shuffler.last_stats.excess_tokens


def _train_with(option, counts):
    """Weights after training with times of which one rank's are longer, and the least speed."""
    torch.manual_seed(0)
    model, optimizer = models.build_plain()
    least = FASTEST
    with closing(CubicShuffler(ShufflerOptions(speeds=option, slack=0.0))) as shuffler:
        shuffler.load_state_dict({"speeds": [FASTEST, 600, FASTEST, FASTEST][: dist.get_world_size()]})
        pipeline = balanced(TrainPipelineBase)(model, optimizer, torch.device("cpu"), batch_shuffler=shuffler)
        source = rank_batches(dist.get_rank(), counts[dist.get_rank()], SIZES)
        loads = []
        for _ in steps_of(pipeline, source):
            stats = pipeline.last_stats
            loads.append(stats.loads_after)
            report(shuffler, stats, 1.7 if dist.get_rank() == SLOW else 1.0)
            least = min([least, *stats.speeds])
        return weights_of(model), least, np.array(loads)


def test_the_training_is_the_same(ranks):
    """Float64 weights are those of one process over the global batch, with speeds and without."""
    counts = [10, 7, 10, 4][: ranks.world_size]
    reference, trained = one_process(counts, ranks.world_size), {}
    for option in ("equal", "measured"):
        answers = ranks.run(_train_with, option, counts)
        assert all(largest_difference(weights, reference) < 1e-10 for weights, _, _ in answers)
        trained[option] = answers[0]
    assert trained["measured"][1] == 600
    assert trained["measured"][2][:, SLOW].sum() < trained["equal"][2][:, SLOW].sum()


def _reported_windows():
    """Rows in all, the loads of the last steps and the last speeds, of windows whose steps are reported."""
    with closing(SquareShuffler(ShufflerOptions(speeds="measured", slack=0.0))) as shuffler:
        batches = windowed_iter((my_batch(step, [8] * 4, max_length=20) for step in range(180)), shuffler, 2)
        rows, loads = 0, []
        for batch in batches:
            rows += batch.actual_batch_size
            stats = batches.take_stats()
            loads.append(stats.loads_after)
            report(shuffler, stats, 1.5 if dist.get_rank() == SLOW else 1.0)
        return rows, np.array(loads), stats.speeds


def test_windows_find_speeds_by_their_own_reports_and_plan_with_them(two_ranks):
    (rows, loads, speeds), (more, _, same) = two_ranks.run(_reported_windows)
    assert rows + more == 180 * 16 and speeds == same == (1024, 683)
    for steps, share in ((loads[:40], 0.5), (loads[-40:], 0.4)):
        assert steps[:, SLOW].sum() / steps.sum() == pytest.approx(share, rel=0.03)


def _tensor_parallel(factors):
    """DP 2 × TP 2: the speeds that each rank sees, where one rank is slow."""
    from megatron.core import parallel_state

    with model_parallel(2), closing(SquareShuffler(ShufflerOptions(speeds="measured", slack=0.0))) as shuffler:
        place = parallel_state.get_data_parallel_rank()
        for step, factor in enumerate(factors):
            batch = shuffler.shuffle(my_batch(step * 7 + place, [16] * 4, max_length=20))
            slow = dist.get_rank() == 3  # its peer is rank 2
            report(shuffler, shuffler.last_stats, factor if slow else 1.0)
        return shuffler.last_stats.speeds, batch.features.values().tolist()


@pytest.mark.slow
def test_tensor_parallel_peers_count_as_the_slowest_of_them():
    with RankPool(4) as pool:
        answers = pool.run(_tensor_parallel, [1.5] * 90)
    assert {speeds for speeds, _ in answers} == {(1024, 683)}
