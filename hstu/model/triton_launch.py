"""Launches of the Triton kernels of `hstu.model.triton_kernels`: which blocks they compute in, and on what devices.

Blocks are chosen by measurement, once per kind of layer: every candidate that the device has shared memory for runs on
a batch made up for it. With nothing in Triton's cache on disk that compiles a dozen kernels, about a minute's work.
`hstu.model.execution` does it when a model is made, on one rank for all GPUs of a kind.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch

from hstu.model.triton_blocks import (
    KERNELS,
    MAX_HEAD_DIM,
    Bias,
    Blocks,
    candidate_blocks,
    padded_head_dim,
    shared_memory,
)

logger = logging.getLogger(__name__)

# Tokens that a tile of a plan spans; blocks are divisors of it.
TILE_SPAN = 128
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MIN_CAPABILITY = (8, 0)


class LayerKind(NamedTuple):
    """What decides which kernels run, and what they are compiled for."""

    dtype: torch.dtype  # of queries
    head_dim: int  # width of a head
    is_causal: bool  # whether a token sees only itself and what precedes it
    has_context: bool  # whether contextual tokens see all of the history
    target_group_size: int  # targets that may see one another
    has_position: bool  # whether there is a bias by position
    has_time: bool  # whether there is a bias by time


# What was chosen, for as long as the process lives.
_BLOCKS: dict[tuple[torch.device, LayerKind], dict[str, Blocks]] = {}


class Inputs(NamedTuple):
    """What all kernels are given."""

    query: torch.Tensor  # `(num_tokens, num_heads, head_dim)`, as key and value, whose strides are the same
    key: torch.Tensor  # as `query`
    value: torch.Tensor  # as `query`
    bias: torch.Tensor | None  # float32 `(num_heads, width)`, or None
    time_bias: torch.Tensor | None  # float32 `(num_heads, num_buckets)`, or None
    times: torch.Tensor | None  # int64 `(num_tokens,)`, with a time bias
    rows: torch.Tensor  # see `TritonPlan`, as what follows
    tiles: torch.Tensor  # of queries or keys, as the kernel takes them
    scale: float  # 1/N
    target_group_size: int  # targets per group
    is_causal: bool  # whether a token sees only itself and what precedes it
    sees_ahead: bool  # whether the bias has distances below zero


def resolve_backend(
    backend: str, device: torch.device, dtype: torch.dtype, head_dim: int
) -> Literal["pytorch", "triton"]:
    """Who computes the attention on this device: "triton" or "pytorch".

    Args:
        backend: what is asked for; "auto" takes Triton wherever it can compute such layers.
        device: where the layers are.
        dtype: of queries.
        head_dim: width of a head.

    Raises:
        ValueError: Triton is asked for and cannot compute them; the reason and the remedy are named.

    """
    if backend == "pytorch":
        return "pytorch"
    reason = why_not(device, dtype, head_dim)
    if reason is None:
        return "triton"
    if backend == "auto":
        return "pytorch"
    raise ValueError(f"kernel_backend is 'triton' and {reason} choose 'pytorch'")


@functools.cache
def why_not(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why the kernels cannot compute such layers on this device, up to the remedy; None if they can."""
    if device.type != "cuda" or torch.version.hip is not None:
        return f"the device is {device.type if torch.version.hip is None else 'hip'!r}; it is made for CUDA:"
    try:
        importlib.import_module("triton")
    except ImportError as error:
        return f"Triton cannot be imported ({error}); builds of PyTorch for CUDA bring it: install triton, or"
    if dtype not in DTYPES:
        return f"tokens are {dtype}; its kernels take {', '.join(map(str, DTYPES))}:"
    widest = MAX_HEAD_DIM[dtype.itemsize]
    if head_dim > widest:
        return f"a head has {head_dim} channels; its kernels hold at most {widest} of {dtype}:"
    if not torch.cuda.is_available():  # a device in pretence, whose tensors no kernel is given
        return None
    found = torch.cuda.get_device_capability(device)
    if found < _MIN_CAPABILITY:
        return f"the GPU has compute capability {found[0]}.{found[1]}; its kernels need {_MIN_CAPABILITY[0]}.0:"
    if _memory_there(device) < shared_memory(dtype, head_dim):
        return _too_little_memory(device, dtype, head_dim)
    return None


