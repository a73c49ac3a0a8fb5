"""Does jagged attention cost what the sum of the squared lengths says, and what does it save over padding?

Three questions, each forward and backward, on one thread, with the variants of a comparison taken in turn so that
a drifting machine cannot fake a ratio. Times are CPU times of the process: what others do on the machine counts little.

1. Time against the sum of L² over batches of very different shapes: the line through it and its R².
2. Time against padding every row to the longest, by the same kernel and by plain dense PyTorch, at Zipf 1.2.
3. Time of a whole training step of a small model.

Examples:
    python -m benchmarks.jagged_attention
    python -m benchmarks.jagged_attention --repeats 3 --output attention.md
    python -m benchmarks.jagged_attention --num-heads 2 --head-dim 64 --longest 256
"""

from __future__ import annotations

import datetime
import gc
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torchrec

from benchmarks.command_line import from_command_line
from benchmarks.report import Fit, fit_line, interleaved_medians
from commons.datasets.hstu_batch import FeatureConfig, HSTUBatch, RandomDistribution
from hstu.model import HSTUConfig, HSTURankingModel, RankingConfig, hstu_attention, plan_attention

RESULT = Path(__file__).parent / "results" / "jagged_attention.md"


@dataclass(frozen=True)
class Args:
    """What to measure.

    Attributes:
        num_heads: attention heads.
        head_dim: width of a head.
        num_rows: rows of a batch in the comparison with padding.
        longest: longest row in the comparison with padding.
        num_shapes: batches in the fit against the sum of squared lengths.
        num_batches: batches in the comparison with padding.
        repeats: times every batch is measured; medians are reported.
        seed: of all lengths and values.
        hardware: the machine, in words.
        output: where the report goes.

    """

    num_heads: int = 4
    head_dim: int = 16
    num_rows: int = 32
    longest: int = 512
    num_shapes: int = 40
    num_batches: int = 5
    repeats: int = 7
    seed: int = 0
    hardware: str = "one core of a shared x86-64 server"
    output: Path = RESULT


def zipf_lengths(num_rows: int, longest: int, generator: torch.Generator) -> torch.Tensor:
    """Lengths with P(L) ∝ L^−1.2 on 1 … longest; int64 `(num_rows,)`."""
    probabilities = torch.arange(1, longest + 1, dtype=torch.float64) ** -1.2
    return torch.multinomial(probabilities, num_rows, replacement=True, generator=generator) + 1


class Inputs:
    """Random queries, keys, values and bias for a jagged batch."""

    def __init__(self, num_tokens: int, longest: int, args: Args, generator: torch.Generator) -> None:
        shape = (num_tokens, args.num_heads, args.head_dim)
        self.qkv = [torch.randn(shape, generator=generator).requires_grad_() for _ in range(3)]
        self.bias = torch.randn(args.num_heads, longest, generator=generator).requires_grad_()

    def clear(self) -> None:
        for tensor in (*self.qkv, self.bias):
            tensor.grad = None


def jagged(inputs: Inputs, lengths: torch.Tensor, args: Args) -> None:
    """Plan, forward and backward of the jagged kernel."""
    plan = plan_attention(lengths, num_heads=args.num_heads)
    q, k, v = inputs.qkv
    hstu_attention(q, k, v, inputs.bias, plan, normalizer=inputs.bias.shape[1]).sum().backward()


def dense(inputs: Inputs, num_rows: int, length: int) -> None:
    """Forward and backward of the formula as one would write it for padded rows."""
    q, k, v = (tensor.unflatten(0, (num_rows, length)).transpose(1, 2) for tensor in inputs.qkv)
    place = torch.arange(length)
    distance = place[:, None] - place[None, :]
    scores = q @ k.transpose(2, 3) + inputs.bias[:, distance.clamp(min=0)]
    weights = torch.nn.functional.silu(scores) * (distance >= 0) / length
    (weights @ v).sum().backward()


def measure_shapes(args: Args) -> tuple[Fit, Fit, list[tuple[int, int, int, float]]]:
    """Time of batches of very different shapes, fitted to Σ L² and to rows × longest²."""
    generator = torch.Generator().manual_seed(args.seed)
    variants: dict[str, Callable[[], None]] = {}
    shapes = []
    for index in range(args.num_shapes):
        num_rows = int(torch.randint(4, 65, (), generator=generator))
        longest = int(torch.randint(64, 1025, (), generator=generator))
        if index % 2:
            lengths = zipf_lengths(num_rows, longest, generator)
        else:
            lengths = torch.randint(1, longest + 1, (num_rows,), generator=generator)
        inputs = Inputs(int(lengths.sum()), 1024, args, generator)

        def run(inputs: Inputs = inputs, lengths: torch.Tensor = lengths) -> None:
            jagged(inputs, lengths, args)
            inputs.clear()

        variants[str(index)] = run
        shapes.append((num_rows, int(lengths.max()), int((lengths**2).sum())))
    medians = interleaved_medians(variants, args.repeats)
    seconds = list(medians.values())
    squares = [float(squared) for _, _, squared in shapes]
    padded = [float(num_rows * longest**2) for num_rows, longest, _ in shapes]
    rows = [(*shape, value) for shape, value in zip(shapes, seconds)]
    return fit_line(squares, seconds), fit_line(padded, seconds), rows


