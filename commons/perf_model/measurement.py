"""MEASURE: times training steps over a range of lengths and batch mixes.

A CostTarget is the user's model on the user's device: it builds a batch of given lengths, trains it, and counts the
tokens that it computes. `measure_steps` runs all batches in turn, several times, so that a drift of the machine's speed
affects all of them, and takes medians.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from commons.perf_model.calibration_fit import StepMeasurement
from commons.perf_model.task_estimator import AttentionTask

# Most tokens of a mix, as a fraction of those of a batch whose rows all have the greatest length.
_TOKEN_BUDGET = 0.5


class RowTokens(NamedTuple):
    """Int64 `(rows,)`, of the real rows of a batch: the arguments of `AttentionTask.get_workloads`."""

    seqlen: torch.Tensor  # tokens that the model computes
    num_targets: torch.Tensor | None = None  # how many of the last tokens are targets; None for no targets
    num_contextual: torch.Tensor | None = None  # first tokens that attend to all tokens except the targets; None for 0

    def cpu(self) -> RowTokens:
        """A copy on the host."""
        counts = (None if part is None else part.cpu() for part in self[1:])
        return RowTokens(self.seqlen.cpu(), *counts)


class CostTarget(Protocol):
    """A model to measure, such as a Recipe."""

    device: torch.device  # where it runs

    @property
    def task(self) -> AttentionTask:
        """Its dimensions."""

    def make_batch(self, lengths: Sequence[int]) -> Any:
        """A random batch on the device with rows of these lengths (items of a history, each at least 1)."""

    def train_step(self, batch: Any) -> None:
        """Forward and backward pass; need not clear gradients."""

    def row_tokens(self, batch: Any) -> RowTokens:
        """Tokens that the model computes for every real row."""


def draw_mixes(num_mixes: int, batch_size: int, max_length: int, seed: int) -> list[list[int]]:
    """Draw the row lengths of batches to measure.

    A mix has between 1 and twice `batch_size` rows, whose lengths are uniform on a logarithmic scale between two limits
    that are drawn for each mix: some mixes are even, some have a heavy tail. A mix has at most half the tokens of
    `batch_size` rows of the greatest length.

    Args:
        num_mixes: number of batches.
        batch_size: rows per rank in training.
        max_length: the longest row.
        seed: of the random draws.

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
        repeats: how often each batch is measured; the median is used.
        progress: wraps the iteration over all steps, for example in a progress bar.

    Raises:
        ValueError: no mixes, or `repeats` below 1.
    """
    if not mixes or repeats < 1:
        raise ValueError(f"there are {len(mixes)} mixes and repeats is {repeats}; both are at least 1: raise them")
    times: list[list[float]] = [[] for _ in mixes]
    largest = max(range(len(mixes)), key=lambda index: sum(mixes[index]))
    # Warm up allocators, kernels and caches with the largest batch.
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
