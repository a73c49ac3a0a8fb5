"""Block sizes of the Triton kernels; the smallest fit into the shared memory of every GPU that the kernels support.

In a chain of matrix products Triton assigns 16 rows to each warp: with fewer rows per warp, warps compute the same
products. Rows are queries, or keys in the kernels that visit queries.
`python -m benchmarks.models.attention_kernels` prints the instructions per score of each block size, and a test limits
them for the sizes used on compute capability 9.0.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

# Tokens that a tile of a plan spans; blocks are divisors of it.
TILE_SPAN = 128
# Widest heads whose gradients of queries may be summed by atomic additions.
ADDED_HEAD_DIM = 64


class Kernel(NamedTuple):
    """How a kernel is launched; names in capitals are names of its arguments."""

    function: str  # name of the kernel in its module
    tiles: str  # field of the plan with the work of its programs
    side: Literal["queries", "keys"]  # the side of a block whose size the tiles are cut into
    visits: tuple[str, ...]  # arguments that are tensor descriptors if the device has these
    outputs: tuple[str, ...]  # arguments that it writes
    module: str = "attention"  # module in `hstu.model.kernels`


_VISITS, _GRADIENTS = ("Q", "GRAD_OUT"), ("GRAD_Q", "GRAD_K", "GRAD_V")
# By name of a launch. The gradients of queries, keys and values take one launch ("backward") for heads of at most
# ADDED_HEAD_DIM channels, or two, three for heads wider than 128.
KERNELS = {
    "forward": Kernel("forward", "query_tiles", "queries", ("K", "V"), ("OUT",)),
    "backward": Kernel("backward_key", "key_tiles", "keys", (*_VISITS, "GRAD_Q"), _GRADIENTS),
    "backward_key": Kernel("backward_key", "key_tiles", "keys", _VISITS, ("GRAD_K", "GRAD_V")),
    "backward_value": Kernel("backward_key", "key_tiles", "keys", _VISITS, ("GRAD_V",)),
    "backward_query": Kernel("backward_query", "query_tiles", "queries", ("K", "V"), ("GRAD_Q",)),
} | {
    name: Kernel(name, work, "queries", ("Q", "K", "V", "GRAD_OUT"), ("GRAD_POSITION", "GRAD_TIME"), "bias_gradient")
    for name, work in (("bias_gradient", "bias_work"), ("target_bias_gradient", "target_work"))
}
# By bytes of an element: wider heads in float32 would not fit into registers.
MAX_HEAD_DIM = {2: 256, 4: 128}


def outputs_of(kernel: str, head_dim: int) -> tuple[str, ...]:
    """The outputs of a launch; for wide heads the gradients of values have their own launch."""
    outputs = KERNELS[kernel].outputs
    return outputs[:1] if kernel == "backward_key" and padded_head_dim(head_dim) > 128 else outputs


class Blocks(NamedTuple):
    """The block size and the launch options of a kernel."""

    queries: int  # queries of a block, a power of two of at least 16
    keys: int  # keys of a block, a power of two of at least 16
    warps: int  # warps of 32 threads in a program
    stages: int  # blocks in flight: the block in use and the blocks loaded ahead


_Table = dict[tuple[int, str, int], list[tuple[int, int, int, int]]]

# By bytes of an element, launch and padded width of a head (64, 128 or 256); the smallest blocks last.
_EVERYWHERE: _Table = {
    (2, "forward", 64): [(128, 64, 8, 3), (64, 64, 4, 2), (64, 32, 4, 2)],
    (2, "forward", 128): [(128, 64, 8, 2), (64, 32, 4, 2)],
    (2, "forward", 256): [(128, 32, 8, 2), (64, 16, 4, 2)],
    (2, "backward_key", 64): [(64, 128, 8, 2), (32, 64, 4, 2)],
    (2, "backward_key", 128): [(32, 128, 8, 2), (16, 64, 4, 2)],
    (2, "backward_key", 256): [(16, 128, 8, 2), (16, 64, 4, 1)],
    (2, "backward_value", 256): [(16, 128, 8, 2), (16, 64, 4, 1)],
    (2, "backward_query", 64): [(128, 64, 8, 2), (64, 32, 4, 2)],
    (2, "backward_query", 128): [(128, 32, 8, 2), (64, 16, 4, 2)],
    (2, "backward_query", 256): [(128, 16, 8, 2), (64, 16, 4, 1)],
    (2, "bias_gradient", 64): [(64, 64, 4, 2)],
    (2, "bias_gradient", 128): [(64, 64, 4, 1)],
    (2, "bias_gradient", 256): [(32, 32, 2, 1)],
    (4, "forward", 64): [(64, 32, 4, 2), (32, 32, 2, 2)],
    (4, "forward", 128): [(64, 16, 4, 2), (32, 16, 2, 2)],
    (4, "backward_key", 64): [(16, 64, 4, 2), (16, 32, 2, 2)],
    (4, "backward_key", 128): [(16, 64, 4, 1), (16, 32, 2, 1)],
    (4, "backward_query", 64): [(64, 16, 4, 2), (32, 16, 2, 2)],
    (4, "backward_query", 128): [(64, 16, 4, 1), (32, 16, 2, 1)],
    (4, "bias_gradient", 64): [(32, 32, 2, 1)],
    (4, "bias_gradient", 128): [(32, 32, 2, 1)],
}
# On compute capability 9.0 and above, where products by warp groups read both factors from shared memory: the fastest
# on an H200 without a bias, see benchmarks/results/on_device.md. Heads of 128 have no "backward": its atomic additions
# took longer than a second launch.
_FROM_90: _Table = {
    (2, "forward", 64): [(64, 64, 4, 3)],
    (2, "forward", 128): [(64, 64, 4, 3)],
    (2, "forward", 256): [(64, 32, 4, 2)],
    (2, "backward", 64): [(64, 64, 4, 3)],
    (2, "backward_key", 64): [(64, 64, 4, 3)],
    (2, "backward_key", 128): [(64, 64, 4, 2)],
    (2, "backward_key", 256): [(32, 128, 8, 3), (32, 128, 8, 2)],
    (2, "backward_value", 256): [(64, 128, 8, 2)],
    (2, "backward_query", 64): [(64, 64, 4, 3)],
    (2, "backward_query", 128): [(64, 64, 4, 2)],
    (2, "backward_query", 256): [(64, 32, 4, 3)],
    (2, "bias_gradient", 64): [(64, 64, 4, 3)],
    (2, "bias_gradient", 128): [(64, 64, 4, 1)],
    (2, "bias_gradient", 256): [(64, 64, 4, 1)],
}
# From this compute capability on a program has less shared memory, or needs more, so small blocks are tried too.
_AFTER_HOPPER = (10, 0)


def padded_head_dim(head_dim: int) -> int:
    """Channels of a block: the next power of two, at least 16; the kernels mask the channels beyond `head_dim`."""
    return max(16, 1 << (head_dim - 1).bit_length())


def candidate_blocks(
    kernel: str, dtype: torch.dtype, head_dim: int, has_bias: bool, capability: tuple[int, int] = (8, 0)
) -> list[Blocks]:
    """Blocks to choose from on a device of this compute capability, the smallest last; empty for an unused kernel."""
    if not has_bias and kernel.endswith("bias_gradient"):
        return []
    if kernel == "target_bias_gradient":
        kernel = "bias_gradient"
    key = dtype.itemsize, kernel, max(64, padded_head_dim(head_dim))
    found = _EVERYWHERE.get(key, [])
    if capability >= (9, 0) and key in _FROM_90:
        found = _FROM_90[key] + (found[-1:] if capability >= _AFTER_HOPPER else [])
    return [Blocks(*numbers) for numbers in dict.fromkeys(found)]
