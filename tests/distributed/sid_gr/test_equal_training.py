"""The decoder trains the same weights with the shuffler on and off, on 2 and 4 ranks and with tensor parallelism."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist

from commons.distributed.process_group import resolve_process_group
from tests.helpers.models.sid_models import build_sharded, heavy_tailed_batches, make_pipeline, model_parallel
from tests.helpers.models.torchrec_model import weights_of

STEPS = 8


def _train(balances, pipeline, sharding, tensor_parallel_size=1):
    """Losses of all steps, the decoder's and the table's weights afterwards, and how often rows moved."""
    with model_parallel(tensor_parallel_size):
        model = build_sharded(sharding, tensor_model_parallel_size=tensor_parallel_size)
        before = weights(model)
        pipeline, shuffler = make_pipeline(pipeline, model, balances)
        source = iter(heavy_tailed_batches(STEPS))
        losses, moved = [], 0
        try:
            for _ in range(STEPS):
                output = pipeline.progress(source)
                terms = torch.tensor([float(output.loss_sum), output.num_loss_tokens], dtype=torch.float64)
                dist.all_reduce(terms, group=resolve_process_group())
                losses.append(float(terms[0] / terms[1]))
                moved += pipeline.last_stats is not None and pipeline.last_stats.moved
        finally:
            shuffler.close()
        return losses, before, weights(model), moved


def weights(model):
    """Every weight by name; layers without the rank that their name has with tensor parallelism."""
    rank = re.compile(r"layers_of_tensor_parallel_rank_\d")
    return {rank.sub("layers", name): value for name, value in weights_of(model).items()}


def assert_equal_training(found, expected):
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    for name, value in expected[2].items():
        if found[2][name].shape == value.shape:  # a tensor-parallel rank has a part
            torch.testing.assert_close(found[2][name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("pipeline", "sharding"),
    [("native", "row_wise"), pytest.param("none", "table_wise", marks=pytest.mark.slow)],
)
def test_shuffler_on_and_off(ranks, pipeline, sharding):
    on = ranks.run(_train, True, pipeline, sharding)[0]
    off = ranks.run(_train, False, pipeline, sharding)[0]
    assert on[3] > STEPS // 2 and off[3] == 0
    assert_equal_training(on, off)
    assert any(float((value - on[1][name]).abs().max()) > 1e-2 for name, value in on[2].items())  # it did train


@pytest.mark.slow
def test_tensor_parallel_ranks_train_as_the_data_parallel_ones(rank_pools):
    reference = rank_pools[2].run(_train, False, "native", "row_wise")[0]
    for balances in (True, False):
        answers = rank_pools[4].run(_train, balances, "native", "row_wise", 2)
        for answer in answers:
            assert_equal_training(answer, reference)
            assert (answer[3] > STEPS // 2) is balances
        # Every rank has the half of the layers that its peer has not; copies of one half agree to the last bit.
        for first, second in ((0, 2), (1, 3)):
            assert all(torch.equal(answers[first][2][name], value) for name, value in answers[second][2].items())
        halves = [name for name, value in reference[2].items() if answers[0][2][name].shape != value.shape]
        assert len(halves) == 2 * 6  # of two layers: weight and bias of QKV and of the first feed-forward, two weights
        for name in reference[2].keys() - set(halves):  # peers keep what they both have alike
            assert torch.equal(answers[0][2][name], answers[1][2][name])
        for name in halves:
            whole = reference[2][name]
            split = next(axis for axis in range(whole.dim()) if answers[0][2][name].shape[axis] != whole.shape[axis])
            joined = torch.cat([answers[rank][2][name] for rank in (0, 1)], dim=split)
            torch.testing.assert_close(joined, whole, rtol=1e-4, atol=1e-5)
