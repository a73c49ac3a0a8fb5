"""The pictures of `evenrank report`: imbalance, loads of the ranks, step time and loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from commons.cli.pictures import COLORS, LOOKS, Picture, as_text, legend_above, percents, whole_numbers
from commons.run_log.reading import RunLog, short_names
from commons.run_log.report import RunReport
from commons.run_log.step_time import PARTS

# Most ranks that are shown by number; more ranks are shown sorted, the fullest first.
_MOST_RANKS = 64
# Most points of a curve; for a longer log, points are means of lines.
_MOST_POINTS = 300
# Least range of an axis: from 0 for an imbalance, relative to the values for other numbers.
_LEAST_IMBALANCE, _LEAST_SPAN = 0.01, 0.01
# Colour and hatch of the parts of a step.
_LOOKS_OF_PARTS = dict(
    zip(
        PARTS,
        (("after", ""), ("before", "////"), ("third", "\\\\\\\\"), ("fourth", "xx"), ("muted", ""), ("grid", "..")),
    )
)


def pictures_of(reports: Sequence[RunReport]) -> tuple[Picture, ...]:
    """All pictures of one run, or the three pictures that compare several runs."""
    # Unbalanced runs first: the first run has the colour of unbalanced loads and is at the top.
    reports = sorted(reports, key=lambda report: not report.is_as_loaded)
    names = [_short(name, 24) for name in short_names([report.log.name for report in reports])]
    return tuple(_pictures_of(reports, names))


def _pictures_of(reports: Sequence[RunReport], names: Sequence[str]) -> Iterator[Picture]:
    log, is_balanced = reports[0].log, reports[0].balancing == "balanced"
    title, of = "Imbalance", ""
    lines = [("as loaded", log, "before"), ("balanced" if is_balanced else "planned", log, "after")]
    if not reports[0].knows_loaded:
        lines = [("as trained", log, "before")]
    if len(reports) > 1:
        title, of = "Imbalance as trained", ", as each run trained its rows"
        lines = [(name, each.log, each.trained) for name, each in zip(names, reports)]
    yield from _curves(
        title,
        f"Largest load ÷ mean − 1 of the ranks{of}: mean of the steps of each line of the log. 0 % is a step in which "
        "no rank waits.",
        [(name, log, f"imbalance_{as_what}") for name, log, as_what in lines],
        "largest ÷ mean − 1",
        _percent_from_zero,
    )
    if len(reports) == 1:
        # A sampler's log has no keys of the rows as loaded.
        for what, title, meaning, is_moved in (
            ("loads", "Load of each rank", "work", is_balanced),
            ("lookups", "Keys of each rank", "embedding lookups", reports[0].moves_rows),
        ):
            before = "as trained" if reports[0].by_work and not is_moved else "as loaded"
            columns = {before: f"{what}_before"} | ({"balanced": f"{what}_after"} if is_moved else {})
            yield from _ranks(log, title, meaning, columns)
        text = "Median of the steps of each line of the log, in milliseconds."
        yield from _curves("Time of a step", text, [("", log, "step_ms")], "ms", _from_zero)
    yield from _parts(reports)
    losses = [(name, report.log, "loss") for name, report in zip(names, reports)]
    yield from _curves("Loss", "Mean of the steps of each line of the log.", losses, "loss", _widen)


def _curves(
    title: str, text: str, lines: Sequence[tuple[str, RunLog, str]], ylabel: str, finish: Callable[[Axes], Any]
) -> Iterator[Picture]:
    """A picture of columns of logs over steps, by label; no picture if no log has values of its column."""
    curves = [(number, label, *curve_of(log, column)) for number, (label, log, column) in enumerate(lines)]
    curves = [curve for curve in curves if len(curve[3])]

    def draw(axes: Axes) -> None:
        for number, label, steps, values in curves:
            (color, _, marker), style = LOOKS[number % len(LOOKS)], (number + number // len(LOOKS)) % len(LOOKS)
            axes.plot(
                steps,
                values,
                color=COLORS[color],
                linestyle=LOOKS[style][1],
                # The first line is wider, so that it stays visible under other lines.
                linewidth=3.2 if number == 0 and len(curves) > 1 else 1.8,
                marker=marker if len(values) <= 20 else "",  # without a marker, a single point would be invisible
                label=label,
            )
        axes.set(xlabel="step", ylabel=ylabel)
        whole_numbers(axes)
        finish(axes)
        if any(label for _, label, _, _ in curves):
            legend_above(axes)

    if curves:
        yield Picture(title, text, draw, height=max(300, 240 + 20 * len(curves)))  # a long name has a line above it


def _from_zero(axes: Axes) -> None:
    """Show values from 0, with room above them also if they hardly differ."""
    axes.set_ylim(0, 1.05 * axes.get_ylim()[1])


def _percent_from_zero(axes: Axes) -> None:
    """Show at least 0 to 1 %, because otherwise small noise would fill the picture, with ticks that all read 0 %."""
    axes.set_ylim(0, max(_LEAST_IMBALANCE, axes.get_ylim()[1]))
    percents(axes)


def _widen(axes: Axes) -> None:
    """Let an axis span at least a hundredth of its values, with full numbers at its ticks instead of an offset."""
    low, high = axes.get_ylim()
    least = _LEAST_SPAN * max(abs(low), abs(high))
    if high - low < least:
        middle = (low + high) / 2
        axes.set_ylim(middle - least / 2, middle + least / 2)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.5g}")


def _ranks(log: RunLog, title: str, meaning: str, columns: dict[str, str]) -> Iterator[Picture]:
    """A picture of each rank's share; `columns` are the log's columns by label. No picture if the log has no values."""
    known = {label: _relative(log, column) for label, column in columns.items()}
    shown = {label: values for label, values in known.items() if values is not None}
    if not shown:
        return
    lines, ranks = next(iter(shown.values())).shape
    order = "" if ranks <= _MOST_RANKS else ", ranks sorted by it, the largest first"
    text = (
        f"Each rank's {meaning} ÷ the mean of the ranks{order}: mean and range over the last steps of {lines} lines of "
        f"the log. {', '.join(shown).capitalize()}."
    )
    yield Picture(title, text, partial(_draw_ranks, shown, ranks))


def _relative(log: RunLog, name: str) -> np.ndarray | None:
    """Each rank's value ÷ the mean of the ranks, float64 `(lines, ranks)`, of lines with the last line's ranks."""
    known = [values for values in log.of_ranks.get(name, ()) if values is not None and len(values) > 1]
    if not known:
        return None
    same = np.stack([values for values in known if len(values) == len(known[-1])])
    means = np.nanmean(same, axis=1, keepdims=True)  # in one call: a long log has many thousand lines
    shown = means[:, 0] > 0
    return same[shown] / means[shown] if shown.any() else None


def _draw_ranks(shown: dict[str, np.ndarray], count: int, axes: Axes) -> None:
    """Draw a dot for the mean and a line for the range of every rank; for many ranks, a band over the sorted ranks."""
    for number, ((label, values), (name, style, marker)) in enumerate(zip(shown.items(), LOOKS)):
        color = COLORS[name]
        if count > _MOST_RANKS:
            values = -np.sort(-values, axis=1)
            axes.fill_between(
                np.arange(count), values.min(axis=0), values.max(axis=0), color=color, alpha=0.3, linewidth=0
            )
            axes.plot(values.mean(axis=0), style, color=color, label=label)
        else:
            positions = np.arange(count) + (number - (len(shown) - 1) / 2) * 0.3
            axes.vlines(positions, values.min(axis=0), values.max(axis=0), color=color, linewidth=1.8)
            axes.plot(positions, values.mean(axis=0), marker, color=color, label=label)
    axes.axhline(1.0, color=COLORS["muted"], linewidth=0.8, zorder=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10))
    axes.set(xlabel="rank" if count <= _MOST_RANKS else "ranks, fullest first", ylabel="÷ mean")
    axes.set_xlim(-0.6, count - 0.4)
    _widen(axes)
    legend_above(axes)


def _parts(reports: Sequence[RunReport]) -> Iterator[Picture]:
    """A picture of the parts of a step's time, a bar for every run; no picture if no run has the parts."""
    known = [(report, report.step_time) for report in reports if report.step_time is not None]
    bars = [time.parts() for _, time in known]
    if all(len(bar) == 1 for bar in bars):
        return
    saved = np.array([max(0.0, time.saved or 0.0) * (report.balancing == "balanced") for report, time in known])
    names, positions = short_names([report.log.name for report, _ in known]), np.arange(len(known))[::-1]

    def draw(axes: Axes) -> None:
        begins = np.zeros(len(bars))
        for part, (color, hatch) in _LOOKS_OF_PARTS.items():
            widths = np.array([bar.get(part, 0.0) for bar in bars])
            looks: dict[str, Any] = {"color": COLORS[color], "hatch": hatch, "linewidth": 0.5}
            looks["edgecolor"] = COLORS["muted" if part == PARTS[-1] else "surface"]
            if widths.any():
                axes.barh(positions, widths, left=begins, height=0.55, label=part, **looks)
            begins += widths
        outlined: dict[str, Any] = {"fill": False, "edgecolor": COLORS["ink"], "linestyle": ":"}
        if saved.any():
            some = saved > 0
            axes.barh(positions[some], saved[some], 0.55, begins[some], label="taken off by balancing", **outlined)
        # Names are above the bars, so that the bars have the whole width.
        for position, name in zip(positions, names):
            axes.annotate(_short(name, 36), (0, position + 0.3), va="bottom")
        axes.set(xlabel="ms of a mean step", yticks=[], ylim=(-0.5, len(bars) - 0.3))
        axes.grid(visible=True, axis="x")
        axes.grid(visible=False, axis="y")
        legend_above(axes)

    text = (
        "Work at the bound is the slowest rank's work at the lower bound of every plan. The time that balancing takes "
        "off is outlined. Without milliseconds per load, work and the rest are not split."
    )
    yield Picture("Where a mean step's time goes", text, draw, height=190 + 80 * len(bars))


def curve_of(log: RunLog, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and known values of a column, each float64 `(points,)`; for many lines, means of several lines."""
    values = log.column(name)
    known = np.isfinite(values)
    steps, values = log.step[known].astype(np.float64), values[known]
    lines_per_point = max(1, -(-len(values) // _MOST_POINTS))
    begins = np.arange(0, len(values), lines_per_point)
    counts = np.diff(begins, append=len(values))
    return np.add.reduceat(steps, begins) / counts, np.add.reduceat(values, begins) / counts


def _short(name: str, longest: int) -> str:
    """The end of a name, because names of runs usually differ at the end."""
    return as_text(name if len(name) <= longest else f"…{name[1 - longest :]}")
