"""Blocks that the Triton kernels may be cut into, and the shared memory that those need.

They were chosen for few spilled registers: none for heads of 64 channels in 16 bits on sm_80 and sm_90a, but more than
50 of 402 spill some. `benchmarks/attention_kernels.py` prints what each of them takes, and its page in
benchmarks/results has those that spill; what that costs is for the measurement on the device to say.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

KERNELS = ("forward", "backward_query", "backward_key")
# By bytes of an element: wider heads of float32 would not fit into registers.
MAX_HEAD_DIM = {2: 256, 4: 128}
Bias = Literal["none", "position", "time", "both"]


class Blocks(NamedTuple):
    """How a kernel is cut."""

    queries: int  # queries of a block, a power of two of at least 16
    keys: int  # keys of a block, the same
    warps: int  # of 32 threads, in a program
    stages: int  # blocks that are loaded ahead, the one in use included


_Lines = dict[tuple[int, str, int], list[list[tuple[int, int, int, int]]]]

# By bytes of an element, kernel and padded width of a head, up to 64, 128 or 256: without biases, with one by position,
# with one by time. What is missing has the line before. The largest first.
_EVERYWHERE: _Lines = {
    (2, "forward", 64): [
        [(128, 64, 8, 3), (128, 64, 8, 2), (64, 64, 4, 2), (64, 32, 4, 2)],
        [(128, 64, 8, 2), (64, 32, 4, 2)],
        [(64, 32, 4, 2)],
    ],
    (2, "forward", 128): [[(128, 64, 8, 3), (128, 64, 8, 2), (64, 32, 4, 2)], [(64, 64, 8, 2)], [(32, 32, 8, 2)]],
    (2, "forward", 256): [[(64, 32, 8, 2), (32, 32, 8, 2)], [(32, 32, 8, 2)]],
    (2, "backward_query", 64): [
        [(128, 64, 8, 2), (64, 64, 4, 2), (64, 64, 8, 2), (64, 32, 4, 2)],
        [(32, 32, 4, 2)],
    ],
    (2, "backward_query", 128): [[(128, 64, 8, 2), (64, 64, 8, 2), (32, 32, 8, 2)], [(32, 32, 8, 2)], [(32, 16, 8, 2)]],
    (2, "backward_query", 256): [[(32, 16, 8, 2), (16, 16, 8, 2)]],
    (2, "backward_key", 64): [[(64, 128, 8, 2), (64, 64, 8, 2), (64, 32, 4, 2)], [(64, 32, 4, 2)]],
    (2, "backward_key", 128): [[(64, 64, 8, 2), (32, 32, 8, 2)], [(32, 32, 8, 2)]],
    (2, "backward_key", 256): [[(32, 32, 8, 2)], [(16, 32, 8, 2)]],
    (4, "forward", 64): [[(32, 32, 8, 2)]],
    (4, "forward", 128): [[(32, 32, 8, 2), (16, 16, 8, 2)]],
    (4, "backward_query", 64): [[(32, 32, 8, 2)], [(16, 16, 4, 2)]],
    (4, "backward_query", 128): [[(16, 16, 8, 2)]],
    (4, "backward_key", 64): [[(16, 32, 4, 2)], [(16, 16, 4, 2)]],
    (4, "backward_key", 128): [[(16, 16, 8, 2)]],
}
# More for compute capability 9.0 and above, whose products of warp groups read both factors from shared memory.
_FROM_90: _Lines = {
    (2, "forward", 64): [[], [(128, 64, 8, 3)], []],
    (2, "backward_query", 64): [[], [(64, 64, 8, 2), (64, 64, 4, 2)], [(64, 32, 8, 2)]],
    (2, "backward_key", 64): [[], [(64, 128, 8, 2), (64, 64, 8, 2)], [(64, 64, 8, 2)]],
    (2, "backward_key", 128): [[], [(32, 64, 8, 2)]],
    (2, "backward_query", 256): [[(64, 32, 8, 2)], []],
}
# Bytes that suffice for the smallest blocks of every kernel, by bytes of an element and padded width.
_SHARED_MEMORY = {(2, 64): 65536, (2, 128): 98304, (2, 256): 98304, (4, 64): 65536, (4, 128): 98304}


def padded_head_dim(head_dim: int) -> int:
    """Channels that a block has for a head: the next power of two, 16 at least; the kernels mask what is not there."""
    return max(16, 1 << (head_dim - 1).bit_length())


def candidate_blocks(
    kernel: str, dtype: torch.dtype, head_dim: int, bias: Bias, capability: tuple[int, int] = (8, 0)
) -> list[Blocks]:
    """Blocks to choose from on a device of a compute capability, the smallest last; never empty."""
    key = dtype.itemsize, kernel, max(64, padded_head_dim(head_dim))
    wanted = {"none": 0, "position": 1}.get(bias, 2)
    tables = (_FROM_90, _EVERYWHERE) if capability >= (9, 0) else (_EVERYWHERE,)
    lines = [table.get(key, [[]]) for table in tables]
    return [Blocks(*numbers) for each in lines for numbers in each[min(wanted, len(each) - 1)]]


def shared_memory(dtype: torch.dtype, head_dim: int) -> int:
    """Bytes of shared memory per program that suffice for some blocks of every kernel."""
    return _SHARED_MEMORY[dtype.itemsize, max(64, padded_head_dim(head_dim))]
