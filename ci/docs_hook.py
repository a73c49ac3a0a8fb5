"""A hook of mkdocs: the pages of docs/ link to files outside, since they are read in the repository too.

README becomes the home page; whatever it and the pages of docs/ link to, and so on, becomes a page as well: Markdown
as it is, a folder as a list of its pages, any other file as a listing of its source. Pictures come along. Links are
changed to lead there, so that mkdocs checks them.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page
from pygments.lexers import get_lexer_for_filename
from pygments.util import ClassNotFound

ROOT = Path(__file__).parents[1]
HOME = "README.md"
_DOCS = "docs/"
_PICTURES = (".png", ".svg")
# What was brought along, such as results and sources, comes behind the pages of docs/ in a search.
_BOOST_OF_OTHERS = 0.1
_LINK = re.compile(r"(?<=\]\()[^)\s]+(?=\))")
_TAGS_THAT_LOAD = re.compile(r"<(?:script|link|img|iframe|source)\b[^>]*=\"?(?:https?:)?//[^>]*>")
# Code holds no links: fenced blocks, and spans within a line.
_CODE = re.compile(r"^ *(`{3,}|~{3,}).*?^ *\1 *$|`[^`\n]+`", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what the pages link to outside docs/."""
    found: set[str] = set()
    waiting = {HOME, *(_DOCS + file.src_uri for file in files.documentation_pages())}
    while waiting:
        path = waiting.pop()
        found.add(path)
        waiting |= {*(_targets_of(path) if path.endswith(".md") else _pages_in(path))} - found
    for path in sorted(found):
        if not path.startswith(_DOCS):
            files.append(_file(path, config))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links lead to where the site has what they mean."""
    origin = _origin(page.file.src_uri)
    if page.file.inclusion is InclusionLevel.NOT_IN_NAV and origin != HOME:
        page.meta.setdefault("search", {"boost": _BOOST_OF_OTHERS})
    if origin is None:
        return markdown

    def to_site(link: str) -> str:
        target, anchor = _resolve(origin, link)
        if target is None:
            return link
        return posixpath.relpath(_place(target), posixpath.dirname(page.file.src_uri) or ".") + anchor

    return _with_links(markdown, to_site)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Stop if a page loads something from the network.

    Raises:
        PluginError: it does; names it.
    """
    loaded = [tag for tag in _TAGS_THAT_LOAD.findall(output) if "canonical" not in tag]
    if loaded:
        raise PluginError(f"{page.file.src_uri} loads {loaded[0]}; the site needs no network: bring it along in docs/")
    return output


def _targets_of(path: str) -> Iterator[str]:
    """Files and folders of the repository that a page links to."""
    links: list[str] = []
    _with_links((ROOT / path).read_text(encoding="utf-8"), lambda link: links.append(link) or link)
    for link in links:
        target, _ = _resolve(path, link)
        if target is not None:
            yield target


def _with_links(markdown: str, change: Callable[[str], str]) -> str:
    """The text with every link outside code changed."""
    parts, end = [], 0
    for code in [*_CODE.finditer(markdown), None]:
        start = len(markdown) if code is None else code.start()
        parts.append(_LINK.sub(lambda found: change(found[0]), markdown[end:start]))
        if code is not None:
            parts.append(code[0])
            end = code.end()
    return "".join(parts)


def _resolve(page: str, link: str) -> tuple[str | None, str]:
    """What a link of a page means in the repository, and its anchor; None for an address, or what does not exist."""
    path, hash_sign, anchor = link.partition("#")
    if not path or re.match(r"[a-z]+:", path):
        return None, ""
    target = posixpath.normpath(posixpath.join(posixpath.dirname(page), path))
    if target.startswith("..") or not (ROOT / target).exists():
        return None, ""  # mkdocs says that there is no such page
    return target, hash_sign + anchor


def _place(path: str) -> str:
    """Where a file or folder of the repository is in the site, by the name of its source."""
    if path == HOME:
        return "index.md"
    if (ROOT / path).is_dir():
        return f"{path}/index.md"
    if path.endswith((".md", *_PICTURES)):
        return path.removeprefix(_DOCS)
    return f"{path}.md"


def _origin(src_uri: str) -> str | None:
    """The page of the repository that a page of the site is; None for one that is made."""
    for path in (HOME if src_uri == "index.md" else "", _DOCS + src_uri, src_uri):
        if path and (ROOT / path).is_file():
            return path
    return None


def _pages_in(folder: str) -> list[str]:
    return sorted(page.relative_to(ROOT).as_posix() for page in (ROOT / folder).glob("*.md"))


def _file(path: str, config: MkDocsConfig) -> File:
    """A file for mkdocs: the file itself, or a page that shows it."""
    at = ROOT / path
    if at.is_dir():
        made = File.generated(config, _place(path), content=_list_of_pages(path))
    elif path.endswith((".md", *_PICTURES)):
        made = File.generated(config, _place(path), abs_src_path=str(at))
    else:
        made = File.generated(config, _place(path), content=_listing(path))
    made.inclusion = InclusionLevel.NOT_IN_NAV  # a page may be there all the same
    return made


def _list_of_pages(folder: str) -> str:
    lines = [f"# `{folder}`", ""]
    for page in _pages_in(folder):
        text = (ROOT / page).read_text(encoding="utf-8")
        title = next((line.removeprefix("# ") for line in text.splitlines() if line.startswith("# ")), page)
        lines.append(f"- [{title}]({posixpath.basename(page)})")
    return "\n".join(lines) + "\n"


def _listing(path: str) -> str:
    try:
        language = get_lexer_for_filename(path).aliases[0]
    except ClassNotFound:
        language = "text"
    return f"# `{path}`\n\n~~~~~~{language}\n{(ROOT / path).read_text(encoding='utf-8')}\n~~~~~~\n"
