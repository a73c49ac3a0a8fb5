"""What training both ways measured: results by side, the figures computed from them, and the file with all of it.

A demo trains every batch as it was loaded and balanced, in turn; see `comparison_ranks`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dacite

from commons.datasets.whole_folder import whole_file

# Steps whose mean is called the final loss.
LAST_STEPS = 10
_FIRST_STEPS = 5


@dataclass
class SideResults:
    """What one side measured.

    Attributes:
        step_ms: milliseconds of every measured step.
        losses: mean loss of every step's global batch, those of the warm-up too.
        evaluation: loss, rows and metrics on held-out users.
    """

    step_ms: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    evaluation: dict[str, float] = field(default_factory=dict)


@dataclass
class ComparisonResults:
    """What a demo measured.

    Attributes:
        machine: what it ran on.
        num_ranks: ranks.
        batch_size: users per rank and step.
        max_history_seqlen: the most items of a user.
        num_layers: layers of the model.
        warmup_steps: steps that were not measured.
        quick: whether it was too short to say anything about time.
        unbalanced: batches as they are loaded.
        balanced: balanced batches.
        stats: the shuffler's stats of every measured step.
        baselines: metrics of what needs no training, by its name.
    """

    machine: dict[str, Any]
    num_ranks: int
    batch_size: int
    max_history_seqlen: int
    num_layers: int
    warmup_steps: int
    quick: bool
    unbalanced: SideResults
    balanced: SideResults
    stats: list[dict[str, Any]]
    baselines: dict[str, dict[str, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Figures:
    """The numbers that the table shows.

    Attributes:
        unbalanced_ms: median step time.
        balanced_ms: median step time, shuffle included.
        speedup: median over steps of unbalanced ÷ balanced time.
        speedup_low: lower end of its 95 % interval.
        speedup_high: upper end of its 95 % interval.
        speedup_of_medians: ratio of the median step times.
        speedup_of_totals: ratio of the total times.
        possible_speedup: median over steps of largest ÷ mean load before: a step cannot become faster than its mean.
        imbalance_before: mean over steps of largest ÷ mean load − 1.
        imbalance_after: the same of balanced batches.
        token_fraction_moved: mean over steps.
        rows_moved: mean over steps.
        shuffle_ms: mean over steps of what the shuffler took of rank 0's main thread.
        unbalanced_loss: mean of the last steps.
        balanced_loss: mean of the last steps.
        first_loss_difference: largest difference of a step's loss over the first steps: rounding.
        largest_loss_difference: the same over all steps: training amplifies rounding, as it does any other change of
            the weights by one part in ten million.
    """

    unbalanced_ms: float
    balanced_ms: float
    speedup: float
    speedup_low: float
    speedup_high: float
    speedup_of_medians: float
    speedup_of_totals: float
    possible_speedup: float
    imbalance_before: float
    imbalance_after: float
    token_fraction_moved: float
    rows_moved: float
    shuffle_ms: float
    unbalanced_loss: float
    balanced_loss: float
    first_loss_difference: float
    largest_loss_difference: float


def compute_figures(results: ComparisonResults) -> Figures:
    """The figures of a run."""
    unbalanced, balanced, stats = results.unbalanced, results.balanced, results.stats
    ratios = [slow / fast for slow, fast in zip(unbalanced.step_ms, balanced.step_ms)]
    low, high = median_interval(ratios)
    differences = [abs(a - b) for a, b in zip(unbalanced.losses, balanced.losses)]
    unbalanced_ms, balanced_ms = statistics.median(unbalanced.step_ms), statistics.median(balanced.step_ms)

    def mean_of(name: str) -> float:
        return statistics.fmean(one[name] for one in stats)

    return Figures(
        unbalanced_ms=unbalanced_ms,
        balanced_ms=balanced_ms,
        speedup=statistics.median(ratios),
        speedup_low=low,
        speedup_high=high,
        speedup_of_medians=unbalanced_ms / balanced_ms,
        speedup_of_totals=sum(unbalanced.step_ms) / sum(balanced.step_ms),
        possible_speedup=statistics.median(1 + one["imbalance_before"] for one in stats),
        imbalance_before=mean_of("imbalance_before"),
        imbalance_after=mean_of("imbalance_after"),
        token_fraction_moved=mean_of("token_fraction_moved"),
        rows_moved=mean_of("rows_moved"),
        shuffle_ms=mean_of("wait_ms") + mean_of("exchange_ms"),
        unbalanced_loss=statistics.fmean(unbalanced.losses[-LAST_STEPS:]),
        balanced_loss=statistics.fmean(balanced.losses[-LAST_STEPS:]),
        first_loss_difference=max(differences[:_FIRST_STEPS]),
        largest_loss_difference=max(differences),
    )


def median_interval(values: list[float]) -> tuple[float, float]:
    """A 95 % interval of the median, from the order of the values alone (normal approximation of the binomial).

    >>> median_interval([float(value) for value in range(100)])
    (40.0, 59.0)
    """
    ordered = sorted(values)
    half_width = 1.96 * math.sqrt(len(ordered)) / 2
    low = max(math.floor((len(ordered) - 1) / 2 - half_width) + 1, 0)
    return ordered[low], ordered[len(ordered) - 1 - low]


def results_path(run_dir: Path) -> Path:
    """Where the results of a run are."""
    return run_dir / "demo.json"


def write_results(results: ComparisonResults, run_dir: Path) -> None:
    """Write demo.json: the figures, then all that they were computed from."""
    content = {"figures": dataclasses.asdict(compute_figures(results)), **dataclasses.asdict(results)}
    with whole_file(results_path(run_dir)) as file:
        file.write((json.dumps(content, indent=1) + "\n").encode())


def read_results(run_dir: Path) -> ComparisonResults:
    """Read demo.json."""
    content = json.loads(results_path(run_dir).read_text(encoding="utf-8"))
    return dacite.from_dict(ComparisonResults, content)
