"""An answer as a page: one HTML file that needs no network, for screens of any width, light and dark, and for paper."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jinja2
from markupsafe import Markup, escape

from commons.cli.pictures import NARROW, THEMES, WIDE, Picture, svg_of
from commons.version import __version__
from commons.whole_folder import whole_file


@dataclass(frozen=True)
class PageTable:
    """A table; its first column names the rows.

    Attributes:
        columns: headings.
        rows: cells, as many per row as there are columns; a row of one cell is a heading of those that follow.
        title: above it; "" for none.
        marked: number of the row that the page is about; None for none.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    title: str = ""
    marked: int | None = None


@dataclass(frozen=True)
class Section:
    """A part of a page.

    Attributes:
        title: its heading.
        paragraphs: text above.
        pictures: with their captions.
        tables: below them.
        terms: words with what they mean, below.
        notes: text below, small.
    """

    title: str
    paragraphs: tuple[str, ...] = ()
    pictures: tuple[Picture, ...] = ()
    tables: tuple[PageTable, ...] = ()
    terms: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Page:
    """A page.

    Attributes:
        title: its heading.
        subtitle: what was looked at.
        answer: the one sentence to remember.
        copy: lines to copy, such as options; may be empty.
        figures: the most important numbers, each with what it is: `("1.63×", "speed-up")`.
        sections: what follows.
        command: how it was made.
    """

    title: str
    subtitle: str
    answer: str
    copy: tuple[str, ...]
    figures: tuple[tuple[str, str], ...]
    sections: tuple[Section, ...]
    command: str


def require_page(path: Path) -> None:
    """Raise ValueError unless the file's type is html."""
    if path.suffix not in (".html", ".htm"):
        raise ValueError(f"html is {str(path)!r}; a page is an .html file: give it that ending")


def write_page(page: Page, path: Path) -> None:
    """Write a page, whole or not at all.

    Raises:
        ValueError: a file type other than .html.
        OSError: the file cannot be written.
    """
    require_page(path)
    names = (f"p{number}" for number in itertools.count())

    def element(picture: Picture, width: int) -> Markup:
        # Its text is escaped by matplotlib.
        return Markup(svg_of(picture, width, next(names)))  # noqa: S704

    template = _templates().get_template("page.html.jinja")
    text = "".join(
        _without_blank_lines(
            template.generate(page=page, themes=THEMES, element=element, wide=WIDE, narrow=NARROW, version=__version__)
        )
    )
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


def _without_blank_lines(parts: Iterator[str]) -> Iterator[str]:
    return (line + "\n" for line in "".join(parts).splitlines() if line.strip())