def measure_padding(args: Args) -> tuple[list[torch.Tensor], dict[str, float]]:
    """Zipf lengths: jagged, padded to the longest by the same kernel, and dense; seconds of all batches together."""
    generator = torch.Generator().manual_seed(args.seed)
    batches = [zipf_lengths(args.num_rows, args.longest, generator) for _ in range(args.num_batches)]
    jagged_inputs = [Inputs(int(lengths.sum()), args.longest, args, generator) for lengths in batches]
    padded_inputs = [Inputs(args.num_rows * int(lengths.max()), args.longest, args, generator) for lengths in batches]

    def run_jagged() -> None:
        for inputs, lengths in zip(jagged_inputs, batches):
            jagged(inputs, lengths, args)
            inputs.clear()

    def run_padded() -> None:
        for inputs, lengths in zip(padded_inputs, batches):
            jagged(inputs, lengths.max().expand(args.num_rows), args)
            inputs.clear()

    def run_dense() -> None:
        for inputs, lengths in zip(padded_inputs, batches):
            dense(inputs, args.num_rows, int(lengths.max()))
            inputs.clear()

    variants = {"jagged": run_jagged, "padded, same kernel": run_padded, "padded, plain PyTorch": run_dense}
    return batches, interleaved_medians(variants, args.repeats)


def measure_step(args: Args) -> tuple[float, float, float]:
    """Tokens, forward and backward seconds of a small model's training step; medians over batches."""
    generator = torch.Generator().manual_seed(args.seed)
    length = RandomDistribution("lognormal", low=1, high=1000, mean=165.6, std=192.7)
    features = [
        FeatureConfig(["user"], [6040], 1, False),
        FeatureConfig(["item", "action"], [3952, 6], 1000, True, length),
    ]
    batches = [
        HSTUBatch.random(32, features, "item", ["user"], "action", 0, 1, device="cpu", generator=generator)
        for _ in range(args.repeats)
    ]
    torch.manual_seed(args.seed)
    model = HSTURankingModel(
        RankingConfig(
            hstu=HSTUConfig(64, 2, 4, 16, max_sequence_length=2001),
            embedding_tables={"user": 6040, "item": 3952, "action": 6},
            prediction_head_arch=(64, 1),
            num_tasks=1,
        )
    )
    forward, backward = [], []
    for batch in [batches[0], *batches]:
        start = time.process_time()
        loss, _ = model(batch)
        middle = time.process_time()
        loss.backward()
        forward.append(middle - start)
        backward.append(time.process_time() - middle)
        model.zero_grad()
    tokens = statistics.median(float(batch.sequence_lengths()[0].sum()) for batch in batches)
    return tokens, statistics.median(forward[1:]), statistics.median(backward[1:])


def report(args: Args) -> str:
    """Measure everything; the text of the result file."""
    fit, padded_fit, shapes = measure_shapes(args)
    gc.collect()
    batches, medians = measure_padding(args)
    gc.collect()
    tokens, forward, backward = measure_step(args)
    squares = sum(int((lengths**2).sum()) for lengths in batches)
    padded = sum(args.num_rows * int(lengths.max()) ** 2 for lengths in batches)
    best = medians["jagged"]
    lines = [
        "# Jagged attention: cost and padding",
        "",
        f"{datetime.date.today().isoformat()} · `python -m benchmarks.jagged_attention` · {args.hardware}, "
        f"one thread. Python {platform.python_version()}, torch {torch.__version__}, torchrec {torchrec.__version__}.",
        f"{args.num_heads} heads × {args.head_dim} channels, float32, causal, learned position bias, forward and "
        f"backward, CPU time, medians of {args.repeats}, variants taken in turn.",
        "",
        "## Time follows Σ L²",
        "",
        f"{args.num_shapes} batches of 4–64 rows, uniform and Zipf 1.2 lengths up to 64–1024 tokens, "
        f"Σ L² from {min(shape[2] for shape in shapes):,} to {max(shape[2] for shape in shapes):,}.",
        "",
        "| time as a line in | R² | ns per unit | fixed |",
        "|---|---|---|---|",
        f"| Σ L² | {fit.r_squared:.4f} | {fit.slope * 1e9:.2f} | {fit.intercept * 1e3:.2f} ms |",
        f"| rows × longest² | {padded_fit.r_squared:.4f} | {padded_fit.slope * 1e9:.2f} "
        f"| {padded_fit.intercept * 1e3:.2f} ms |",
        "",
        "## Against padding to the longest row",
        "",
        f"{args.num_batches} batches of {args.num_rows} rows, Zipf 1.2 up to {args.longest}, longest rows "
        f"{sorted(int(lengths.max()) for lengths in batches)}, {sum(int(lengths.sum()) for lengths in batches):,} "
        f"tokens; Σ L² is {squares:,}, rows × longest² {padded:,} ({padded / squares:.1f}×).",
        "",
        "| variant | ms | × jagged |",
        "|---|---|---|",
        *(f"| {name} | {value * 1e3:.1f} | {value / best:.1f} |" for name, value in medians.items()),
        "",
        "## A training step",
        "",
        "Hidden 64, 2 layers, 4 heads × 16, items and actions interleaved, 32 rows, lognormal histories of 166 items "
        f"in the mean (median batch: {tokens:,.0f} tokens): forward {forward * 1e3:.0f} ms, backward "
        f"{backward * 1e3:.0f} ms, without optimizer.",
        "",
    ]
    return "\n".join(lines)


def main(args: Args) -> None:
    """Measure, print and write the report."""
    torch.set_num_threads(1)
    text = report(args)
    print(text)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(text)


if __name__ == "__main__":
    main(from_command_line(Args, __doc__))
