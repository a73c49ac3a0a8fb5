"""HSTU attention with Triton kernels over jagged rows, without padding.

    lengths on the host ─► TritonPlan, once per batch ─► triton_attention, in every layer

The results, with masks and biases, are those of `hstu.model.attention`. Biases and sums are added in float32, and the
backward pass recomputes the scores, so no tensor of the size of the scores is stored.

The forward pass takes one launch. The gradients of queries, keys and values take one launch, which sums the gradients
of queries with atomic additions; or two launches if sums must be deterministic
(`torch.use_deterministic_algorithms`), rows are short, heads are wider than 64, or no tensor descriptors can be used;
three for heads wider than 128. The gradients of the biases take one launch more, and another one if there are targets.
"""

from __future__ import annotations

from typing import Any, get_type_hints

import torch
from torch.autograd.function import once_differentiable

from hstu.model.attention import TokenTimes, require_inputs
from hstu.model.triton_blocks import TILE_SPAN, outputs_of
from hstu.model.triton_launch import Inputs, Tensors, adds_up, launch
from hstu.model.triton_plan import TritonPlan

# For rows below this length two launches are no slower than one that also clears a buffer, by a model of the costs.
_SHORT_ROW = 256
# Enough buckets for all differences of 63 bits, so that the kernels need not clamp bucket numbers.
_ALL_TIME_BUCKETS = 160


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
    """HSTU attention of a jagged batch on CUDA; arguments, result and errors as `hstu_attention`.

    Tokens are float32, bfloat16 or float16; strided tensors are not copied if the channels are contiguous. Timestamps
    may be the result of `in_two_parts`, computed once for all layers.

    The gradients of the biases are sums of atomic additions in float32: their last bits may differ between two runs.
    The weights of replicas remain equal, because gradients are reduced over the ranks before use.
    """
    require_inputs(plan, query, key, value, bias, times)
    origin, position, time, seconds = 0, None, None, None
    if bias is not None:
        position, origin = position_table(bias, plan)
    if times is not None:
        time, seconds = time_table(times.bias), in_two_parts(times.values)
    # Autocast must not change the dtype of the kernels' inputs.
    with torch.autocast(query.device.type, enabled=False):
        options = plan.options(1.0 / normalizer, origin)
        return _TritonAttention.apply(query, key, value, position, time, seconds, plan.longest, *options)


def position_table(bias: torch.Tensor, plan: TritonPlan) -> tuple[torch.Tensor, int]:
    """Half of a bias by distance, padded so that no block reads outside the table, and the column of distance 0.

    A masked pair may be at distance −`target_group_size`. Tiles of `bias_work` begin at multiples of TILE_SPAN, so
    their first blocks may have pairs nearly 2 · TILE_SPAN below the lowest distance of the bias.
    """
    before = 2 * TILE_SPAN + min(plan.target_group_size, bias.shape[1])
    return torch.nn.functional.pad(bias.float() * 0.5, (before, TILE_SPAN)), before + plan.zero_column(bias)


def time_table(bias: torch.Tensor) -> torch.Tensor:
    """Half of a bias by time, with the last bucket repeated for all longer times."""
    missing = max(0, _ALL_TIME_BUCKETS - bias.shape[1])
    return torch.cat([bias, bias[:, -1:].expand(-1, missing)], dim=1).float() * 0.5


def in_two_parts(times: torch.Tensor) -> torch.Tensor:
    """Times as float32 `(num_tokens, 2)`: the multiple of 2²⁴, and the remainder. Differences are exact up to 2⁴⁸."""
    if times.dim() == 2:  # already in two parts
        return times
    if times.numel():
        times = times - times.min()
    return torch.stack([times >> 24, times & 0xFFFFFF], dim=1).float()


