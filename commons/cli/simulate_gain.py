"""`evenrank simulate --lengths`: what each way of dealing rows to ranks would gain, from the lengths of rows alone."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Literal, get_args

import numpy as np
from tqdm import tqdm

from commons.checks import require_at_least
from commons.cli.simulate_answer import Answer, StepTime
from commons.cli.simulate_lengths import Lengths, find_lengths
from commons.datasets.budget_sampler import BudgetBatchSampler
from commons.perf_model.gain import Budget, Comparison, DealtRows, LoadedRows, compare_ways, compared, dealt_steps
from commons.perf_model.partitioner.inputs import MOST_LOAD
from commons.perf_model.task_estimator import AttentionTask, HSTUAttentionTask, SelfAttentionTask

Task = Literal["hstu", "transformer", "tokens"]

# Rows that steps of constant cost are planned for, and at least so many steps: each is found by a search.
_BUDGET_ROWS = 1 << 18
_FEWEST_STEPS = 8
# Rows of all steps together, a few arrays of which fit a host.
_MOST_ROWS = 1 << 28


@dataclass
class LengthOptions:
    """What belongs to `--lengths`."""

    column: str | None = None
    """The column of lengths, or of lists whose items count; None where there is one column."""

    group_by: str | None = None
    """The column of users in a file of events: a user's length is the number of events. None: rows have lengths."""

    batch_size: int = 32
    """Rows of a rank in a step."""

    task: Task = "hstu"
    """What a row costs: operations of HSTU or transformer layers (SID-GR, language models), or tokens."""

    hidden_size: int = 256
    """Width of the model."""

    num_heads: int = 4
    """Attention heads."""

    head_dim: int = 64
    """Width of a head."""

    num_layers: int = 8
    """Layers."""

    value_dim: int | None = None
    """Width of a head of u and v, with --task hstu; None for --head-dim."""

    concat_ux: bool = False
    """The output projection reads [u, x, y], with --task hstu, as in generative-recommenders; y alone otherwise."""

    tokens_per_item: int = 1
    """Tokens that the model computes per unit of length; 2 for HSTU with interleaved actions."""

    extra_tokens: int = 0
    """Tokens of every row besides, such as its context."""

    max_length: int | None = None
    """Longer rows are cut to it; None for no limit."""

    in_order: bool = False
    """Rows are loaded as they lie in the file, not in a random order."""

    with_replacement: bool = False
    """Rows are drawn as often as needed, where the file is a sample of more data."""

    seed: int = 0
    """Of the random order, and of draws."""

    bytes_per_token: int = 8
    """What a token takes on the wire: 8 for an ID, 16 with an action or a time."""

    peak_tflops: float | None = None
    """Operations per second of a device at most, in 10^12; gives milliseconds."""

    mfu: float = 0.4
    """The part of --peak-tflops that training reaches, above 0 and at most 1."""

    link_gbps: float | None = None
    """What a rank sends per second, in 10^9 bits; gives milliseconds of the exchange."""

    def given(self) -> list[str]:
        """Flags of the options that are not at their default."""
        default = LengthOptions()
        return [
            "--" + item.name.replace("_", "-")
            for item in fields(self)
            if getattr(self, item.name) != getattr(default, item.name)
        ]

    def check(self) -> None:
        """Raise ValueError for a value out of its range."""
        for name in ("batch_size", "tokens_per_item", "bytes_per_token"):
            require_at_least(name, getattr(self, name), 1)
        for name in ("extra_tokens", "seed"):
            require_at_least(name, getattr(self, name), 0)
        if self.max_length is not None:
            require_at_least("max_length", self.max_length, 1)
        for name in ("peak_tflops", "link_gbps"):
            value = getattr(self, name)
            if value is not None and not 0 < value < 1e9:
                raise ValueError(f"{name} is {value}; rates are positive: correct it")
        if not 0 < self.mfu <= 1:
            raise ValueError(f"mfu is {self.mfu}; it is the part of the peak that is reached, in (0, 1]: correct it")
        if self.task not in get_args(Task):
            raise ValueError(f"task is {self.task!r}; known tasks are {', '.join(get_args(Task))}: choose one")
        if self.task == "tokens" and self.peak_tflops is not None:
            raise ValueError("task is 'tokens' and peak_tflops is given; tokens are no operations: choose another task")
        if self.task != "hstu" and (self.value_dim is not None or self.concat_ux):
            raise ValueError(
                f"task is {self.task!r}; value_dim and concat_ux are dimensions of HSTU: leave them out, or give "
                "--task hstu"
            )
        self.model()

    def model(self) -> AttentionTask | None:
        """What counts the operations; None where tokens are the cost."""
        if self.task == "tokens":
            return None
        dimensions = self.hidden_size, self.num_heads, self.head_dim, self.num_layers
        if self.task == "hstu":
            return HSTUAttentionTask(*dimensions, value_dim=self.value_dim, concat_ux=self.concat_ux)
        return SelfAttentionTask(*dimensions)

    def tokens(self, lengths: np.ndarray) -> np.ndarray:
        """Tokens that the model computes, int64 as the lengths."""
        if self.max_length is not None:
            lengths = np.minimum(lengths, self.max_length)
        # Checked in Python's integers, which do not overflow.
        longest = int(lengths.max(initial=0)) * self.tokens_per_item + self.extra_tokens
        if longest >= 2**40:
            raise ValueError(f"a row of {longest} tokens fits no device; check the lengths, or set --max-length")
        return lengths * self.tokens_per_item + self.extra_tokens

    def costs(self, tokens: np.ndarray) -> np.ndarray:
        """What rows of so many tokens cost, int64 as the tokens."""
        model = self.model()
        if model is None:
            return tokens
        try:
            return model.get_workloads(tokens)
        except ValueError:
            raise ValueError(
                f"a row of {int(tokens.max()):,} tokens can cost more than 2**63 operations, which no plan counts: "
                "check the lengths, or cut rows by --max-length"
            ) from None


