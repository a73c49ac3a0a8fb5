"""Does attention over rows of any length cost what the shufflers say, and what does it save over padding?

For HSTU's attention over jagged rows and for that of the semantic-ID decoder over packed ones:

1. Time against the pairs that the causal mask keeps, over batches of very different shapes.
2. Time against padding every row to the longest: by the same kernel, and by whole score matrices in plain PyTorch.
3. Time of a training step of a small model against the workloads of its shuffler.
4. HSTU alone: time and pairs of long rows by the width of a window.

Forward and backward on the CPU, one thread. Times are CPU times of the process, medians; variants are taken in turn, so
that a drifting machine cannot fake a ratio.

Examples:
    python -m benchmarks.attention
    python -m benchmarks.attention --quick
    python -m benchmarks.attention --num-heads 2 --head-dim 64 --longest 256
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from benchmarks.command_line import from_command_line
from benchmarks.report import Fit, Page, fit_line, interleaved_medians, one_rank, rows_table
from commons.datasets.gpt_sid_batch import GPTSIDBatch
from commons.datasets.hstu_batch import FeatureConfig, HSTUBatch
from commons.datasets.random.distribution import RandomDistribution
from commons.distributed.batch_shuffler import BaseTaskBalancedBatchShuffler
from commons.perf_model.task_estimator import attention_pairs
from hstu import HSTUBalancedBatchShuffler
from hstu.model import HSTUConfig, HSTURankingModel, RankingConfig, hstu_attention, plan_attention
from sid_gr import SIDGRBalancedBatchShuffler
from sid_gr.model import SIDGRConfig, SIDGRModel
from sid_gr.model.attention import CausalRows
from sid_gr.model.token_layout import lay_out_batch
from sid_gr.parallel import initialize_model_parallel

CPU = torch.device("cpu")
CODEBOOK_SIZES = (500, 500, 500, 500)


@dataclass(frozen=True)
class Args:
    """What to measure."""

    num_heads: int = 4  # attention heads
    head_dim: int = 16  # width of a head
    num_rows: int = 32  # rows of a batch in the comparison with padding, and the most of one in the training steps
    longest: int = 512  # longest row there, in tokens
    num_shapes: int = 40  # batches in the fits
    num_batches: int = 5  # batches in the comparison with padding
    repeats: int = 5  # times every batch is measured
    quick: bool = False  # few batches, to see it run; no page is written


class Subject:
    """An attention and a small model that has it.

    A subclass attends with what it plans for a batch, says what weights a whole matrix of scores `(rows, heads, length,
    length)` has, of which `ahead` is what the mask drops, and makes batches for the model and counts their tokens.
    """

    title: str
    model: torch.nn.Module
    shuffler: BaseTaskBalancedBatchShuffler

    def __init__(self, args: Args) -> None:
        self.args, self.width, self.longest = args, args.num_heads * args.head_dim, args.longest
        self.generator = torch.Generator().manual_seed(0)
        torch.manual_seed(0)


class HSTU(Subject):
    """HSTU: SiLU, a bias by position, items and actions interleaved."""

    title = "HSTU, jagged rows"

    def __init__(self, args: Args) -> None:
        super().__init__(args)
        self.bias = torch.randn(args.num_heads, 4 * args.longest, generator=self.generator).requires_grad_()
        config = HSTUConfig(self.width, 2, args.num_heads, args.head_dim, max_sequence_length=2 * args.longest + 1)
        tables = {"user": 6040, "item": 3952, "action": 6}
        self.model = HSTURankingModel(RankingConfig(config, tables, (64, 1), 1), plain_embeddings=True)
        self.shuffler = HSTUBalancedBatchShuffler(self.width, args.num_heads, args.head_dim, 2)

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor, max_attn_len: int | None = None
    ) -> torch.Tensor:
        plan = plan_attention(lengths, num_heads=self.args.num_heads, max_attn_len=max_attn_len)
        return hstu_attention(q, k, v, self.bias, plan, normalizer=float(self.longest))

    def weigh(self, scores: torch.Tensor, ahead: torch.Tensor) -> torch.Tensor:
        place = torch.arange(scores.shape[-1])
        scores = scores + self.bias[:, (place[:, None] - place).clamp(min=0)]
        return torch.nn.functional.silu(scores) * ~ahead / self.longest

    def batch(self, num_rows: int, histories: RandomDistribution) -> HSTUBatch:
        features = [
            FeatureConfig(["user"], [6040], 1, False),
            FeatureConfig(["item", "action"], [3952, 6], self.longest, True, histories),
        ]
        options: dict[str, Any] = {"device": "cpu", "generator": self.generator}
        return HSTUBatch.random(num_rows, features, "item", ["user"], "action", 0, 1, **options)

    def tokens(self, batch: HSTUBatch) -> int:
        return int(batch.sequence_lengths()[0].sum())


class SIDGR(Subject):
    """The semantic-ID decoder: softmax, four codes an item."""

    title = "SID-GR, packed rows"

    def __init__(self, args: Args) -> None:
        super().__init__(args)
        config = SIDGRConfig(CODEBOOK_SIZES, args.longest // 4 + 1, self.width, 2, args.num_heads)
        self.model = SIDGRModel(config)
        self.shuffler = SIDGRBalancedBatchShuffler(self.width, args.num_heads, args.head_dim, 2)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        layout = lay_out_batch(
            lengths.numpy() - 1,
            np.zeros(len(lengths), dtype=np.int64),
            num_rows=len(lengths),
            num_hierarchies=1,
            num_heads=self.args.num_heads,
            device=CPU,
        )
        return CausalRows(layout=layout).attend(1, q, k, v)

    def weigh(self, scores: torch.Tensor, ahead: torch.Tensor) -> torch.Tensor:
        return (scores * self.args.head_dim**-0.5).masked_fill(ahead, -10_000.0).softmax(-1)

    def batch(self, num_rows: int, histories: RandomDistribution) -> GPTSIDBatch:
        histories = replace(histories, high=max(1, (histories.high or 4) // 4))
        options: dict[str, Any] = {"device": CPU, "generator": self.generator}
        return GPTSIDBatch.random(num_rows, CODEBOOK_SIZES, self.longest // 4, history_dist=histories, **options)

    def tokens(self, batch: GPTSIDBatch) -> int:
        return int(batch.sequence_lengths().sum())


def draw_lengths(subject: Subject, num_rows: int, longest: int, zipf: bool = True) -> torch.Tensor:
    """int64 `(num_rows,)` of 1 to `longest`: P(L) ∝ L^−1.2, or uniform."""
    weights = torch.arange(1, longest + 1, dtype=torch.float64) ** (-1.2 if zipf else 0.0)
    return torch.multinomial(weights, num_rows, replacement=True, generator=subject.generator) + 1


def attention_pass(subject: Any, lengths: torch.Tensor, *, dense: bool = False, **options: Any) -> Callable[[], None]:
    """Forward and backward over a batch, with random queries, keys and values of its own."""
    shape = (int(lengths.sum()), subject.args.num_heads, subject.args.head_dim)
    inputs = [torch.randn(shape, generator=subject.generator).requires_grad_() for _ in range(3)]

    def run() -> None:
        if dense:
            q, k, v = (each.unflatten(0, (len(lengths), -1)).transpose(1, 2) for each in inputs)
            ahead = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
            output = subject.weigh(q @ k.transpose(2, 3), ahead) @ v
        else:
            output = subject.attend(*inputs, lengths, **options)
        output.sum().backward()
        for each in inputs:
            each.grad = None

    return run


def fitted(subject: Subject, passes: list[Callable[[], None]], **measures: list[float]) -> list[Fit]:
    """Seconds of every pass, in turn, as a line in each measure of its size."""
    seconds = interleaved_medians({str(at): run for at, run in enumerate(passes)}, subject.args.repeats)
    return [fit_line(measure, list(seconds.values())) for measure in measures.values()]


def measure_shapes(subject: Subject) -> list[Fit]:
    """Attention of batches of very different shapes, fitted to the pairs kept and to rows × longest²."""
    args, passes, pairs, padded = subject.args, [], [], []
    for index in range(args.num_shapes):
        num_rows, longest = (
            int(torch.randint(low, high, (), generator=subject.generator))
            for low, high in ((4, 65), (64, 2 * args.longest))
        )
        lengths = draw_lengths(subject, num_rows, longest, zipf=index % 2 == 1)
        passes.append(attention_pass(subject, lengths))
        pairs.append(float((lengths * (lengths + 1) // 2).sum()))
        padded.append(float(num_rows * int(lengths.max()) ** 2))
    return fitted(subject, passes, pairs=pairs, padded=padded)


def measure_padding(subject: Subject) -> tuple[float, dict[str, float]]:
    """Rows × longest² ÷ pairs of Zipf lengths, and seconds of the rows as they are and padded in two ways."""
    args = subject.args
    batches = [draw_lengths(subject, args.num_rows, args.longest) for _ in range(args.num_batches)]
    passes: dict[str, list[Callable[[], None]]] = {"as they are": [], "padded, same kernel": [], "padded, matrices": []}
    for lengths in batches:
        longest = lengths.max().repeat(args.num_rows)
        passes["as they are"].append(attention_pass(subject, lengths))
        passes["padded, same kernel"].append(attention_pass(subject, longest))
        passes["padded, matrices"].append(attention_pass(subject, longest, dense=True))

    def run_all(of_batches: list[Callable[[], None]]) -> Callable[[], None]:
        return lambda: [run() for run in of_batches] and None

    medians = interleaved_medians({name: run_all(each) for name, each in passes.items()}, args.repeats)
    kept = sum(int((lengths * (lengths + 1) // 2).sum()) for lengths in batches)
    return sum(args.num_rows * int(lengths.max()) ** 2 for lengths in batches) / kept, medians


def measure_steps(subject: Subject) -> list[Fit]:
    """Training steps on batches of many sizes, fitted to the shuffler's workloads and to the tokens."""
    args, passes, work, tokens = subject.args, [], [], []
    for index in range(args.num_shapes):
        most = int(torch.randint(32, args.longest + 1, (), generator=subject.generator))
        num_rows = int(torch.randint(2, args.num_rows + 1, (), generator=subject.generator))
        kind: Any = {"dist_type": "zipf", "alpha": 1.2} if index % 2 else {"dist_type": "uniform"}
        batch = subject.batch(num_rows, RandomDistribution(low=1, high=most, **kind))

        def run(batch: Any = batch) -> None:
            subject.model(batch)[0].backward()
            subject.model.zero_grad()

        passes.append(run)
        work.append(float(subject.shuffler.get_workloads(batch).sum()))
        tokens.append(float(subject.tokens(batch)))
    return fitted(subject, passes, work=work, tokens=tokens)