def _memory_there(device: torch.device) -> int:
    """Bytes of shared memory that a program may have."""
    properties: Any = torch.cuda.get_device_properties(device)
    return properties.shared_memory_per_block_optin


def _too_little_memory(device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    return (
        f"the GPU has {_memory_there(device)} bytes of shared memory per block; heads of {head_dim} channels in "
        f"{dtype} need {shared_memory(dtype, head_dim)}:"
    )


def launch(kernel: str, inputs: Inputs, outputs: Sequence[torch.Tensor | None]) -> None:
    """Run a kernel; `outputs` are what stands between its inputs and the rows, gradients of the output among them."""
    query = inputs.query
    if not query.numel():
        return
    kind = LayerKind(
        *(query.dtype, query.shape[2], inputs.is_causal, inputs.sees_ahead and inputs.is_causal),
        *(inputs.target_group_size, inputs.bias is not None, inputs.time_bias is not None),
    )
    # Triton launches on the current device: also what is launched to choose blocks.
    with torch.cuda.device(query.device) if query.is_cuda else contextlib.nullcontext():
        _launch(kernel, choose_blocks(query.device, kind)[kernel], inputs, outputs)


def _launch(kernel: str, blocks: Blocks, inputs: Inputs, outputs: Sequence[torch.Tensor | None]) -> None:
    num_heads, head_dim = inputs.query.shape[1:]
    block = blocks.keys if kernel == "backward_key" else blocks.queries
    grid = (inputs.tiles.shape[0] * (TILE_SPAN // block) * num_heads,)
    getattr(_kernels(), kernel)[grid](
        *inputs[:6],
        *outputs,
        inputs.rows,
        inputs.tiles,
        *scalars(inputs),
        **constants(
            inputs.query.dtype,
            head_dim,
            blocks,
            inputs.is_causal,
            inputs.target_group_size,
            fast=inputs.query.device.type == "cuda",
        ),
        num_warps=blocks.warps,
        num_stages=blocks.stages,
    )


def scalars(inputs: Inputs) -> tuple[int | float, ...]:
    """Numbers that the kernels are given, in their order."""
    # Half of the division by N comes before the sum, so that float16 neither overflows nor loses small values; by a
    # power of two, which rounds nothing.
    before = 2.0 ** round(math.log2(inputs.scale) / 2) if inputs.query.dtype == torch.float16 else 1.0
    width = 0 if inputs.bias is None else inputs.bias.shape[1]
    return (
        inputs.query.shape[1],
        *inputs.query.stride()[:2],
        *(before, inputs.scale / before),
        width // 2 if inputs.sees_ahead else 0,  # the column of distance 0
        width,
        0 if inputs.time_bias is None else inputs.time_bias.shape[1],
    )


def constants(
    dtype: torch.dtype, head_dim: int, blocks: Blocks, is_causal: bool, target_group_size: int = 1, *, fast: bool
) -> dict[str, Any]:
    """What the kernels are compiled for: nothing that changes from batch to batch."""
    return {
        "HEAD_DIM": head_dim,
        "BLOCK_DIM": padded_head_dim(head_dim),
        "BLOCK_M": blocks.queries,
        "BLOCK_N": blocks.keys,
        "GROUP": target_group_size,
        "CAUSAL": is_causal,
        "PRECISION": _precision(dtype),
        "FAST": fast and dtype != torch.float32,
    }


def _precision(dtype: torch.dtype) -> str:
    """As the products of torch are set: float32 on the tensor cores in three parts, or in one where that is allowed.

    The attribute follows both of torch's interfaces; `get_float32_matmul_precision` raises once the new one is used.
    """
    if dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision != "tf32":
        return "tf32x3"
    return "tf32"


@functools.cache
def _kernels() -> Any:
    """The module of the kernels; imported when first needed, for Triton comes with CUDA builds of PyTorch only."""
    return importlib.import_module("hstu.model.triton_kernels")


def choose_blocks(device: torch.device, kind: LayerKind) -> dict[str, Blocks]:
    """The fastest blocks of every kernel, measured once per process; the smallest ones where there is no CUDA.

    Raises:
        ValueError: no candidate fits into the device's shared memory.

    """
    if (device, kind) not in _BLOCKS:
        use_blocks(device, kind, _measured_blocks(device, kind))
    return _BLOCKS[device, kind]


def use_blocks(device: torch.device, kind: LayerKind, blocks: dict[str, Blocks]) -> None:
    """Take these blocks, which were measured here or on another rank's GPU of the same kind."""
    _BLOCKS[device, kind] = blocks


def _measured_blocks(device: torch.device, kind: LayerKind) -> dict[str, Blocks]:
    biases: dict[tuple[bool, bool], Bias] = {
        (False, False): "none",
        (True, False): "position",
        (False, True): "time",
        (True, True): "both",
    }
    layer = (kind.dtype, kind.head_dim, biases[kind.has_position, kind.has_time])
    if device.type != "cuda":
        return {kernel: candidate_blocks(kernel, *layer)[-1] for kernel in KERNELS}
    capability = torch.cuda.get_device_capability(device)
    inputs = _sample_inputs(device, kind)
    outputs = _sample_outputs(inputs)
    chosen = {}
    for kernel in KERNELS:
        seconds = {
            blocks: _seconds(functools.partial(_launch, kernel, blocks, inputs, outputs[kernel]))
            for blocks in candidate_blocks(kernel, *layer, capability)
        }
        chosen[kernel] = min(seconds, key=seconds.__getitem__)
        if math.isinf(seconds[chosen[kernel]]):
            reason = _too_little_memory(device, kind.dtype, kind.head_dim)
            raise ValueError(f"kernel_backend is 'triton' and {reason} choose 'pytorch'")
    logger.info("attention kernels on %s: %s", device, chosen)
    return chosen


def _seconds(run: Callable[[], object]) -> float:
    """Time of a launch, see `seconds_of`; infinite where the device has not the memory for it."""
    try:
        return seconds_of(run)
    except importlib.import_module("triton.runtime.errors").OutOfResources:
        return math.inf


def seconds_of(run: Callable[[], object], repeats: int = 5) -> float:
    """Time that something takes on the current CUDA device, once it has run and so is compiled."""
    run()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(repeats):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / repeats


def _sample_inputs(device: torch.device, kind: LayerKind) -> Inputs:
    """Sixteen rows of 1024 tokens, of constants: no random number is drawn from the generators of the training."""
    num_rows, length, num_heads = 16, 1024, 4
    sees_ahead = kind.has_context or not kind.is_causal
    first = torch.arange(0, num_rows * length, length)
    rows = torch.stack([first, *(torch.full_like(first, number) for number in (length, length, 0))], dim=1)
    places = torch.arange(length - TILE_SPAN, -1, -TILE_SPAN).repeat_interleave(num_rows)
    tiles = torch.stack([torch.arange(num_rows).repeat(length // TILE_SPAN), places], dim=1)
    tokens = torch.full((num_rows * length, num_heads, kind.head_dim), 0.1, device=device, dtype=kind.dtype)
    return Inputs(
        *(tokens, tokens, tokens),
        torch.zeros(num_heads, 2 * length - 1 if sees_ahead else length, device=device) if kind.has_position else None,
        torch.zeros(num_heads, 64, device=device) if kind.has_time else None,
        torch.arange(num_rows * length, device=device) * 3600 if kind.has_time else None,
        *(rows.to(device, torch.int32), tiles.to(device, torch.int32)),
        scale=1.0 / length,
        target_group_size=kind.target_group_size,
        is_causal=kind.is_causal,
        sees_ahead=sees_ahead,
    )


def _sample_outputs(inputs: Inputs) -> dict[str, list[torch.Tensor | None]]:
    like = torch.empty_like(inputs.query)
    return {
        "forward": [like],
        "backward_query": [like, like, inputs.bias, inputs.time_bias],
        "backward_key": [like, like, like],
    }