def simulate_lengths(
    source: str, options: LengthOptions, ranks: tuple[int, ...], windows: tuple[int, ...], steps: int
) -> Answer:
    """Deal the rows in every way, for every number of ranks.

    Args:
        source: what `--lengths` names.
        options: how it is read, and what a row costs.
        ranks: numbers of ranks, at least 2 each.
        windows: batches of every rank that are planned together; 1 is always among the ways.
        steps: steps to look at; fewer where the file has fewer rows.

    Raises:
        FileNotFoundError: no such file.
        ValueError: an option out of its range, lengths that are none, or too few rows for a step.
    """
    options.check()
    lengths = find_lengths(
        source,
        options.column,
        group_by=options.group_by,
        in_order=options.in_order,
        with_replacement=options.with_replacement,
    )
    notes, comparisons = [], []
    for num_ranks in sorted(set(ranks)):
        per_step = num_ranks * options.batch_size
        possible = steps if lengths.num_rows is None else min(steps, lengths.num_rows // per_step)
        if possible < steps:
            notes.append(
                f"{num_ranks} ranks: {possible} of {steps} steps. There are {lengths.num_rows:,} rows, {steps} steps "
                f"train {steps * per_step:,}; no row counts twice, unless --with-replacement says that they are a "
                "sample."
            )
        if possible:
            longer = [window for window in windows if 1 < window <= possible]
            comparisons.append(_compare(_load(lengths, options, num_ranks, possible, longer), longer))
    if not comparisons:
        raise ValueError(
            f"{source} has {lengths.num_rows:,} rows, a step of {min(ranks)} ranks trains "
            f"{min(ranks) * options.batch_size:,}: lower --ranks or --batch-size, or give --with-replacement"
        )
    summary = options.tokens(lengths.summary(np.random.default_rng(options.seed)))
    model = options.model()
    ms = None
    if options.peak_tflops is not None or options.link_gbps is not None:
        ms = StepTime(options.peak_tflops, options.mfu, options.link_gbps)
    return Answer(
        source=source,
        num_rows=lengths.num_rows,
        tokens=summary,
        costs=options.costs(summary),
        task="tokens" if model is None else f"{options.task}, {_dimensions(model)}",
        comparisons=tuple(comparisons),
        bytes_per_token=options.bytes_per_token,
        time=ms,
        notes=tuple(notes),
    )


def _dimensions(model: AttentionTask) -> str:
    said = f"hidden {model.hidden_size}, {model.num_layers} layers, {model.num_heads} heads × {model.head_dim}"
    if isinstance(model, HSTUAttentionTask):
        said += f", values × {model.value_dim}" if model.value_dim else ""
        said += ", output of [u, x, y]" if model.concat_ux else ""
    return said


def _load(lengths: Lengths, options: LengthOptions, num_ranks: int, steps: int, windows: list[int]) -> LoadedRows:
    """The rows of the first steps, dealt as our loaders deal them: row i of all to rank i modulo the ranks."""
    shape = (steps, options.batch_size, num_ranks)
    if math.prod(shape) > _MOST_ROWS:
        raise ValueError(
            f"{steps} steps of {num_ranks} ranks × {options.batch_size} are {math.prod(shape):,} rows; at most "
            f"{_MOST_ROWS:,} are looked at: lower --steps"
        )
    taken = lengths.take(int(np.prod(shape)), np.random.default_rng(options.seed))
    tokens = np.ascontiguousarray(options.tokens(taken).reshape(shape).swapaxes(1, 2))
    workloads = options.costs(tokens)
    if not workloads.any():
        raise ValueError("all rows have length 0; there is nothing to balance: check the lengths")
    rows = LoadedRows(workloads, tokens)
    together = max([1, *windows])
    if together > _countable_steps(rows):
        heaviest = float(workloads.sum(axis=(1, 2), dtype=np.float64).max())
        raise ValueError(
            f"a step of {num_ranks} ranks × {options.batch_size} rows can cost {heaviest:.2g} operations, a window of "
            f"{together} as many times that; a plan counts to {MOST_LOAD:.2g}: lower --num-layers, which changes no "
            "ratio, or --batch-size"
        )
    return rows


def _compare(rows: LoadedRows, windows: list[int]) -> Comparison:
    ways: list[DealtRows] = []
    count = 5 + sum(window <= rows.num_steps for window in windows)
    with tqdm(total=count, desc=f"{rows.num_ranks} ranks", leave=False, disable=not sys.stderr.isatty()) as progress:
        for way in _all_ways(rows, windows):
            ways.append(way)
            progress.update()
    return compared(rows, ways)


def _all_ways(rows: LoadedRows, windows: list[int]) -> Iterator[DealtRows]:
    yield from compare_ways(rows, windows)
    yield _constant_cost(rows)


def _countable_steps(rows: LoadedRows) -> int:
    """Steps whose costs a plan can add up."""
    return int(MOST_LOAD / max(1.0, float(rows.workloads.sum(axis=(1, 2), dtype=np.float64).max())) * (1 - 1e-9))


def _constant_cost(rows: LoadedRows) -> DealtRows:
    """Steps of a sampler that fills them to a budget: that of a batch's average rows, at least the costliest row."""
    per_step = rows.num_ranks * rows.batch_size
    steps = min(rows.num_steps, max(_FEWEST_STEPS, _BUDGET_ROWS // per_step), _countable_steps(rows))
    steps = steps if rows.workloads[:steps].any() else rows.num_steps
    # In the order of the file again, in which a sampler fills steps.
    workloads, tokens = (values[:steps].swapaxes(1, 2).ravel() for values in (rows.workloads, rows.tokens))
    mean = float(workloads.mean())
    average_rows = max(rows.batch_size, math.ceil(int(workloads.max()) / mean))
    sampler = BudgetBatchSampler(
        workloads, budget_per_rank=math.ceil(average_rows * mean), num_ranks=rows.num_ranks, rank=0, shuffle=False
    )
    dealt, most_rows = [], 1
    begin = time.thread_time()
    planned = list(sampler.plan(epoch=0))
    spent = time.thread_time() - begin
    # The last step has what is left over; a whole epoch has many more steps.
    for of_rows, of_ranks in planned[:-1] or planned:
        loads, sums = np.zeros(rows.num_ranks, np.int64), np.zeros(rows.num_ranks, np.int64)
        np.add.at(loads, of_ranks, workloads[of_rows])
        np.add.at(sums, of_ranks, tokens[of_rows])
        dealt.append((loads, sums))
        most_rows = max(most_rows, int(np.bincount(of_ranks).max()))
    return dealt_steps("constant cost", dealt, 1e3 * spent / len(planned), Budget(average_rows, most_rows))
