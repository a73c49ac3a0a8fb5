"""Does the time of attention over rows of any length follow the pairs of the mask, and does padding take longer?

For HSTU's attention over jagged rows and the semantic-ID decoder's attention over packed rows, forward and backward:
time against the pairs that the causal mask keeps, over batches of very different shapes; time compared with padding
every row to the longest; and for HSTU time and pairs of long rows by the width of a window. On the CPU, one thread;
times are medians of the process's CPU time, and variants alternate, so that a change of the machine's speed does not
change a ratio. benchmarks/models/cost_model.py compares training steps with the shuffler's workloads.

`python -m benchmarks.on_device --only attention` times HSTU's Triton kernels with this module, in bfloat16 by the
device's clock. It compares them with the blocks of dense products, with the kernel of generative-recommenders if that
is installed, and with the arithmetic floor: 3.5 · 4 · pairs · channels operations at 550 TFLOP/s, two products forward
and five backward.

Examples:
    python -m benchmarks.models.attention
    python -m benchmarks.models.attention --quick
"""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.shared.command_line import Quick, from_command_line
from benchmarks.shared.report import Page, every, interleaved_medians, measured, table
from commons.perf_model.attention_pairs import attention_pairs
from hstu.model import hstu_attention, plan_attention
from hstu.model.triton_attention import triton_attention
from hstu.model.triton_launch import keep_busy, uses_triton
from hstu.model.triton_plan import plan_triton_attention
from sid_gr.model.attention import CausalRows
from sid_gr.model.token_layout import lay_out_batch

HEADS, HEAD_DIM = 4, 16
ROWS, LONGEST = 32, 512
_FLOOR_FLOPS = 550e12
Attend = Callable[..., torch.Tensor]


def draw_lengths(kind: str, rows: int, longest: int, generator: torch.Generator) -> torch.Tensor:
    """int64 `(rows,)` of 1 to `longest`: "zipf" 1.2, "uniform", or "lognormal" around an eighth of the longest."""
    if kind == "lognormal":
        return (torch.randn(rows, generator=generator).exp() * longest / 8).long().clamp(1, longest)
    weights = torch.arange(1, longest + 1, dtype=torch.float64) ** (-1.2 if kind == "zipf" else 0.0)
    return torch.multinomial(weights, rows, replacement=True, generator=generator) + 1


