"""An answer as a page: one HTML file that needs no network, for screens of any width, light and dark, and for paper."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from pathlib import Path

import jinja2
from markupsafe import Markup, escape

from commons.cli.pictures import THEMES, Picture, svg_of
from commons.version import __version__
from commons.whole_folder import whole_file


@dataclass(frozen=True)
class PageTable:
    """A table; its first column names the rows."""

    columns: tuple[str, ...]  # headings
    # cells, as many per row as there are columns; a row of one cell is a heading of those that follow
    rows: tuple[tuple[str, ...], ...]
    title: str = ""  # above it; "" for none
    marked: int | None = None  # number of the row that the page is about; None for none


@dataclass(frozen=True)
class Section:
    """A part of a page."""

    title: str  # its heading
    paragraphs: tuple[str, ...] = ()  # text above
    pictures: tuple[Picture, ...] = ()  # with their captions
    tables: tuple[PageTable, ...] = ()  # below them
    terms: tuple[tuple[str, str], ...] = ()  # words with what they mean, below
    notes: tuple[str, ...] = ()  # text below, small


@dataclass(frozen=True)
class Page:
    """A page."""

    title: str  # its heading
    subtitle: str  # what was looked at
    answer: str  # the one sentence to remember
    copy: tuple[str, ...]  # lines to copy, such as options; may be empty
    figures: tuple[tuple[str, str], ...]  # the most important numbers, each with what it is: `("1.63×", "speed-up")`
    sections: tuple[Section, ...]  # what follows
    command: str  # how it was made


def write_page(page: Page, path: Path) -> None:
    """Write a page, whole or not at all; OSError where it cannot be written."""
    names = (f"p{number}" for number in itertools.count())

    def element(picture: Picture) -> Markup:
        # Its text is escaped by matplotlib.
        return Markup(svg_of(picture, next(names)))  # noqa: S704

    template = _templates().get_template("page.html.jinja")
    text = template.render(page=page, themes=THEMES, element=element, version=__version__)
    text = "".join(line + "\n" for line in text.splitlines() if line.strip())
    with whole_file(path) as file:
        file.write(text.encode())


def _templates() -> jinja2.Environment:
    templates = jinja2.Environment(
        loader=jinja2.PackageLoader("commons.cli", package_path="templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters["flags"] = _flags_as_code
    return templates


def _flags_as_code(text: str) -> Markup:
    """Text whose flags are code, and so not broken at their hyphens."""
    return Markup(re.sub(r"--[a-z][\w.-]*\w", r"<code>\g<0></code>", str(escape(text))))  # noqa: S704
