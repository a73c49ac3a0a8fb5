"""A window in the attention, on two ranks: gradients are those of one process, the shuffler counts what it hides."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest
import torch
import torch.distributed as dist

from commons.trainer.config.load import load_config
from hstu import HSTUBalancedBatchShuffler
from hstu.model import HSTUConfig, HSTURankingModel, RankingConfig
from hstu.recipe import HSTURecipe
from hstu.train_config import TrainConfig
from tests.distributed.hstu.test_model import share
from tests.helpers.jobs.training_configs import TINY
from tests.helpers.models.hstu_models import TABLES, random_batch

HSTU = HSTUConfig(
    **{"hidden_size": 8, "num_layers": 2, "num_attention_heads": 2, "kv_channels": 4, "max_sequence_length": 64},
    **{"contextual_mask": True, "target_group_size": 2, "max_attn_len": 5},
)


def global_batch():
    return random_batch(24, longest=20, seed=3, max_num_candidates=4)


def gradients(batch, hstu=HSTU):
    torch.manual_seed(0)
    model = HSTURankingModel(RankingConfig(hstu, TABLES, (8, 2), 2), plain_embeddings=True).double()
    model(batch)[0].backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def averaged_gradients(*, balanced):
    batch = share(global_batch())
    moved = 0
    if balanced:
        shuffler = HSTUBalancedBatchShuffler(8, 2, 4, 2, contextual_mask=True, target_group_size=2, max_attn_len=5)
        with contextlib.closing(shuffler):
            batch = shuffler.shuffle(batch)
            moved = shuffler.last_stats.moved
    found = gradients(batch)
    for gradient in found.values():
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()
    return found, moved


@pytest.mark.parametrize("balanced", [False, True])
def test_gradients_are_those_of_one_process(two_ranks, balanced):
    found, moved = two_ranks.run(averaged_gradients, balanced=balanced)[0]
    assert bool(moved) == balanced
    whole = global_batch()
    for name, expected in gradients(whole).items():
        torch.testing.assert_close(found[name], expected, rtol=0, atol=1e-10, msg=name)
    without = gradients(whole, dataclasses.replace(HSTU, max_attn_len=None))
    assert any(float((found[name] - other).abs().max()) > 1e-6 for name, other in without.items())


def dimensions():
    flags = [*TINY, "--model.max-attn-len", "5", "--trainer.enable-balanced-shuffler"]
    recipe = HSTURecipe(load_config(TrainConfig, flags), torch.device("cpu"))
    with contextlib.closing(recipe.build_shuffler(balances=True)) as shuffler:
        return shuffler.task == recipe.task, shuffler.task.max_attn_len, recipe.objective.config.hstu.max_attn_len


def test_model_and_shuffler_have_the_window_of_the_config(two_ranks):
    assert two_ranks.run(dimensions) == [(True, 5, 5)] * 2
