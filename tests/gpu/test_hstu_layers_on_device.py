"""HSTU on the job's devices, as `hstu.train` makes it: attention with every mask, compiled layers, both tasks."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist

from hstu.model import (
    ExecutionConfig,
    HSTURankingModel,
    HSTURetrievalModel,
    RankingConfig,
    RetrievalConfig,
    triton_launch,
)
from hstu.model import triton_attention as triton_attention_module
from hstu.model.attention import TokenTimes, hstu_attention
from hstu.model.attention_plan import plan_attention
from hstu.model.execution import choose_execution
from hstu.model.triton_attention import triton_attention
from hstu.model.triton_blocks import candidate_blocks
from hstu.model.triton_launch import uses_triton
from hstu.model.triton_plan import plan_triton_attention
from hstu.train_config import ModelArgs
from tests.helpers.models.hstu_models import TABLES, random_batch
from tests.helpers.models.torchrec_model import rank_device

CONFIGS = {
    "ranking": lambda hstu: RankingConfig(hstu, TABLES, (8, 2), 2, embedding_dims={"item": 4}),
    "retrieval": lambda hstu: RetrievalConfig(hstu, TABLES, "item", in_batch_pool="global", embedding_dims={"item": 4}),
}
MODELS = {"ranking": HSTURankingModel, "retrieval": HSTURetrievalModel}


ROWS = [300, 0, 41, 7, 7], [90, 0, 0, 7, 2], [2, 0, 1, 0, 1]  # lengths, targets and contextual tokens


def random_tensors(head_dim, dtype, *, sees_ahead):
    """A projection of the tokens of ROWS in a dtype, biases by distance and by time, and times."""
    generator = torch.Generator().manual_seed(0)
    projection = torch.randn(355, 4 * 2 * head_dim, generator=generator).mul_(0.3).to(dtype)
    position = torch.randn(2, 599 if sees_ahead else 300, generator=generator) * 0.3
    time_bias = torch.randn(2, 20, generator=generator)
    return projection, position, time_bias, torch.randint(100, (355,), generator=generator)  # none on a bucket's edge


def plan_of(make_plan, with_context, **options):
    lengths, targets, contextual = map(torch.tensor, ROWS)
    return make_plan(lengths, targets, contextual if with_context else None, **options)


def attend(where, dtype, tensors, attention, plan, bias):
    """The output of attention on a device, and the gradients of what it uses."""
    projection, position, time_bias, seconds = tensors
    leaves = [each.detach().to(where).requires_grad_() for each in (projection.to(dtype), position, time_bias)]
    _, v, q, k = (part.unflatten(1, (2, -1)) for part in leaves[0].chunk(4, dim=1))
    times = TokenTimes(seconds.to(where), leaves[2]) if bias == "both" else None
    output = attention(q, k, v, None if bias == "none" else leaves[1], plan, normalizer=300.0, times=times)
    (output * torch.linspace(-1, 1, output.numel()).view(output.shape).to(where, dtype)).sum().backward()
    used = [True, bias != "none", bias == "both"]
    return [output.detach(), *(leaf.grad for leaf, has in zip(leaves, used) if has)]


@pytest.mark.parametrize("bias", ["none", "position", "both"])
@pytest.mark.parametrize("with_context", [False, True])
@pytest.mark.parametrize(("is_causal", "group"), [(True, 1), (True, 3), (False, 1)])
def test_attention_is_that_of_the_host(device, is_causal, group, with_context, bias):
    tensors = random_tensors(8, torch.float32, sees_ahead=with_context or not is_causal)
    found, expected = (
        attend(
            where,
            dtype,
            tensors,
            hstu_attention,
            plan_of(
                plan_attention, with_context, num_heads=2, is_causal=is_causal, target_group_size=group, device=where
            ),
            bias,
        )
        for where, dtype in ((rank_device(device), torch.float32), (torch.device("cpu"), torch.float64))
    )
    for value, wanted in zip(found, expected):
        scale = float(wanted.abs().max())
        torch.testing.assert_close(value.cpu().double(), wanted.double(), rtol=0, atol=1e-4 * scale)


def one_of(candidates, number):
    """A list with one of the candidates, if there are any; another one for the next number."""
    return candidates[number % len(candidates) :][:1] if candidates else []


# Largest difference, as a part of the largest value. tanh.approx and weights rounded to 16 bits make up for most of it.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.03, torch.float16: 0.01}


MASKS = [(True, 1, False, None), (True, 3, True, None), (False, 1, False, None), (True, 3, True, 40)]
# Every mask and bias with the commonest heads, every width and dtype with one of them: each kind of layer compiles
# kernels of its own.
CASES = [(*mask, bias, 64, torch.bfloat16) for mask in MASKS for bias in ("none", "position", "both")]
CASES += [(*MASKS[1], "both", head_dim, dtype) for head_dim in (24, 64, 128, 256) for dtype in TOLERANCE]
CASES = sorted(set(CASES), key=CASES.index)


@pytest.mark.parametrize(
    ("is_causal", "group", "with_context", "max_attn_len", "bias", "head_dim", "dtype", "number"),
    [(*case, number) for number, case in enumerate(CASES)],
)
def test_triton_attention_is_that_of_the_host(
    device, monkeypatch, is_causal, group, with_context, max_attn_len, bias, head_dim, dtype, number
):
    """Its backward pass too, in the launches of long rows and in those of short ones.

    From compute capability 9.0 on, where all blocks fit, a case takes one candidate of every kernel, and the next case
    another one: few are compiled, and most of them compared.
    """
    where = rank_device(device)
    if not uses_triton("auto", where, dtype, head_dim):
        pytest.skip(f"kernels of Triton cannot run on {where} or for {head_dim} channels of {dtype}")
    if torch.cuda.get_device_capability(where) >= (9, 0):
        monkeypatch.setattr(triton_launch, "candidate_blocks", lambda *kind: one_of(candidate_blocks(*kind), number))
    masks = {"is_causal": is_causal, "target_group_size": group, "max_attn_len": max_attn_len}
    tensors = random_tensors(head_dim, dtype, sees_ahead=with_context or not is_causal)
    plan = plan_of(plan_attention, with_context, num_heads=2, **masks)
    of_host = attend(torch.device("cpu"), torch.float32, tensors, hstu_attention, plan, bias)
    plan = plan_of(plan_triton_attention, with_context, device=where, **masks)
    for short_row in (0, 1000):
        monkeypatch.setattr(triton_attention_module, "_SHORT_ROW", short_row)
        for value, expected in zip(attend(where, dtype, tensors, triton_attention, plan, bias), of_host):
            scale = float(expected.abs().max())
            torch.testing.assert_close(value.cpu().float(), expected, rtol=0, atol=TOLERANCE[dtype] * scale)


@pytest.mark.parametrize("task", ["ranking", "retrieval"])
@pytest.mark.parametrize(("compute_dtype", "tolerance"), [("fp32", 1e-3), ("bf16", 0.05)])
def test_a_model_is_that_of_the_host(device, task, compute_dtype, tolerance):
    """Compiled where that is the default; for batches of several lengths, no tokens among them."""
    where = rank_device(device)
    args = ModelArgs(hidden_size=8, num_attention_heads=2, kv_channels=4, compute_dtype=compute_dtype)
    hstu = args.hstu_config(64)
    assert choose_execution(hstu, where).compiles is (device == "cuda")
    torch.manual_seed(0)
    model = MODELS[task](CONFIGS[task](hstu), plain_embeddings=True)
    plain = dataclasses.replace(hstu, execution=ExecutionConfig())
    # NCCL serves no tensor of the host.
    of_host = dist.new_group(backend="gloo")
    reference = MODELS[task](CONFIGS[task](plain), plain_embeddings=True, pg_group=of_host)
    reference.load_state_dict(model.state_dict())
    reference.double()
    model.to(where)
    for longest in (9, 14, 0, 3):
        batch = random_batch(longest=longest, actual_batch_size=5 if longest else 0, seed=longest)
        loss, expected = model(batch.to(where))[0], reference(batch)[0]
        loss.backward()
        expected.backward()
        assert loss.item() == pytest.approx(expected.item(), rel=tolerance)
    for (name, parameter), other in zip(model.named_parameters(), reference.parameters()):
        error = (parameter.grad.cpu().double() - other.grad).norm() / other.grad.norm().clamp(min=1e-3)
        assert float(error) < 10 * tolerance, name
