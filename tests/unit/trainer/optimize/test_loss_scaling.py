"""Training in float16: scaled losses, unscaled tables, steps that are left out when gradients overflow."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch

from commons.trainer.config.args import OptimizationArgs
from commons.trainer.optimize.loss_scaling import unscaled_gradients
from commons.trainer.optimize.updates import StepUpdate
from hstu.model import ExecutionConfig, HSTURankingModel, RetrievalConfig
from hstu.negatives import draw_negatives, with_negatives
from tests.helpers.models.hstu_models import CONFIG, model_of, random_batch


def scaler_from(scale, growth_interval=2000):
    return torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=growth_interval)


def update(optimizer, scaler, max_grad_norm=None):
    args = OptimizationArgs(max_grad_norm=max_grad_norm)
    StepUpdate(args, optimizer, torch.nn.Module(), 1, torch.device("cpu"), scaler).after_step(0, 1)


def in_float16(config):
    hstu = dataclasses.replace(config.hstu, execution=ExecutionConfig(compute_dtype="fp16"))
    return dataclasses.replace(config, hstu=hstu)


def gradients(model):
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


RETRIEVAL = RetrievalConfig(
    dataclasses.replace(CONFIG.hstu, contextual_mask=False), CONFIG.embedding_tables, "item", num_negatives=4
)


@pytest.mark.parametrize("config", [CONFIG, RETRIEVAL], ids=["ranking", "retrieval"])
@pytest.mark.parametrize("tables", [[], ["item"], list(CONFIG.embedding_tables), None])
def test_dense_gradients_are_scaled_and_those_of_self_training_tables_are_not(config, tables):
    """Negatives go with the table that they come from. Plain tables (None) never train themselves."""
    plain, scaled = model_of(config), model_of(config, plain_embeddings=tables is None)
    scaled.load_state_dict(plain.state_dict())
    # In float32 and with a power of two nothing is rounded, but for negatives, which are added up in another order.
    scaled.scale_loss(scaler_from(1024.0), tables or [])
    tables = config.embedding_tables if tables is None else tables
    batch = random_batch()
    if config is RETRIEVAL:
        drawn = draw_negatives(np.arange(batch.batch_size), 4, config.embedding_tables["item"], seed=3, epoch=0)
        batch = with_negatives(batch, config.negatives_feature_name, torch.from_numpy(drawn))
    (loss, output), (scaled_loss, scaled_output) = plain(batch), scaled(batch)
    loss.backward()
    scaled_loss.backward()
    assert torch.equal(scaled_loss, loss * 1024) and torch.equal(scaled_output.loss_sum, output.loss_sum)
    expected = gradients(plain)
    assert len(expected) == len(list(plain.parameters()))
    for name, gradient in gradients(scaled).items():
        trains_itself = name.startswith("embedding.") and name.split(".")[-2] not in tables
        wanted = expected[name] * (1 if trains_itself else 1024)
        torch.testing.assert_close(gradient, wanted, rtol=1e-6 if config is RETRIEVAL else 0, atol=0)


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
    update(optimizer, scaler)  # without any gradient, of which torch's GradScaler makes an error
    assert weight.tolist() == pytest.approx([-4.5, -6.0], abs=1e-5) and scaler.get_scale() == 8.0


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