class _TritonAttention(torch.autograd.Function):
    """Attention over the tiles of a plan; the backward pass recomputes the scores."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        position: torch.Tensor | None,
        time: torch.Tensor | None,
        times: torch.Tensor | None,
        longest: int,
        *options: Any,
    ) -> torch.Tensor:
        query, key, value = _with_common_strides(query, key, value)
        ctx.save_for_backward(query, key, value, position, time, times)
        ctx.longest, ctx.options = longest, options
        return torch.ops.evenrank.hstu_attention.default(query, key, value, position, time, times, *options)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        saved = ctx.saved_tensors  # read once: activation checkpointing allows no second access
        inputs = (*saved, *ctx.options, grad_output.contiguous())
        in_one = ctx.longest >= _SHORT_ROW and not torch.are_deterministic_algorithms_enabled()
        gradients = torch.ops.evenrank.hstu_attention_backward.default(*inputs, in_one)
        biases: list[torch.Tensor | None] = [None, None]
        if any(ctx.needs_input_grad[3:5]):
            found = torch.ops.evenrank.hstu_attention_bias_gradient.default(*inputs)
            biases = [None if bias is None else gradient for bias, gradient in zip(saved[3:5], found)]
        return (*gradients, *biases, *(None,) * (2 + len(ctx.options)))


def _with_common_strides(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors themselves if their strides are equal and channels contiguous, else contiguous copies."""
    if tensors[0].stride(2) == 1 and all(tensor.stride() == tensors[0].stride() for tensor in tensors):
        return tensors
    return tuple(tensor.contiguous() for tensor in tensors)


# The kernels are torch operators so that fake tensors, on which a kernel cannot run, can pass through a model. An
# operator defined in this way costs about 6 µs per call, by torch.library.custom_op about 30 µs.
_LIBRARY = torch.library.Library("evenrank", "FRAGMENT")
_KINDS = {torch.Tensor: "Tensor", torch.Tensor | None: "Tensor?", float: "float", int: "int", bool: "bool"}
_INPUTS = ", ".join(f"{_KINDS[kind]} {name}" for name, kind in get_type_hints(Inputs).items())


def _define(name: str, arguments: str, result: str, implementation: Any, fake: Any) -> None:
    _LIBRARY.define(f"{name}({arguments}) -> {result}")
    _LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"evenrank::{name}", fake, lib=_LIBRARY)


def _forward(*arguments: Any) -> torch.Tensor:
    inputs = Inputs(*arguments)
    output = _fake_forward(inputs.query)
    launch("forward", inputs, {"OUT": output})
    return output


def _backward(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    *of_inputs, grad, in_one = arguments
    inputs = Inputs(*of_inputs)
    query, key, value = results = _fake_backward(*arguments)
    outputs: Tensors = {"GRAD_Q": query, "GRAD_K": key, "GRAD_V": value}
    if in_one and adds_up(inputs):
        sums = torch.zeros_like(query, dtype=torch.float32)
        launch("backward", inputs, outputs | {"GRAD_Q": sums}, grad)
        # In float16 the kernel has already divided the sums by N.
        torch.mul(sums, 1.0 if query.dtype == torch.float16 else inputs.scale, out=query)
        return results
    computed: tuple[str, ...] = ()
    for kernel in ("backward_query", "backward_key", "backward_value"):
        names = outputs_of(kernel, query.shape[2])
        if not set(names) <= set(computed):
            launch(kernel, inputs, {name: outputs[name] for name in names}, grad)
        computed += names
    return results


def _bias_gradient(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    *of_inputs, grad = arguments
    inputs = Inputs(*of_inputs)
    results = _fake_bias_gradient(*arguments)
    biases = {"GRAD_POSITION": inputs.position, "GRAD_TIME": inputs.time}
    outputs: Tensors = {
        name: None if bias is None else each.zero_() for each, (name, bias) in zip(results, biases.items())
    }
    launch("bias_gradient", inputs, outputs, grad)
    launch("target_bias_gradient", inputs, outputs, grad)
    return results


def _fake_forward(query: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(query, memory_format=torch.contiguous_format)


def _fake_backward(query: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _fake_forward(query), _fake_forward(query), _fake_forward(query)


def _fake_bias_gradient(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    query, _, _, *biases = arguments[:5]
    position, time = (query.new_empty(0) if bias is None else torch.empty_like(bias) for bias in biases)
    return position, time


_define("hstu_attention", _INPUTS, "Tensor", _forward, _fake_forward)
_define(
    "hstu_attention_backward",
    f"{_INPUTS}, Tensor grad_output, bool in_one",
    "(Tensor, Tensor, Tensor)",
    _backward,
    _fake_backward,
)
_define(
    "hstu_attention_bias_gradient",
    f"{_INPUTS}, Tensor grad_output",
    "(Tensor, Tensor)",
    _bias_gradient,
    _fake_bias_gradient,
)
