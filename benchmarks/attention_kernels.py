"""What HSTU's Triton kernels need of a GPU, by compiling them for one; no GPU is needed for that.

Registers and spills are those that ptxas tells, shared memory what Triton reserves, wgmma the matrix products of whole
warp groups that sm_90a has.

Examples:
    python -m benchmarks.attention_kernels
    python -m benchmarks.attention_kernels --architectures 90 --head-dims 64 128 --dtypes bf16
"""

from __future__ import annotations

import itertools
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from benchmarks.command_line import from_command_line
from hstu.model import triton_kernels
from hstu.model.triton_blocks import KERNELS, MAX_HEAD_DIM, Bias, Blocks, candidate_blocks
from hstu.model.triton_launch import constants

# Name for ptxas: the instructions of a generation that others do not have are under its own letter.
_ARCHITECTURES = {80: "sm_80", 90: "sm_90a", 100: "sm_100a"}
# Shared memory that a program may have, in bytes.
LIMITS = {80: 166912, 90: 232448, 100: 232448}
_POINTERS = {"POSITION": "*fp32", "TIME": "*fp32", "GRAD_POSITION": "*fp32", "GRAD_TIME": "*fp32"} | {
    "TIMES": "*i64",
    "ROWS": "*i32",
    "TILES": "*i32",
}
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_SHORT = {dtype: name for name, dtype in _DTYPES.items()}
HEADER = (
    "| kernel | for | dtype | width | bias | queries × keys | warps | stages | registers | spills | shared | wgmma |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|---|"
)


@dataclass(frozen=True)
class Args:
    """What to compile.

    Attributes:
        architectures: compute capabilities times ten.
        head_dims: widths of a head.
        dtypes: of queries, keys and values.
        biases: kinds of bias.

    """

    architectures: tuple[Literal[80, 90, 100], ...] = (80, 90, 100)
    head_dims: tuple[Literal[16, 32, 64, 128, 256], ...] = (16, 32, 64, 128, 256)
    dtypes: tuple[Literal["fp32", "bf16", "fp16"], ...] = ("bf16", "fp32")
    biases: tuple[Bias, ...] = ("none", "position", "both")


class Compiled(NamedTuple):
    """A kernel as compiled for an architecture.

    Attributes:
        registers: per thread.
        spills: bytes stored to local memory, per thread.
        shared: bytes per program.
        wgmma: matrix products of warp groups in the code.
        async_copies: copies to shared memory that do not wait.

    """

    registers: int
    spills: int
    shared: int
    wgmma: int
    async_copies: int


def compile_kernel(
    name: str,
    blocks: Blocks,
    *,
    architecture: int,
    dtype: torch.dtype,
    head_dim: int,
    bias: Bias = "none",
    is_causal: bool = True,
) -> Compiled:
    """Compile a kernel as a launch on that architecture would."""
    kernel = getattr(triton_kernels, name)
    fixed: dict[str, Any] = constants(dtype, head_dim, blocks, is_causal, fast=True)
    missing = {"POSITION", "GRAD_POSITION"} if bias not in ("position", "both") else set()
    missing |= {"TIME", "TIMES", "GRAD_TIME"} if bias not in ("time", "both") else set()
    fixed |= dict.fromkeys(missing & set(kernel.arg_names))
    signature, divisible = {}, {}
    for place, argument in enumerate(kernel.arg_names):
        if argument in fixed:
            signature[argument] = "constexpr"
        elif argument.isupper():
            signature[argument] = _POINTERS.get(argument, f"*{_SHORT[dtype]}")
        else:
            signature[argument] = "fp32" if argument in ("before", "after") else "i32"
        aligned = argument.isupper() and argument not in ("ROWS", "TILES", "TIMES")
        if argument not in fixed and (aligned or (argument.endswith("_stride") and head_dim % 16 == 0)):
            divisible[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(kernel.arg_names.index(argument),): value for argument, value in fixed.items()},
        attrs=divisible,
    )
    options = {"num_warps": blocks.warps, "num_stages": blocks.stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    ptx = compiled.asm["ptx"]
    said = _ptxas(ptx, _ARCHITECTURES[architecture])
    return Compiled(
        registers=int(re.search(r"Used (\d+) registers", said).group(1)),
        spills=int(re.search(r"(\d+) bytes spill stores", said).group(1)),
        shared=compiled.metadata.shared,
        wgmma=ptx.count("wgmma.mma_async"),
        async_copies=ptx.count("cp.async"),
    )


def _ptxas(ptx: str, architecture: str) -> str:
    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    program = folder / ("ptxas-blackwell" if architecture.startswith("sm_10") else "ptxas")
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [str(program), "-v", "--gpu-name", architecture, file.name, "-o", "/dev/null"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr


def table_row(
    kernel: str, blocks: Blocks, architecture: int, dtype: torch.dtype, head_dim: int, bias: Bias, found: Compiled
) -> str:
    """A row below HEADER."""
    return (
        f"| {kernel} | {_ARCHITECTURES[architecture]} | {_SHORT[dtype]} | {head_dim} | {bias} "
        f"| {blocks.queries} × {blocks.keys} | {blocks.warps} | {blocks.stages} | {found.registers} | {found.spills} "
        f"| {found.shared} | {found.wgmma} |"
    )


def main(args: Args) -> None:
    """Compile everything and print the table."""
    print(HEADER)
    for kernel, architecture, name, head_dim, bias in itertools.product(
        KERNELS, args.architectures, args.dtypes, args.head_dims, args.biases
    ):
        dtype = _DTYPES[name]
        if head_dim > MAX_HEAD_DIM[dtype.itemsize]:
            continue
        for blocks in candidate_blocks(kernel, dtype, head_dim, bias, divmod(architecture, 10)):
            options = {"architecture": architecture, "dtype": dtype, "head_dim": head_dim, "bias": bias}
            print(table_row(kernel, blocks, *options.values(), compile_kernel(kernel, blocks, **options)), flush=True)


if __name__ == "__main__":
    main(from_command_line(Args, __doc__))
