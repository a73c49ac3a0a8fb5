"""The pictures of `evenrank report`: imbalance and loads of each run; steps, their time and loss of all together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter

from commons.cli.pictures import COLORS, LOOKS, Picture, as_text, legend_above, whole_steps
from commons.run_log.reading import RunLog, short_names
from commons.run_log.report import RunReport
from commons.run_log.step_time import PARTS

# Ranks that are shown one by one; of more, the fullest first.
_MOST_RANKS = 64
# Points of a curve; of a longer log so many means of lines.
_MOST_POINTS = 300
# What an axis shows at least: of an imbalance from 0 on, of others as a part of the values.
_LEAST_IMBALANCE, _LEAST_SPAN = 0.01, 0.01
# Of the parts of a step, their colour and hatch.
_NOT_SPLIT = "a step, not split"
_LOOKS_OF_PARTS = dict(
    zip(
        (*PARTS, _NOT_SPLIT),
        (("after", ""), ("before", "////"), ("third", "\\\\\\\\"), ("fourth", "xx"), ("muted", ""), ("grid", "..")),
    )
)


def pictures_of(reports: Sequence[RunReport]) -> tuple[Picture, ...]:
    """Of one run all that its log knows; of several three pictures in which they stand together."""
    # The first has the colour of what is not balanced, and stands above the others.
    reports = sorted(reports, key=lambda report: not report.is_as_loaded)
    names = [_short(name, 24) for name in short_names([report.log.name for report in reports])]
    return tuple(_pictures_of(reports, names))


def _pictures_of(reports: Sequence[RunReport], names: Sequence[str]) -> Iterator[Picture]:
    log, is_balanced = reports[0].log, reports[0].balancing == "balanced"
    title, of = "Imbalance", ""
    lines = [("as loaded", log, "before"), ("balanced" if is_balanced else "planned", log, "after")]
    if len(reports) > 1:
        title, of = "Imbalance as trained", ", as each run trained its rows"
        lines = [(name, each.log, each.trained) for name, each in zip(names, reports)]
    yield from _curves(
        title,
        f"Largest load ÷ mean − 1 of the ranks{of}: mean of the steps of each line of the log. 0 % is a step in which "
        "nobody waits.",
        [(name, log, f"imbalance_{as_what}") for name, log, as_what in lines],
        "largest ÷ mean − 1",
        _percent_from_zero,
    )
    if len(reports) == 1:
        for what, title, meaning in (
            ("loads", "Load of each rank", "work"),
            ("lookups", "Keys of each rank", "embedding lookups"),
        ):
            columns = {"as loaded": f"{what}_before"} | ({"balanced": f"{what}_after"} if is_balanced else {})
            yield from _ranks(log, title, meaning, columns)
        text = "Median of the steps of each line of the log, in milliseconds."
        yield from _curves("Time of a step", text, [("", log, "step_ms")], "ms", lambda axes: axes.set_ylim(0))
    yield from _parts(reports)
    losses = [(name, report.log, "loss") for name, report in zip(names, reports)]
    yield from _curves("Loss", "Mean of the steps of each line of the log.", losses, "loss", _widen)


def _curves(
    title: str, text: str, lines: Sequence[tuple[str, RunLog, str]], ylabel: str, finish: Callable[[Axes], Any]
) -> Iterator[Picture]:
    """Columns of logs over steps, by label, each with its colour, line and marker; none if no log knows its column."""
    curves = [(place, label, *curve_of(log, column)) for place, (label, log, column) in enumerate(lines)]
    curves = [curve for curve in curves if len(curve[3])]

    def draw(axes: Axes) -> None:
        for place, label, steps, values in curves:
            (color, _, marker), style = LOOKS[place % len(LOOKS)], (place + place // len(LOOKS)) % len(LOOKS)
            axes.plot(
                steps,
                values,
                color=COLORS[color],
                linestyle=LOOKS[style][1],
                # The first is seen where another one covers it.
                linewidth=3.2 if place == 0 and len(curves) > 1 else 1.8,
                marker=marker if len(values) <= 20 else "",  # one point alone would not be seen as a curve
                label=label,
            )
        axes.set(xlabel="step", ylabel=ylabel)
        whole_steps(axes)
        finish(axes)
        if any(label for _, label, _, _ in curves):
            legend_above(axes)

    if curves:
        yield Picture(title, text, draw)


def _percent_from_zero(axes: Axes) -> None:
    """From 0 to a percent at least: the noise of even ranks would look like hills, and every tick would say 0 %."""
    top = max(_LEAST_IMBALANCE, axes.get_ylim()[1])
    axes.set_ylim(0, top)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0 if top > 0.05 else 1))


def _widen(axes: Axes) -> None:
    """Let an axis span a hundredth of its values at least, with whole numbers at its ticks instead of an offset."""
    low, high = axes.get_ylim()
    least = _LEAST_SPAN * max(abs(low), abs(high))
    if high - low < least:
        middle = (low + high) / 2
        axes.set_ylim(middle - least / 2, middle + least / 2)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.5g}")


def _ranks(log: RunLog, title: str, meaning: str, columns: dict[str, str]) -> Iterator[Picture]:
    """What each rank of a run has, by label the column of the log; none if the log does not know."""
    known = {label: _relative(log, column) for label, column in columns.items()}
    shown = {label: values for label, values in known.items() if values is not None}
    if not shown:
        return
    lines, ranks = next(iter(shown.values())).shape
    each = "Each rank's" if ranks <= _MOST_RANKS else "The fullest rank's, the next one's, and so on,"
    text = (
        f"{each} {meaning} ÷ the mean of the ranks, in the last step of each of {lines} lines of the log: mean, and "
        f"range. {', '.join(shown).capitalize()}."
    )
    yield Picture(title, text, partial(_draw_ranks, shown, ranks))


def _relative(log: RunLog, name: str) -> np.ndarray | None:
    """float64 `(lines, ranks)`, each rank's number ÷ the mean of the ranks, of lines with as many ranks as the last."""
    known = [values for values in log.of_ranks.get(name, ()) if values is not None and len(values) > 1]
    same = [values for values in known if len(values) == len(known[-1]) and np.nanmean(values) > 0]
    return np.stack([values / np.nanmean(values) for values in same]) if same else None


