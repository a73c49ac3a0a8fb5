"""What training both ways showed: the figures, and the file, the table and the picture of them."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from commons.run_log.standard_error import STANDARD_ERROR, shown_with_error
from commons.trainer.comparison import ComparisonResults
from commons.whole_folder import whole_file

# Steps whose mean is called the final loss.
_LAST_STEPS = 10
_FIRST_STEPS = 5
# Steps whose loads the picture shows; more would be too narrow to tell apart.
_SHOWN_STEPS = 30
_UNBALANCED, _BALANCED = "#c44e52", "#2a788e"


@dataclass(frozen=True)
class Wording:
    """What a demo calls things.

    Attributes:
        title: the model and its data.
        items: what a history is made of, such as "ratings".
        metrics: how a metric of the evaluation is called, by its name there.
    """

    title: str
    items: str
    metrics: Mapping[str, str] = field(default_factory=dict)


def report(results: ComparisonResults, run_dir: Path, console: Console, wording: Wording) -> None:
    """Write demo.json (the figures, then all that they were computed from), print the table and draw the picture."""
    figures = compute_figures(results)
    path, picture = run_dir / "demo.json", run_dir / "balance.png"
    with whole_file(path) as file:
        content = {"figures": figures, **dataclasses.asdict(results)}
        file.write((json.dumps(content, indent=1) + "\n").encode())
    console.print(make_table(results, figures, wording))
    if results.quick:
        console.print("a quick run, too short to say anything about time")
    with whole_file(picture) as file:
        draw(results, figures, wording).savefig(file, format="png", dpi=150)
    console.print(f"picture: {picture}    figures: {path}")


def compute_figures(results: ComparisonResults) -> dict[str, float]:
    """The numbers that the table shows.

    Returns:
        unbalanced_ms, balanced_ms: median step times, shuffle included.
        speedup: median over steps of unbalanced ÷ balanced time; speedup_low and speedup_high are its 95 % interval.
        speedup_of_medians, speedup_of_totals: ratios of the median and of the total times.
        possible_speedup: median over steps of largest ÷ mean load before: a step cannot become faster than its mean.
        imbalance_before, imbalance_after: mean over steps of largest ÷ mean load − 1.
        token_fraction_moved, rows_moved: means over steps.
        shuffle_ms: mean over steps of what the shuffler took of rank 0's main thread.
        unbalanced_loss, balanced_loss: means of the last steps.
        first_loss_difference: largest difference of a step's loss over the first steps: rounding.
        largest_loss_difference: the same over all steps: training amplifies rounding, as it does any other change of
            the weights by one part in ten million.
    """
    unbalanced, balanced, stats = results.unbalanced, results.balanced, results.stats
    ratios = [slow / fast for slow, fast in zip(unbalanced.step_ms, balanced.step_ms)]
    low, high = median_interval(ratios)
    differences = [abs(a - b) for a, b in zip(unbalanced.losses, balanced.losses)]
    unbalanced_ms, balanced_ms = statistics.median(unbalanced.step_ms), statistics.median(balanced.step_ms)

    def mean_of(name: str) -> float:
        return statistics.fmean(one[name] for one in stats)

    return {
        "unbalanced_ms": unbalanced_ms,
        "balanced_ms": balanced_ms,
        "speedup": statistics.median(ratios),
        "speedup_low": low,
        "speedup_high": high,
        "speedup_of_medians": unbalanced_ms / balanced_ms,
        "speedup_of_totals": sum(unbalanced.step_ms) / sum(balanced.step_ms),
        "possible_speedup": statistics.median(1 + one["imbalance_before"] for one in stats),
        "imbalance_before": mean_of("imbalance_before"),
        "imbalance_after": mean_of("imbalance_after"),
        "token_fraction_moved": mean_of("token_fraction_moved"),
        "rows_moved": mean_of("rows_moved"),
        "shuffle_ms": mean_of("wait_ms") + mean_of("exchange_ms"),
        "unbalanced_loss": statistics.fmean(unbalanced.losses[-_LAST_STEPS:]),
        "balanced_loss": statistics.fmean(balanced.losses[-_LAST_STEPS:]),
        "first_loss_difference": max(differences[:_FIRST_STEPS]),
        "largest_loss_difference": max(differences),
    }


def median_interval(values: list[float]) -> tuple[float, float]:
    """A 95 % interval of the median, from the order of the values alone (normal approximation of the binomial).

    >>> median_interval([float(value) for value in range(100)])
    (40.0, 59.0)
    """
    ordered = sorted(values)
    half_width = 1.96 * math.sqrt(len(ordered)) / 2
    low = max(math.floor((len(ordered) - 1) / 2 - half_width) + 1, 0)
    return ordered[low], ordered[len(ordered) - 1 - low]


def make_table(results: ComparisonResults, figures: Mapping[str, float], wording: Wording) -> Table:
    """Both ways side by side."""
    machine = results.machine
    table = Table(
        title=f"{wording.title}\n"
        f"{results.num_layers} layers, {results.num_ranks} ranks × {results.batch_size} users, up to "
        f"{results.max_history_seqlen:,} {wording.items} each\n"
        f"{len(results.stats)} steps, each trained both ways in turn",
        caption=f"{machine['device']}: {machine['processor']}, {machine['cpu_count']} cores, torch {machine['torch']}\n"
        "Both ways see the same batches; float32 rounding grows with every step.",
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("")
    for name in ("unbalanced", "balanced", "gain"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_row(
        "load, largest ÷ mean − 1", f"{figures['imbalance_before']:.1%}", f"{figures['imbalance_after']:.2%}", ""
    )
    table.add_row(
        "median step, shuffle included",
        f"{figures['unbalanced_ms']:.1f} ms",
        f"{figures['balanced_ms']:.1f} ms",
        f"{figures['speedup_of_medians']:.2f}×",
    )
    table.add_row("speed-up, median of steps", "", "", f"[bold]{figures['speedup']:.2f}×[/bold]")
    table.add_row("  its 95 % interval", "", f"{figures['speedup_low']:.2f} to {figures['speedup_high']:.2f}", "")
    table.add_row("speed-up, all steps together", "", "", f"{figures['speedup_of_totals']:.2f}×")
    table.add_row("most it can be (largest ÷ mean)", "", "", f"{figures['possible_speedup']:.2f}×", end_section=True)
    table.add_row("tokens moved to another rank", "", f"{figures['token_fraction_moved']:.1%}", "")
    table.add_row("shuffle on the main thread", "", f"{figures['shuffle_ms']:.1f} ms", "", end_section=True)
    last = min(_LAST_STEPS, len(results.balanced.losses))
    table.add_row(
        f"loss, last {last} steps", f"{figures['unbalanced_loss']:.4f}", f"{figures['balanced_loss']:.4f}", ""
    )
    table.add_row("loss difference, first steps", "", f"{figures['first_loss_difference']:.0e}", "")
    table.add_row("loss difference, all steps", "", f"{figures['largest_loss_difference']:.0e}", "")
    for name, label in wording.metrics.items():
        table.add_row(
            f"{label}, {results.balanced.evaluation['rows']:,} held-out users",
            *(
                shown_with_error(each.evaluation[name], each.evaluation.get(name + STANDARD_ERROR))
                for each in (results.unbalanced, results.balanced)
            ),
            "",
        )
        for baseline, metrics in results.baselines.items():
            table.add_row(f"  {baseline}", "", f"{metrics[name]:.4f}", "")
    return table


def draw(results: ComparisonResults, figures: Mapping[str, float], wording: Wording) -> Figure:
    """Load per rank on the left, step times on the right."""
    figure = Figure(figsize=(12, 4.8), layout="constrained")
    loads, times = figure.subplots(1, 2, width_ratios=(1.35, 1))
    _draw_loads(loads, results)
    _draw_times(times, results, figures)
    device = results.machine["device"]
    figure.suptitle(
        f"{wording.title}: {results.num_ranks} ranks on "
        f"{'the CPU' if device == 'cpu' else device}, {results.batch_size} users each",
        fontsize=11,
    )
    return figure


def _draw_loads(axes: Axes, results: ComparisonResults) -> None:
    shown = results.stats[:_SHOWN_STEPS]
    steps = range(1, len(shown) + 1)
    for name, key, color, shift in (
        ("as loaded", "loads_before", _UNBALANCED, -0.16),
        ("balanced", "loads_after", _BALANCED, 0.16),
    ):
        relative = [[load * len(one[key]) / max(sum(one[key]), 1) for load in one[key]] for one in shown]
        places = [step + shift for step in steps]
        axes.vlines(places, [min(loads) for loads in relative], [max(loads) for loads in relative], color=color, lw=1.2)
        # One dot per rank; ranks need no colours of their own.
        axes.scatter(
            [place for place, loads in zip(places, relative) for _ in loads],
            [load for loads in relative for load in loads],
            s=22,
            color=color,
            label=f"{name} (one dot per rank)",
            zorder=3,
        )
    axes.axhline(1.0, color="0.6", lw=0.8, zorder=0)
    axes.set(
        xlabel="measured step",
        ylabel="load of a rank ÷ mean of the ranks",
        title="What each rank computes: all wait for the highest dot",
        xlim=(0.2, len(shown) + 0.8),
    )
    axes.set_ylim(top=axes.get_ylim()[1] * 1.12)  # room for the legend
    axes.legend(loc="upper center", ncols=2, frameon=False)
    _tidy(axes)


def _draw_times(axes: Axes, results: ComparisonResults, figures: Mapping[str, float]) -> None:
    for name, side, color, median in (
        ("unbalanced", results.unbalanced, _UNBALANCED, figures["unbalanced_ms"]),
        ("balanced", results.balanced, _BALANCED, figures["balanced_ms"]),
    ):
        count = len(side.step_ms)
        percent = [100 * (index + 0.5) / count for index in range(count)]
        axes.plot(percent, sorted(side.step_ms), color=color, lw=2, label=f"{name}, median {median:.0f} ms")
        axes.plot([50], [median], "o", color=color)
    axes.set(
        xlabel="steps, fastest first (%)",
        ylabel="step time (ms), shuffle included",
        title=f"Step times: {figures['speedup']:.2f}× faster, of {figures['possible_speedup']:.2f}× possible",
        xlim=(0, 100),
    )
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper left", frameon=False)
    _tidy(axes)


def _tidy(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="0.92")
    axes.set_axisbelow(True)
