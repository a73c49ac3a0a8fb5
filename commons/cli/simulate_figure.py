"""The pictures of `evenrank simulate --config`: the gain by number of ranks and window, and the ranks' loads."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.axes import Axes

from commons.cli.pictures import COLORS, Picture, marked_lines
from commons.perf_model.simulation import SimulatedSteps

# Width of the bar of a number of ranks, and of the bars of several windows together.
_BAR, _BARS = 0.55, 0.85
_HATCHES = ("", "////", "....", "xxxx", "\\\\\\\\")
_STYLES = ("--", "-.", ":", (0, (5, 1)), (0, (1, 1)))


def pictures_of_steps(results: Sequence[SimulatedSteps]) -> tuple[Picture, ...]:
    """The gain by number of ranks and window, and the ranks' loads in the most uneven step of the largest number."""
    most_ranks = max(result.num_ranks for result in results)
    return (
        Picture(
            "Gain by number of ranks",
            "Speed-up of the slowest rank, and the bound that no plan can exceed.",
            _gain(results),
            height=340,
        ),
        Picture(
            f"Most uneven step of {most_ranks} ranks",
            "Load of every rank ÷ the mean, fullest rank first, as loaded and balanced. All ranks wait for the one at "
            "the left.",
            _loads([result for result in results if result.num_ranks == most_ranks]),
        ),
    )


def _name_of(window: int, windows: Sequence[int]) -> str:
    return "balanced" if list(windows) == [1] else f"window {window}"


def _gain(results: Sequence[SimulatedSteps]) -> Callable[[Axes], None]:
    ranks = list(dict.fromkeys(result.num_ranks for result in results))
    windows = sorted({result.window for result in results})
    several = len(windows) > 1
    width = _BARS / len(windows) if several else _BAR

    def draw(axes: Axes) -> None:
        for place, window in enumerate(windows):
            shown = [result for result in results if result.window == window]
            at = (
                np.array([ranks.index(result.num_ranks) for result in shown]) + (place - (len(windows) - 1) / 2) * width
            )
            bounds = [result.possible_speed_up for result in shown]
            axes.bar(
                at,
                [result.speed_up for result in shown],
                color=COLORS["after"],
                edgecolor=COLORS["surface"],
                hatch=_HATCHES[place % len(_HATCHES)],
                width=width,
                label=_name_of(window, windows),
            )
            ends = at - width * 0.4, at + width * 0.4
            axes.hlines(bounds, *ends, color=COLORS["before"], label="_nolegend_" if place else "possible")
            for x, bound, result in zip(at, bounds, shown):
                axes.annotate(
                    f"{result.speed_up:.2f}×",
                    (x, bound),
                    (0, 3),
                    textcoords="offset points",
                    ha="center",
                    va="bottom",
                    rotation=90 if several else 0,
                )
        axes.axhline(1, color=COLORS["muted"], linewidth=0.8)
        axes.set_xticks(range(len(ranks)), [str(each) for each in ranks])
        axes.set(xlabel="ranks", ylabel="speed-up of the slowest rank")
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3)
        axes.margins(y=0.25 if several else 0.12)

    return draw


def _loads(results: Sequence[SimulatedSteps]) -> Callable[[Axes], None]:
    num_ranks = results[0].num_ranks
    windows = [each.window for each in results]
    names = [_name_of(window, windows) for window in windows]
    lines = {"as loaded": _relative(results[0].loads_before)}
    lines |= {name: _relative(each.loads_after) for name, each in zip(names, results)}
    labels = marked_lines(lines)

    def draw(axes: Axes) -> None:
        _draw_step(axes, lines["as loaded"], COLORS["before"], "-", labels["as loaded"])
        for place, name in enumerate(names):
            _draw_step(axes, lines[name], COLORS["after"], _STYLES[place % len(_STYLES)], labels[name])
        axes.set(xlabel="ranks, fullest first", ylabel="load ÷ mean", xlim=(0, num_ranks), ylim=(0, None))
        axes.legend()

    return draw


def _relative(loads: np.ndarray) -> np.ndarray:
    """Loads ÷ the mean, the fullest first."""
    return np.sort(loads)[::-1] / max(1.0, float(loads.mean()))


def _draw_step(axes: Axes, order: np.ndarray, color: str, style: object, label: str) -> None:
    places = np.arange(len(order) + 1)
    axes.step(places, [*order, order[-1]], where="post", color=color, linestyle=style, label=label)
