"""The pictures of `evenrank report`: imbalance and loads of each run; steps, their time and loss of all together."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter

from commons.cli.pictures import COLORS, Picture, as_text, is_narrow, whole_steps
from commons.run_log.comparison import is_as_loaded
from commons.run_log.reading import RunLog
from commons.run_log.report import RunReport
from commons.run_log.step_time import PARTS

# Ranks that are shown one by one; of more, the fullest first.
_MOST_RANKS = 64
# Points of a curve; of a longer log so many means of lines.
_MOST_POINTS = 300
# What an axis shows at least: of an imbalance from 0 on, of others as a part of the values.
_LEAST_IMBALANCE, _LEAST_SPAN = 0.01, 0.01
# Colours, line styles and markers of runs, told apart by all.
_RUN_COLORS = ("before", "after", "third", "fourth")
_RUN_STYLES = ("-", "--", "-.", ":")
_RUN_MARKERS = "os^D"
# Of the parts of a step, their colour and hatch.
_NOT_SPLIT = "a step, not split"
_PART_LOOKS = dict(
    zip(
        (*PARTS, _NOT_SPLIT),
        (("after", ""), ("before", "////"), ("third", "\\\\\\\\"), ("fourth", "xx"), ("muted", ""), ("grid", "..")),
    )
)


def short_names(reports: Sequence[RunReport]) -> list[str]:
    """The names of runs without the folder that they share."""
    names = [Path(report.log.name) for report in reports]
    if len({name.is_absolute() for name in names}) > 1:
        return list(map(str, names))
    shared = os.path.commonpath([name.parent for name in names])
    return [str(name.relative_to(shared)) for name in names]


def pictures_of(reports: Sequence[RunReport]) -> tuple[Picture, ...]:
    """Of one run all that its log knows; of several three pictures in which they stand together."""
    several = len(reports) > 1
    # The first has the colour of what is not balanced, and stands above the others.
    reports = sorted(reports, key=lambda report: not is_as_loaded(report))
    pictures = [_imbalance_of_runs(reports)] if several else _pictures_of(reports[0])
    if not several and reports[0].speed.step_ms is not None:
        said = "Median of the steps of each line of the log, in milliseconds."
        pictures.append(Picture("Time of a step", said, _over_steps(reports, "step_ms", "ms")))
    timed = [report for report in reports if report.step_time is not None]
    if any(_is_split(report) for report in timed):
        pictures.append(
            Picture(
                "Where a mean step's time goes",
                "Work at the bound is the slowest rank's if the plan were as even as can be. What balancing takes off "
                "is outlined. A run whose loads nobody looked at is not split.",
                _parts(timed),
                height=190 + 80 * len(timed),
            )
        )
    if any(report.loss is not None for report in reports):
        said = "Mean of the steps of each line of the log."
        pictures.append(Picture("Loss", said, _over_steps(reports, "loss", "loss")))
    return tuple(each for each in pictures if each is not None)


def _imbalance_of_runs(reports: Sequence[RunReport]) -> Picture | None:
    """Of every run as it trained its rows."""
    if not any(_imbalance_trained(report) for report in reports):
        return None
    return Picture(
        "Imbalance as trained",
        "Largest load ÷ mean − 1 of the ranks, as each run trained its rows: mean of the steps of each line of the "
        "log. 0 % is a step in which nobody waits.",
        _imbalances(reports),
    )


def _imbalance_trained(report: RunReport) -> str:
    """The column with the imbalance of the rows as they were trained; "" where the log has none."""
    name = "imbalance_after" if _is_balanced(report) else "imbalance_before"
    return name if report.log.mean(name) is not None else ""


def _is_split(report: RunReport) -> bool:
    """Whether more is known of a step than all of it."""
    return report.step_time is not None and len(report.step_time.parts()) > 1


def _pictures_of(report: RunReport) -> list[Picture | None]:
    log, pictures = report.log, list[Picture | None]()
    carried_out = _is_balanced(report)
    if report.gain.imbalance_before is not None:
        after = "" if report.gain.imbalance_after is None else f", and {'after' if carried_out else 'as planned'}"
        pictures.append(
            Picture(
                "Imbalance",
                f"Largest load ÷ mean − 1 of the ranks, as the rows were loaded{after}: mean of the steps of each "
                "line of the log. 0 % is a step in which nobody waits.",
                _imbalance(log, "balanced" if carried_out else "planned"),
            )
        )
    for what, title, meaning in (
        ("loads", "Load of each rank", "work"),
        ("lookups", "Keys of each rank", "embedding lookups"),
    ):
        shown = {"as loaded": _relative(log, f"{what}_before")}
        if carried_out:
            shown["balanced"] = _relative(log, f"{what}_after")
        known = {name: values for name, values in shown.items() if values is not None}
        if known:
            pictures.append(_picture_of_ranks(title, meaning, known))
    return pictures


def _picture_of_ranks(title: str, meaning: str, shown: dict[str, np.ndarray]) -> Picture:
    lines, ranks = next(iter(shown.values())).shape
    each = "Each rank's" if ranks <= _MOST_RANKS else "The fullest rank's, the next one's, and so on,"
    return Picture(
        title,
        f"{each} {meaning} ÷ the mean of the ranks, in the last step of each of {lines} lines of the log: mean, and "
        f"range. {', '.join(shown).capitalize()}.",
        _ranks(shown),
    )


def _imbalance(log: RunLog, after: str) -> Callable[[Axes], None]:
    def draw(axes: Axes) -> None:
        for name, label, color, style in (
            ("imbalance_before", "as loaded", COLORS["before"], "-"),
            ("imbalance_after", after, COLORS["after"], "--"),
        ):
            steps, values = curve_of(log, name)
            if len(values):
                axes.plot(steps, values, color=color, linestyle=style, marker=_marker(values), label=label)
        _finish_imbalance(axes, columns=2)

    return draw


def _imbalances(reports: Sequence[RunReport]) -> Callable[[Axes], None]:
    names = short_names(reports)

    def draw(axes: Axes) -> None:
        for place, report in enumerate(reports):
            if column := _imbalance_trained(report):
                _plot_run(axes, curve_of(report.log, column), place, names)
        _finish_imbalance(axes, columns=1 if is_narrow(axes) else 2)

    return draw


def _finish_imbalance(axes: Axes, columns: int) -> None:
    """From 0 to a percent at least: the noise of even ranks would look like hills, and every tick would say 0 %."""
    top = max(_LEAST_IMBALANCE, axes.get_ylim()[1])
    axes.set(xlabel="step", ylabel="largest ÷ mean − 1", ylim=(0, top))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0 if top > 0.05 else 1))
    whole_steps(axes)
    _finish(axes, columns)


def _relative(log: RunLog, name: str) -> np.ndarray | None:
    """float64 `(lines, ranks)`, each rank's number ÷ the mean of the ranks, of lines with as many ranks as the last."""
    told = [values for values in log.of_ranks.get(name, ()) if values is not None and len(values) > 1]
    same = [values for values in told if len(values) == len(told[-1]) and np.nanmean(values) > 0]
    return np.stack([values / np.nanmean(values) for values in same]) if same else None


