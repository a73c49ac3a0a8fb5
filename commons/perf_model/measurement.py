"""MEASURE: how long a training step takes, over a spread of lengths and batch mixes.

A CostTarget is the user's model on the user's device: it builds a batch of given lengths, trains it, and counts the
tokens that it computes. `measure_steps` runs batches of all kinds in turn, several times over, so that a machine that
drifts changes all of them alike, and takes medians.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from commons.perf_model.calibration_fit import StepMeasurement
from commons.perf_model.task_estimator import AttentionTask

# The most tokens of a mix, as a part of those of a batch whose rows are all as long as possible.
_TOKEN_BUDGET = 0.5


class RowTokens(NamedTuple):
    """What the model computes for the real rows of a batch, as `AttentionTask.get_workloads` takes it.

    Attributes:
        seqlen: int64 `(rows,)`, tokens.
        num_targets: int64 `(rows,)`, how many of the last ones are targets; None for none.
        num_contextual: int64 `(rows,)`, how many of the first ones see all but the targets; None for none.
    """

    seqlen: torch.Tensor
    num_targets: torch.Tensor | None = None
    num_contextual: torch.Tensor | None = None

    def cpu(self) -> RowTokens:
        """The same on the host."""
        counts = (None if part is None else part.cpu() for part in self[1:])
        return RowTokens(self.seqlen.cpu(), *counts)


class CostTarget(Protocol):
    """A model whose cost is to be known.

    Attributes:
        task: its dimensions.
        device: where it runs.
        batch_size: rows per rank in training.
        max_length: the longest row, in items as `make_batch` takes them.
    """

    task: AttentionTask
    device: torch.device
    batch_size: int
    max_length: int

    def make_batch(self, lengths: Sequence[int]) -> Any:
        """A random batch on the device, of rows of these lengths (items of a history, each at least 1)."""

    def train_step(self, batch: Any) -> None:
        """Forward and backward pass; gradients may be left behind."""

    def row_tokens(self, batch: Any) -> RowTokens:
        """Tokens that the model computes for every real row."""

    def host_batches(self) -> Iterator[Any]:
        """Batches of the training data, of `batch_size` rows, as a single rank would read them, each row once.

        Files end; data that are drawn at random had better not, for as many are read as there are ranks × steps.
        """


def draw_mixes(num_mixes: int, batch_size: int, max_length: int, seed: int) -> list[list[int]]:
    """Lengths of the rows of batches to measure.

    A mix has between 1 and twice `batch_size` rows, whose lengths are uniform on a logarithmic scale between two ends
    that differ from mix to mix: some mixes are even, some have a heavy tail. A mix has at most half the tokens of
    `batch_size` rows of the greatest length.

    Args:
        num_mixes: batches.
        batch_size: rows per rank in training.
        max_length: the longest row.
        seed: the same seed gives the same mixes.

    Raises:
        ValueError: a number below 1.
    """
    for name, value in (("num_mixes", num_mixes), ("batch_size", batch_size), ("max_length", max_length)):
        if value < 1:
            raise ValueError(f"{name} is {value}; batches have rows and rows have items: give at least 1")
    generator = np.random.default_rng(seed)
    budget = max(max_length, int(_TOKEN_BUDGET * batch_size * max_length))
    mixes = []
    for _ in range(num_mixes):
        low, high = sorted(generator.uniform(0, np.log(max_length), 2).tolist())
        num_rows = int(generator.integers(1, 2 * batch_size + 1))
        lengths = np.rint(np.exp(generator.uniform(low, high, num_rows))).astype(np.int64).clip(1, max_length)
        fitting = max(1, int(np.searchsorted(lengths.cumsum(), budget, side="right")))
        mixes.append(lengths[:fitting].tolist())
    return mixes


def measure_steps(
    target: CostTarget,
    mixes: Sequence[Sequence[int]],
    *,
    repeats: int = 3,
    progress: Callable[[Iterable[Any]], Iterable[Any]] = lambda steps: steps,
) -> list[StepMeasurement]:
    """Measure a step of every mix.

    Args:
        target: the model.
        mixes: lengths of the rows of each batch.
        repeats: times that each batch is measured; the median counts.
        progress: wraps the iteration over all steps, such as a progress bar.

    Raises:
        ValueError: no mixes, or `repeats` below 1.
    """
    if not mixes or repeats < 1:
        raise ValueError(
            f"there are {len(mixes)} mixes and repeats is {repeats}; at least one batch is measured once: raise them"
        )
    times: list[list[float]] = [[] for _ in mixes]
    largest = max(range(len(mixes)), key=lambda index: sum(mixes[index]))
    # Allocators, kernels and caches warm up with the batch that needs most.
    for _ in range(2):
        target.train_step(target.make_batch(mixes[largest]))
    sizes: list[tuple[int, int, int]] = [(0, 0, 0)] * len(mixes)
    for step in progress(range(repeats * len(mixes))):
        index = step % len(mixes)
        batch = target.make_batch(mixes[index])
        times[index].append(time_step(target, batch))
        sizes[index] = batch_size_of(target, batch)
    return [StepMeasurement(*size, statistics.median(ms)) for size, ms in zip(sizes, times)]


def time_step(target: CostTarget, batch: Any) -> float:
    """Milliseconds of one step, from an idle device to an idle device."""
    _wait_for(target.device)
    started = time.perf_counter()
    target.train_step(batch)
    _wait_for(target.device)
    return (time.perf_counter() - started) * 1e3


def batch_size_of(target: CostTarget, batch: Any) -> tuple[int, int, int]:
    """Rows, tokens and pairs of a batch."""
    tokens, pairs = target.task.tokens_and_pairs(*target.row_tokens(batch).cpu())
    return len(tokens), int(tokens.sum()), int(pairs.sum())


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
