"""The picture of `evenrank simulate`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure

from commons.perf_model.simulation import SimulatedSteps
from commons.whole_folder import whole_file

_SUFFIXES = (".png", ".svg", ".pdf")
_BEFORE, _AFTER = "#b5442e", "#2e6fb5"
# The shade of the smallest window, where there are several.
_LIGHT = "#bdd3ea"
# Width of the bar of a number of ranks, and of the bars of several windows together.
_BAR, _BARS = 0.55, 0.85


def require_picture(path: Path) -> None:
    """Raise ValueError unless the file's type is png, svg or pdf."""
    if path.suffix not in _SUFFIXES:
        raise ValueError(f"figure is {str(path)!r}; pictures are {', '.join(_SUFFIXES)}: choose one of these endings")


def write_figure(results: Sequence[SimulatedSteps], path: Path) -> None:
    """Draw the gain by number of ranks and window, and the ranks' loads in the most uneven step of the largest number.

    Raises:
        ValueError: a file type other than png, svg and pdf.
    """
    require_picture(path)
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    gain, loads = figure.subplots(1, 2)
    windows = sorted({result.window for result in results})
    colors = dict(zip(windows, _shades(len(windows))))
    _draw_gain(gain, results, colors)
    most_ranks = max(result.num_ranks for result in results)
    _draw_loads(loads, [result for result in results if result.num_ranks == most_ranks], colors)
    for axes in (gain, loads):
        axes.spines[["top", "right"]].set_visible(False)
    with matplotlib.rc_context({"svg.hashsalt": "evenrank"}), whole_file(path) as file:
        figure.savefig(file, format=path.suffix[1:], dpi=150)


def _shades(count: int) -> list[str]:
    """Colours from light to `_AFTER`, which a single one is."""
    light, full = (np.array(to_rgb(color)) for color in (_LIGHT, _AFTER))
    return [to_hex(full + (light - full) * (count - 1 - place) / max(1, count - 1)) for place in range(count)]


def _draw_gain(axes: Axes, results: Sequence[SimulatedSteps], colors: dict[int, str]) -> None:
    ranks = list(dict.fromkeys(result.num_ranks for result in results))
    windows = list(colors)
    several = len(windows) > 1
    width = _BARS / len(windows) if several else _BAR
    for place, window in enumerate(windows):
        shown = [result for result in results if result.window == window]
        at = np.array([ranks.index(result.num_ranks) for result in shown]) + (place - (len(windows) - 1) / 2) * width
        bounds = [result.possible_speed_up for result in shown]
        label = "balanced" if windows == [1] else f"window {window}"
        axes.bar(at, [result.speed_up for result in shown], color=colors[window], width=width, label=label)
        axes.hlines(
            bounds, at - width * 0.4, at + width * 0.4, color=_BEFORE, label="_nolegend_" if place else "possible"
        )
        for x, bound, result in zip(at, bounds, shown):
            text = f"{result.speed_up:.2f}×"
            if several:  # a number is wider than its bar
                axes.annotate(f" {text}", (x, bound), ha="center", va="bottom", rotation=90)
            else:
                axes.annotate(text, (x, result.speed_up - 0.04), ha="center", va="top", color="white")
    axes.axhline(1, color="grey", linewidth=0.8)
    axes.set(xlabel="ranks", ylabel="speed-up of the slowest rank", xticks=range(len(ranks)), xticklabels=ranks)
    if several:
        axes.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3)
    else:
        axes.legend(frameon=False, loc="upper left")
    axes.margins(y=0.25 if several else 0.2)


def _draw_loads(axes: Axes, results: Sequence[SimulatedSteps], colors: dict[int, str]) -> None:
    num_ranks = results[0].num_ranks
    drawn = [(results[0].loads_before, _BEFORE, "as loaded")]
    for each in results:
        label = "balanced" if list(colors) == [1] else f"window {each.window}"
        drawn.append((each.loads_after, colors[each.window], label))
    for values, color, label in drawn:
        order = np.sort(values)[::-1] / max(1.0, float(values.mean()))
        axes.step(np.arange(len(order) + 1), [*order, order[-1]], where="post", color=color, label=label)
    axes.set(
        xlabel="ranks, fullest first",
        ylabel="load ÷ mean",
        title=f"most uneven step of {num_ranks} ranks",
        xlim=(0, num_ranks),
        ylim=(0, None),
    )
    axes.legend(frameon=False)
