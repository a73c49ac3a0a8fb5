"""Damaged files, and what a reader may answer: success, or a user's mistake in one line."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from hypothesis import HealthCheck, settings

# What run_main reports as a user's mistake.
MISTAKES = (ValueError, TypeError, KeyError, FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)
_ODD_VALUES: list[Any] = [
    *(None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63) - 1, 10**30, 0.5, 1e308, -0.0, float("nan"), float("inf")),
    *("", "x", "../../etc/passwd", "/", "\x00", "a\nb", "\ud800", "é" * 300, "1", "nan", "9" * 400),
    *([], [[]], {}, {"": {}}, [None], [1, "a"], [2**70]),
]
_ODD_TEXTS = [
    *("", "nan", "inf", "1e999", "-1", "true", "null", "~", "[]", "{}", "[[[[", '"', '"""', "'", "&a [*a]", "*a"),
    *("9" * 30, "9" * 5000, "0x10", "1979-05-27", "1_000", '"x"', '"\\ud800"', "\x00", "\ufeff", "!!python/none x"),
    *("<<", "::", ",", "\t", "\r", "1.5", "-0", "99999999999999999999"),
]


def fuzzed(few: int, many: int | None = None) -> settings:
    """The examples of a fuzz test: a few, always the same; with `--hypothesis-profile soak` many, drawn anew.

    Args:
        few: examples in the suite.
        many: examples of the profile, if not its own number: where one takes seconds.
    """
    quiet = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large]
    if settings.get_current_profile_name() == "soak":
        profile = settings(suppress_health_check=quiet)
        return profile if many is None else settings(profile, max_examples=many)
    return settings(max_examples=few, derandomize=True, database=None, deadline=None, suppress_health_check=quiet)


def damaged_bytes(raw: bytes, random: Random) -> bytes:
    """Bytes with some of them flipped, cut out, doubled, or put elsewhere."""
    data = bytearray(raw)
    for _ in range(random.randint(1, 3)):
        kind, at = random.randrange(6), random.randrange(len(data) + 1)
        length = random.choice([1, 1, 4, 32, 1000])
        if kind == 0 and data:
            data[min(at, len(data) - 1)] ^= 1 << random.randrange(8)
        elif kind == 1:
            del data[at:]
        elif kind == 2:
            del data[at : at + length]
        elif kind == 3:
            data[at:at] = bytes(random.randrange(256) for _ in range(min(length, 32)))
        elif kind == 4:
            data[at : at + 4] = random.choice([b"\xff\xff\xff\xff", b"\xff\xff\xff\x7f", bytes(4)])
        else:
            data[at:at] = data[max(0, at - length) : at]
    return bytes(data)


def damaged_text(text: str, random: Random) -> bytes:
    """A text whose values are odd, or whose lines are doubled, lost, or swapped; now and then no UTF-8."""
    lines = text.splitlines(keepends=True)
    for _ in range(random.randint(1, 2)):
        kind, at = random.randrange(6), random.randrange(max(1, len(lines)))
        if not lines:
            break
        if kind <= 2:
            words = [found.span() for found in re.finditer(r"[\w.+-]+|\"[^\"]*\"|\[[^\]]*\]", lines[at])]
            if words:
                start, end = random.choice(words)
                lines[at] = lines[at][:start] + random.choice(_ODD_TEXTS) + lines[at][end:]
        elif kind == 3:
            lines.insert(random.randrange(len(lines) + 1), lines[at])
        elif kind == 4:
            del lines[at]
        else:
            lines[at] = random.choice(
                ["[" * 3000 + "\n", "a.b.c.d = 1\n", "- - - x: {\n", "\n", "\x00\n", "a" * 70_000]
            )
    raw = "".join(lines).encode("utf-8", "surrogatepass")
    return damaged_bytes(raw, random) if random.random() < 0.3 else raw


def damaged_json(content: Any, random: Random) -> Any:
    """A nested value with one or two of its parts replaced, lost, or added."""
    content = copy.deepcopy(content)
    for _ in range(random.randint(1, 2)):
        places = list(_places(content))
        if not places:
            break
        parent, key = random.choice(places)
        kind = random.randrange(8)
        if kind == 0 and isinstance(parent, dict):
            del parent[key]
        elif kind == 1 and isinstance(parent, dict):
            parent[random.choice(["", "x", "__class__", "self", f"{key} "])] = random.choice(_ODD_VALUES)
        elif kind == 2 and isinstance(parent, list):
            parent.append(copy.deepcopy(parent[key]))
        elif kind == 3 and isinstance(parent[key], (int, float)) and not isinstance(parent[key], bool):
            parent[key] = random.choice(
                [-parent[key], parent[key] + 1, parent[key] * 2, float(parent[key]), str(parent[key])]
            )
        else:
            parent[key] = copy.deepcopy(random.choice(_ODD_VALUES))
    return content


def _places(content: Any) -> Any:
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in items:
        yield content, key
        yield from _places(value)


def odd_place(path: Path, kind: str) -> Path:
    """What is no file at `path`: a folder, a loop of links, a link to nothing, an empty file, or nothing."""
    if kind == "folder":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path)
    elif kind == "dangling":
        path.symlink_to(path.with_name("nothing here"))
    elif kind == "empty":
        path.write_bytes(b"")
    return path


ODD_PLACES = ("folder", "loop", "dangling", "empty", "nothing")


def require_answer(read: Callable[[], Any]) -> str | None:
    """Call a reader; None for success, else the text of a user's mistake.

    Raises:
        AssertionError: another exception, or a text that is empty or more than one line.
    """
    try:
        read()
    except MISTAKES as error:
        text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
        if not text or "\n" in text or "\r" in text:
            raise AssertionError(f"{type(error).__name__} is no line: {text[:500]!r}") from error
        return text
    except Exception as error:
        raise AssertionError(f"no mistake of a user's: {type(error).__name__}: {error}") from error
    return None
