"""What the steps of a run were like: their times, loss, rows, tokens, operations, and the shuffler's numbers."""

from __future__ import annotations

import dataclasses
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from commons.distributed.process_group import resolve_process_group
from commons.distributed.stats import ShuffleStats
from commons.perf_model.measured_saving import MeasuredSaving
from commons.perf_model.peak_rates import peak_flops_of
from commons.sequence_batch.open_batch import real_rows
from commons.trainer.observe.times import StepClock
from commons.trainer.ranks.collectives import gather_numbers

if TYPE_CHECKING:
    from commons.trainer.recipe import Recipe

# Fields of ShuffleStats with a number of every rank.
SNAPSHOTS = ("loads_before", "loads_after", "lookups_before", "lookups_after")
# Of more ranks than this, lines would be mostly these: every so many lines have them.
_MANY_RANKS, _EVERY = 256, 10
SPEEDS = ("rank_speeds", "speeds")
PER_RANK = (*SNAPSHOTS, *SPEEDS)
# Fields of ShuffleStats that are averaged over the steps that have them; switches become fractions of steps.
AVERAGED = [
    field.name for field in dataclasses.fields(ShuffleStats) if field.name not in ("step", "step_ms", *PER_RANK)
]


class StepOutput(Protocol):
    """What the model returns beside the loss to call `backward` on."""

    @property
    def loss_sum(self) -> torch.Tensor:
        """0-dimensional: the loss terms of this rank, summed."""

    @property
    def num_loss_tokens(self) -> int:
        """How many terms that are."""


