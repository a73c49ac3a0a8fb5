"""Training in float16: scaled losses, unscaled tables, steps that are left out when gradients overflow."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch

from commons.trainer.config.args import OptimizationArgs
from commons.trainer.optimize.loss_scaling import unscaled_gradients
from commons.trainer.optimize.updates import StepUpdate
from hstu.model import ExecutionConfig, HSTURankingModel, HSTURetrievalModel, RetrievalConfig
from hstu.negatives import draw_negatives, with_negatives
from tests.helpers.models.hstu_models import CONFIG, random_batch


def scaler_from(scale, growth_interval=2000):
    return torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=growth_interval)


def update(optimizer, scaler, max_grad_norm=None):
    args = OptimizationArgs(max_grad_norm=max_grad_norm)
    StepUpdate(args, optimizer, torch.nn.Module(), 1, torch.device("cpu"), scaler).after_step(0, 1)


def in_float16(config):
    return dataclasses.replace(
        config, hstu=dataclasses.replace(config.hstu, execution=ExecutionConfig(compute_dtype="fp16"))
    )


def gradients(model):
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("with_tables", [False, True])
def test_dense_gradients_are_scaled_and_those_of_self_training_tables_are_not(with_tables):
    plain, scaled = HSTURankingModel(CONFIG), HSTURankingModel(CONFIG)
    scaled.load_state_dict(plain.state_dict())
    # In float32 and with a power of two nothing is rounded, and so the gradients are equal bit by bit.
    scaled.scale_loss(scaler_from(1024.0), list(CONFIG.embedding_tables) if with_tables else ())
    loss, output = plain(random_batch())
    loss.backward()
    scaled_loss, scaled_output = scaled(random_batch())
    scaled_loss.backward()
    assert torch.equal(scaled_loss, loss * 1024) and torch.equal(scaled_output.loss_sum, output.loss_sum)
    expected = gradients(plain)
    assert len(expected) == len(list(plain.parameters()))
    for name, gradient in gradients(scaled).items():
        own = name.startswith("embedding.") and not with_tables
        assert torch.equal(gradient, expected[name] * (1 if own else 1024)), name


@pytest.mark.parametrize("with_items", [False, True])
def test_negatives_are_unscaled_with_the_table_they_come_from(with_items):
    hstu = dataclasses.replace(CONFIG.hstu, contextual_mask=False)
    config = RetrievalConfig(hstu, CONFIG.embedding_tables, "item", num_negatives=4)
    plain, scaled = HSTURetrievalModel(config), HSTURetrievalModel(config)
    scaled.load_state_dict(plain.state_dict())
    batch = random_batch()
    drawn = draw_negatives(np.arange(batch.batch_size), 4, config.embedding_tables["item"], seed=3, epoch=0)
    batch = with_negatives(batch, config.negatives_feature_name, torch.from_numpy(drawn))
    scaled.scale_loss(scaler_from(1024.0), ["item"] if with_items else [])
    for model in (plain, scaled):
        model(batch)[0].backward()
    expected = gradients(plain)
    for name, gradient in gradients(scaled).items():
        own = name.startswith("embedding.") and not (with_items and ".item." in name)
        torch.testing.assert_close(gradient, expected[name] * (1 if own else 1024), rtol=1e-6, atol=0)


def test_float16_computes_the_layers_and_trains_like_float32():
    torch.manual_seed(1)
    exact, fast = HSTURankingModel(CONFIG), HSTURankingModel(in_float16(CONFIG))
    fast.load_state_dict(exact.state_dict())
    scaler = scaler_from(256.0)
    fast.scale_loss(scaler)
    seen = []
    fast.dense.encoder.layers[0].uvqk.register_forward_hook(lambda _, __, output: seen.append(output.dtype))
    optimizer = torch.optim.SGD(fast.dense.parameters(), lr=1.0)
    before = {name: parameter.detach().clone() for name, parameter in fast.dense.named_parameters()}
    exact(random_batch())[0].backward()
    fast(random_batch())[0].backward()
    update(optimizer, scaler)
    assert seen == [torch.float16] and scaler.get_scale() == 256.0
    for name, parameter in exact.dense.named_parameters():
        step = before[name] - dict(fast.dense.named_parameters())[name]
        torch.testing.assert_close(step, parameter.grad, rtol=0.05, atol=0.02 * float(parameter.grad.abs().max()))
    for name, gradient in gradients(fast.embedding).items():
        expected = gradients(exact.embedding)[name]
        torch.testing.assert_close(gradient, expected, rtol=0.05, atol=0.02 * float(expected.abs().max()))


def test_a_step_that_overflows_is_left_out_and_the_scale_is_halved():
    model = HSTURankingModel(in_float16(CONFIG))
    scaler = scaler_from(2.0**30, growth_interval=1)
    model.scale_loss(scaler)
    optimizer = torch.optim.SGD(model.dense.parameters(), lr=1.0)
    before = {name: parameter.detach().clone() for name, parameter in model.dense.named_parameters()}
    model(random_batch())[0].backward()
    assert not all(gradient.isfinite().all() for gradient in gradients(model.dense).values())
    assert all(not gradient.any() for gradient in gradients(model.embedding).values())
    update(optimizer, scaler, max_grad_norm=1.0)
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.dense.named_parameters())
    assert scaler.get_scale() == 2.0**29
    # It goes on falling until a step fits, and rises again after `growth_interval` of those.
    scales = []
    for _ in range(40):
        optimizer.zero_grad()
        model(random_batch())[0].backward()
        update(optimizer, scaler)
        scales.append(scaler.get_scale())
    assert any(later > earlier for earlier, later in itertools.pairwise(scales))
    assert any(not torch.equal(parameter, before[name]) for name, parameter in model.dense.named_parameters())


def test_clipping_sees_unscaled_gradients():
    weight = torch.nn.Parameter(torch.zeros(2, dtype=torch.float32))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = scaler_from(8.0)
    scaler.scale(weight)  # as a loss is, first
    weight.grad = torch.tensor([3.0, 4.0]) * 8.0
    update(optimizer, scaler, max_grad_norm=10.0)
    assert weight.tolist() == [-3.0, -4.0]
    weight.grad = torch.tensor([3.0, 4.0]) * 8.0
    update(optimizer, scaler, max_grad_norm=2.5)
    assert weight.tolist() == pytest.approx([-4.5, -6.0], abs=1e-5)


def test_one_overflow_clears_all_tables_of_the_rank():
    values = [torch.ones(3, 2, requires_grad=True), torch.ones(1, 2, requires_grad=True)]
    left, right = unscaled_gradients(values, torch.tensor(4.0))
    (left.sum() * 8 + right.sum() * 2).backward()
    assert values[0].grad.unique().tolist() == [2.0] and values[1].grad.unique().tolist() == [0.5]
    for each in values:
        each.grad = None
    left, right = unscaled_gradients(values, torch.tensor(4.0))
    (left.sum() * 8 + right[0, 1] * float("inf")).backward()
    assert not values[0].grad.any() and not values[1].grad.any()
