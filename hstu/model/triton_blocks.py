"""Blocks that the Triton kernels may be cut into, and the shared memory that those need.

Triton gives the rows of products that follow one another to warps, 16 each: a block needs 16 rows per warp, or warps
compute the same products. Rows are queries, or keys in the kernels that visit queries.
`python -m benchmarks.models.attention_kernels` prints what each of the blocks costs per score, and a test holds the
best ones to limits.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

# Tokens that a tile of a plan spans; blocks are divisors of it.
TILE_SPAN = 128


class Kernel(NamedTuple):
    """How a kernel is launched; names in capitals are those of its arguments."""

    function: str  # of the module below `hstu.model.kernels`
    module: str
    tiles: str  # field of a plan: what its programs take
    side: Literal["queries", "keys"]  # the side of a block that those are cut into
    visits: tuple[str, ...]  # what comes by tensor descriptors where there are any
    outputs: tuple[str, ...]  # what it computes


# By name of a launch: the gradients of queries, keys and values in one ("backward"), or in two or, for heads wider than
# 128, three.
KERNELS = {
    "forward": Kernel("forward", "forward", "query_tiles", "queries", ("K", "V"), ("OUT",)),
    "backward": Kernel(
        *("backward_key", "backward", "key_tiles", "keys"),
        *(("Q", "GRAD_OUT", "GRAD_Q"), ("GRAD_Q", "GRAD_K", "GRAD_V")),
    ),
    "backward_key": Kernel("backward_key", "backward", "key_tiles", "keys", ("Q", "GRAD_OUT"), ("GRAD_K", "GRAD_V")),
    "backward_value": Kernel("backward_key", "backward", "key_tiles", "keys", ("Q", "GRAD_OUT"), ("GRAD_V",)),
    "backward_query": Kernel("backward_query", "backward", "query_tiles", "queries", ("K", "V"), ("GRAD_Q",)),
} | {
    name: Kernel(name, "bias_gradient", tiles, "queries", ("Q", "K", "V", "GRAD_OUT"), ("GRAD_POSITION", "GRAD_TIME"))
    for name, tiles in (("bias_gradient", "bias_work"), ("target_bias_gradient", "target_work"))
}
# By bytes of an element: wider heads of float32 would not fit into registers.
MAX_HEAD_DIM = {2: 256, 4: 128}


def outputs_of(kernel: str, head_dim: int) -> tuple[str, ...]:
    """What a launch computes; the gradients of wide heads' values take one of their own."""
    outputs = KERNELS[kernel].outputs
    return outputs[:1] if kernel == "backward_key" and padded_head_dim(head_dim) > 128 else outputs


class Blocks(NamedTuple):
    """How a kernel is cut."""

    queries: int  # queries of a block, a power of two of at least 16
    keys: int  # keys of a block, the same
    warps: int  # of 32 threads, in a program
    stages: int  # blocks that are loaded ahead, the one in use included


_Table = dict[tuple[int, str, int], list[tuple[int, int, int, int]]]

# By bytes of an element, launch and padded width of a head, up to 64, 128 or 256; the smallest last.
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
# Before those, for compute capability 9.0 and above: blocks by tensor descriptors, products of warp groups, which read
# both factors from shared memory, and sums of queries that memory adds up.
_FROM_90: _Table = {
    (2, "forward", 64): [(64, 64, 4, 2), (128, 64, 8, 2), (128, 128, 8, 2)],
    (2, "forward", 128): [(64, 64, 4, 2), (128, 64, 8, 2)],
    (2, "forward", 256): [(64, 32, 4, 2), (128, 32, 8, 2)],
    (2, "backward", 64): [(64, 128, 8, 2), (64, 64, 4, 2)],
    (2, "backward", 128): [(64, 128, 8, 2), (64, 64, 4, 2)],
    (2, "backward_key", 256): [(32, 128, 8, 2)],
    (2, "backward_value", 256): [(32, 128, 8, 2)],
    (2, "backward_query", 256): [(128, 32, 8, 2)],
    (2, "bias_gradient", 128): [(64, 64, 4, 2)],
    (2, "bias_gradient", 256): [(64, 64, 4, 1)],
}
# Bytes that suffice for the smallest blocks of every kernel, by bytes of an element and padded width.
_SHARED_MEMORY = {(2, 64): 65536, (2, 128): 98304, (2, 256): 98304, (4, 64): 65536, (4, 128): 98304}


def padded_head_dim(head_dim: int) -> int:
    """Channels that a block has for a head: the next power of two, 16 at least; the kernels mask what is not there."""
    return max(16, 1 << (head_dim - 1).bit_length())


def candidate_blocks(
    kernel: str, dtype: torch.dtype, head_dim: int, has_bias: bool, capability: tuple[int, int] = (8, 0)
) -> list[Blocks]:
    """Blocks to choose from on a device of a compute capability, the smallest last; none if layers do without."""
    if not has_bias and kernel.endswith("bias_gradient"):
        return []
    if kernel == "target_bias_gradient":
        kernel = "bias_gradient"
    key = dtype.itemsize, kernel, max(64, padded_head_dim(head_dim))
    tables = (_FROM_90, _EVERYWHERE) if capability >= (9, 0) else (_EVERYWHERE,)
    return [Blocks(*numbers) for numbers in dict.fromkeys(each for table in tables for each in table.get(key, []))]


def shared_memory(dtype: torch.dtype, head_dim: int) -> int:
    """Bytes of shared memory per program that suffice for some blocks of every kernel."""
    return _SHARED_MEMORY[dtype.itemsize, max(64, padded_head_dim(head_dim))]
