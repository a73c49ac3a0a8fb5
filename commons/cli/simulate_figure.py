"""The picture of `evenrank simulate`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from commons.perf_model.simulation import SimulatedSteps
from commons.whole_folder import whole_file

_SUFFIXES = (".png", ".svg", ".pdf")
_BEFORE, _AFTER = "#b5442e", "#2e6fb5"


def require_picture(path: Path) -> None:
    """Raise ValueError unless the file's type is png, svg or pdf."""
    if path.suffix not in _SUFFIXES:
        raise ValueError(f"figure is {str(path)!r}; pictures are {', '.join(_SUFFIXES)}: choose one of these endings")


def write_figure(results: Sequence[SimulatedSteps], path: Path) -> None:
    """Draw the gain by number of ranks, and the ranks' loads in the most uneven step of the largest number.

    Raises:
        ValueError: a file type other than png, svg and pdf.
    """
    require_picture(path)
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    gain, loads = figure.subplots(1, 2)
    ranks = [str(result.num_ranks) for result in results]
    gain.bar(ranks, [result.speed_up for result in results], color=_AFTER, width=0.55, label="balanced")
    gain.plot(
        ranks, [result.possible_speed_up for result in results], "_", color=_BEFORE, markersize=24, label="possible"
    )
    gain.axhline(1, color="grey", linewidth=0.8)
    gain.set(xlabel="ranks", ylabel="speed-up of the slowest rank")
    for index, result in enumerate(results):
        gain.annotate(f"{result.speed_up:.2f}×", (index, result.speed_up - 0.04), ha="center", va="top", color="white")
    gain.legend(frameon=False, loc="upper left")
    gain.margins(y=0.2)
    widest = max(results, key=lambda result: result.num_ranks)
    mean = widest.loads_before.mean()
    for values, color, label in ((widest.loads_before, _BEFORE, "as loaded"), (widest.loads_after, _AFTER, "balanced")):
        order = np.sort(values)[::-1] / mean
        loads.step(np.arange(len(order) + 1), [*order, order[-1]], where="post", color=color, label=label)
    loads.set(
        xlabel="ranks, fullest first",
        ylabel="load ÷ mean",
        title=f"most uneven step of {widest.num_ranks} ranks",
        xlim=(0, widest.num_ranks),
        ylim=(0, None),
    )
    loads.legend(frameon=False)
    for axes in (gain, loads):
        axes.spines[["top", "right"]].set_visible(False)
    with matplotlib.rc_context({"svg.hashsalt": "evenrank"}), whole_file(path) as file:
        figure.savefig(file, format=path.suffix[1:], dpi=150)
