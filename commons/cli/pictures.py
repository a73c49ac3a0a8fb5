"""Pictures and pages of a command's answer.

A page is one HTML file that needs no network, for screens of any width, light and dark, and for paper. A picture draws
on one Axes in the colours of `COLORS`. In a page, the colours become CSS variables, whose values depend on the theme
(`THEMES`), and text stays text.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import matplotlib
import numpy as np
from markupsafe import Markup, escape
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import ArrayLike

from commons.cli.answer import Answer
from commons.version import __version__
from commons.whole_folder import whole_file

# Distinguishable with every kind of colour vision (after Okabe and Ito, Color Universal Design, 2008), darkened or
# lightened to a contrast of 4.5 to 1 with the surface, which text needs (WCAG 2.2, 1.4.3).
_COLORS = {  # light and dark theme
    "surface": ("#ffffff", "#15171a"),
    "raised": ("#f4f5f7", "#202328"),
    "ink": ("#1b1d21", "#e9eaec"),
    "muted": ("#5a5f68", "#a9afb8"),
    "grid": ("#dfe2e7", "#3a3f46"),
    "before": ("#b8460a", "#f08b4c"),
    "after": ("#0b66a3", "#63b3ea"),
    "third": ("#06775c", "#3fc5a2"),
    "fourth": ("#87478a", "#d892d3"),
}
THEMES = {theme: {name: both[place] for name, both in _COLORS.items()} for place, theme in enumerate(("light", "dark"))}
# Colours in which pictures are drawn.
COLORS = THEMES["light"]

# Width of a picture in CSS pixels, 96 per inch; a page scales the picture to the screen.
WIDTH = 440
_PIXELS_PER_INCH = 96
_FILE_WIDTH = 625  # width of a picture in a file, which is not scaled
_TEXT = 10  # points: 13 pixels


@dataclass(frozen=True)
class Picture:
    """A picture with its texts."""

    title: str  # a few words
    text: str  # a sentence or two: the caption, also for screen readers
    draw: Callable[[Axes], None]
    height: int = 300  # pixels


# Colours, line styles and markers of lines; each line differs from the others in all three.
LOOKS = (("before", "-", "o"), ("after", "--", "s"), ("third", "-.", "^"), ("fourth", ":", "D"))


def whole_numbers(axes: Axes) -> None:
    """Label the horizontal axis, of steps or ranks, only at whole numbers."""
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8, min_n_ticks=1))


def percents(axes: Axes) -> None:
    """Label the vertical axis, of fractions, in percent, with as many digits as its ticks have."""
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.5g}%")


def legend_above(axes: Axes) -> None:
    """Put the legend above the picture, in as many columns as fit."""
    # Until the layout, axes have 0.775 of the picture's width; then a vertical axis with a label leaves them some 0.85.
    room = axes.bbox.width / 0.775 * (0.85 if axes.get_ylabel() else 0.97)
    for columns in (3, 2, 1):
        legend = axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=columns, borderaxespad=0.2)
        if legend.get_window_extent().width <= room:
            break


def write_pictures(pictures: Sequence[Picture], path: Path) -> None:
    """Write pictures, at least one, into one .png, .svg or .pdf, two in a row; OSError if it cannot be written."""
    columns = min(2, len(pictures))
    rows = [pictures[first : first + columns] for first in range(0, len(pictures), columns)]
    heights = [max(picture.height for picture in row) + 40 for row in rows]
    size = (columns * _FILE_WIDTH / _PIXELS_PER_INCH, sum(heights) / _PIXELS_PER_INCH)
    with _drawing("evenrank", COLORS["surface"]):
        figure = Figure(figsize=size, layout="constrained")
        grid = figure.add_gridspec(len(rows), columns, height_ratios=heights)
        for row, of_row in enumerate(rows):
            for column, picture in enumerate(of_row):
                whole_row = len(of_row) < columns
                part = figure.add_subfigure(grid[row, :] if whole_row else grid[row, column])
                part.suptitle(as_text(picture.title), x=0.01, ha="left", fontweight="bold")
                picture.draw(part.subplots())
        with whole_file(path) as file:
            figure.savefig(file, format=path.suffix[1:], dpi=144)


def svg_of(picture: Picture, name: str) -> str:
    """A picture as an SVG element, without its title; `name`, unique on the page, makes the ids of its parts unique."""
    written = io.StringIO()
    with _drawing(name, "none"):
        size = (WIDTH / _PIXELS_PER_INCH, picture.height / _PIXELS_PER_INCH)
        figure = Figure(figsize=size, layout="constrained")
        picture.draw(figure.subplots())
        figure.savefig(written, format="svg", metadata={"Date": None, "Creator": None})
    return _as_element(written.getvalue())


def as_text(name: str) -> str:
    """A name for pictures: without TeX, and without a leading `_`, which would hide it from a legend."""
    shown = name.replace("$", r"\$")
    return f"\u200b{shown}" if shown.startswith("_") else shown


@contextlib.contextmanager
def _drawing(salt: str, surface: str) -> Iterator[None]:
    """Draw in our style; equal salts and contents give equal ids in an SVG."""
    ink, muted = COLORS["ink"], COLORS["muted"]
    style: dict[Any, Any] = {
        **dict.fromkeys(("font.size", "legend.fontsize"), _TEXT),
        "figure.titlesize": _TEXT + 1,
        "svg.fonttype": "none",
        "svg.hashsalt": salt,
        **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), ink),
        **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), muted),
        **dict.fromkeys(("axes.facecolor", "figure.facecolor"), surface),
        "grid.color": COLORS["grid"],
        "axes.grid": True,
        "axes.grid.axis": "y",
        "axes.axisbelow": True,
        **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
        "lines.linewidth": 1.8,
        "lines.markersize": 5,
    }
    with matplotlib.rc_context(style), warnings.catch_warnings():
        # Names of runs may have letters that matplotlib's font does not have, but a browser's fonts do.
        warnings.filterwarnings("ignore", r"Glyph .* missing from font", UserWarning)
        yield


def _as_element(svg: str) -> str:
    """Turn an SVG file into an element that the page scales and colours, without ids that nothing refers to."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(<svg[^>]*?) (?:width="[^"]*" height="[^"]*"|height="[^"]*" width="[^"]*")', r"\1", svg, count=1)
    svg = re.sub(r' (?:xmlns:xlink|version)="[^"]*"', "", svg, count=2)
    referred = set(re.findall(r'(?:url\(#|href="#)([\w-]+)', svg))
    svg = re.sub(r' id="([^"]+)"', lambda found: found[0] if found[1] in referred else "", svg)
    for name, color in COLORS.items():
        svg = svg.replace(color, f"var(--{name})")
    return svg.replace("<svg", '<svg aria-hidden="true"', 1)