def _ranks(shown: dict[str, np.ndarray]) -> Callable[[Axes], None]:
    """A dot for the mean and a line for the range of every rank; of many ranks, bands over ranks in order."""

    def draw(axes: Axes) -> None:
        for place, (label, values) in enumerate(shown.items()):
            color = COLORS[("before", "after")[place]]
            if values.shape[1] > _MOST_RANKS:
                ordered = -np.sort(-values, axis=1)
                ranks = np.arange(values.shape[1])
                axes.fill_between(ranks, ordered.min(axis=0), ordered.max(axis=0), color=color, alpha=0.3, linewidth=0)
                axes.plot(ranks, ordered.mean(axis=0), ("-", "--")[place], color=color, label=label)
                continue
            places = np.arange(values.shape[1]) + (place - (len(shown) - 1) / 2) * 0.3
            axes.vlines(places, values.min(axis=0), values.max(axis=0), color=color, linewidth=1.8)
            axes.plot(places, values.mean(axis=0), "os"[place], color=color, markersize=5, label=label)
        count = next(iter(shown.values())).shape[1]
        axes.axhline(1.0, color=COLORS["muted"], linewidth=0.8, zorder=0)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6 if is_narrow(axes) else 12))
        axes.set(
            xlabel="rank" if count <= _MOST_RANKS else "ranks, fullest first", ylabel="÷ mean", xlim=(-0.6, count - 0.4)
        )
        _widen(axes)
        _finish(axes, columns=2)

    return draw


