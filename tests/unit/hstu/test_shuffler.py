"""The HSTU shuffler's workloads are those of the tokens that the model computes."""

import contextlib

import pytest
import torch

from commons.distributed.options import ShufflerOptions
from commons.perf_model.task_estimator import HSTUAttentionTask
from commons.trainer import DatasetArgs, TrainerArgs
from hstu import HSTUBalancedBatchShuffler
from hstu.recipe import HSTURecipe
from hstu.train_config import ModelArgs, TrainConfig
from tests.helpers.models.calibrations import write_calibration
from tests.helpers.models.hstu_models import random_batch

SIZES = {"hidden_size": 32, "num_heads": 2, "head_dim": 24, "num_layers": 3}
TASK = HSTUAttentionTask(**SIZES)


def make_batch(max_num_candidates=0, actions=True, longest=60):
    options = {"max_num_candidates": max_num_candidates, "with_actions": actions, "longest": longest}
    return random_batch(6, actual_batch_size=5, seed=3, **options)


def context_of(batch):
    return sum(batch.features[name].lengths().long() for name in batch.contextual_feature_names)


@pytest.mark.parametrize("candidates", [0, 4])
@pytest.mark.parametrize("actions", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("longest", [60, 0])  # a user without a history still costs the context
def test_a_row_costs_its_own_tokens(candidates, actions, interleaved, longest):
    batch = make_batch(candidates, actions, longest)
    shuffler = HSTUBalancedBatchShuffler(**SIZES, action_interleaved=interleaved)
    items = batch.features["item"].lengths().long()
    factor = 2 if actions and interleaved else 1
    targets = factor * batch.num_candidates if candidates else torch.zeros(6, dtype=torch.int64)
    expected = TASK.get_workloads(context_of(batch) + factor * items, targets)
    workloads = shuffler.get_workloads(batch)
    assert workloads.dtype == torch.int64 and torch.equal(workloads, expected)
    assert workloads[-1] == 0 and (workloads[:-1] > 0).all()
    shuffler.close()


@pytest.mark.parametrize("candidates", [0, 4])
@pytest.mark.parametrize("window", [None, 3])
def test_contextual_tokens_that_see_all_cost_more_and_windows_less(candidates, window):
    batch = make_batch(candidates)
    seqlen, num_targets = batch.sequence_lengths()
    task = HSTUAttentionTask(**SIZES, max_attn_len=window)
    expected = task.get_workloads(seqlen, num_targets, context_of(batch))
    model = ModelArgs(
        hidden_size=32, num_attention_heads=2, kv_channels=24, num_layers=3, contextual_mask=True, max_attn_len=window
    )
    recipe = HSTURecipe(TrainConfig(TrainerArgs(6, 6), DatasetArgs("random", 60), model), torch.device("cpu"))
    with contextlib.closing(HSTUBalancedBatchShuffler(**SIZES, contextual_mask=True, max_attn_len=window)) as shuffler:
        assert shuffler.task == recipe.task == task and torch.equal(shuffler.get_workloads(batch), expected)
    assert recipe.flops(batch) == 3 * int(expected.sum()) and recipe.num_tokens(batch) == int(seqlen.sum())
    plain = TASK.get_workloads(seqlen, num_targets)
    assert (expected[:5] > plain[:5]).all() if window is None else int(expected.sum()) < int(plain.sum())


def test_metas_dimensions_are_those_of_the_task():
    with contextlib.closing(HSTUBalancedBatchShuffler(**SIZES, value_dim=7, concat_ux=True)) as shuffler:
        assert shuffler.task == HSTUAttentionTask(*SIZES.values(), value_dim=7, concat_ux=True)


def test_with_a_calibration_a_row_costs_its_measured_time(tmp_path):
    batch, options = make_batch(), ShufflerOptions(calibration=write_calibration(tmp_path / "c.toml", TASK))
    with contextlib.closing(HSTUBalancedBatchShuffler(**SIZES, options=options)) as shuffler:
        found = shuffler.shuffle(batch, return_workloads=True)[1].double()
    ms = 0.25 + 0.5 * batch.sequence_lengths()[0][:5].double()  # as in the file: per row and per token
    torch.testing.assert_close(found / found.sum(), ms / ms.sum(), rtol=1e-6, atol=0)
