"""The fenced blocks of the documentation, and the commands in them."""

from __future__ import annotations

import itertools
import re
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

ROOT = Path(__file__).parents[3]
PAGES = ("*.md", "docs/**/*.md", "benchmarks/**/*.md", "examples/**/*.md")

# Page, heading, and which block under that heading, from 0 on.
Key: TypeAlias = tuple[str, str, int]

_HEADING = r"^#+ *(?P<heading>.*)$"
_FENCED = r"^ *(?P<fence>`{3,}|~{3,})(?P<language>[\w-]*).*\n(?P<text>(?:.*\n)*?)(?: *(?P<end>(?P=fence)) *$|\Z)"
_PART = re.compile(f"{_HEADING}|{_FENCED}", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block as it is printed, without the indentation of the list it may lie in."""

    key: Key  # where it is
    line: int  # number of its first line in the page
    language: str  # what follows the fence; empty for pictures
    text: str

    def __str__(self) -> str:
        return f"{self.key[0]}:{self.line}"


def documented_blocks() -> dict[Key, Block]:
    """All blocks of all pages."""
    pages = sorted({page for pattern in PAGES for page in ROOT.glob(pattern)})
    texts = {page.relative_to(ROOT).as_posix(): page.read_text(encoding="utf-8") for page in pages}
    return {block.key: block for name, text in texts.items() for block in blocks_of(name, text)}


def blocks_of(name: str, text: str) -> Iterator[Block]:
    """The blocks of one page.

    Raises:
        ValueError: a block without an end: it takes what follows for its text.
    """
    heading, number = "", 0
    for part in _PART.finditer(text):
        if part["heading"] is not None:
            heading, number = part["heading"].strip(), 0
            continue
        line = text.count("\n", 0, part.start("text")) + 1
        if part["end"] is None or re.search(f"^ *{part['fence']}", part["text"], re.MULTILINE):
            raise ValueError(f"{name}:{line}: a block without an end")
        yield Block((name, heading, number), line, part["language"], textwrap.dedent(part["text"]).removesuffix("\n"))
        number += 1


def is_excerpt(text: str, source: str) -> bool:
    """Whether the lines of a text are consecutive lines of a source, however far the whole is indented there.

    Imports, which a text begins with, are lines of the source too, wherever they stand in it.
    """
    lines = [line.rstrip() for line in source.splitlines()]
    stated = [line.rstrip() for line in textwrap.dedent(text).strip("\n").splitlines()]
    body = [line for line in stated if not (line.startswith(("import ", "from ")) and line in lines)]
    wanted = "\n".join(body).strip("\n").splitlines()
    windows = (lines[start : start + len(wanted)] for start in range(len(lines) - len(wanted) + 1))
    found = any(textwrap.dedent("\n".join(window)).splitlines() == wanted for window in windows)
    return bool(stated) and (not wanted or found)


def commands_in(text: str) -> list[str]:
    """The commands of a shell block: continued lines as one, without comments and blank lines; <<'END' and <(…) as is.

    >>> commands_in('make demo   # a table\\n\\nevenrank simulate \\\\\\n    --ranks 8')
    ['make demo', 'evenrank simulate --ranks 8']
    >>> commands_in("source <(evenrank --help)")
    ['source <(evenrank --help)']
    """
    commands = []
    lines = iter(re.sub(r"\\\n\s*", "", text).splitlines())
    for line in lines:
        here = re.search(r"<<'(\w+)'", line)
        if here:
            inside = itertools.takewhile(lambda each: each != here[1], lines)
            commands.append("\n".join([line, *inside, here[1]]))
        elif "<(" in line:
            commands.append(line.strip())
        elif words := shlex.split(line, comments=True):
            commands.append(shlex.join(words))
    return commands