def _draw_ranks(shown: dict[str, np.ndarray], count: int, axes: Axes) -> None:
    """A dot for the mean and a line for the range of every rank; of many ranks, bands over ranks in order."""
    for place, ((label, values), (name, style, marker)) in enumerate(zip(shown.items(), LOOKS)):
        color = COLORS[name]
        if count > _MOST_RANKS:
            values = -np.sort(-values, axis=1)
            axes.fill_between(
                np.arange(count), values.min(axis=0), values.max(axis=0), color=color, alpha=0.3, linewidth=0
            )
            axes.plot(values.mean(axis=0), style, color=color, label=label)
        else:
            places = np.arange(count) + (place - (len(shown) - 1) / 2) * 0.3
            axes.vlines(places, values.min(axis=0), values.max(axis=0), color=color, linewidth=1.8)
            axes.plot(places, values.mean(axis=0), marker, color=color, label=label)
    axes.axhline(1.0, color=COLORS["muted"], linewidth=0.8, zorder=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10))
    axes.set(xlabel="rank" if count <= _MOST_RANKS else "ranks, fullest first", ylabel="÷ mean")
    axes.set_xlim(-0.6, count - 0.4)
    _widen(axes)
    legend_above(axes)


def _parts(reports: Sequence[RunReport]) -> Iterator[Picture]:
    """Where a step's time goes, a bar for every run; none where no run knows."""
    known = [(report, report.step_time) for report in reports if report.step_time is not None]
    bars = [time.parts() if len(time.parts()) > 1 else {_NOT_SPLIT: time.total} for _, time in known]
    if all(_NOT_SPLIT in bar for bar in bars):
        return
    saved = np.array([max(0.0, time.saved or 0.0) * (report.balancing == "balanced") for report, time in known])
    names, places = short_names([report.log.name for report, _ in known]), np.arange(len(known))[::-1]

    def draw(axes: Axes) -> None:
        begins = np.zeros(len(bars))
        for part, (color, hatch) in _LOOKS_OF_PARTS.items():
            widths = np.array([bar.get(part, 0.0) for bar in bars])
            looks: dict[str, Any] = {"color": COLORS[color], "hatch": hatch, "linewidth": 0.5}
            looks["edgecolor"] = COLORS["muted" if part == _NOT_SPLIT else "surface"]
            if widths.any():
                axes.barh(places, widths, left=begins, height=0.55, label=part, **looks)
            begins += widths
        outlined: dict[str, Any] = {"fill": False, "edgecolor": COLORS["ink"], "linestyle": ":"}
        if saved.any():
            some = saved > 0
            axes.barh(places[some], saved[some], 0.55, begins[some], label="taken off by balancing", **outlined)
        # A name stands above its bar, where it takes no width from it.
        for place, name in zip(places, names):
            axes.annotate(_short(name, 36), (0, place + 0.3), va="bottom")
        axes.set(xlabel="ms of a mean step", yticks=[], ylim=(-0.5, len(bars) - 0.3))
        axes.grid(visible=True, axis="x")
        axes.grid(visible=False, axis="y")
        legend_above(axes)

    text = (
        "Work at the bound is the slowest rank's if the plan were as even as can be. What balancing takes off is "
        "outlined. A run whose loads nobody looked at is not split."
    )
    yield Picture("Where a mean step's time goes", text, draw, height=190 + 80 * len(bars))


def curve_of(log: RunLog, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of a column where it is known, each float64 `(points,)`; of many lines means of a few."""
    values = log.column(name)
    known = np.isfinite(values)
    steps, values = log.step[known].astype(np.float64), values[known]
    together = max(1, -(-len(values) // _MOST_POINTS))
    begins = np.arange(0, len(values), together)
    counts = np.diff(begins, append=len(values))
    return np.add.reduceat(steps, begins) / counts, np.add.reduceat(values, begins) / counts


def _short(name: str, longest: int) -> str:
    """The end of a name, in which runs differ."""
    return as_text(name if len(name) <= longest else f"…{name[1 - longest :]}")
