"""HSTU attention by Triton kernels: jagged, nothing padded, one launch forward and two backward.

    lengths on the host ─► TritonPlan: rows and tiles, once per batch ─► triton_attention, in every layer

What it computes, masks and biases included, is what `hstu.model.attention` defines. It adds biases in float32, sums in
float32, and computes the scores again in the backward pass, so that nothing of the size of the scores is ever kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.autograd.function import once_differentiable

from commons.sequence_batch.host_copies import to_device
from hstu.model.attention import TokenTimes, require_plan_of, require_reach
from hstu.model.attention_plan import read_lengths
from hstu.model.triton_launch import TILE_SPAN, Inputs, launch

# Of a group of targets, so that places behind one are 32-bit integers; more than a batch can have.
_LARGEST_GROUP = 2**30


@dataclass(frozen=True)
class TritonPlan:
    """Where the rows of a jagged batch begin, and the tiles that programs take."""

    # int32 `(batch_size, 4)`, of every row its first token, its tokens, those of its history, and how many of those are
    # contextual.
    rows: torch.Tensor
    # int32 `(num_tiles, 2)`, row and first place of every tile of queries, the most keys first.
    query_tiles: torch.Tensor
    key_tiles: torch.Tensor  # int32 `(num_tiles, 2)`, as `query_tiles`, the most queries first
    num_tokens: int  # tokens of the batch
    longest: int  # tokens of the longest row
    is_causal: bool  # whether a token sees only itself and what precedes it
    sees_ahead: bool  # whether some token sees a later one, so that distances below zero have a bias
    target_group_size: int  # targets per group; that of the model, for the kernels are compiled for it


def plan_triton_attention(
    lengths: torch.Tensor,
    num_targets: torch.Tensor | None = None,
    num_contextual: torch.Tensor | None = None,
    *,
    is_causal: bool = True,
    target_group_size: int = 1,
    device: torch.device | None = None,
) -> TritonPlan:
    """Cut the rows of a jagged batch into tiles; arguments and errors as those of `plan_attention`.

    Everything goes to the device in one copy, from pinned memory where that is CUDA.
    """
    device = lengths.device if device is None else device
    tokens, targets, contextual = read_lengths(lengths, num_targets, num_contextual)
    if not is_causal:
        targets, contextual = np.zeros_like(tokens), np.zeros_like(tokens)
    history = tokens - targets
    num_tokens = int(tokens.sum())
    if num_tokens >= 2**31:
        raise ValueError(f"the batch has {num_tokens} tokens; they are counted in 32 bits: use a smaller batch")
    counts = -(-tokens // TILE_SPAN)
    row = np.repeat(np.arange(tokens.size), counts)
    place = (np.arange(row.size) - np.repeat(np.cumsum(counts) - counts, counts)) * TILE_SPAN
    end = np.minimum(place + TILE_SPAN, tokens[row])
    keys_seen = queries_seeing = tokens[row]
    if is_causal:
        keys_seen = np.where(place < contextual[row], np.maximum(history[row], end), end)
        queries_seeing = np.where(place < history[row], tokens[row] - place, TILE_SPAN)
    tiles = np.stack([row, place], axis=1)
    parts = [
        np.stack([np.cumsum(tokens) - tokens, tokens, history, contextual], axis=1),
        tiles[np.argsort(-keys_seen, kind="stable")],
        tiles[np.argsort(-queries_seeing, kind="stable")],
    ]
    flat = to_device([part.astype(np.int32).ravel() for part in parts], device)
    rows, query_tiles, key_tiles = (tensor.view(part.shape) for tensor, part in zip(flat, parts))
    return TritonPlan(
        rows=rows,
        query_tiles=query_tiles,
        key_tiles=key_tiles,
        num_tokens=num_tokens,
        longest=int(tokens.max(initial=0)),
        is_causal=is_causal,
        sees_ahead=not is_causal or num_contextual is not None,
        target_group_size=compiled_group_size(target_group_size, is_causal=is_causal),
    )


def compiled_group_size(target_group_size: int, *, is_causal: bool) -> int:
    """The size of groups that the kernels are compiled for, in a model with such groups."""
    return min(target_group_size, _LARGEST_GROUP) if is_causal else 1


def triton_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    plan: TritonPlan,
    *,
    normalizer: float,
    times: TokenTimes | None = None,
) -> torch.Tensor:
    """HSTU attention of a jagged batch; as `hstu_attention`, on CUDA.

    The gradients of the biases are sums of atomic additions in float32: their last bits may differ between two runs.
    Weights of replicas do not drift apart by that, for gradients are reduced over the ranks before they are used.

    Args:
        query: float32, bfloat16 or float16 `(num_tokens, num_heads, head_dim)`, the rows of the batch one after the
            other; strided tensors are read as they are where channels are side by side.
        key: as `query`.
        value: as `query`.
        bias: by distance, as that of `hstu_attention`; none if not given.
        plan: the tiles of this batch.
        normalizer: N, by which the sums are divided.
        times: adds a bias for the time between two tokens; none if not given.

    Returns:
        `(num_tokens, num_heads, head_dim)`, the dtype of `query`. It can be differentiated once.

    Raises:
        ValueError: a row longer than the bias reaches, or tensors of another number of tokens than the plan's.

    """
    require_plan_of(query, plan.num_tokens)
    if bias is not None:
        require_reach(plan.longest, bias.shape[1], sees_ahead=plan.sees_ahead)
        bias = bias.float().contiguous()
    time_bias = None if times is None else times.bias.float().contiguous()
    seconds = None if times is None else times.values.contiguous()
    # Autocast must not change the dtype of what the kernels are given.
    with torch.autocast(query.device.type, enabled=False):
        return _TritonAttention.apply(query, key, value, bias, time_bias, seconds, plan, 1.0 / normalizer)


class _TritonAttention(torch.autograd.Function):
    """Attention over the tiles of a plan; the backward pass computes the scores again."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        bias: torch.Tensor | None,
        time_bias: torch.Tensor | None,
        times: torch.Tensor | None,
        plan: TritonPlan,
        scale: float,
    ) -> torch.Tensor:
        query, key, value = _with_common_strides(query, key, value)
        ctx.save_for_backward(query, key, value, bias, time_bias, times)
        ctx.plan, ctx.scale = plan, scale
        return torch.ops.evenrank.hstu_attention.default(
            query, key, value, bias, time_bias, times, plan.rows, plan.query_tiles, *_options(plan, scale)
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        plan: TritonPlan = ctx.plan
        saved = ctx.saved_tensors  # once: under activation checkpointing it cannot be asked for again
        inputs = (*saved, grad_output.contiguous(), plan.rows)
        options = _options(plan, ctx.scale)
        grad_query, grad_bias, grad_time_bias = torch.ops.evenrank.hstu_attention_backward_query.default(
            *inputs, plan.query_tiles, *options
        )
        grad_key, grad_value = torch.ops.evenrank.hstu_attention_backward_key.default(*inputs, plan.key_tiles, *options)
        _, _, _, bias, time_bias, _ = saved
        return (
            *(grad_query, grad_key, grad_value),
            None if bias is None else grad_bias,
            None if time_bias is None else grad_time_bias,
            *(None, None, None),
        )


def _with_common_strides(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors as they are where they are parts of one projection, else contiguous copies."""
    if tensors[0].stride(2) == 1 and all(tensor.stride() == tensors[0].stride() for tensor in tensors):
        return tensors
    return tuple(tensor.contiguous() for tensor in tensors)


def _options(plan: TritonPlan, scale: float) -> tuple[float, int, bool, bool]:
    return scale, plan.target_group_size, plan.is_causal, plan.sees_ahead


# An operator for each launch: fake tensors, which cannot be given to a kernel, then go through a model too. Defined in
# this way one costs about 6 µs per call, by torch.library.custom_op about 30.
_LIBRARY = torch.library.Library("evenrank", "FRAGMENT")
_INPUTS = "Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor? time_bias, Tensor? times"
_OPTIONS = "Tensor rows, Tensor tiles, float scale, int target_group_size, bool is_causal, bool sees_ahead"


def _define(name: str, arguments: str, result: str, implementation: Any, fake: Any) -> None:
    _LIBRARY.define(f"{name}({arguments}) -> {result}")
    _LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"evenrank::{name}", fake, lib=_LIBRARY)


def _forward(*arguments: Any) -> torch.Tensor:
    inputs = Inputs(*arguments)
    output = torch.empty_like(inputs.query, memory_format=torch.contiguous_format)
    launch("forward", inputs, [output])
    return output


def _backward_query(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    inputs, grad_output = _with_gradient(*arguments)
    results = _fake_backward_query(*arguments)
    biases = zip(results[1:], (inputs.bias, inputs.time_bias))
    gradients = (None if bias is None else gradient.zero_() for gradient, bias in biases)
    launch("backward_query", inputs, [grad_output, results[0], *gradients])
    return results


def _backward_key(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, grad_output = _with_gradient(*arguments)
    results = _fake_backward_key(*arguments)
    launch("backward_key", inputs, [grad_output, *results])
    return results


def _with_gradient(*arguments: Any) -> tuple[Inputs, torch.Tensor]:
    return Inputs(*arguments[:6], *arguments[7:]), arguments[6]


def _fake_forward(query: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(query, memory_format=torch.contiguous_format)


def _fake_backward_query(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    query, _, _, *biases = arguments[:5]
    bias, time_bias = (query.new_empty(0) if bias is None else torch.empty_like(bias) for bias in biases)
    return _fake_forward(query), bias, time_bias


def _fake_backward_key(query: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return _fake_forward(query), _fake_forward(query)


_define("hstu_attention", f"{_INPUTS}, {_OPTIONS}", "Tensor", _forward, _fake_forward)
_define(
    "hstu_attention_backward_query",
    f"{_INPUTS}, Tensor grad_output, {_OPTIONS}",
    "(Tensor, Tensor, Tensor)",
    _backward_query,
    _fake_backward_query,
)
_define(
    "hstu_attention_backward_key",
    f"{_INPUTS}, Tensor grad_output, {_OPTIONS}",
    "(Tensor, Tensor)",
    _backward_key,
    _fake_backward_key,
)
