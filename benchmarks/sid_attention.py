"""Does the semantic-ID decoder cost what its shuffler says, and what does packing save over padding?

1. Attention over packed rows, time against the pairs that the causal mask keeps, over batches of very different shapes.
2. The same against padding every row to the longest: by the same kernel, and by the matrix products of megatron-core's
   DotProductAttention, which computes what the mask drops.
3. A whole training step of the decoder against the workloads of `SIDGRBalancedBatchShuffler`.

Forward and backward, one thread, CPU time; variants are taken in turn, so that a drifting machine cannot fake a ratio.

Examples:
    python -m benchmarks.sid_attention
    python -m benchmarks.sid_attention --quick
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.command_line import from_command_line
from benchmarks.report import Fit, fit_line, heading, interleaved_medians, table, write_page
from commons.datasets.gpt_sid_batch import GPTSIDBatch, RandomDistribution
from sid_gr import SIDGRBalancedBatchShuffler
from sid_gr.model import SIDGRConfig, SIDGRModel
from sid_gr.model.attention import CausalRows
from sid_gr.model.token_layout import lay_out_batch
from sid_gr.parallel import initialize_model_parallel

CPU = torch.device("cpu")
CODEBOOK_SIZES = (500, 500, 500, 500)


@dataclass(frozen=True)
class Args:
    """What to measure.

    Attributes:
        num_heads: attention heads.
        head_dim: width of a head.
        num_rows: rows of a batch in the comparison with padding, and in the training steps.
        longest: longest row there, in tokens.
        num_shapes: batches in the fit against the pairs, and in that against the workloads.
        num_batches: batches in the comparison with padding.
        repeats: times every batch is measured; medians are reported.
        quick: few batches, to see it run; no page is written.

    """

    num_heads: int = 4
    head_dim: int = 16
    num_rows: int = 32
    longest: int = 1024
    num_shapes: int = 40
    num_batches: int = 5
    repeats: int = 5
    quick: bool = False


def zipf_lengths(num_rows: int, longest: int, generator: torch.Generator) -> torch.Tensor:
    """Lengths with P(L) ∝ L^−1.2 on 1 … longest; int64 `(num_rows,)`."""
    probabilities = torch.arange(1, longest + 1, dtype=torch.float64) ** -1.2
    return torch.multinomial(probabilities, num_rows, replacement=True, generator=generator) + 1


def make_inputs(num_tokens: int, args: Args, generator: torch.Generator) -> list[torch.Tensor]:
    """Random queries, keys and values."""
    shape = (num_tokens, args.num_heads, args.head_dim)
    return [torch.randn(shape, generator=generator).requires_grad_() for _ in range(3)]


def packed(inputs: list[torch.Tensor], lengths: torch.Tensor, args: Args) -> None:
    """Layout, forward and backward over packed rows."""
    layout = lay_out_batch(
        lengths.numpy() - 1,
        np.zeros(len(lengths), dtype=np.int64),
        num_rows=len(lengths),
        num_hierarchies=1,
        num_heads=args.num_heads,
        device=CPU,
    )
    CausalRows(layout=layout).attend(1, *inputs).sum().backward()
    for tensor in inputs:
        tensor.grad = None


def dense(inputs: list[torch.Tensor], num_rows: int, length: int) -> None:
    """Forward and backward by whole score matrices, masked before the softmax."""
    q, k, v = (tensor.unflatten(0, (num_rows, length)).transpose(1, 2) for tensor in inputs)
    ahead = torch.ones(length, length, dtype=torch.bool).triu(1)
    scores = (q @ k.transpose(2, 3) * q.shape[3] ** -0.5).masked_fill(ahead, -10_000.0)
    (scores.softmax(3) @ v).sum().backward()
    for tensor in inputs:
        tensor.grad = None


def measure_shapes(args: Args) -> tuple[Fit, Fit]:
    """Attention of batches of very different shapes, fitted to the pairs kept and to rows × longest²."""
    generator = torch.Generator().manual_seed(0)
    variants: dict[str, Callable[[], None]] = {}
    pairs, padded = [], []
    for index in range(args.num_shapes):
        num_rows = int(torch.randint(4, 65, (), generator=generator))
        longest = int(torch.randint(64, 2 * args.longest, (), generator=generator))
        if index % 2:
            lengths = zipf_lengths(num_rows, longest, generator)
        else:
            lengths = torch.randint(1, longest + 1, (num_rows,), generator=generator)
        inputs = make_inputs(int(lengths.sum()), args, generator)

        def run(inputs: list[torch.Tensor] = inputs, lengths: torch.Tensor = lengths) -> None:
            packed(inputs, lengths, args)

        variants[str(index)] = run
        pairs.append(float((lengths * (lengths + 1) // 2).sum()))
        padded.append(float(num_rows * int(lengths.max()) ** 2))
    seconds = list(interleaved_medians(variants, args.repeats).values())
    return fit_line(pairs, seconds), fit_line(padded, seconds)


def measure_padding(args: Args) -> tuple[list[torch.Tensor], dict[str, float]]:
    """Zipf lengths: packed, padded to the longest by the same kernel, and by whole score matrices."""
    generator = torch.Generator().manual_seed(0)
    batches = [zipf_lengths(args.num_rows, args.longest, generator) for _ in range(args.num_batches)]
    own = [make_inputs(int(lengths.sum()), args, generator) for lengths in batches]
    wide = [make_inputs(args.num_rows * int(lengths.max()), args, generator) for lengths in batches]

    def run_packed() -> None:
        for inputs, lengths in zip(own, batches):
            packed(inputs, lengths, args)

    def run_padded() -> None:
        for inputs, lengths in zip(wide, batches):
            packed(inputs, lengths.max().repeat(args.num_rows), args)

    def run_dense() -> None:
        for inputs, lengths in zip(wide, batches):
            dense(inputs, args.num_rows, int(lengths.max()))

    variants = {"packed": run_packed, "padded, same kernel": run_padded, "padded, whole score matrices": run_dense}
    return batches, interleaved_medians(variants, args.repeats)


def measure_steps(args: Args) -> tuple[Fit, Fit]:
    """Training steps of a decoder on batches of many sizes, fitted to the shuffler's workloads and to the tokens."""
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    longest = args.longest // 4
    config = SIDGRConfig(CODEBOOK_SIZES, longest + 1, args.num_heads * args.head_dim, 2, args.num_heads)
    model = SIDGRModel(config)
    shuffler = SIDGRBalancedBatchShuffler(config.hidden_size, args.num_heads, args.head_dim, 2)
    variants: dict[str, Callable[[], None]] = {}
    work, tokens = [], []
    for index in range(args.num_shapes):
        most = int(torch.randint(8, longest + 1, (), generator=generator))
        histories = (
            RandomDistribution("zipf", low=1, high=most, alpha=1.2)
            if index % 2
            else RandomDistribution("uniform", low=1, high=most)
        )
        num_rows = int(torch.randint(2, args.num_rows + 1, (), generator=generator))
        batch = GPTSIDBatch.random(
            num_rows, CODEBOOK_SIZES, most, history_dist=histories, device=CPU, generator=generator
        )

        def run(batch: GPTSIDBatch = batch) -> None:
            loss, _ = model(batch)
            loss.backward()
            model.zero_grad()

        variants[str(index)] = run
        work.append(float(shuffler.get_workloads(batch).sum()))
        tokens.append(float(batch.sequence_lengths().sum()))
    shuffler.close()
    seconds = list(interleaved_medians(variants, args.repeats).values())
    return fit_line(work, seconds), fit_line(tokens, seconds)


