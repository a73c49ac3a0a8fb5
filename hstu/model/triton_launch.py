"""Launches of the Triton kernels of `hstu.model.kernels`, and the choice of their block sizes.

Where there are several candidates, blocks are chosen by measurement, once per kind of layer: every candidate that fits
the device's shared memory runs on a synthetic batch. If Triton's cache on disk is empty, this compiles a dozen kernels,
which takes about a minute. `hstu.model.execution` calls it when a model is sharded, on one rank for all GPUs of a kind.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from hstu.model.triton_blocks import (
    ADDED_HEAD_DIM,
    KERNELS,
    MAX_HEAD_DIM,
    TILE_SPAN,
    Blocks,
    candidate_blocks,
    outputs_of,
    padded_head_dim,
)
from hstu.model.triton_plan import NO_WINDOW, plan_triton_attention

logger = logging.getLogger(__name__)

# Tensors by the names of a kernel's arguments.
Tensors = dict[str, torch.Tensor | None]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MIN_CAPABILITY = (8, 0)
_REPEATS = 5  # launches that are timed together
# The first compute capability with tensor descriptors (TMA) and atomic additions of blocks.
_TMA_CAPABILITY = (9, 0)


class LayerKind(NamedTuple):
    """The properties of a layer that determine which kernels run, their compilation and the fastest blocks."""

    dtype: torch.dtype  # dtype of queries
    head_dim: int  # width of a head
    is_causal: bool  # whether a token sees only itself and earlier tokens
    has_context: bool  # whether contextual tokens see all of the history
    target_group_size: int  # number of targets that may see one another
    has_position: bool  # whether there is a bias by position
    has_time: bool  # whether there is a bias by time
    window: int = NO_WINDOW  # the largest distance at which a token is seen


# The chosen blocks of this process.
_BLOCKS: dict[tuple[torch.device, LayerKind], dict[str, Blocks]] = {}


class Inputs(NamedTuple):
    """The inputs of all kernels."""

    query: torch.Tensor  # `(num_tokens, num_heads, head_dim)`
    key: torch.Tensor  # as `query`, with the same strides
    value: torch.Tensor  # as `query`, with the same strides
    position: torch.Tensor | None  # float32 `(num_heads, width)`, see `triton_attention.position_table`
    time: torch.Tensor | None  # float32 `(num_heads, num_buckets)`, see `triton_attention.time_table`
    times: torch.Tensor | None  # float32 `(num_tokens, 2)`, with a time bias; see `triton_attention.in_two_parts`
    rows: torch.Tensor  # this and the next four: see `TritonPlan`
    query_tiles: torch.Tensor  # for the forward pass and the gradients of queries
    key_tiles: torch.Tensor  # for the gradients of keys and values
    bias_work: torch.Tensor  # for the gradients of biases
    target_work: torch.Tensor  # for the gradients of biases, for targets on the history
    scale: float  # 1/N
    target_group_size: int  # targets per group
    is_causal: bool  # whether a token sees only itself and earlier tokens
    sees_ahead: bool  # whether biases have negative distances
    window: int  # the largest distance at which a token is seen
    origin: int  # the column of distance 0 in `position`


def uses_triton(backend: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether Triton computes the attention of these layers on this device; with "auto", whether it can.

    Raises:
        ValueError: `backend` is "triton" and Triton cannot; the error has the reason and the remedy.
    """
    reason = None if backend == "pytorch" else why_not(device, dtype, head_dim)
    if reason is not None and backend == "triton":
        raise ValueError(f"kernel_backend is 'triton' and {reason} choose 'pytorch'")
    return backend != "pytorch" and reason is None


