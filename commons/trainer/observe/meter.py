"""Measurements of a run's steps: times, loss, rows, tokens, FLOPs, and the shuffler's stats."""

from __future__ import annotations

import dataclasses
import statistics
from collections import deque
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

# Fields of ShuffleStats with one number per rank.
SNAPSHOTS = ("loads_before", "loads_after", "lookups_before", "lookups_after")
# With more ranks than the first number, only every n-th line has the numbers per rank: they would dominate the log.
_MANY_RANKS, _EVERY = 256, 10
SPEEDS = ("rank_speeds", "speeds")
PER_RANK = (*SNAPSHOTS, *SPEEDS)
# Fields of ShuffleStats that are averaged over the steps with a value; a bool becomes a fraction of steps.
AVERAGED = [
    field.name for field in dataclasses.fields(ShuffleStats) if field.name not in ("step", "step_ms", *PER_RANK)
]


class StepOutput(Protocol):
    """The model's second output; the first is the loss to call `backward` on."""

    @property
    def loss_sum(self) -> torch.Tensor:
        """Sum of this rank's loss terms, 0-dimensional."""

    @property
    def num_loss_tokens(self) -> int:
        """Number of this rank's loss terms."""


class StepMeter:
    """Measures the steps of one run from every loaded batch and every finished step.

    Rows move between ranks, but over all ranks the rows of step n are the rows of the n-th loaded batches. The peak of
    the device, for MFU, is `peak_tflops` of the settings or, without it, from a table.
    """

    def __init__(self, recipe: Recipe) -> None:
        device, peak_tflops = recipe.device, recipe.config.trainer.peak_tflops
        self._device, self._num_tokens, self._flops = device, recipe.num_tokens, recipe.flops
        self._peak_flops = peak_flops_of(device, recipe.compute_dtype) if peak_tflops is None else peak_tflops * 1e12
        self._clock = StepClock(device)
        # Rows, tokens and FLOPs of batches that are loaded but not yet trained.
        self._loaded: deque[tuple[int, int, int]] = deque()
        self._saving = MeasuredSaving()
        self._ms_per_load: float | None = None
        # Of the steps since the last line; the stats are None for a step without shuffle.
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
        """Count a host batch that this rank has loaded."""
        self._loaded.append((real_rows(batch), self._num_tokens(batch), self._flops(batch)))

    def begin(self) -> None:
        """Begin to measure; the time since the last step belongs to no step."""
        self._clock.begin()

    def step(self, output: StepOutput, stats: ShuffleStats | None) -> None:
        """Add a step that has just ended; reads nothing from the device."""
        self._clock.end()
        rows, tokens, flops = self._loaded.popleft() if self._loaded else (0, 0, 0)
        self._sums.add(output.loss_sum, output.num_loss_tokens, rows=rows, tokens=tokens, flops=flops)
        self._step_flops.append(flops)
        self._stats.append(stats)

    def take(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Numbers and details of the steps since the last call, both empty without steps; called on all ranks together.

        The numbers `rank_speeds` and `speeds`, if known, are lists. Details are written to the log only, not to sinks:
        `ranks`, the number of ranks that share the data; `steps` and their `total_ms`; `ms_per_load`, if known; and, if
        the shuffler has planned the last step, its `loads_before`, `loads_after`, `lookups_before` and `lookups_after`
        per rank. With more than 256 ranks, only the first line and every tenth after it have the last four.
        """
        step_ms = self._clock.take()
        if not step_ms:
            return {}, {}
        sums, total_ms = self._sums.all_reduce(self._device), sum(step_ms)
        flops_per_s = sums.flops / dist.get_world_size() / total_ms * 1e3  # of a rank
        numbers: dict[str, Any] = {
            "loss": sums.mean_loss,
            "tokens_per_s": sums.tokens / total_ms * 1e3,
            "rows_per_s": sums.rows / total_ms * 1e3,
            "step_ms": statistics.median(step_ms),
            "tflops_per_rank": flops_per_s / 1e12,
            **({} if self._peak_flops is None else {"mfu": flops_per_s / self._peak_flops}),
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
        """The fields of TrainSummary that come from steps; without any step only `shuffle`."""
        shuffle = self._mean_stats.means() or _not_balanced(self._imbalances)
        if not self._step_ms:
            return {"shuffle": shuffle}
        return {
            "loss": self._loss,
            "step_ms": statistics.median(self._step_ms),
            "tokens_per_s": self._tokens / sum(self._step_ms) * 1e3,
            "shuffle": shuffle,
        }

    def _imbalance(self) -> dict[str, float]:
        """Mean imbalance of the FLOPs since the last line, if no shuffler has planned these steps."""
        if any(stats is not None for stats in self._stats):
            return {}
        own = torch.tensor(self._step_flops, dtype=torch.float64, device=self._device)
        per_rank = gather_numbers(own, "loads of steps", group=resolve_process_group())
        mean = per_rank.mean(0)
        found = (per_rank.amax(0) / mean - 1.0)[mean > 0].tolist()
        self._imbalances += found
        return _not_balanced(found)

    def _shuffle(self, step_ms: list[float]) -> dict[str, float]:
        """Means of the shuffler's stats since the last line, with the time of the step that trained each batch."""
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
        """Mean speed of every rank since the last line, None for an unknown speed; empty if no speed is known."""
        means = {}
        for name in SPEEDS:
            by_step = [getattr(stats, name) for stats in self._stats if stats is not None]
            per_rank = [[speed for speed in speeds if speed is not None] for speeds in zip(*by_step)]
            if any(per_rank):
                means[name] = [statistics.fmean(each) if each else None for each in per_rank]
        return means


class StatsMean:
    """Means of the shuffler's stats over steps."""

    def __init__(self) -> None:
        self._counts = dict.fromkeys(AVERAGED, 0)
        self._sums = dict.fromkeys(AVERAGED, 0.0)

    def add(self, stats: ShuffleStats) -> None:
        """Add the stats of a step, except fields that are None."""
        for name in AVERAGED:
            value = getattr(stats, name)
            if value is not None:
                self._counts[name] += 1
                self._sums[name] += value

    def means(self) -> dict[str, float]:
        """The means by name, of the fields that any step had."""
        return {name: self._sums[name] / count for name, count in self._counts.items() if count}


@dataclass
class StepSums:
    """Sums over steps and, after `all_reduce`, over ranks."""

    loss_sum: torch.Tensor | None = None  # sum of all loss terms, float64, 0-dimensional; None before the first step
    loss_terms: int = 0  # number of terms
    tokens: int = 0  # tokens of the loaded batches
    rows: int = 0  # real rows of the loaded batches
    flops: int = 0  # FLOPs of forward and backward pass; summed over ranks in float64, exact to 16 digits

    def add(self, loss_sum: torch.Tensor, loss_terms: int, *, tokens: int = 0, rows: int = 0, flops: int = 0) -> None:
        """Add a step; reads nothing from the device."""
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
        return StepSums(torch.tensor(loss_sum, dtype=torch.float64, device="cpu"), *map(int, others))

    @property
    def mean_loss(self) -> float:
        """Mean of all loss terms; 0 without any."""
        return 0.0 if self.loss_sum is None or self.loss_terms == 0 else float(self.loss_sum) / self.loss_terms


def of_all_ranks(value: float | None, device: torch.device) -> list[float | None]:
    """Gather a positive number from every data-parallel rank, None for a rank without one; a collective call."""
    own = torch.tensor([value or 0.0], dtype=torch.float64, device=device)
    values = gather_numbers(own, "numbers of a line of the log", group=resolve_process_group())
    return [each if each > 0 else None for each in values[:, 0].tolist()]


def _not_balanced(imbalances: list[float]) -> dict[str, float]:
    """The mean imbalance of unbalanced steps, under the name of the shuffler's field."""
    return {"imbalance_before": statistics.fmean(imbalances)} if imbalances else {}
