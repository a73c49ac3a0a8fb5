"""An answer as a page: one HTML file that needs no network, for screens of any width, light and dark, and for paper."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import jinja2
from markupsafe import Markup, escape

from commons.cli.answer import Answer
from commons.cli.pictures import THEMES, Picture, svg_of
from commons.version import __version__
from commons.whole_folder import whole_file


def write_page(answer: Answer, path: Path, command: str) -> None:
    """Write a page that ends with the command that made it, whole or not at all; OSError where that cannot be done."""
    names = (f"p{number}" for number in itertools.count())

    def element(picture: Picture) -> Markup:
        # Its text is escaped by matplotlib.
        return Markup(svg_of(picture, next(names)))  # noqa: S704

    templates = jinja2.Environment(
        loader=jinja2.PackageLoader("commons.cli", package_path="templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters["flags"] = _flags_as_code
    template = templates.get_template("page.html.jinja")
    text = template.render(page=answer, command=command, themes=THEMES, element=element, version=__version__)
    text = "".join(line + "\n" for line in text.splitlines() if line.strip())
    with whole_file(path) as file:
        file.write(text.encode())


def _flags_as_code(text: str) -> Markup:
    """Text whose flags are code, and so not broken at their hyphens."""
    return Markup(re.sub(r"--[a-z][\w.-]*\w", r"<code>\g<0></code>", str(escape(text))))  # noqa: S704
