"""Windows of attention by the Triton kernels, against their definition."""

from __future__ import annotations

import pytest
import torch

from hstu.model.triton_attention import plan_triton_attention, triton_attention
from tests.unit.hstu.interpreted.cases import MASKS


def dense(q, k, v, position, rows, max_attn_len, *, contextual, is_causal, target_group_size):
    """The definition, one row after the other."""
    outputs, begin = [], 0
    for length, targets, context in zip(*rows):
        i = torch.arange(length)
        history = length - targets if is_causal else length
        place = torch.where(i < history, i, history + (i - history) % target_group_size)
        apart = place[:, None] - place
        seen = apart.abs() <= max_attn_len
        if is_causal:
            before = seen & (i[:, None] >= i)
            own = (i[:, None] - history) // target_group_size == (i - history) // target_group_size
            free = (i < (context if contextual else 0))[:, None]
            seen = torch.where(i < history, before | free, before & own)
        zero = position.shape[1] // 2 if contextual or not is_causal else 0
        bias = position[:, (apart + zero).clamp(0, position.shape[1] - 1)]
        qs, ks, vs = (each[begin : begin + length].transpose(0, 1) for each in (q, k, v))
        weights = torch.nn.functional.silu(qs @ ks.transpose(1, 2) + bias) * seen
        outputs.append((weights @ vs).transpose(0, 1) / 64.0)
        begin += length
    return torch.cat(outputs)


@pytest.mark.parametrize("max_attn_len", [1, 7, 20, 1000])
@pytest.mark.parametrize("mask", MASKS)
def test_windows_compute_what_their_definition_says(request, mask, max_attn_len):
    if max_attn_len == 20:
        request.getfixturevalue("launched")
    options = {"contextual": False, "is_causal": True, "target_group_size": 1} | MASKS[mask]
    rows = [53, 0, 1, 20], [18, 0, 0, 3], [5, 0, 1, 0]
    generator = torch.Generator().manual_seed(0)
    q, k, v, weights = torch.randn(4, 74, 1, 16, generator=generator) * 0.5
    sees_ahead = options["contextual"] or not options["is_causal"]
    position = torch.randn(1, 107 if sees_ahead else 54, generator=generator)
    plan = plan_triton_attention(
        *(torch.tensor(each) for each in rows[:2]),
        torch.tensor(rows[2]) if options["contextual"] else None,
        is_causal=options["is_causal"],
        target_group_size=options["target_group_size"],
        max_attn_len=max_attn_len,
    )
    found = []
    for attend in (
        lambda *each: dense(*each, rows, max_attn_len, **options),
        lambda *each: triton_attention(*each, plan, normalizer=64.0),
    ):
        leaves = [each.clone().requires_grad_() for each in (q, k, v, position)]
        output = attend(*leaves)
        found.append([output.detach(), *torch.autograd.grad((output * weights).sum(), leaves)])
    for expected, value in zip(*found):
        torch.testing.assert_close(value, expected, rtol=0, atol=1e-6 * float(expected.abs().max()))