def marked_lines(lines: Mapping[str, ArrayLike]) -> dict[str, str]:
    """Labels of lines; a line that covers an equal earlier line has the earlier line's name in brackets.

    Lines count as equal if they differ by less than 1 % of the picture's height.

    >>> marked_lines({"refined": [1.2, 1.5], "free counts": [1.2, 1.501], "window": [1.3, 1.5]})
    {'refined': 'refined', 'free counts': 'free counts (≈ refined)', 'window': 'window'}
    """
    drawn = {name: np.asarray(values, dtype=np.float64) for name, values in lines.items()}
    height = np.ptp(np.concatenate([*drawn.values()]))
    marked: dict[str, str] = {}
    for name, values in drawn.items():
        firsts = (each for each, shown in marked.items() if shown == each)
        alike = (each for each in firsts if np.allclose(drawn[each], values, rtol=1e-3, atol=0.01 * height))
        same = next(alike, None)
        marked[name] = name if same is None else f"{name} (≈ {same})"
    return marked


def write_page(answer: Answer, path: Path, command: str) -> None:
    """Write a page, with the command that made it at the end; OSError if it cannot be written, and then no file."""
    names = map("p{}".format, itertools.count())
    templates = jinja2.Environment(
        loader=jinja2.PackageLoader("commons.cli", package_path="templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters["flags"] = _flags_as_code
    template = templates.get_template("page.html.jinja")
    text = template.render(
        page=answer,
        command=command,
        themes=THEMES,
        element=lambda picture: Markup(svg_of(picture, next(names))),  # noqa: S704  matplotlib escapes its text
        version=__version__,
    )
    text = "".join(line + "\n" for line in text.splitlines() if line.strip())
    with whole_file(path) as file:
        file.write(text.encode())


def _flags_as_code(text: str) -> Markup:
    """Mark flags as code, so that lines do not break at their hyphens."""
    return Markup(re.sub(r"--[a-z][\w.-]*\w(?: \d+)?", r"<code>\g<0></code>", str(escape(text))))  # noqa: S704  escaped