class StepMeter:
    """Measures the steps of one run: takes every batch as it is loaded and every step as it ends.

    Rows move between ranks, but the rows of step n are those that all ranks loaded n-th.
    The peak rate of the device, for MFU, is that of the settings, else looked up.
    """

    def __init__(self, recipe: Recipe) -> None:
        device, peak_tflops = recipe.device, recipe.config.trainer.peak_tflops
        self._device, self._num_tokens, self._flops = device, recipe.num_tokens, recipe.flops
        self._peak_flops = peak_flops_of(device, recipe.compute_dtype) if peak_tflops is None else peak_tflops * 1e12
        self._clock = StepClock(device)
        # Rows, tokens and operations of batches that are loaded but not trained.
        self._loaded: deque[tuple[int, int, int]] = deque()
        self._saving = MeasuredSaving()
        self._ms_per_load: float | None = None
        # Of the steps since the last line; None among the stats for a step that was not balanced.
        self._sums = StepSums()
        self._stats: list[ShuffleStats | None] = []
        self._step_flops: list[int] = []
        # Of all steps.
        self._lines = 0
        self._loss = 0.0
        self._tokens = 0
        self._step_ms: list[float] = []
        self._mean_stats = StatsMean()
        self._imbalances: list[float] = []

    def loaded(self, batch: Any) -> None:
        """Take a host batch that this rank has loaded."""
        self._loaded.append((real_rows(batch), self._num_tokens(batch), self._flops(batch)))

    def begin(self) -> None:
        """Begin to measure; what has passed since the last step belongs to none."""
        self._clock.begin()

    def step(self, output: StepOutput, stats: ShuffleStats | None) -> None:
        """Take a step that has just ended; nothing is read from the device."""
        self._clock.end()
        rows, tokens, flops = self._loaded.popleft() if self._loaded else (0, 0, 0)
        self._sums.add(output.loss_sum, output.num_loss_tokens, rows=rows, tokens=tokens, flops=flops)
        self._step_flops.append(flops)
        self._stats.append(stats)

    def take(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Numbers of the steps since the last call, and what they describe; empty without steps. On all ranks together.

        `rank_speeds` and `speeds`, where they are known, are lists. What the numbers describe is for readers of the log
        and not worth a series: `ranks` that share the data; `steps`, and `total_ms` of them; `ms_per_load`, where it is
        known; and of the last step, if it was looked at, `loads_before`, `loads_after`, `lookups_before` and
        `lookups_after` of every rank. Of more than 256 ranks, the first line and every tenth after it have these.
        """
        step_ms = self._clock.take()
        if not step_ms:
            return {}, {}
        sums, total_ms = self._sums.all_reduce(self._device), sum(step_ms)
        numbers: dict[str, Any] = {
            "loss": sums.mean_loss,
            "tokens_per_s": sums.tokens / total_ms * 1e3,
            "rows_per_s": sums.rows / total_ms * 1e3,
            "step_ms": statistics.median(step_ms),
            **self._rates(sums.flops, total_ms),
            **self._imbalance(),
            **self._shuffle(step_ms),
            **self._speeds(),
        }
        details = self._describe(step_ms)
        self._sums, self._stats, self._step_flops = StepSums(), [], []
        self._loss = sums.mean_loss
        self._tokens += sums.tokens
        self._step_ms += step_ms
        return numbers, details

    def _describe(self, step_ms: list[float]) -> dict[str, Any]:
        ms_per_load, last = self._ms_per_load, self._stats[-1]
        ranks = dist.get_world_size(resolve_process_group())
        if ranks > _MANY_RANKS and self._lines % _EVERY:
            last = None
        self._lines += 1
        return {
            "ranks": ranks,
            "steps": len(step_ms),
            "total_ms": sum(step_ms),
            **({} if ms_per_load is None else {"ms_per_load": ms_per_load}),
            **({} if last is None else {name: list(getattr(last, name)) for name in SNAPSHOTS}),
        }

    def totals(self) -> dict[str, Any]:
        """Numbers of all steps that were taken, as TrainSummary has them; without the times, if there are none."""
        shuffle = self._mean_stats.means() or _not_balanced(self._imbalances)
        if not self._step_ms:
            return {"shuffle": shuffle}
        return {
            "loss": self._loss,
            "step_ms": statistics.median(self._step_ms),
            "tokens_per_s": self._tokens / sum(self._step_ms) * 1e3,
            "shuffle": shuffle,
        }

    def _rates(self, flops: float, total_ms: float) -> dict[str, float]:
        """TFLOPS per rank and, where the device's peak is known, the utilisation of the model."""
        rate = flops / dist.get_world_size() / total_ms * 1e3
        utilisation = {} if self._peak_flops is None else {"mfu": rate / self._peak_flops}
        return {"tflops_per_rank": rate / 1e12, **utilisation}

    def _imbalance(self) -> dict[str, float]:
        """Mean imbalance of the operations since the last line, where no shuffler has looked at the rows."""
        if any(stats is not None for stats in self._stats):
            return {}
        found = step_imbalances(self._step_flops, self._device)
        self._imbalances += found
        return _not_balanced(found)

    def _shuffle(self, step_ms: list[float]) -> dict[str, float]:
        """Means of the shuffler's numbers since the last line, completed by the time of the step that trained each."""
        timed = [dataclasses.replace(stats, step_ms=ms) for stats, ms in zip(self._stats, step_ms) if stats is not None]
        for stats in timed:
            self._saving.add(stats.largest_load_trained, stats.step_ms or 0.0)
        # Rank 0 writes the log.
        self._ms_per_load = ms_per_load = self._saving.ms_per_load() if dist.get_rank() == 0 else None
        mean = StatsMean()
        for stats in timed:
            if ms_per_load is not None:
                saved = stats.largest_load_before - stats.largest_load_after
                stats = dataclasses.replace(stats, measured_saving_ms=ms_per_load * saved)
            mean.add(stats)
            self._mean_stats.add(stats)
        return mean.means()

    def _speeds(self) -> dict[str, list[float | None]]:
        """Mean speeds of every rank since the last line, None where one is not known; nothing where none is."""
        means = {}
        for name in SPEEDS:
            said = [getattr(stats, name) for stats in self._stats if stats is not None]
            of_ranks = [[speed for speed in speeds if speed is not None] for speeds in zip(*said)]
            if any(of_ranks):
                means[name] = [statistics.fmean(each) if each else None for each in of_ranks]
        return means


class StatsMean:
    """Means of the shuffler's numbers over steps."""

    def __init__(self) -> None:
        self._counts = dict.fromkeys(AVERAGED, 0)
        self._sums = dict.fromkeys(AVERAGED, 0.0)

    def add(self, stats: ShuffleStats) -> None:
        """Add a step; what it does not know is left out."""
        for name in AVERAGED:
            value = getattr(stats, name)
            if value is not None:
                self._counts[name] += 1
                self._sums[name] += value

    def means(self) -> dict[str, float]:
        """By name, of what any step knew."""
        return {name: self._sums[name] / count for name, count in self._counts.items() if count}


@dataclass
class StepSums:
    """Sums over steps and, after `all_reduce`, over ranks."""

    loss_sum: torch.Tensor | None = None  # sum of all loss terms, float64, 0-dimensional; None before the first step
    loss_terms: int = 0  # number of terms
    tokens: int = 0  # tokens of the batches, as they were loaded
    rows: int = 0  # real rows of the batches, as they were loaded
    flops: int = 0  # operations of forward and backward pass; summed over ranks in float64, exact to 16 digits

    def add(self, loss_sum: torch.Tensor, loss_terms: int, *, tokens: int = 0, rows: int = 0, flops: int = 0) -> None:
        """Add a step; nothing is read from the device."""
        term = loss_sum.detach().double()
        self.loss_sum = term if self.loss_sum is None else self.loss_sum + term
        self.loss_terms += loss_terms
        self.tokens += tokens
        self.rows += rows
        self.flops += flops

    def all_reduce(self, device: torch.device) -> StepSums:
        """The sums over all data-parallel ranks; waits for the device."""
        counts = torch.tensor(
            [0.0, self.loss_terms, self.tokens, self.rows, self.flops], dtype=torch.float64, device=device
        )
        if self.loss_sum is not None:
            counts[0] = self.loss_sum
        gathered = gather_numbers(counts, "sums of a line of the log", group=resolve_process_group())
        loss_sum, *others = gathered.sum(0).tolist()
        return StepSums(torch.tensor(loss_sum, dtype=torch.float64), *map(int, others))

    @property
    def mean_loss(self) -> float:
        """Mean of all loss terms; 0 without any."""
        return 0.0 if self.loss_sum is None or self.loss_terms == 0 else float(self.loss_sum) / self.loss_terms


def of_all_ranks(value: float | None, device: torch.device) -> list[float | None]:
    """A positive number of every data-parallel rank, None for a rank without; called on all of them together."""
    own = torch.tensor([value or 0.0], dtype=torch.float64, device=device)
    values = gather_numbers(own, "numbers of a line of the log", group=resolve_process_group())
    return [each if each > 0 else None for each in values[:, 0].tolist()]


def step_imbalances(loads: Sequence[int], device: torch.device) -> list[float]:
    """Largest load divided by the mean, minus 1, of every step that had one; called on all ranks together.

    `loads` has one of this rank per step; as many on all data-parallel ranks.
    """
    own = torch.tensor(loads, dtype=torch.float64, device=device)
    of_ranks = gather_numbers(own, "loads of steps", group=resolve_process_group())
    mean = of_ranks.mean(0)
    return (of_ranks.amax(0) / mean - 1.0)[mean > 0].tolist()


def _not_balanced(imbalances: list[float]) -> dict[str, float]:
    """The mean imbalance of rows that stay where they are, by the shuffler's name for it."""
    return {"imbalance_before": statistics.fmean(imbalances)} if imbalances else {}
