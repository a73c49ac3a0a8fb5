"""Before the Triton kernels are trusted on a device: do they compute there what the reference does?

Looked at once per process, device and kind of layer, on a batch made up for it, so that a compiler that is missing, or
one that is wrong for a GPU that nobody has tried, is known before the first step.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from hstu.model.attention import TokenTimes, hstu_attention
from hstu.model.attention_plan import plan_attention
from hstu.model.triton_attention import plan_triton_attention, triton_attention

# Rows over several blocks, of targets and context, an empty one, and one of a single token.
_LENGTHS, _TARGETS, _CONTEXTUAL = (150, 0, 37, 1), (40, 0, 3, 0), (5, 0, 2, 0)
_NUM_HEADS, _NUM_BUCKETS, _NORMALIZER = 2, 16, 64.0
# Of the largest value: what rounding to 16 bits, or products in TensorFloat-32, may make of a few hundred sums.
_TOLERANCE = {4: 0.01, 2: 0.05}


class LayerKind(NamedTuple):
    """What decides which kernels run.

    Attributes:
        dtype: of queries.
        head_dim: width of a head.
        is_causal: whether a token sees only itself and what precedes it.
        has_context: whether contextual tokens see all of the history.
        target_group_size: targets that may see one another.
        has_position: whether there is a bias by position.
        has_time: whether there is a bias by time.

    """

    dtype: torch.dtype
    head_dim: int
    is_causal: bool
    has_context: bool
    target_group_size: int
    has_position: bool
    has_time: bool


@functools.cache
def disagreement(device: torch.device, kind: LayerKind) -> str | None:
    """Why the kernels should not be used for such layers on this device; None if they compute what they should.

    Compiles and measures the kernels if that has not been done; draws from no generator of the training.
    """
    try:
        with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device.type, enabled=False):
            pairs = zip(("outputs", "gradients of tokens", "gradients of biases"), *_both(device, kind))
            for name, expected, found in pairs:
                largest = float(expected.abs().max())
                error = float((found - expected).abs().max())
                if not error <= _TOLERANCE[kind.dtype.itemsize] * largest:
                    return f"it computes {name} that are off by {error:.3g}, where the reference's reach {largest:.3g}"
    except Exception as error:  # of Triton's compiler, say, or of the one that it asks for
        return f"its kernels cannot run ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
    return None


def _both(device: torch.device, kind: LayerKind) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Output and gradients of a batch, float32, by the reference and by the kernels."""
    generator = torch.Generator().manual_seed(0)
    tokens, width = sum(_LENGTHS), max(_LENGTHS) * 2 - 1
    shape = (4, tokens, _NUM_HEADS, kind.head_dim)
    drawn = torch.randn(shape, generator=generator).mul_(kind.head_dim**-0.25).to(device, kind.dtype)
    sees_ahead = kind.has_context or not kind.is_causal
    biases = torch.randn(_NUM_HEADS, width + _NUM_BUCKETS, generator=generator).to(device)
    seconds = torch.randint(0, 5000, (tokens,), generator=generator).cumsum(0).to(device)
    lengths, targets, contextual = (torch.tensor(each) for each in (_LENGTHS, _TARGETS, _CONTEXTUAL))
    rows = (lengths, targets, contextual if kind.has_context else None)

    def run(by_kernels: bool) -> list[torch.Tensor]:
        inputs = drawn[:3].to(kind.dtype if by_kernels else torch.float32).clone().requires_grad_()
        query, key, value = inputs
        leaf = biases.clone().requires_grad_()
        position, time = leaf[:, : width if sees_ahead else max(_LENGTHS)], leaf[:, width:]
        times = TokenTimes(seconds, time) if kind.has_time else None
        masks: dict[str, Any] = {"is_causal": kind.is_causal, "target_group_size": kind.target_group_size}
        if by_kernels:
            plan = plan_triton_attention(*rows, **masks, device=device)
            output = triton_attention(
                query, key, value, position if kind.has_position else None, plan, normalizer=_NORMALIZER, times=times
            )
        else:
            blocks = plan_attention(*rows, num_heads=_NUM_HEADS, **masks, device=device)
            table = position if kind.has_position else torch.zeros_like(position)
            output = hstu_attention(query, key, value, table, blocks, normalizer=_NORMALIZER, times=times)
        leaves = [inputs, leaf]
        gradients = torch.autograd.grad(output, leaves, drawn[3].to(output.dtype), allow_unused=True)
        found = (torch.zeros_like(each) if grad is None else grad for each, grad in zip(leaves, gradients))
        return [output.detach().float(), *(each.float() for each in found)]

    return run(False), run(True)