def main(args: Args) -> None:
    """Measure, print and write the report."""
    torch.set_num_threads(1)
    if args.quick:
        args = Args(**{**vars(args), "num_shapes": 4, "num_batches": 1, "repeats": 1, "longest": 128})
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        initialize_model_parallel()
        pairs, padded = measure_shapes(args)
        batches, medians = measure_padding(args)
        work, tokens = measure_steps(args)
        dist.destroy_process_group()
    kept = sum(int((lengths * (lengths + 1) // 2).sum()) for lengths in batches)
    whole = sum(args.num_rows * int(lengths.max()) ** 2 for lengths in batches)
    units = [("Σ L(L + 1) ÷ 2", pairs), ("rows × longest²", padded)]
    page = "\n".join(
        [
            heading("SID-GR: attention over packed rows", "python -m benchmarks.sid_attention"),
            f"{args.num_heads} heads × {args.head_dim}, float32, forward and backward, CPU time, medians of "
            f"{args.repeats}.",
            "\n## Attention follows the pairs of the causal mask\n",
            f"{args.num_shapes} batches of 4 to 64 rows, uniform and Zipf 1.2, up to {2 * args.longest:,} tokens.\n",
            table(
                ["time as a line in", "R²", "ns per unit", "fixed, ms"],
                [
                    [name, f"{fit.r_squared:.4f}", f"{fit.slope * 1e9:.2f}", f"{fit.intercept * 1e3:.2f}"]
                    for name, fit in units
                ],
            ),
            "\n## Against padding to the longest row\n",
            f"{args.num_batches} batches of {args.num_rows} rows, Zipf 1.2 up to {args.longest:,}: the mask keeps "
            f"{kept:,} pairs, rows × longest² is {whole:,} ({whole / kept:.0f}×).\n",
            table(
                ["variant", "ms", "× packed"],
                [[name, f"{value * 1e3:.1f}", f"{value / medians['packed']:.1f}"] for name, value in medians.items()],
            ),
            "\n## A training step follows the workloads\n",
            f"Hidden {args.num_heads * args.head_dim}, 2 layers, four codebooks of 500; {args.num_shapes} batches of 2 "
            f"to {args.num_rows} rows, uniform and Zipf 1.2 histories of up to {args.longest // 4:,} items.\n",
            table(
                ["time as a line in", "R²", "fixed, ms"],
                [
                    ["the shuffler's workloads", f"{work.r_squared:.4f}", f"{work.intercept * 1e3:.1f}"],
                    ["tokens", f"{tokens.r_squared:.4f}", f"{tokens.intercept * 1e3:.1f}"],
                ],
            ),
        ]
    )
    print(page)
    if not args.quick:
        print(f"\nwritten to {write_page('sid_attention', page)}")


if __name__ == "__main__":
    main(from_command_line(Args, __doc__))
