"""The pictures of `evenrank simulate --lengths`: loads of ranks, what lengths cost, the gain, and step after step."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from commons.cli.pictures import COLORS, Picture, is_narrow, marked_lines, whole_steps
from commons.cli.simulate_answer import WORTH, Answer
from commons.perf_model.gain import Comparison, DealtRows

# Steps that a picture shows one by one, and the most bands of lengths.
_SHOWN_STEPS, _BANDS = 60, 14
_MARKERS = "os^Dv"


def pictures_of(answer: Answer) -> tuple[Picture, ...]:
    """All of them; loads and steps are those of the largest number of ranks."""
    largest = answer.comparisons[-1]
    shown = _shown_ways(largest)
    names = ", ".join(way.name for way in shown[1:])
    several = len(answer.comparisons) > 1
    return (
        Picture(
            f"Load of each of {largest.num_ranks} ranks",
            f"Mean over {largest.rows.num_steps} steps of the fullest rank's load, the next one's, and so on, divided "
            f"by the mean load: as loaded, {names}. All ranks wait for the one at the left.",
            _loads(largest, shown),
        ),
        Picture(
            "Where the cost lies",
            "Share of the rows and share of the cost that rows of each length have.",
            _bands(answer),
        ),
        Picture(
            "Gain by number of ranks" if several else f"Gain on {largest.num_ranks} ranks",
            "Speed-up of the slowest rank by each way of dealing rows, with what equal ranks would give as the bound.",
            _gain_by_ranks(answer) if several else _gain_of_ways(largest),
            height=340,
        ),
        Picture(
            "Step after step",
            f"Largest load ÷ mean in the first {min(_SHOWN_STEPS, largest.rows.num_steps)} steps of "
            f"{largest.num_ranks} ranks, as loaded and {shown[-1].name}. 1 is a step in which nobody waits.",
            _steps(largest, shown),
        ),
    )


def _shown_ways(result: Comparison) -> list[DealtRows]:
    """As loaded, each batch refined and, where it gains 2 % more, the best window."""
    windows = [way for way in result.ways if way.window > 1]
    refined = next(way for way in result.ways if way.name == "refined")
    best = min(windows, key=lambda way: way.total, default=refined)
    return [result.ways[0], refined, *([best] if WORTH * best.total <= refined.total else [])]


def _looks(ways: list[DealtRows]) -> list[tuple[DealtRows, str, str]]:
    """Each way with its colour and line style, which also tells them apart in one colour."""
    return list(zip(ways, (COLORS["before"], COLORS["after"], COLORS["third"]), ("-", "--", "-.")))


def _loads(result: Comparison, ways: list[DealtRows]) -> Callable[[Axes], None]:
    lines = {}
    for way in ways:
        ordered = -np.sort(-way.loads, axis=1)
        lines[way.name] = (ordered / np.maximum(1e-12, way.loads.mean(axis=1, keepdims=True))).mean(axis=0)
    labels = marked_lines(lines)

    def draw(axes: Axes) -> None:
        for way, color, style in _looks(ways):
            relative = lines[way.name]
            places, label = np.arange(len(relative) + 1), labels[way.name]
            axes.step(places, [*relative, relative[-1]], where="post", color=color, linestyle=style, label=label)
        axes.set(xlabel="ranks, fullest first", ylabel="load ÷ mean", xlim=(0, result.num_ranks), ylim=(0, None))
        axes.margins(y=0.1)
        axes.legend(loc="best")

    return draw


def _bands(answer: Answer) -> Callable[[Axes], None]:
    edges = band_edges(answer.tokens)
    band = np.clip(np.searchsorted(edges, answer.tokens, side="right") - 1, 0, len(edges) - 2)
    rows, cost = (
        np.bincount(band, weights=weights, minlength=len(edges) - 1)
        for weights in (None, answer.costs.astype(np.float64))
    )
    shares = rows / rows.sum(), cost / max(1e-12, cost.sum())
    names = [_span(first, last) for first, last in zip(edges[:-1], edges[1:] - 1)]

    def draw(axes: Axes) -> None:
        places = np.arange(len(names))
        for share, shift, color, label, hatch in (
            (shares[0], -0.21, COLORS["before"], "of all rows", ""),
            (shares[1], 0.21, COLORS["after"], "of the cost", "////"),
        ):
            axes.bar(
                places + shift, share, width=0.4, color=color, label=label, hatch=hatch, edgecolor=COLORS["surface"]
            )
        every = 1 + (len(names) - 1) // (5 if is_narrow(axes) else 8)
        axes.set_xticks(places[::every], names[::every], rotation=35, ha="right", rotation_mode="anchor")
        axes.set(xlabel="tokens of a row", ylabel="share")
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.legend(loc="best")

    return draw


def band_edges(tokens: np.ndarray) -> np.ndarray:
    """Where bands of lengths begin, and one past the last: integers that rise by a factor, or one by one.

    Args:
        tokens: int64 `(n,)`, at least one.

    Returns:
        int64 `(bands + 1,)`, strictly rising, at most 14 bands; every token is in `[edges[0], edges[-1])`.

    >>> band_edges(np.array([3, 4, 6])).tolist()
    [3, 4, 5, 6, 7]
    """
    first, last = int(tokens.min()), int(tokens.max())
    if last - first < _BANDS:
        return np.arange(first, last + 2)
    # Of equal factor; bands at the short end, which hold next to nothing, become one.
    low = max(first, 1, int(np.quantile(tokens, 0.01, method="lower")))
    inner = np.unique(np.round(np.geomspace(low, last + 1, _BANDS + 1)).astype(np.int64))
    return np.unique([first, *inner[1:-1], last + 1])


def _span(first: int, last: int) -> str:
    return f"{first:,}" if first == last else f"{first:,}–{last:,}"


def _gain_by_ranks(answer: Answer) -> Callable[[Axes], None]:
    ranks = [result.num_ranks for result in answer.comparisons]
    by_way: dict[str, dict[int, float]] = {}
    for result in answer.comparisons:
        for way in result.ways[1:]:
            by_way.setdefault(way.name, {})[result.num_ranks] = result.speed_up(way)
    possible = [result.possible for result in answer.comparisons]
    lines = {name: [gains.get(each, 1.0) for each in ranks] for name, gains in by_way.items()}
    labels = marked_lines({**lines, "possible": possible})

    def draw(axes: Axes) -> None:
        windows = 0
        for name, gains in by_way.items():
            color, style = _look_of(name)
            marker = "x"
            if name.startswith("window"):
                marker, windows = _MARKERS[windows % len(_MARKERS)], windows + 1
            places = [ranks.index(each) for each in gains]
            axes.plot(places, list(gains.values()), style, color=color, marker=marker, markersize=5, label=labels[name])
        axes.plot(range(len(ranks)), possible, ":", color=COLORS["muted"], label=labels["possible"])
        axes.set_xticks(range(len(ranks)), [str(each) for each in ranks])
        axes.set(xlabel="ranks", ylabel="speed-up", ylim=(min(1.0, axes.get_ylim()[0]), None))
        columns = (2 if is_narrow(axes) else 3) - any("(" in label for label in labels.values())
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=columns)

    return draw


def _look_of(name: str) -> tuple[str, str]:
    """Colour and line style of a way."""
    looks = {
        "Karmarkar-Karp": (COLORS["before"], "--"),
        "refined": (COLORS["before"], "-"),
        "free counts": (COLORS["fourth"], "-."),
        "constant cost": (COLORS["third"], "-"),
    }
    return looks.get(name, (COLORS["after"], "-"))


def _gain_of_ways(result: Comparison) -> Callable[[Axes], None]:
    ways = result.ways[1:][::-1]

    def draw(axes: Axes) -> None:
        gains = [result.speed_up(way) for way in ways]
        axes.barh(range(len(ways)), gains, color=[_look_of(way.name)[0] for way in ways], height=0.62)
        for place, gain in enumerate(gains):
            axes.annotate(f"{gain:.2f}× ", (gain, place), va="center", ha="right", color=COLORS["surface"])
        axes.axvline(result.possible, color=COLORS["muted"], linestyle=":")
        axes.annotate(
            f"possible {result.possible:.2f}× ",
            (result.possible, len(ways) - 0.35),
            color=COLORS["muted"],
            va="bottom",
            ha="right",
        )
        axes.set_yticks(range(len(ways)), [way.name for way in ways])
        axes.grid(visible=False)
        axes.set(xlabel="speed-up", xlim=(0, 1.16 * max(*gains, result.possible)), ylim=(-0.6, len(ways) + 0.2))

    return draw


def _steps(result: Comparison, ways: list[DealtRows]) -> Callable[[Axes], None]:
    shown = [ways[0], ways[-1]]
    first = {way.name: way.loads[:_SHOWN_STEPS] for way in shown}
    lines = {name: loads.max(axis=1) / np.maximum(1e-12, loads.mean(axis=1)) for name, loads in first.items()}
    labels = marked_lines(lines)

    def draw(axes: Axes) -> None:
        for way, color, style in _looks(shown):
            ratio, label = lines[way.name], labels[way.name]
            axes.step(np.arange(1, len(ratio) + 1), ratio, where="mid", color=color, linestyle=style, label=label)
        axes.axhline(1.0, color=COLORS["muted"], linewidth=0.8)
        axes.set(xlabel="step", ylabel="largest load ÷ mean")
        whole_steps(axes)
        axes.margins(x=0.01)
        axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, borderaxespad=0.2)

    return draw
