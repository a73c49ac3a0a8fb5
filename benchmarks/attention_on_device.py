"""HSTU attention on a GPU: Triton kernels against the blocks of dense products, the arithmetic floor and the peers.

Forward and backward in bfloat16, medians by the device's own clock. The floor is 3.5 · 4 · pairs · channels operations
at 550 TFLOP/s: two products forward and five backward.

Examples:
    python -m benchmarks.attention_on_device
    python -m benchmarks.attention_on_device --device cpu --rows 4 --longest 64
"""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from benchmarks.command_line import from_command_line
from benchmarks.report import fit_line
from hstu.model.attention import hstu_attention
from hstu.model.attention_plan import plan_attention
from hstu.model.triton_attention import plan_triton_attention, triton_attention
from hstu.model.triton_launch import resolve_backend

_FLOOR_FLOPS = 550e12
HEADER = (
    "| lengths | batch | heads | bias | tokens | Triton, ms | TFLOP/s | × floor | blocks, ms | ÷ Triton | peer, ms |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|"
)


@dataclass(frozen=True)
class Args:
    """What to measure.

    Attributes:
        device: where.
        rows: rows of a batch.
        longest: the most tokens of a row.
        repeats: times every batch is measured.

    """

    device: Literal["cuda", "cpu"] = "cuda"
    rows: int = 32
    longest: int = 4096
    repeats: int = 12


class AttentionRow(NamedTuple):
    """One batch; times in ms, forward and backward.

    Attributes:
        lengths: how they are distributed.
        rows: rows of the batch.
        longest: the most tokens a row may have.
        num_heads: heads.
        head_dim: channels of a head.
        has_bias: whether there is a bias by position.
        num_tokens: tokens of the batch.
        pairs: of a query and a key that it sees, over all rows.
        triton_ms: by the Triton kernels; None where they cannot run.
        blocks_ms: by the blocks of dense products.
        floor_ms: what the arithmetic alone takes at 550 TFLOP/s.
        peer: milliseconds of generative-recommenders' Triton kernel, or why there are none.

    """

    lengths: str
    rows: int
    longest: int
    num_heads: int
    head_dim: int
    has_bias: bool
    num_tokens: int
    pairs: int
    triton_ms: float | None
    blocks_ms: float
    floor_ms: float
    peer: str

    def text(self) -> str:
        """The row below HEADER."""
        triton = ["–"] * 3
        if self.triton_ms is not None:
            flops = self.floor_ms * _FLOOR_FLOPS / self.triton_ms / 1e12
            triton = [f"{self.triton_ms:.3f}", f"{flops:.0f}", f"{self.triton_ms / self.floor_ms:.2f}"]
        ratio = "–" if self.triton_ms is None else f"{self.blocks_ms / self.triton_ms:.1f}"
        return (
            f"| {self.lengths} | {self.rows} × {self.longest} | {self.num_heads} × {self.head_dim} "
            f"| {'position' if self.has_bias else 'none'} | {self.num_tokens} | {' | '.join(triton)} "
            f"| {self.blocks_ms:.2f} | {ratio} | {self.peer} |"
        )


