"""The cost of HSTU's Triton kernels per score, counted in the machine code compiled for a GPU; no GPU is needed.

Counted in the loop without a mask, which takes most of the time: instructions of a thread ÷ its scores of the block,
how many of these instructions compute a sigmoid, and products on the tensor cores ÷ the products that each score needs.
A product that several warps compute counts several times. Registers and spills, in bytes per thread, are those of the
whole kernel.

Examples:
    python -m benchmarks.models.attention_kernels
    python -m benchmarks.models.attention_kernels --architectures 80 100 --head-dims 64 --biases none
"""

from __future__ import annotations

import collections
import math
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from benchmarks.shared.command_line import from_command_line
from benchmarks.shared.report import every, measured, table
from hstu.model.kernels.parts import UNALIGNED
from hstu.model.triton_blocks import KERNELS, MAX_HEAD_DIM, Blocks, candidate_blocks, outputs_of, padded_head_dim
from hstu.model.triton_launch import constants, function_of, tokens_of

Bias = Literal["none", "position", "time", "both"]

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
# Name for ptxas: a letter selects the instructions that only this generation has.
_ARCHITECTURES = {80: "sm_80", 90: "sm_90a", 100: "sm_100a"}
# Shared memory that a program may have, in bytes.
SHARED_MEMORY = {80: 166912, 90: 232448, 100: 232448}
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_SHORT = {dtype: name for name, dtype in _DTYPES.items()}
# Products of scores and channels that a kernel is to compute, by what it computes: the scores themselves, the gradient
# of the weights where it needs that, and one per result.
_PRODUCTS = {("OUT",): 2, ("GRAD_V",): 2, ("GRAD_POSITION", "GRAD_TIME"): 2, ("GRAD_K",): 3, ("GRAD_Q",): 3} | {
    ("GRAD_K", "GRAD_V"): 4,
    ("GRAD_Q", "GRAD_K", "GRAD_V"): 5,
}


class Layer(NamedTuple):
    """The properties for which kernels are compiled, besides blocks."""

    architecture: int
    dtype: torch.dtype = torch.bfloat16
    head_dim: int = 64
    bias: Bias = "none"
    is_causal: bool = True

    def has_descriptors(self) -> bool:
        """Whether blocks are loaded by tensor descriptors on this architecture."""
        return self.architecture >= 90 and self.dtype.itemsize == 2


class Cost(NamedTuple):
    """Counts of a compiled kernel; per score of its loop without a mask, except the last three."""

    instructions: float
    sigmoids: float
    products: float  # as computed, over one per score and channel; not a number where the code does not say
    is_warp_group: bool  # whether the products are those of warp groups or, on sm_100a, of one thread for the program
    is_serialized: bool  # whether ptxas made every product wait for the one before
    spills: int  # bytes per thread stored to local memory
    registers: int  # per thread
    shared: int  # bytes of shared memory per program


def products_of(kernel: str, head_dim: int) -> int:
    return _PRODUCTS[outputs_of(kernel, head_dim)]


def has_repeated_products(kernel: str, layer: Layer, cost: Cost) -> bool:
    """Whether several warps compute the same products or sigmoids."""
    return cost.sigmoids > 1 or cost.products > products_of(kernel, layer.head_dim)


def cost_of(kernel: str, blocks: Blocks, layer: Layer) -> Cost:
    compiled = compile_kernel(kernel, blocks, layer)
    report = _assembler(compiled.asm["ptx"], _ARCHITECTURES[layer.architecture])
    loop = _hottest_loop(compiled.asm["cubin"], blocks)
    names = [_name(instruction) for instruction in loop]
    scores = blocks.queries * blocks.keys / (32 * blocks.warps)
    on_tensor_cores = [name for name in names if re.match(r"(HMMA|HGMMA|UTC\w*MMA)", name)]
    of_groups = [name for name in on_tensor_cores if not name.startswith("HMMA")]
    flops = sum(_flops(instruction, blocks.warps) for instruction in on_tensor_cores)
    waits = sum(name.startswith("WARPGROUP.DEPBAR") for name in names)
    return Cost(
        instructions=len(loop) / scores,
        sigmoids=sum(name == "MUFU.TANH" for name in names) / scores,
        products=flops / (2 * blocks.queries * blocks.keys * padded_head_dim(layer.head_dim)) if flops else math.nan,
        is_warp_group=len(of_groups) == len(on_tensor_cores),
        is_serialized=waits > len(of_groups) / 2 > 0,
        spills=sum(map(int, re.findall(r"(\d+) bytes spill stores", report))),
        registers=int(re.findall(r"Used (\d+) registers", report)[0]),
        shared=compiled.metadata.shared,
    )