def pairs_of(lengths: torch.Tensor) -> int:
    return int((lengths * (lengths + 1) // 2).sum())


def r_squared(work: list[float], times: list[float]) -> float:
    """R² of a linear fit of times to a measure of work."""
    return float(np.corrcoef(work, times)[0, 1] ** 2)


def attend_hstu(
    bias: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor, **options: Any
) -> torch.Tensor:
    """HSTU: SiLU and a bias by position."""
    return hstu_attention(q, k, v, bias, plan_attention(lengths, num_heads=HEADS, **options), normalizer=float(LONGEST))


def attend_sid_gr(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """The semantic-ID decoder: softmax."""
    sizes: dict[str, Any] = {"num_rows": len(lengths), "num_hierarchies": 1, "num_heads": HEADS, "device": q.device}
    layout = lay_out_batch(lengths.numpy() - 1, np.zeros(len(lengths), dtype=np.int64), **sizes)
    return CausalRows(layout=layout).attend(1, q, k, v)


def attention_pass(attend: Attend, lengths: torch.Tensor, **options: Any) -> Callable[[], None]:
    """Forward and backward over a batch, with random queries, keys and values."""
    shape = (int(lengths.sum()), HEADS, HEAD_DIM)
    inputs = [torch.randn(shape).requires_grad_() for _ in range(3)]

    def run() -> None:
        attend(*inputs, lengths, **options).sum().backward()
        for each in inputs:
            each.grad = None

    return run


def measure_shapes(attend: Attend, shapes: int, repeats: int, generator: torch.Generator) -> list[Any]:
    """Time of batches of many shapes as a line in the pairs, and in the size of padded batches."""
    draw = partial(torch.randint, size=(), generator=generator)
    batches = [
        draw_lengths("zipf" if index % 2 else "uniform", int(draw(4, 65)), int(draw(64, 2 * LONGEST)), generator)
        for index in range(shapes)
    ]
    passes = {index: attention_pass(attend, lengths) for index, lengths in enumerate(batches)}
    ms = [seconds * 1e3 for seconds in interleaved_medians(passes, repeats).values()]
    work: Mapping[str, list[float]] = {
        "pairs of the mask": [pairs_of(lengths) for lengths in batches],
        "rows × longest²": [len(lengths) * int(lengths.max()) ** 2 for lengths in batches],
    }
    fits = {name: np.polyfit(each, ms, 1).tolist() for name, each in work.items()}
    return [
        f"{shapes} batches, uniform and Zipf 1.2, of 4 to 64 rows of up to {2 * LONGEST:,} tokens, "
        f"{fits['pairs of the mask'][0] * 1e6:.1f} ns per pair.",
        [
            {"time as a line in": name, "R²": r_squared(each, ms), "fixed, ms": fits[name][1]}
            for name, each in work.items()
        ],
    ]


def measure_padding(attend: Attend, batches: int, repeats: int, generator: torch.Generator) -> list[Any]:
    """Time of batches as they are, and with every row padded to the longest."""
    drawn = [draw_lengths("zipf", ROWS, LONGEST, generator) for _ in range(batches)]
    passes = {
        "as they are": [attention_pass(attend, lengths) for lengths in drawn],
        "padded to the longest": [attention_pass(attend, lengths.max().repeat(ROWS)) for lengths in drawn],
    }
    calls = {name: partial(lambda runs: [run() for run in runs], own) for name, own in passes.items()}
    medians = interleaved_medians(calls, repeats)
    more = sum(ROWS * int(lengths.max()) ** 2 for lengths in drawn) / sum(map(pairs_of, drawn))
    return [
        f"{batches} batches of {ROWS} rows, Zipf 1.2 up to {LONGEST:,} tokens; rows × longest² is {more:.0f} times the "
        "pairs that the mask keeps.",
        [{"rows": name, "ms": value * 1e3, "×": value / medians["as they are"]} for name, value in medians.items()],
    ]


def measure_windows(attend: Attend, longest: int, repeats: int) -> list[Any]:
    """Attention of long rows, by the width of the window."""
    lengths = torch.full((4,), longest)
    windows: dict[str, int | None] = {"none": None, "512": 512, "128": 128, "32": 32}
    passes = {name: attention_pass(attend, lengths, max_attn_len=width) for name, width in windows.items()}
    seconds = interleaved_medians(passes, repeats)
    pairs = {name: int(attention_pairs(longest, max_attn_len=width)) for name, width in windows.items()}
    rows = [
        {"window": name, "pairs ÷ pairs without": pairs[name] / pairs["none"], "ms": taken * 1e3}
        | {"time ÷ time without": taken / seconds["none"]}
        for name, taken in seconds.items()
    ]
    return [f"Windows (`max_attn_len`): {len(lengths)} rows of {longest:,} tokens.", rows]


def device_milliseconds(call: Callable[[], Any], device: torch.device, repeats: int, warmup: int = 2) -> float:
    """Median time of a call on the device; on the CPU by the host's clock.

    Without the time of its launches, if these take less than `keep_busy` does, about five milliseconds on an H200.
    """
    taken = []
    for _ in range(warmup + repeats):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            keep_busy(device)
            begin.record()
            call()
            end.record()
            end.synchronize()
            taken.append(begin.elapsed_time(end))
        else:
            taken.append(host_milliseconds(call))
    return statistics.median(taken[warmup:])


def host_milliseconds(call: Callable[[], Any]) -> float:
    """Time that a call takes on the host; on CUDA that of its launches."""
    started = time.perf_counter()
    call()
    return (time.perf_counter() - started) * 1e3


def device_sections(
    device: torch.device,
    head_dims: tuple[int, ...] = (64, 128, 256),
    rows: int = 32,
    longest: int = 4096,
    repeats: int = 12,
) -> list[str]:
    """A table of uniform, lognormal and Zipf lengths, with and without a bias; and the fit of time to pairs."""
    kinds: dict[str, Any] = {"lengths": ("uniform", "lognormal", "zipf")}
    time_all = partial(measured, measure_kernels, longest=longest, device=device, repeats=repeats)
    body = time_all(every(**kinds, rows=(rows,), head_dim=head_dims, bias=("none", "position")))
    of_shapes = time_all(every(**kinds, rows=(8, 16, 32, 64), head_dim=(64,), bias=("none",)))
    best = "Triton, ms" if of_shapes[0]["Triton, ms"] else "blocks, ms"
    fit = r_squared([each["pairs"] for each in of_shapes], [each[best] for each in of_shapes])
    return [
        f"{HEADS} heads, rows of up to {longest:,} tokens. Milliseconds of the device, forward and backward; those of "
        "the host to launch them; and the floor. The gradient of a bias recomputes two products, which the floor "
        "leaves out.",
        table(body),
        f"Time as a line in the pairs, over twelve batches: R² {fit:.4f}.",
    ]


def measure_kernels(
    lengths: str, rows: int, head_dim: int, bias: str, *, longest: int, device: torch.device, repeats: int
) -> dict[str, Any]:
    """Time one batch by all kernels that can run here."""
    drawn = draw_lengths(lengths, rows, longest, torch.Generator().manual_seed(0))
    pairs, dtype = pairs_of(drawn), torch.bfloat16
    shape = (int(drawn.sum()), HEADS, head_dim)
    draw = partial(torch.randn, shape, device=device, generator=torch.Generator(device).manual_seed(0))
    q, k, v, gradient = (draw().mul_(0.5).to(dtype) for _ in range(4))
    by_position = torch.zeros(HEADS, longest, device=device)
    leaves = [tensor.requires_grad_() for tensor in (q, k, v, by_position)]
    flops = 3.5 * 4 * pairs * HEADS * head_dim
    floor_ms = flops / _FLOOR_FLOPS * 1e3

    def step_of(attend: Attend, *arguments: Any, **options: Any) -> Callable[[], None]:
        def step() -> None:
            for leaf in leaves:
                leaf.grad = None
            attend(*arguments, **options).backward(gradient)

        return step

    options = {"normalizer": float(longest)}
    own_bias = by_position if bias == "position" else None
    blocks = plan_attention(drawn, num_heads=HEADS, device=device)
    blocks_ms = device_milliseconds(
        step_of(hstu_attention, q, k, v, own_bias, blocks, **options), device, max(1, repeats // 4), 1
    )
    triton_ms = host_ms = None
    if uses_triton("auto", device, dtype, head_dim):
        plan = plan_triton_attention(drawn, device=device)
        step = step_of(triton_attention, q, k, v, own_bias, plan, **options)
        triton_ms = device_milliseconds(step, device, repeats)
        host_ms = statistics.median(host_milliseconds(step) for _ in range(repeats))
    peer: float | str = "has no bias"
    if bias == "none":
        try:
            module = importlib.import_module("generative_recommenders.ops.triton.triton_hstu_attention")
            offsets = torch.nn.functional.pad(drawn.cumsum(0), (1, 0)).to(device)
            peer = device_milliseconds(step_of(module.triton_hstu_mha, longest, 1.0, q, k, v, offsets), device, repeats)
        except ImportError:
            peer = "not installed"
        except (TypeError, RuntimeError) as error:
            peer = f"{type(error).__name__}: {str(error)[:60]}"
    return {
        "tokens": shape[0],
        "pairs": pairs,
        "blocks, ms": blocks_ms,
        "Triton, ms": triton_ms,
        "host, ms": host_ms,
        "floor, ms": floor_ms,
        "× floor": triton_ms / floor_ms if triton_ms else None,
        "TFLOP/s": flops / triton_ms / 1e9 if triton_ms else None,
        "peer, ms": peer,
    }


def main(quick: Quick = False) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    shapes, batches, repeats = (4, 1, 1) if quick else (40, 5, 5)
    page = Page("Attention over rows of any length", f"{HEADS} heads × {HEAD_DIM}, float32, medians of {repeats}.")
    longest = 4 * LONGEST
    hstu: Attend = partial(attend_hstu, torch.randn(HEADS, longest).requires_grad_())
    for title, attend in (("HSTU, jagged rows", hstu), ("SID-GR, packed rows", attend_sid_gr)):
        generator = torch.Generator().manual_seed(0)
        parts = measure_shapes(attend, shapes, repeats, generator)
        parts += measure_padding(attend, batches, repeats, generator)
        page.section(title, *parts, *(measure_windows(attend, longest, repeats) if attend is hstu else []))
    page.finish(quick=quick)


if __name__ == "__main__":
    from_command_line(main, __doc__)
