"""The pictures of `evenrank simulate`: loads of ranks, cost by length, the gain, and loads by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes

from commons.cli.pictures import COLORS, LOOKS, Picture, legend_above, marked_lines, percents, whole_numbers
from commons.cli.simulate.simulation import WORTH, Simulation, Source
from commons.perf_model.gain import Comparison, DealtRows

# Most steps of the picture by step, and most bands of lengths.
_SHOWN_STEPS, _BANDS = 60, 14
# Colour, line style and marker by the name of a way; windows have different markers.
_LOOKS_OF_WAYS = {
    "Karmarkar-Karp": ("before", "--", "x"),
    "refined": ("before", "-", "x"),
    "each batch": ("before", "-", "x"),
    "free counts": ("fourth", "-.", "x"),
    "constant cost": ("third", "-", "x"),
    "equal ranks": ("muted", ":", ""),
}
_WINDOW_COLOR, _WINDOW_MARKERS = "after", "os^Dv"


def pictures_of(simulation: Simulation) -> tuple[Picture, ...]:
    """All pictures; loads and steps are shown for the largest number of ranks."""
    largest, several = simulation.comparisons[-1], len(simulation.comparisons) > 1
    shown = _shown_ways(largest)
    names = ", ".join(way.name for way in shown[1:])
    return (
        Picture(
            f"Load of each of {largest.num_ranks} ranks",
            f"Load ÷ mean load of the ranks, in each step sorted from the largest to the smallest, mean over "
            f"{largest.rows.num_steps} steps: as loaded, {names}. All ranks wait for the leftmost rank.",
            partial(_loads, shown),
        ),
        Picture(
            "Cost by length",
            "For each range of lengths, its fraction of all rows and its fraction of the total cost.",
            partial(_bands, simulation.source),
        ),
        Picture(
            "Gain by number of ranks" if several else f"Gain on {largest.num_ranks} ranks",
            "Speed-up of each way to distribute rows; the bound is the speed-up with equal loads on all ranks.",
            partial(_gain_by_ranks, simulation.comparisons) if several else partial(_gain_of_ways, largest),
            height=420 if several else 340,
        ),
        Picture(
            "Load by step",
            f"Largest load ÷ mean in the first {min(_SHOWN_STEPS, largest.rows.num_steps)} steps of "
            f"{largest.num_ranks} ranks: as loaded, {shown[-1].name}. 1 is a step in which no rank waits.",
            partial(_steps, [shown[0], shown[-1]]),
        ),
    )


def _shown_ways(result: Comparison) -> list[DealtRows]:
    """The ways in the pictures: as loaded, each batch balanced and, if it gains 2 % more, the best window."""
    batch = result.balanced_batch
    windows = [way for way in result.ways if way.window > 1]
    best = max(windows, key=result.speed_up, default=batch)
    return [result.ways[0], batch, *([best] if result.speed_up(best) >= WORTH * result.speed_up(batch) else [])]


def _draw_steps(axes: Axes, lines: Mapping[str, np.ndarray], begin: int, where: Literal["post", "mid"]) -> None:
    """Draw a stepped line for each way; a line that covers an equal one has that one's name too."""
    labels = marked_lines(lines)
    for (name, values), (color, style, _) in zip(lines.items(), LOOKS):
        positions = np.arange(begin, begin + len(values))
        axes.step(positions, values, where=where, color=COLORS[color], linestyle=style, label=labels[name])


def _loads(ways: list[DealtRows], axes: Axes) -> None:
    lines = {}
    for way in ways:
        ordered = -np.sort(-way.loads, axis=1)
        relative = (ordered / np.maximum(1e-12, way.loads.mean(axis=1, keepdims=True))).mean(axis=0)
        lines[way.name] = np.append(relative, relative[-1])
    _draw_steps(axes, lines, begin=0, where="post")
    axes.set(xlabel="ranks, fullest first", ylabel="load ÷ mean", xlim=(0, ways[0].loads.shape[1]), ylim=(0, None))
    axes.margins(y=0.1)
    whole_numbers(axes)
    axes.legend(loc="best")


def _steps(ways: list[DealtRows], axes: Axes) -> None:
    first = {way.name: way.loads[:_SHOWN_STEPS] for way in ways}
    lines = {name: loads.max(axis=1) / np.maximum(1e-12, loads.mean(axis=1)) for name, loads in first.items()}
    _draw_steps(axes, lines, begin=1, where="mid")
    axes.axhline(1.0, color=COLORS["muted"], linewidth=0.8)
    axes.set(xlabel="step", ylabel="largest load ÷ mean")
    whole_numbers(axes)
    axes.margins(x=0.01)
    legend_above(axes)