@functools.cache
def why_not(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """The reason why the kernels cannot compute these layers on this device, without the remedy; None if they can."""
    if device.type != "cuda" or torch.version.hip is not None:
        return f"the device is {device.type if torch.version.hip is None else 'hip'!r}; its kernels need CUDA:"
    try:
        importlib.import_module("triton")
    except ImportError as error:
        return f"Triton cannot be imported ({error}); PyTorch for CUDA usually installs it: install triton, or"
    if dtype not in DTYPES:
        return f"tokens are {dtype}; its kernels take {', '.join(map(str, DTYPES))}:"
    widest = MAX_HEAD_DIM[dtype.itemsize]
    if head_dim > widest:
        return f"a head has {head_dim} channels; its kernels take at most {widest} in {dtype}:"
    if not torch.cuda.is_available():  # fake tensors, on which no kernel runs
        return None
    found = torch.cuda.get_device_capability(device)
    if found < _MIN_CAPABILITY:
        return f"the GPU has compute capability {found[0]}.{found[1]}; its kernels need {_MIN_CAPABILITY[0]}.0:"
    return None


def launch(kernel: str, inputs: Inputs, outputs: Tensors, grad_output: torch.Tensor | None = None) -> None:
    """Run a kernel; `outputs` are the tensors to write, by argument name. Outputs that are missing are not computed."""
    query = inputs.query
    if not query.numel():
        return
    kind = LayerKind(
        *(query.dtype, query.shape[2], inputs.is_causal, inputs.sees_ahead and inputs.is_causal),
        *(inputs.target_group_size, inputs.position is not None, inputs.time is not None, inputs.window),
    )
    # Triton launches on the current device, also the kernels that choose_blocks measures.
    with torch.cuda.device(query.device) if query.is_cuda else contextlib.nullcontext():
        _launch(kernel, choose_blocks(query.device, kind)[kernel], inputs, outputs, grad_output)


def _launch(
    name: str, blocks: Blocks, inputs: Inputs, outputs: Tensors, grad_output: torch.Tensor | None = None
) -> None:
    kernel, query = KERNELS[name], inputs.query
    work = getattr(inputs, kernel.tiles)
    grid = (work.shape[0] * (TILE_SPAN // getattr(blocks, kernel.side)) * query.shape[1],)
    if not grid[0]:
        return
    tensors: Tensors = dict(zip(("Q", "K", "V", "POSITION", "TIME", "TIMES"), inputs[:6]))
    tensors |= {"GRAD_OUT": grad_output, "ROWS": inputs.rows, "TILES": work} | dict.fromkeys(
        KERNELS["backward"].outputs
    )
    tensors |= dict.fromkeys(kernel.outputs) | outputs
    arguments: dict[str, Any] = tensors | scalars(inputs)
    tma = uses_tma(inputs)
    if tma:
        described = {each: tensors[each] for each in kernel.visits}
        arguments |= {
            each: _descriptor(tensor, tokens_of(each, blocks))
            for each, tensor in described.items()
            if tensor is not None
        }
    arguments |= constants(
        *(query.dtype, query.shape[2], blocks, inputs.is_causal, inputs.target_group_size),
        fast=query.is_cuda,
        tma=tma,
    )
    function = function_of(name)
    function[grid](
        **{each: arguments[each] for each in function.arg_names}, num_warps=blocks.warps, num_stages=blocks.stages
    )


def tokens_of(argument: str, blocks: Blocks) -> int:
    """Tokens of a block of an argument that is passed as a tensor descriptor."""
    return blocks.keys if argument in ("K", "V") else blocks.queries


def uses_tma(inputs: Inputs) -> bool:
    """Whether to use tensor descriptors, which need addresses that are multiples of 16, and heads of 2ⁿ channels."""
    query = inputs.query
    if not query.is_cuda or query.element_size() != 2 or _capability(query.device) < _TMA_CAPABILITY:
        return False
    addresses = [each.data_ptr() for each in inputs[:3]]
    is_aligned = not any(number % 16 for number in (*addresses, 2 * query.stride(0)))
    return is_aligned and query.stride(1) == query.shape[2] == padded_head_dim(query.shape[2])


def adds_up(inputs: Inputs) -> bool:
    """Whether one launch can compute the gradients of keys and values, and sum those of queries by atomic additions."""
    return uses_tma(inputs) and inputs.query.shape[2] <= ADDED_HEAD_DIM


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def _descriptor(tensor: torch.Tensor, size: int) -> Any:
    """A descriptor of a tensor `(num_tokens, num_heads, head_dim)`, for blocks of `size` tokens and one head."""
    num_tokens, num_heads, head_dim = tensor.shape
    descriptor = importlib.import_module("triton.tools.tensor_descriptor").TensorDescriptor
    return descriptor(tensor, [num_tokens, num_heads * head_dim], [tensor.stride(0), 1], [size, head_dim])


def scalars(inputs: Inputs) -> dict[str, int | float]:
    """The kernels' numeric arguments."""
    # In float16 divide by about √N before the sum and by the rest after it, so that sums neither overflow nor lose
    # small values; the first divisor is a power of two, so that it causes no rounding.
    before = 2.0 ** round(math.log2(inputs.scale) / 2) if inputs.query.dtype == torch.float16 else 1.0
    token_stride, head_stride, _ = inputs.query.stride()
    return {
        "num_heads": inputs.query.shape[1],
        "token_stride": token_stride,
        "head_stride": head_stride,
        "before": before,
        "after": inputs.scale / before,
        "window": inputs.window,
        "origin": inputs.origin,
        "width": 0 if inputs.position is None else inputs.position.shape[1],
        "num_buckets": 0 if inputs.time is None else inputs.time.shape[1],
    }


def constants(
    dtype: torch.dtype,
    head_dim: int,
    blocks: Blocks,
    is_causal: bool,
    target_group_size: int = 1,
    *,
    fast: bool,
    tma: bool = False,
) -> dict[str, Any]:
    """The kernels' compile-time constants; none of them depends on the batch."""
    return {
        "HEAD_DIM": head_dim,
        "BLOCK_DIM": padded_head_dim(head_dim),
        "BLOCK_M": blocks.queries,
        "BLOCK_N": blocks.keys,
        "GROUP": target_group_size,
        "CAUSAL": is_causal,
        "PRECISION": _precision(dtype),
        "FAST": fast and dtype != torch.float32,
        "TMA": tma,
    }


def _precision(dtype: torch.dtype) -> str:
    """The precision of products in float32: three TensorFloat-32 products, or one if torch's settings allow "tf32".

    The attribute read here follows both of torch's interfaces; `get_float32_matmul_precision` raises after use of the
    new interface.
    """
    if dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision != "tf32":
        return "tf32x3"
    return "tf32"


@functools.cache
def function_of(kernel: str) -> Any:
    """The function of a kernel; imported on first use, because only CUDA builds of PyTorch install Triton."""
    return getattr(importlib.import_module(f"hstu.model.kernels.{KERNELS[kernel].module}"), KERNELS[kernel].function)


def choose_blocks(device: torch.device, kind: LayerKind) -> dict[str, Blocks]:
    """The blocks of every kernel; of several candidates the fastest, measured once. Without CUDA the smallest."""
    if (device, kind) not in _BLOCKS:
        use_blocks(device, kind, _measured_blocks(device, kind))
    return _BLOCKS[device, kind]


def use_blocks(device: torch.device, kind: LayerKind, blocks: dict[str, Blocks]) -> None:
    """Set the blocks, measured on this GPU or on another rank's GPU of the same kind."""
    _BLOCKS[device, kind] = blocks


def _measured_blocks(device: torch.device, kind: LayerKind) -> dict[str, Blocks]:
    layer = (kind.dtype, kind.head_dim, kind.has_position or kind.has_time)
    if device.type != "cuda":
        found = {kernel: candidate_blocks(kernel, *layer) for kernel in KERNELS}
        return {kernel: candidates[-1] for kernel, candidates in found.items() if candidates}
    capability = torch.cuda.get_device_capability(device)
    inputs = _sample_inputs(device, kind)
    chosen = {}
    for kernel in KERNELS:
        candidates = candidate_blocks(kernel, *layer, capability)
        if candidates and (kernel != "backward" or adds_up(inputs)):
            chosen[kernel] = candidates[0] if len(candidates) == 1 else _fastest(kernel, candidates, inputs)
    logger.info("attention kernels on %s: %s", device, chosen)
    return chosen


def _fastest(kernel: str, candidates: list[Blocks], inputs: Inputs) -> Blocks:
    """The blocks with which a kernel is fastest on these inputs; the smallest if the device has too little memory."""
    outputs = _sample_outputs(kernel, inputs)
    gradient = None if kernel == "forward" else inputs.query
    seconds = {}
    for blocks in candidates:
        # Fails for blocks that need more shared memory than the device has.
        with contextlib.suppress(importlib.import_module("triton.runtime.errors").OutOfResources):
            run = functools.partial(_launch, kernel, blocks, inputs, outputs, gradient)
            seconds[blocks] = seconds_of(run, on_device=True)
    return min(seconds, key=seconds.__getitem__, default=candidates[-1])


def seconds_of(run: Callable[[], object], *, on_device: bool = False) -> float:
    """Mean seconds of a call on the current CUDA device, after a first call that compiles.

    Args:
        run: the call.
        on_device: whether the time of the device alone counts: it is kept busy until the calls are queued, since a
            small kernel runs for a shorter time than its launch takes on the host.
    """
    run()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    if on_device:
        keep_busy(torch.device("cuda", torch.cuda.current_device()))
    begin.record()
    for _ in range(_REPEATS):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / _REPEATS


def _sample_inputs(device: torch.device, kind: LayerKind) -> Inputs:
    """Sixteen rows of 1024 tokens, of constant values, so that the global random generators are not used."""
    num_rows, length, num_heads = 16, 1024, 4
    lengths = torch.full((num_rows,), length)
    plan = plan_triton_attention(
        lengths,
        torch.full_like(lengths, TILE_SPAN if kind.is_causal else 0),
        torch.zeros_like(lengths) if kind.has_context else None,
        is_causal=kind.is_causal,
        target_group_size=kind.target_group_size,
        max_attn_len=kind.window,
        device=device,
    )
    tokens = torch.full((plan.num_tokens, num_heads, kind.head_dim), 0.1, device=device, dtype=kind.dtype)
    origin = length + TILE_SPAN
    of_tables: dict[str, Any] = {"device": device, "dtype": torch.float32}  # not torch's default dtype
    return Inputs(
        *(tokens, tokens, tokens),
        torch.zeros(num_heads, 2 * origin, **of_tables) if kind.has_position else None,
        torch.zeros(num_heads, 160, **of_tables) if kind.has_time else None,
        torch.zeros(plan.num_tokens, 2, **of_tables) if kind.has_time else None,
        *plan.options(1.0 / length, origin),
    )


def _sample_outputs(kernel: str, inputs: Inputs) -> Tensors:
    made: Tensors = {"GRAD_POSITION": inputs.position, "GRAD_TIME": inputs.time}
    if kernel == "backward":
        made["GRAD_Q"] = torch.empty_like(inputs.query, dtype=torch.float32)
    like = torch.empty_like(inputs.query)
    return {name: made.get(name, like) for name in outputs_of(kernel, inputs.query.shape[2])}


def keep_busy(device: torch.device) -> None:
    """Queue work for a few milliseconds, so that the device begins the calls after it when all of them are queued."""
    ballast = torch.empty(2**25, device=device)
    for _ in range(150):
        ballast.zero_()
