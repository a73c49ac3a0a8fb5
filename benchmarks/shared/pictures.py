"""Pictures for the documentation: the same bytes for the same numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure


@contextmanager
def picture(path: Path, shape: tuple[int, int], size: tuple[float, float], **options: Any) -> Iterator[np.ndarray]:
    """Axes of a picture, an array of this shape; drawn upon, it is saved with the legend of its first axis."""
    with matplotlib.rc_context({"svg.hashsalt": "evenrank", "font.size": 9}):
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots(*shape, squeeze=False, **options)
        yield axes
        handles, labels = axes[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=shape[1] + 1, fontsize=8, frameon=False)
        figure.savefig(path, metadata={"Date": None})