def _bands(source: Source, axes: Axes) -> None:
    edges = band_edges(source.tokens)
    names = [f"{first:,}" if first == last else f"{first:,}–{last:,}" for first, last in zip(edges[:-1], edges[1:] - 1)]
    positions = np.arange(len(names))
    for weights, shift, color, label, hatch in (
        (np.ones(len(source.tokens)), -0.21, "before", "of all rows", ""),
        (source.costs.astype(np.float64), 0.21, "after", "of the cost", "////"),
    ):
        part = np.histogram(source.tokens, edges, weights=weights)[0]
        looks: dict[str, Any] = {"color": COLORS[color], "hatch": hatch, "edgecolor": COLORS["surface"]}
        axes.bar(positions + shift, part / max(1e-12, part.sum()), width=0.4, label=label, **looks)
    every = 1 + (len(names) - 1) // 8
    axes.set_xticks(positions[::every], names[::every], rotation=35, ha="right", rotation_mode="anchor")
    axes.set(xlabel="tokens of a row", ylabel="share")
    percents(axes)
    legend_above(axes)


def band_edges(tokens: np.ndarray) -> np.ndarray:
    """Edges of bands of lengths, the last one exclusive, int64 `(bands + 1,)`, strictly rising, at most 14 bands.

    All `tokens`, int64 `(n,)`, are in `[edges[0], edges[-1])`.

    >>> band_edges(np.array([3, 4, 6])).tolist()
    [3, 4, 5, 6, 7]
    """
    first, last = int(tokens.min()), int(tokens.max())
    if last - first < _BANDS:
        return np.arange(first, last + 2)
    # Bands of equal factor; the shortest percent of rows is one band.
    low = max(first, 1, int(np.quantile(tokens, 0.01, method="lower")))
    inner = np.unique(np.round(np.geomspace(low, last + 1, _BANDS + 1)).astype(np.int64))
    return np.unique([first, *inner[1:-1], last + 1])


def _gain_by_ranks(results: Sequence[Comparison], axes: Axes) -> None:
    lines: dict[str, dict[int, float]] = {}
    for position, result in enumerate(results):
        for way in result.ways[1:]:
            lines.setdefault(way.name, {})[position] = result.speed_up(way)
    lines["equal ranks"] = {position: result.equal for position, result in enumerate(results)}
    positions = range(len(results))
    labels = marked_lines({name: [gains.get(each, 1.0) for each in positions] for name, gains in lines.items()})
    markers = iter(_WINDOW_MARKERS * len(lines))
    for name, gains in lines.items():
        color, style, marker = _LOOKS_OF_WAYS.get(name) or (_WINDOW_COLOR, "-", next(markers))
        looks: dict[str, Any] = {"color": COLORS[color], "marker": marker, "label": labels[name]}
        axes.plot(list(gains), list(gains.values()), style, **looks)
    axes.set_xticks(positions, [str(result.num_ranks) for result in results])
    axes.set(xlabel="ranks", ylabel="speed-up", ylim=(min(1.0, axes.get_ylim()[0]), None))
    legend_above(axes)


def _gain_of_ways(result: Comparison, axes: Axes) -> None:
    ways = result.ways[:0:-1]
    gains = [result.speed_up(way) for way in ways]
    colors = [COLORS[_LOOKS_OF_WAYS.get(way.name, (_WINDOW_COLOR,))[0]] for way in ways]
    axes.barh(range(len(ways)), gains, color=colors, height=0.62)
    muted, top = COLORS["muted"], (result.equal, len(ways) - 0.35)
    axes.axvline(result.equal, color=muted, linestyle=":")
    axes.annotate(f"equal ranks {result.equal:.2f}× ", top, color=muted, va="bottom", ha="right")
    # Beside the names, because a bar may be too short for its number.
    axes.set_yticks(range(len(ways)), [f"{way.name}: {gain:.2f}×" for way, gain in zip(ways, gains)])
    axes.grid(visible=False)
    axes.set(xlabel="speed-up", xlim=(0, 1.16 * max(*gains, result.equal)), ylim=(-0.6, len(ways) + 0.2))