def compile_kernel(kernel: str, blocks: Blocks, layer: Layer) -> Any:
    """Compile a kernel as for a launch on that architecture."""
    function, short = function_of(kernel), _SHORT[layer.dtype]
    tma = layer.has_descriptors()
    fixed = constants(layer.dtype, layer.head_dim, blocks, layer.is_causal, fast=True, tma=tma)
    outputs = set(outputs_of(kernel, layer.head_dim))
    missing = {"GRAD_Q", "GRAD_K", "GRAD_V"} - outputs
    missing |= {"POSITION", "GRAD_POSITION"} if layer.bias not in ("position", "both") else set()
    missing |= {"TIME", "TIMES", "GRAD_TIME"} if layer.bias not in ("time", "both") else set()
    fixed |= dict.fromkeys(missing & set(function.arg_names))
    signature, divisible = {}, {}
    for place, name in enumerate(function.arg_names):
        is_float = name in ("POSITION", "TIME", "TIMES", "GRAD_POSITION", "GRAD_TIME") or (
            name == "GRAD_Q" and kernel == "backward"
        )
        kind = "fp32" if is_float else short
        if name in fixed:
            signature[name] = "constexpr"
        elif tma and name in KERNELS[kernel].visits:
            signature[name] = f"tensordesc<{kind}[{tokens_of(name, blocks)}, {layer.head_dim}]>"
        elif name.isupper():
            signature[name] = "*i32" if name in ("ROWS", "TILES") else f"*{kind}"
        else:
            signature[name] = "fp32" if name in ("before", "after") else "i32"
        is_pointer = signature[name].startswith("*") and name not in UNALIGNED
        if is_pointer or (name.endswith("_stride") and layer.head_dim % 16 == 0):
            divisible[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(
        fn=function,
        signature=signature,
        constexprs={(function.arg_names.index(name),): value for name, value in fixed.items()},
        attrs=divisible,
    )
    options = {"num_warps": blocks.warps, "num_stages": blocks.stages}
    return triton.compile(source, target=GPUTarget("cuda", layer.architecture, 32), options=options)


def _assembler(ptx: str, architecture: str) -> str:
    """The messages of ptxas about a kernel."""
    program = _TOOLS / ("ptxas-blackwell" if architecture.startswith("sm_10") else "ptxas")
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [str(program), "-v", "--gpu-name", architecture, file.name, "-o", "/dev/null"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr


def _hottest_loop(cubin: bytes, blocks: Blocks) -> list[str]:
    """The instructions of the shortest loop that computes scores of a block: the one without a mask."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(_TOOLS / "nvdisasm"), "-c", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    code: list[str] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if found := re.match(r"\s*(\.L_x_\d+):", line):
            labels[found[1]] = len(code)
        elif found := re.match(r"\s*/\*[0-9a-f]+\*/\s+(.*?);", line):
            code.append(found[1])
    scores = blocks.queries * blocks.keys / (32 * blocks.warps)
    loops = []
    for place, instruction in enumerate(code):
        found = re.search(r"BRA\S*\s+.*?`?\(?(\.L_x_\d+)", instruction)
        begin = labels.get(found[1], len(code)) if found else len(code)
        if begin < place:
            body = code[begin : place + 1]
            counts = collections.Counter(_name(each).split(".")[0] for each in body)
            if counts["MUFU"] >= scores and any(re.match(r"(HMMA|HGMMA|UTC\w*MMA)", name) for name in counts):
                loops.append(body)
    return min(loops, key=len)


def _name(instruction: str) -> str:
    """`HMMA.16816.F32.BF16` of `@P0 HMMA.16816.F32.BF16 R4, …`."""
    return re.sub(r"^@!?U?P\w+\s+", "", instruction).split()[0]


def _flops(name: str, warps: int) -> int:
    """Operations of a product on the tensor cores for the whole program, all warps or groups of four together."""
    if found := re.match(r"HGMMA\.(\d+)x(\d+)x(\d+)", name):
        return 2 * int(found[1]) * int(found[2]) * int(found[3]) * warps // 4
    if found := re.match(r"HMMA\.(16)(8)(\d+)", name):
        return 2 * 16 * 8 * int(found[3]) * warps
    return 0


def candidates(layer: Layer) -> Iterator[tuple[str, Blocks]]:
    """Every kernel of such layers, with all of its candidate blocks."""
    for kernel in KERNELS:
        capability = divmod(layer.architecture, 10)
        for blocks in candidate_blocks(kernel, layer.dtype, layer.head_dim, layer.bias != "none", capability):
            yield kernel, blocks


def measure_layer(architecture: int, dtype: str, head_dim: int, bias: Bias) -> list[dict[str, Any]]:
    layer = Layer(architecture, _DTYPES[dtype], head_dim, bias)
    return [
        {"kernel": kernel, **blocks._asdict(), **cost_of(kernel, blocks, layer)._asdict()}
        for kernel, blocks in candidates(layer)
    ]


def main(
    architectures: tuple[Literal[80, 90, 100], ...] = (90,),
    head_dims: tuple[Literal[16, 32, 64, 128, 256], ...] = (64, 128, 256),
    dtypes: tuple[Literal["fp32", "bf16", "fp16"], ...] = ("bf16",),
    biases: tuple[Bias, ...] = ("none", "position", "time"),
) -> None:
    """Compile everything and print the table.

    Args:
        architectures: compute capabilities times ten.
        head_dims: widths of a head.
        dtypes: dtypes of queries, keys and values.
        biases: kinds of bias of the scores.
    """
    cases = every(architecture=architectures, dtype=dtypes, head_dim=head_dims, bias=biases)
    fitting = [case for case in cases if case["head_dim"] <= MAX_HEAD_DIM[_DTYPES[case["dtype"]].itemsize]]
    print(table(measured(measure_layer, fitting)))


if __name__ == "__main__":
    from_command_line(main, __doc__)