def _over_steps(reports: Sequence[RunReport], name: str, label: str) -> Callable[[Axes], None]:
    names = short_names(reports)

    def draw(axes: Axes) -> None:
        for place, report in enumerate(reports):
            _plot_run(axes, curve_of(report.log, name), place, names)
        axes.set(xlabel="step", ylabel=label)
        whole_steps(axes)
        if name == "step_ms":
            axes.set_ylim(0, None)
        else:
            _widen(axes)
        _finish(axes, columns=1 if is_narrow(axes) else 2)

    return draw


def _plot_run(axes: Axes, curve: tuple[np.ndarray, np.ndarray], place: int, names: Sequence[str]) -> None:
    """One of several runs, told apart from the others by colour, line and marker."""
    axes.plot(
        *curve,
        color=COLORS[_RUN_COLORS[place % 4]],
        linestyle=_RUN_STYLES[(place + place // 4) % 4],
        # The first is seen where another one covers it.
        linewidth=3.2 if place == 0 and len(names) > 1 else 1.8,
        marker=_marker(curve[1]) and _RUN_MARKERS[place % 4],
        markersize=5,
        label=_short(names[place], 24),
    )


def _widen(axes: Axes) -> None:
    """Let an axis span a hundredth of its values at least, with whole numbers at its ticks instead of an offset."""
    low, high = axes.get_ylim()
    least = _LEAST_SPAN * max(abs(low), abs(high))
    if high - low < least:
        middle = (low + high) / 2
        axes.set_ylim(middle - least / 2, middle + least / 2)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.5g}")


def _parts(reports: Sequence[RunReport]) -> Callable[[Axes], None]:
    times = []
    for report in reports:
        parts = report.step_time.parts() if report.step_time else {}
        times.append(parts if len(parts) > 1 else {_NOT_SPLIT: sum(parts.values())})
    saved = np.array(
        [(report.step_time.saved if report.step_time and _is_balanced(report) else None) or 0.0 for report in reports]
    )
    names, places = short_names(reports), np.arange(len(reports))[::-1]

    def draw(axes: Axes) -> None:
        begins = np.zeros(len(reports))
        for part in (part for part in _PART_LOOKS if any(part in time for time in times)):
            color, hatch = _PART_LOOKS[part]
            widths = np.array([time.get(part, 0.0) for time in times])
            axes.barh(
                places,
                widths,
                left=begins,
                height=0.55,
                color=COLORS[color],
                hatch=hatch,
                edgecolor=COLORS["muted" if part == _NOT_SPLIT else "surface"],
                linewidth=0.5,
                label=part,
            )
            begins += widths
        if (taken := saved > 0).any():
            axes.barh(
                places[taken],
                saved[taken],
                left=begins[taken],
                height=0.55,
                fill=False,
                edgecolor=COLORS["ink"],
                linestyle=":",
                label="taken off by balancing",
            )
        # A name stands above its bar, where it takes no width from it.
        for place, name in zip(places, names):
            axes.annotate(_short(name, 36), (0, place + 0.3), va="bottom")
        axes.set(xlabel="ms of a mean step", yticks=[], ylim=(-0.5, len(reports) - 0.3))
        axes.grid(visible=True, axis="x")
        axes.grid(visible=False, axis="y")
        _finish(axes, columns=1 if is_narrow(axes) else 2)

    return draw


def curve_of(log: RunLog, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of a column where it is known, each float64 `(points,)`; of many lines means of a few."""
    values = log.column(name)
    known = np.isfinite(values)
    steps, values = log.step[known].astype(np.float64), values[known]
    together = -(-len(values) // _MOST_POINTS)
    if together <= 1:
        return steps, values
    begins = np.arange(0, len(values), together)
    counts = np.diff(begins, append=len(values))
    return np.add.reduceat(steps, begins) / counts, np.add.reduceat(values, begins) / counts


def _is_balanced(report: RunReport) -> bool:
    return report.balancing == "balanced"


def _finish(axes: Axes, columns: int) -> None:
    """The legend above, where it hides nothing."""
    axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=columns, borderaxespad=0.2)


def _marker(values: np.ndarray) -> str:
    """A dot for every line where there are few; one alone would not be seen as a curve."""
    return "o" if len(values) <= 20 else ""


def _short(name: str, longest: int) -> str:
    """The end of a name, which tells runs apart."""
    return as_text(name if len(name) <= longest else f"…{name[1 - longest :]}")
