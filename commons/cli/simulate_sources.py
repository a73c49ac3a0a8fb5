"""What `evenrank simulate` looks at: rows from lengths or from the batches of a config, behind one protocol."""

from __future__ import annotations

import itertools
import math
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from commons.cli.lengths import Lengths
from commons.datasets.samplers.budget import BudgetBatchSampler
from commons.perf_model.gain import Budget, Comparison, DealtRows, LoadedRows, StepCost, compare_ways, deal
from commons.perf_model.partitioner.core import sum_at
from commons.perf_model.partitioner.inputs import MOST_LOAD
from commons.perf_model.task_estimator import AttentionTask, HSTUAttentionTask

if TYPE_CHECKING:
    from commons.distributed.options import ShufflerOptions

# Rows that steps of constant cost are planned for, and at least so many steps: each is found by a search.
_BUDGET_ROWS = 1 << 18
_FEWEST_STEPS = 8
# Rows of all steps together, a few arrays of which fit a host.
_MOST_ROWS = 1 << 28


@dataclass(frozen=True, eq=False)
class Source(ABC):
    """Rows to simulate."""

    name: str  # of the rows, as the user named them
    num_rows: int | None  # rows that there are; None for any number
    batch_size: int  # rows of a rank in a step
    task: str  # what a row costs, in words
    of_what: str  # what a speed-up is a ratio of
    cost: StepCost | None  # turns loads into milliseconds; None for none
    bytes_per_token: int | None  # what a token takes on the wire; None where it is not known
    remedy: str  # what gives more steps where there are too few rows

    @abstractmethod
    def load(self, num_ranks: int, steps: int) -> LoadedRows:
        """The rows of the first steps, where training loads them; there are rows for all of them."""

    @abstractmethod
    def summary(self) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and costs of rows, int64 `(n,)` each, to describe the whole by."""

    @abstractmethod
    def ways(self, rows: LoadedRows, windows: Sequence[int]) -> Iterator[DealtRows]:
        """Ways of dealing them; the first is as loaded."""


def compare(source: Source, num_ranks: int, steps: int, windows: Sequence[int]) -> Comparison:
    """Deal the rows of a number of ranks in every way; ValueError without work, or with more than a plan counts."""
    rows = source.load(num_ranks, steps)
    longer = [window for window in windows if 1 < window <= steps]
    if not rows.workloads.any():
        raise ValueError("all rows have length 0; there is nothing to balance: check the lengths")
    heaviest = _heaviest_step(rows)
    if max([1, *longer]) * heaviest >= MOST_LOAD:
        raise ValueError(
            f"a step of {num_ranks} ranks × {source.batch_size} rows can cost {heaviest:.2g} operations, a window of "
            f"{max([1, *longer])} as many times that; a plan counts to {MOST_LOAD:.2g}: lower --num-layers, which "
            "changes no ratio, or the rows of a step"
        )
    found = source.ways(rows, longer)
    ways = tqdm(found, f"{num_ranks} ranks", unit="way", leave=False, disable=not sys.stderr.isatty())
    return Comparison(rows, tuple(ways), source.cost)


def _heaviest_step(rows: LoadedRows) -> float:
    return float(np.bincount(rows.step, rows.workloads.astype(np.float64)).max())


@dataclass(frozen=True, eq=False)
class LengthRows(Source):
    """Rows of given lengths, dealt to ranks in turn."""

    lengths: Lengths  # of the rows
    to_tokens: Callable[[np.ndarray], np.ndarray]  # tokens of lengths
    to_costs: Callable[[np.ndarray], np.ndarray]  # costs of tokens
    seed: int  # of the order, and of draws

    @classmethod
    def of(
        cls,
        lengths: Lengths,
        task: AttentionTask | None,
        to_tokens: Callable[[np.ndarray], np.ndarray],
        to_costs: Callable[[np.ndarray], np.ndarray],
        *,
        seed: int = 0,
        batch_size: int,
        cost: StepCost | None = None,
        bytes_per_token: int | None = None,
    ) -> LengthRows:
        """Rows whose cost is that of a task; their tokens for None. Arguments as in the class."""
        return cls(
            name=lengths.name,
            num_rows=lengths.num_rows,
            batch_size=batch_size,
            task=describe(task),
            of_what="in tokens of the slowest rank" if task is None else "in the layers' time",
            cost=cost,
            bytes_per_token=bytes_per_token,
            remedy="lower --ranks or --batch-size, or give --with-replacement if they are a sample",
            lengths=lengths,
            to_tokens=to_tokens,
            to_costs=to_costs,
            seed=seed,
        )

    def load(self, num_ranks: int, steps: int) -> LoadedRows:
        """See Source."""
        count = steps * num_ranks * self.batch_size
        if count > _MOST_ROWS:
            raise ValueError(
                f"{steps} steps of {num_ranks} ranks × {self.batch_size} are {count:,} rows; at most {_MOST_ROWS:,} "
                "are looked at: lower --steps"
            )
        tokens = self.to_tokens(self.lengths.take(count, np.random.default_rng(self.seed)))
        return LoadedRows.in_turn(self.to_costs(tokens), tokens, num_ranks, self.batch_size)

    def summary(self) -> tuple[np.ndarray, np.ndarray]:
        """See Source."""
        tokens = self.to_tokens(self.lengths.summary(np.random.default_rng(self.seed)))
        return tokens, self.to_costs(tokens)

    def ways(self, rows: LoadedRows, windows: Sequence[int]) -> Iterator[DealtRows]:
        """See Source."""
        yield from compare_ways(rows, windows)
        yield constant_cost(rows, self.batch_size)


def constant_cost(rows: LoadedRows, batch_size: int) -> DealtRows:
    """Steps of a sampler that fills them to a budget: that of a batch's average rows, at least the costliest row."""
    per_step = rows.num_ranks * batch_size
    countable = int(MOST_LOAD / max(1.0, _heaviest_step(rows)) * (1 - 1e-9))
    some = rows.first_steps(min(max(_FEWEST_STEPS, _BUDGET_ROWS // per_step), countable))
    rows = some if some.workloads.any() else rows
    mean = float(rows.workloads.mean())
    average_rows = max(batch_size, math.ceil(int(rows.workloads.max()) / mean))
    sampler = BudgetBatchSampler(
        rows.workloads, budget_per_rank=math.ceil(average_rows * mean), num_ranks=rows.num_ranks, rank=0, shuffle=False
    )
    begin = time.thread_time()
    planned = list(sampler.plan(epoch=0))
    planning_ms = 1e3 * (time.thread_time() - begin) / len(planned)
    # The last step has what is left over; a whole epoch has many more steps.
    steps = planned[:-1] or planned
    loads, tokens = (
        np.stack([sum_at(ranks, values[of_rows], rows.num_ranks) for of_rows, ranks in steps])
        for values in (rows.workloads, rows.tokens)
    )
    most_rows = max(int(np.bincount(ranks).max()) for _, ranks in steps)
    return DealtRows("constant cost", loads, tokens, planning_ms=planning_ms, budget=Budget(average_rows, most_rows))


@dataclass(frozen=True, eq=False)
class ConfigRows(Source):
    """The rows of the batches of a training run, dealt to ranks as its loaders deal them."""

    # workloads and tokens of the real rows of every batch, as a single rank reads them
    batches: Sequence[tuple[np.ndarray, np.ndarray]]
    draws_per_rank: bool  # whether each rank draws batches of its own; else the rows of a step are dealt in turn
    plan_options: dict[str, Any]  # as for `plan_shuffle`

    @classmethod
    def read(cls, config: Path, model: str | None, shuffler: ShufflerOptions, num_batches: int) -> ConfigRows:
        """Read the first batches of a training run, fewer where the data end; arguments and errors as `load_recipe`.

        `shuffler` says how batches are balanced; its calibration may not be found, or not fit, either.
        """
        # Imported here: it needs TorchRec, and lengths alone do not.
        import torch

        from commons.cli.recipes import load_recipe
        from commons.perf_model.calibration import CalibratedTask, load_calibration

        calibration = None if shuffler.calibration is None else load_calibration(shuffler.calibration)
        target = load_recipe(model, config, torch.device("cpu"))
        calibrated = None if calibration is None else CalibratedTask(target.task, calibration)
        batches = []
        wanted = itertools.islice(target.host_batches(), num_batches)
        for batch in tqdm(wanted, "read", num_batches, unit="batch", leave=False, disable=not sys.stderr.isatty()):
            rows = target.row_tokens(batch)
            tokens, _ = target.task.tokens_and_pairs(*rows)
            batches.append(((calibrated or target.task).get_workloads(*rows).numpy(), tokens.numpy()))
        num_rows = sum(len(workloads) for workloads, _ in batches)
        ends = len(batches) < num_batches
        # In training every rank ends with as few rows; here one rank alone would.
        if ends and batches and len(batches[-1][0]) < target.batch_size:
            del batches[-1]
        return cls(
            name=str(config),
            batches=batches,
            # A target that is no Recipe may not say; its rows are dealt as those of files are.
            draws_per_rank=getattr(target, "draws_per_rank", False),
            plan_options=shuffler.plan_arguments(),
            num_rows=num_rows if ends else None,
            batch_size=target.batch_size,
            task=describe(target.task),
            of_what="in the layers' time" if calibrated is None else "of a whole step, by the calibration",
            bytes_per_token=None,
            remedy="lower --ranks, or train_batch_size in the config",
            cost=StepCost(1 / calibrated.units_per_ms, calibrated.calibration.per_step) if calibrated else None,
        )

    def load(self, num_ranks: int, steps: int) -> LoadedRows:
        """See Source."""
        batches = self.batches[: num_ranks * steps]
        sizes = [len(workloads) for workloads, _ in batches]
        step = np.repeat(np.arange(len(batches)) // num_ranks, sizes)
        if self.draws_per_rank:
            rank = np.repeat(np.arange(len(batches)) % num_ranks, sizes)
        else:
            rank = (np.arange(len(step)) - np.searchsorted(step, step)) % num_ranks
        workloads, tokens = (np.concatenate(columns) for columns in zip(*batches))
        return LoadedRows(workloads, tokens, step, rank, num_ranks)

    def summary(self) -> tuple[np.ndarray, np.ndarray]:
        """See Source."""
        workloads, tokens = (np.concatenate(columns) for columns in zip(*self.batches))
        return tokens, workloads

    def ways(self, rows: LoadedRows, windows: Sequence[int]) -> Iterator[DealtRows]:
        """See Source."""
        yield rows.as_loaded
        yield deal(rows, "each batch", **self.plan_options)
        for window in windows:
            yield deal(rows, f"window of {window}", window, **self.plan_options)


def describe(task: AttentionTask | None) -> str:
    """The dimensions of a model in words; "tokens" for none."""
    if task is None:
        return "tokens"
    kind = "hstu" if isinstance(task, HSTUAttentionTask) else "transformer"
    text = f"{kind}, hidden {task.hidden_size}, {task.num_layers} layers, {task.num_heads} heads × {task.head_dim}"
    if isinstance(task, HSTUAttentionTask):
        text += f", values × {task.value_dim}" if task.value_dim else ""
        text += ", output of [u, x, y]" if task.concat_ux else ""
        text += f", attention within {task.max_attn_len} tokens" if task.max_attn_len else ""
    return text