def measure_windows(subject: HSTU) -> list[str]:
    """Attention of rows as long as the bias reaches, by the width of the window."""
    longest = subject.bias.shape[1]
    lengths = torch.full((4,), longest)
    windows: dict[str, int | None] = {"none": None} | {f"{width:,}": width for width in (512, 128, 32)}
    passes = {name: attention_pass(subject, lengths, max_attn_len=width) for name, width in windows.items()}
    seconds = interleaved_medians(passes, subject.args.repeats)
    pairs = {name: int(attention_pairs(longest, max_attn_len=width)) for name, width in windows.items()}
    rows = [
        {
            "window": name,
            "pairs, of those without": pairs[name] / pairs["none"],
            "ms": seconds[name] * 1e3,
            "time, of that without": seconds[name] / seconds["none"],
        }
        for name in windows
    ]
    return [f"Windows (`max_attn_len`): {len(lengths)} rows of {longest:,} tokens.", rows_table(rows)]


def measured(subject: Subject) -> list[str]:
    """Measure a subject; the paragraphs of its section."""
    args = subject.args
    fits = dict(zip(("pairs of the mask", "rows × longest²"), measure_shapes(subject)))
    ratio, medians = measure_padding(subject)
    steps = dict(zip(("the shuffler's workloads", "tokens"), measure_steps(subject)))
    subject.shuffler.close()
    rows = [
        {"time of": what, "as a line in": name, "R²": fit.r_squared, "fixed, ms": fit.intercept * 1e3}
        for what, of in (("attention", fits), ("training step", steps))
        for name, fit in of.items()
    ]
    own = medians["as they are"]
    return [
        f"{args.num_shapes} batches, uniform and Zipf 1.2: attention of 4 to 64 rows of up to {2 * args.longest:,} "
        f"tokens, {fits['pairs of the mask'].slope * 1e9:.1f} ns per pair; steps of 2 layers on 2 to {args.num_rows} "
        "rows.",
        rows_table(rows),
        f"{args.num_batches} batches of {args.num_rows} rows, Zipf 1.2 up to {args.longest:,} tokens; rows × "
        f"longest² is {ratio:.0f} times the pairs that the mask keeps.",
        rows_table([{"rows": name, "ms": value * 1e3, "×": value / own} for name, value in medians.items()]),
    ]


def main(args: Args) -> None:
    """Measure, print and write the page."""
    torch.set_num_threads(1)
    if args.quick:
        args = replace(args, num_shapes=4, num_batches=1, repeats=1, longest=128)
    page = Page(
        "attention",
        "Attention over rows of any length",
        "python -m benchmarks.attention",
        f"{args.num_heads} heads × {args.head_dim}, float32, CPU time on cores that other programs share, medians of "
        f"{args.repeats}.",
    )
    with one_rank():
        initialize_model_parallel()
        for subject in (HSTU, SIDGR):
            made = subject(args)
            page.section(subject.title, *measured(made), *(measure_windows(made) if isinstance(made, HSTU) else []))
    page.finish(quick=args.quick)


if __name__ == "__main__":
    main(from_command_line(Args, __doc__))