def draw_lengths(kind: str, rows: int, longest: int, seed: int = 0) -> torch.Tensor:
    """int64 `(rows,)`: "uniform" over the upper half, "lognormal" around an eighth, or "zipf" with exponent 1.2."""
    generator = torch.Generator().manual_seed(seed)
    if kind == "uniform":
        return torch.randint(longest // 2, longest + 1, (rows,), generator=generator)
    if kind == "lognormal":
        return (torch.randn(rows, generator=generator).exp() * longest / 8).long().clamp(1, longest)
    weights = torch.arange(1, longest + 1, dtype=torch.float64) ** -1.2
    return torch.multinomial(weights, rows, replacement=True, generator=generator) + 1


def attention_table(
    device: torch.device,
    *,
    rows: int = 32,
    longest: int = 4096,
    repeats: int = 12,
    head_dims: tuple[int, ...] = (64, 128),
) -> list[AttentionRow]:
    """Uniform, lognormal and Zipf lengths, 4 heads of every width, with and without a bias by position."""
    return [
        measure(kind, rows, longest, 4, head_dim, has_bias, device, repeats)
        for kind in ("uniform", "lognormal", "zipf")
        for head_dim in head_dims
        for has_bias in (False, True)
    ]


def time_follows_pairs(device: torch.device, *, longest: int = 4096, repeats: int = 12) -> float:
    """R² of the time as a line in the pairs of queries and keys, over batches of very different shapes."""
    shapes = [(kind, rows) for kind in ("uniform", "lognormal", "zipf") for rows in (8, 16, 32, 64)]
    measured = [measure(kind, rows, longest, 4, 64, False, device, repeats) for kind, rows in shapes]
    seconds = [row.blocks_ms if row.triton_ms is None else row.triton_ms for row in measured]
    return fit_line([float(row.pairs) for row in measured], seconds).r_squared


def describe_fit(r_squared: float) -> str:
    """What `time_follows_pairs` has found, in words."""
    return f"Time as a line in the pairs, over twelve batches: R² {r_squared:.4f}"


def measure(
    kind: str,
    rows: int,
    longest: int,
    num_heads: int,
    head_dim: int,
    has_bias: bool,
    device: torch.device,
    repeats: int,
) -> AttentionRow:
    """Time one batch by all kernels that can run here."""
    lengths = draw_lengths(kind, rows, longest)
    num_tokens, pairs = int(lengths.sum()), int((lengths * (lengths + 1) // 2).sum())
    generator = torch.Generator().manual_seed(0)
    shape = (num_tokens, num_heads, head_dim)
    dtype = torch.bfloat16
    q, k, v, gradient = (torch.randn(shape, generator=generator).mul_(0.5).to(device, dtype) for _ in range(4))
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    bias = torch.zeros(num_heads, longest, device=device, requires_grad=True)
    blocks = plan_attention(lengths, num_heads=num_heads, device=device)

    def timed(output: Callable[[], torch.Tensor]) -> float:
        def step() -> None:
            for leaf in (*leaves, bias):
                leaf.grad = None
            output().backward(gradient)

        return _milliseconds(step, device, repeats)

    triton_ms = None
    if resolve_backend("auto", device, dtype, head_dim) == "triton":
        plan, table = plan_triton_attention(lengths, device=device), bias if has_bias else None
        triton_ms = timed(lambda: triton_attention(q, k, v, table, plan, normalizer=float(longest)))
    return AttentionRow(
        *(kind, rows, longest, num_heads, head_dim, has_bias, num_tokens, pairs, triton_ms),
        blocks_ms=timed(lambda: hstu_attention(q, k, v, bias, blocks, normalizer=float(longest))),
        floor_ms=3.5 * 4 * pairs * num_heads * head_dim / _FLOOR_FLOPS * 1e3,
        peer=_peer(lengths, q, k, v, longest, has_bias, timed),
    )


def _peer(
    lengths: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    longest: int,
    has_bias: bool,
    timed: Callable[[Callable[[], torch.Tensor]], float],
) -> str:
    """Milliseconds of generative-recommenders' Triton kernel, or why there are none."""
    if has_bias:
        return "has no bias"
    try:
        module = importlib.import_module("generative_recommenders.ops.triton.triton_hstu_attention")
    except ImportError:
        return "not installed"
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(q.device)
    try:
        return f"{timed(lambda: module.triton_hstu_mha(longest, 1.0, q, k, v, offsets)):.3f}"
    except (TypeError, RuntimeError) as error:
        return f"{type(error).__name__}: {str(error)[:60]}"


def _milliseconds(step: Callable[[], None], device: torch.device, repeats: int) -> float:
    """Median time of a step, after two that are not counted; on CUDA by the device's clock."""
    for _ in range(2):
        step()
    taken = []
    for _ in range(repeats):
        if device.type == "cuda":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            step()
            end.record()
            end.synchronize()
            taken.append(begin.elapsed_time(end))
        else:
            started = time.perf_counter()
            step()
            taken.append((time.perf_counter() - started) * 1e3)
    return statistics.median(taken)


def main(args: Args) -> None:
    """Measure and print."""
    device = torch.device(args.device)
    print(HEADER)
    for row in attention_table(device, rows=args.rows, longest=args.longest, repeats=args.repeats):
        print(row.text(), flush=True)
    print(f"\n{describe_fit(time_follows_pairs(device, longest=args.longest, repeats=args.repeats))}")


if __name__ == "__main__":
    main(from_command_line(Args, __doc__))
