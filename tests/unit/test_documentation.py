"""The pages lead somewhere, wherever they are read: in the repository and as a site."""

from __future__ import annotations

import importlib.util
import itertools
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

import evenrank
from tests.helpers.documents.documented import PAGES, ROOT

DOCS = ROOT / "docs"
PATHS = sorted({page.relative_to(ROOT).as_posix() for pattern in PAGES for page in ROOT.glob(pattern)})
MOST_LINES_OF_README = 120


def tokens_of(page: Path) -> list[Token]:
    """The page as the repository shows it: CommonMark, with tables."""
    return MarkdownIt("commonmark").enable("table").parse(page.read_text(encoding="utf-8"))


def links_of(page: Path) -> Iterator[str]:
    for token in tokens_of(page):
        for part in token.children or ():
            address = part.attrs.get("href") or part.attrs.get("src")
            if isinstance(address, str) and not re.match(r"[a-z]+:", address):
                yield address


@cache
def anchors_of(page: Path) -> set[str]:
    """Of the headings, by the rule of code forges: lower case, spaces to hyphens, and no punctuation."""
    tokens, anchors = tokens_of(page), set()
    for opening, heading in itertools.pairwise(tokens):
        if opening.type == "heading_open":
            text = "".join(part.content for part in heading.children or () if part.type in ("text", "code_inline"))
            anchors.add(re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-"))
    return anchors


@pytest.mark.parametrize("path", PATHS)
def test_links_lead_to_files_and_headings(path):
    page = ROOT / path
    for link in links_of(page):
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists() and target.is_relative_to(ROOT), f"{path}: {link}"
        assert not anchor or anchor in anchors_of(target), f"{path}: {link} has no such heading"


@pytest.mark.parametrize("path", PATHS)
def test_a_list_begins_behind_an_empty_line_or_a_heading(path):
    """The site's Markdown takes it for text otherwise."""
    lines = (ROOT / path).read_text(encoding="utf-8").splitlines()
    for token in tokens_of(ROOT / path):
        if token.type in ("bullet_list_open", "ordered_list_open") and token.map and token.map[0]:
            before = lines[token.map[0] - 1].strip()
            assert not before or before.startswith("#"), f"{path}:{token.map[0] + 1}"


def test_every_public_name_has_its_place_in_the_api():
    shown = [
        name
        for page in sorted((DOCS / "api").glob("*.md"))
        for name in re.findall(r"^::: evenrank\.(\w+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert sorted(shown) == sorted(set(evenrank.__all__) - {"__version__"})


def test_named_files_and_promises_are_there():
    promises = (ROOT / "tests/test_promises.py").read_text(encoding="utf-8")
    there = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    for page in sorted(DOCS.rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        for path in re.findall(r"`(tests/[\w/]+\.py)`", text):
            assert (ROOT / path).is_file(), f"{page.name} names {path}"
        for name in re.findall(r"`(?:\w+/)*(test_\w+\.py)`", text):
            assert name in there, f"{page.name} names {name}"
        for number in re.findall(r"`(test_\d\d)…`", text):
            assert f"def {number}_" in promises, f"{page.name} names {number}"


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= MOST_LINES_OF_README


@pytest.fixture(scope="module")
def hook():
    pytest.importorskip("mkdocs", reason="make docs installs what builds the site")
    spec = importlib.util.spec_from_file_location("docs_hook", ROOT / "ci/docs_hook.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def page_of_site(path):
    """A page and the config of a site."""
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import File
    from mkdocs.structure.pages import Page

    config = MkDocsConfig()
    return Page(None, File(path, str(DOCS), str(ROOT / "site"), use_directory_urls=False), config), config


@pytest.mark.parametrize(
    ("tag", "stops"),
    [
        ('<script src="https://unpkg.com/x"></script>', True),
        ('<link rel="stylesheet" href="//fonts.googleapis.com/css">', True),
        ('<img alt="" src=http://example.org/x.png>', True),
        ('<script src="assets/x.js"></script>', False),
        ('<a href="https://example.org">x</a> <svg xmlns="http://www.w3.org/2000/svg">', False),
        ('<link rel="canonical" href="https://example.org/x.html">', False),
    ],
)
def test_a_page_that_loads_from_the_network_stops_the_build(hook, tag, stops):
    from mkdocs.exceptions import PluginError

    page, config = page_of_site("llm.md")
    if not stops:
        assert hook.on_post_page(tag, page, config) == tag
        return
    with pytest.raises(PluginError, match=r"llm\.md loads .*; the site needs no network"):
        hook.on_post_page(tag, page, config)
