"""Checks of the Triton kernels on a device before their use: are they as correct and as fast as the reference?

A check runs once per process, device and kind of layer, on synthetic batches, so that a missing compiler, or wrong code
for a GPU that is not tested, is found before the first step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hstu.model.attention import TokenTimes, hstu_attention
from hstu.model.attention_plan import plan_attention
from hstu.model.triton_attention import triton_attention
from hstu.model.triton_launch import LayerKind, choose_blocks, seconds_of, use_blocks
from hstu.model.triton_plan import NO_WINDOW, plan_triton_attention

# Lengths, targets and contextual tokens of the rows of two batches, and for each the largest window, shorter than the
# rows so that it hides tokens; the kernels' code does not depend on its width. Rows span several blocks, with targets
# and context; one is empty, and one has a single token. Gradients of the first batch, of short rows, take other
# launches than those of the second, which also has blocks without masked pairs.
_COMPARED = (
    (((150, 0, 37, 1), (40, 0, 3, 0), (5, 0, 2, 0)), 50),
    (((300, 0, 37, 1), (40, 0, 3, 0), (5, 0, 2, 0)), 200),
)
# Heavy-tailed lengths for the measurement of time.
_TIMED_LENGTHS = (1024, 700, 500, 350, 256, 200, 150, 100, 80, 60, 50, 40, 30, 20, 10, 5)
_NUM_HEADS, _NORMALIZER = 4, 64.0
# Neighbouring tokens are less than _GAP seconds apart: pairs are in all buckets, and none is so near the edge of one
# that two ways to compute a logarithm could give different buckets.
_GAP, _NUM_BUCKETS = 60, 24
# By bytes of an element: the allowed error ÷ the largest value. It covers sums of a few hundred terms with rounding to
# 16 bits or products in TensorFloat-32.
_TOLERANCE = {4: 0.01, 2: 0.05}


@functools.cache
def disagreement(device: torch.device, kind: LayerKind) -> str | None:
    """How the kernels' results differ from the reference's, or why they cannot run, on this device; None if correct.

    Compiles and measures the kernels if that has not been done; does not use the global random generators.
    """
    try:
        with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device.type, enabled=False):
            for rows, window in _COMPARED:
                compared = kind if kind.window == NO_WINDOW else kind._replace(window=min(kind.window, window))
                use_blocks(device, compared, choose_blocks(device, kind))
                run = attention_of(device, compared, *rows)
                pairs = zip(
                    ("outputs", "gradients of tokens", "gradients of biases"),
                    run(False, torch.float32),
                    run(True, kind.dtype),
                )
                for name, expected, found in pairs:
                    largest = float(expected.abs().max())
                    error = float((found.float() - expected).abs().max())
                    if not error <= _TOLERANCE[kind.dtype.itemsize] * largest:
                        return (
                            f"it computes {name} that are off by {error:.3g}, where the reference's reach {largest:.3g}"
                        )
    except Exception as error:  # for example from Triton's compiler, or from the C compiler that Triton runs
        return f"its kernels cannot run ({error_in_words(error)})"
    return None


def slowness(device: torch.device, kind: LayerKind) -> str | None:
    """A sentence with both times if PyTorch is faster than the kernels on this CUDA device; None if it is not."""
    empty = (0,) * len(_TIMED_LENGTHS)
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device.type, enabled=False):
        run = attention_of(device, kind, _TIMED_LENGTHS, empty, empty)
        pytorch, kernels = (seconds_of(functools.partial(run, each, kind.dtype)) * 1e3 for each in (False, True))
    if kernels <= pytorch:
        return None
    return f"its kernels take {kernels:.2f} ms for a batch that takes PyTorch {pytorch:.2f} ms"


def error_in_words(error: Exception) -> str:
    """The type and the first 200 characters of an error, in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def attention_of(
    device: torch.device, kind: LayerKind, *rows: Sequence[int], num_heads: int = _NUM_HEADS, seed: int = 0
) -> Callable[[bool, torch.dtype], list[torch.Tensor]]:
    """A function that computes attention over a random batch with these lengths, targets and contextual tokens.

    The function takes whether to use the kernels or the reference, and a dtype; it returns the output and the
    gradients of the tokens and of the biases.
    """
    # The device is stated, because torch's default device may be another one than the generator's.
    on_host: dict[str, Any] = {"generator": torch.Generator().manual_seed(seed), "device": "cpu"}
    tokens, longest = sum(rows[0]), max([1, *rows[0]])
    width, heads = 2 * longest - 1, (num_heads, kind.head_dim)
    drawn = torch.randn(tokens, 4 * num_heads * kind.head_dim, **on_host).mul_(kind.head_dim**-0.25)
    drawn = drawn.to(device, kind.dtype)
    biases = torch.randn(num_heads, width + _NUM_BUCKETS, **on_host).to(device)
    seconds = torch.randint(0, _GAP, (tokens,), **on_host).cumsum(0).to(device)
    lengths, targets, contextual = (torch.tensor(each, dtype=torch.int64, device="cpu") for each in rows)
    masks: dict[str, Any] = {
        "is_causal": kind.is_causal,
        "target_group_size": kind.target_group_size,
        "max_attn_len": kind.window,
        "device": device,
    }
    batch = (lengths, targets, contextual if kind.has_context else None)

    def run(by_kernels: bool, dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [drawn.to(dtype).clone().requires_grad_(), biases.clone().requires_grad_()]
        # As in a layer, tokens are parts of one projection; its first part is the gradient of the output.
        gradient, value, query, key = (part.unflatten(1, heads) for part in leaves[0].chunk(4, dim=1))
        position = leaves[1][:, : width if kind.has_context or not kind.is_causal else longest]
        bias = position if kind.has_position else None
        times = TokenTimes(seconds, leaves[1][:, width:]) if kind.has_time else None
        if by_kernels:
            plan = plan_triton_attention(*batch, **masks)
            output = triton_attention(query, key, value, bias, plan, normalizer=_NORMALIZER, times=times)
        else:
            blocks = plan_attention(*batch, num_heads=num_heads, **masks)
            output = hstu_attention(query, key, value, bias, blocks, normalizer=_NORMALIZER, times=times)
        gradients = torch.autograd.grad(output, leaves, gradient.detach(), allow_unused=True)
        found = (torch.zeros_like(each) if grad is None else grad for each, grad in zip(leaves, gradients))
        return [output.detach(), *found]

    return run
