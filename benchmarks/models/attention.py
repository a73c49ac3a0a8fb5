"""Does the time of attention over rows of any length follow the workloads, and how much faster is it than padding?

For HSTU's attention over jagged rows and the semantic-ID decoder's attention over packed rows, forward and backward:
time against the pairs that the causal mask keeps, over batches of very different shapes; time compared with padding
every row to the longest; time of a small model's training step against the workloads of its shuffler; and for HSTU time
and pairs of long rows by the width of a window. On the CPU, one thread; times are medians of the process's CPU time,
and variants alternate, so that a change of the machine's speed does not change a ratio.

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
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.shared.command_line import Quick, from_command_line
from benchmarks.shared.report import Page, interleaved_medians, one_rank, table
from commons.datasets.gpt_sid_batch import GPTSIDBatch
from commons.datasets.hstu_batch import FeatureConfig, HSTUBatch
from commons.datasets.random.distribution import RandomDistribution
from commons.perf_model.attention_pairs import attention_pairs
from hstu import HSTUBalancedBatchShuffler
from hstu.model import HSTUConfig, HSTURankingModel, RankingConfig, hstu_attention, plan_attention
from hstu.model.triton_attention import triton_attention
from hstu.model.triton_launch import keep_busy, uses_triton
from hstu.model.triton_plan import plan_triton_attention
from sid_gr import SIDGRBalancedBatchShuffler
from sid_gr.model import SIDGRConfig, SIDGRModel
from sid_gr.model.attention import CausalRows
from sid_gr.model.token_layout import lay_out_batch
from sid_gr.parallel import initialize_model_parallel

CPU = torch.device("cpu")
CODEBOOK_SIZES = (500, 500, 500, 500)
HEADS, HEAD_DIM = 4, 16
WIDTH, ROWS, LONGEST = HEADS * HEAD_DIM, 32, 512
_FLOOR_FLOPS = 550e12


def draw_lengths(kind: str, rows: int, longest: int, generator: torch.Generator) -> torch.Tensor:
    """int64 `(rows,)` of 1 to `longest`: "zipf" 1.2, "uniform", or "lognormal" around an eighth of the longest."""
    if kind == "lognormal":
        return (torch.randn(rows, generator=generator).exp() * longest / 8).long().clamp(1, longest)
    weights = torch.arange(1, longest + 1, dtype=torch.float64) ** (-1.2 if kind == "zipf" else 0.0)
    return torch.multinomial(weights, rows, replacement=True, generator=generator) + 1


def pairs_of(lengths: torch.Tensor) -> int:
    return int((lengths * (lengths + 1) // 2).sum())


def line_in(work: list[float], seconds: list[float]) -> tuple[float, float, float]:
    """Slope, intercept and R² of a linear fit of seconds to a measure of work."""
    slope, intercept = np.polyfit(work, seconds, 1)
    residual = np.asarray(seconds) - (slope * np.asarray(work) + intercept)
    return float(slope), float(intercept), 1.0 - float(residual.var() / np.var(seconds))


def _seeded() -> torch.Generator:
    torch.manual_seed(0)
    return torch.Generator().manual_seed(0)


class HSTU:
    """HSTU: SiLU, a bias by position, items and actions interleaved."""

    title = "HSTU, jagged rows"

    def __init__(self) -> None:
        self.generator = _seeded()
        self.bias = torch.randn(HEADS, 4 * LONGEST, generator=self.generator).requires_grad_()
        config = HSTUConfig(WIDTH, 2, HEADS, HEAD_DIM, max_sequence_length=2 * LONGEST + 1)
        tables = {"user": 6040, "item": 3952, "action": 6}
        self.model = HSTURankingModel(RankingConfig(config, tables, (64, 1), 1), plain_embeddings=True)
        self.shuffler = HSTUBalancedBatchShuffler(WIDTH, HEADS, HEAD_DIM, 2)

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor, **options: Any
    ) -> torch.Tensor:
        return hstu_attention(
            q, k, v, self.bias, plan_attention(lengths, num_heads=HEADS, **options), normalizer=float(LONGEST)
        )

    def batch(self, num_rows: int, histories: RandomDistribution) -> HSTUBatch:
        features = [
            FeatureConfig(["user"], [6040], 1, False),
            FeatureConfig(["item", "action"], [3952, 6], LONGEST, True, histories),
        ]
        options: dict[str, Any] = {"device": "cpu", "generator": self.generator}
        return HSTUBatch.random(num_rows, features, "item", ["user"], "action", 0, 1, **options)

    def tokens(self, batch: HSTUBatch) -> int:
        return int(batch.sequence_lengths()[0].sum())


class SIDGR:
    """The semantic-ID decoder: softmax, four codes an item."""

    title = "SID-GR, packed rows"

    def __init__(self) -> None:
        self.generator = _seeded()
        self.model = SIDGRModel(SIDGRConfig(CODEBOOK_SIZES, LONGEST // 4 + 1, WIDTH, 2, HEADS))
        self.shuffler = SIDGRBalancedBatchShuffler(WIDTH, HEADS, HEAD_DIM, 2)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        sizes: dict[str, Any] = {"num_rows": len(lengths), "num_hierarchies": 1, "num_heads": HEADS, "device": CPU}
        layout = lay_out_batch(lengths.numpy() - 1, np.zeros(len(lengths), dtype=np.int64), **sizes)
        return CausalRows(layout=layout).attend(1, q, k, v)

    def batch(self, num_rows: int, histories: RandomDistribution) -> GPTSIDBatch:
        histories = replace(histories, high=max(1, (histories.high or 4) // 4))
        options: dict[str, Any] = {"device": CPU, "generator": self.generator}
        return GPTSIDBatch.random(num_rows, CODEBOOK_SIZES, LONGEST // 4, history_dist=histories, **options)

    def tokens(self, batch: GPTSIDBatch) -> int:
        return int(batch.sequence_lengths().sum())


def attention_pass(subject: HSTU | SIDGR, lengths: torch.Tensor, **options: Any) -> Callable[[], None]:
    """Forward and backward over a batch, with random queries, keys and values."""
    shape = (int(lengths.sum()), HEADS, HEAD_DIM)
    inputs = [torch.randn(shape, generator=subject.generator).requires_grad_() for _ in range(3)]

    def run() -> None:
        subject.attend(*inputs, lengths, **options).sum().backward()
        for each in inputs:
            each.grad = None

    return run


def measured(subject: HSTU | SIDGR, shapes: int, batches: int, repeats: int) -> list[Any]:
    """Measure a subject; returns the parts of its section."""
    draw = partial(torch.randint, size=(), generator=subject.generator)
    passes, steps, work = [], [], np.empty((4, shapes))
    for index in range(shapes):
        num_rows, longest = int(draw(4, 65)), int(draw(64, 2 * LONGEST))
        lengths = draw_lengths("zipf" if index % 2 else "uniform", num_rows, longest, subject.generator)
        passes.append(attention_pass(subject, lengths))
        kind: Any = {"dist_type": "zipf", "alpha": 1.2} if index % 2 else {"dist_type": "uniform"}
        histories = RandomDistribution(low=1, high=int(draw(32, LONGEST + 1)), **kind)
        batch = subject.batch(int(draw(2, ROWS + 1)), histories)

        def step(batch: Any = batch) -> None:
            subject.model(batch)[0].backward()
            subject.model.zero_grad()

        steps.append(step)
        work[0, index], work[1, index] = pairs_of(lengths), num_rows * int(lengths.max()) ** 2
        work[2, index], work[3, index] = subject.shuffler.get_workloads(batch).sum(), subject.tokens(batch)
    names = ("pairs of the mask", "rows × longest²", "the shuffler's workloads", "tokens")
    fits = []
    for what, runs, own in (("attention", passes, (0, 1)), ("training step", steps, (2, 3))):
        seconds = list(interleaved_medians(dict(enumerate(runs)), repeats).values())
        fits += [(what, names[at], *line_in(work[at].tolist(), seconds)) for at in own]
    drawn = [draw_lengths("zipf", ROWS, LONGEST, subject.generator) for _ in range(batches)]
    own_passes = [attention_pass(subject, lengths) for lengths in drawn]
    padded = [attention_pass(subject, lengths.max().repeat(ROWS)) for lengths in drawn]
    medians = interleaved_medians(
        {
            "as they are": lambda: [run() for run in own_passes],
            "padded to the longest": lambda: [run() for run in padded],
        },
        repeats,
    )
    more = sum(ROWS * int(lengths.max()) ** 2 for lengths in drawn) / sum(map(pairs_of, drawn))
    return [
        f"{shapes} batches, uniform and Zipf 1.2: attention of 4 to 64 rows of up to {2 * LONGEST:,} tokens, "
        f"{fits[0][2] * 1e9:.1f} ns per pair; steps of 2 layers on 2 to {ROWS} rows.",
        [
            {"time of": what, "as a line in": name, "R²": r_squared, "fixed, ms": fixed * 1e3}
            for what, name, _, fixed, r_squared in fits
        ],
        f"{batches} batches of {ROWS} rows, Zipf 1.2 up to {LONGEST:,} tokens; rows × longest² is {more:.0f} times the "
        "pairs that the mask keeps.",
        [{"rows": name, "ms": value * 1e3, "×": value / medians["as they are"]} for name, value in medians.items()],
    ]


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
    kinds = ("uniform", "lognormal", "zipf")
    timed = partial(time_kernels, longest=longest, device=device, repeats=repeats)
    body = [timed(*case)[0] for case in itertools.product(kinds, (rows,), head_dims, (False, True))]
    of_shapes = [timed(kind, num_rows, 64, False) for kind, num_rows in itertools.product(kinds, (8, 16, 32, 64))]
    _, _, r_squared = line_in([pairs for _, pairs, _ in of_shapes], [ms for _, _, ms in of_shapes])
    return [
        "Milliseconds of the device, forward and backward; those of the host to launch them; and the floor. The "
        "gradient of a bias recomputes two products, which the floor leaves out.",
        table(body),
        f"Time as a line in the pairs, over twelve batches: R² {r_squared:.4f}.",
    ]


def time_kernels(
    kind: str, rows: int, head_dim: int, has_bias: bool, *, longest: int, device: torch.device, repeats: int
) -> tuple[dict[str, Any], float, float]:
    """Time one batch by all kernels that can run here: a row of the table, the pairs, and the best milliseconds."""
    dtype = torch.bfloat16
    lengths = draw_lengths(kind, rows, longest, torch.Generator().manual_seed(0))
    num_tokens, pairs = int(lengths.sum()), pairs_of(lengths)
    shape = (num_tokens, HEADS, head_dim)
    draw = partial(torch.randn, shape, device=device, generator=torch.Generator(device).manual_seed(0))
    q, k, v, gradient = (draw().mul_(0.5).to(dtype) for _ in range(4))
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    bias = torch.zeros(HEADS, longest, device=device, requires_grad=True)
    floor_ms = 3.5 * 4 * pairs * HEADS * head_dim / _FLOOR_FLOPS * 1e3

    def step_of(output: Callable[[], torch.Tensor]) -> Callable[[], None]:
        def step() -> None:
            for leaf in (*leaves, bias):
                leaf.grad = None
            output().backward(gradient)

        return step

    blocks = plan_attention(lengths, num_heads=HEADS, device=device)
    step = step_of(lambda: hstu_attention(q, k, v, bias, blocks, normalizer=float(longest)))
    best = blocks_ms = device_milliseconds(step, device, max(1, repeats // 4), warmup=1)
    by_triton: dict[str, Any] = dict.fromkeys(("Triton, ms", "host, ms", "TFLOP/s", "× floor", "blocks ÷ Triton"), "–")
    if uses_triton("auto", device, dtype, head_dim):
        plan, of_bias = plan_triton_attention(lengths, device=device), bias if has_bias else None
        step = step_of(lambda: triton_attention(q, k, v, of_bias, plan, normalizer=float(longest)))
        best = device_milliseconds(step, device, repeats)
        host = statistics.median(host_milliseconds(step) for _ in range(repeats))
        flops = floor_ms * _FLOOR_FLOPS / best / 1e12
        values = (f"{best:.3f}", f"{host:.2f}", f"{flops:.0f}", f"{best / floor_ms:.2f}", f"{blocks_ms / best:.1f}")
        by_triton = dict(zip(by_triton, values))
    peer = "has no bias"
    if not has_bias:
        try:
            module = importlib.import_module("generative_recommenders.ops.triton.triton_hstu_attention")
            offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(device)
            step = step_of(lambda: module.triton_hstu_mha(longest, 1.0, q, k, v, offsets))
            peer = f"{device_milliseconds(step, device, repeats):.3f}"
        except ImportError:
            peer = "not installed"
        except (TypeError, RuntimeError) as error:
            peer = f"{type(error).__name__}: {str(error)[:60]}"
    row = {"lengths": kind, "batch": f"{rows} × {longest}", "heads": f"{HEADS} × {head_dim}"}
    row |= {"bias": "position" if has_bias else "none", "tokens": num_tokens, "blocks, ms": f"{blocks_ms:.2f}"}
    return row | by_triton | {"floor, ms": f"{floor_ms:.3f}", "peer, ms": peer}, float(pairs), best


def measure_windows(subject: HSTU, repeats: int) -> list[Any]:
    """Attention of rows as long as the bias reaches, by the width of the window."""
    longest = subject.bias.shape[1]
    lengths = torch.full((4,), longest)
    windows: dict[str, int | None] = {"none": None} | {f"{width:,}": width for width in (512, 128, 32)}
    passes = {name: attention_pass(subject, lengths, max_attn_len=width) for name, width in windows.items()}
    seconds = interleaved_medians(passes, repeats)
    pairs = {name: int(attention_pairs(longest, max_attn_len=width)) for name, width in windows.items()}
    rows = [
        {
            "window": name,
            "pairs ÷ pairs without": pairs[name] / pairs["none"],
            "ms": seconds[name] * 1e3,
            "time ÷ time without": seconds[name] / seconds["none"],
        }
        for name in windows
    ]
    return [f"Windows (`max_attn_len`): {len(lengths)} rows of {longest:,} tokens.", rows]


def main(quick: Quick = False) -> None:
    torch.set_num_threads(1)
    shapes, batches, repeats = (4, 1, 1) if quick else (40, 5, 5)
    page = Page(
        "Attention over rows of any length",
        f"{HEADS} heads × {HEAD_DIM}, float32, CPU time, medians of {repeats}.",
    )
    with one_rank():
        initialize_model_parallel()
        for subject in (HSTU(), SIDGR()):
            windows = measure_windows(subject, repeats) if isinstance(subject, HSTU) else []
            page.section(subject.title, *measured(subject, shapes, batches, repeats), *windows)
            subject.shuffler.close()
    page.finish(quick=quick)


if __name__ == "__main__":
    from_command_line(main, __doc__)
