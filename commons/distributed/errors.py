"""Errors of one rank, or differences between ranks, raised on all ranks."""

from __future__ import annotations

import itertools
import json
import re
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")

# Exception types that are raised under their own name on every rank; any other becomes a RuntimeError.
_USER_ERRORS: dict[str, type[Exception]] = {"ValueError": ValueError, "TypeError": TypeError, "KeyError": KeyError}
# Characters of an error's text that are sent; how many different errors, and ranks of each, a message names.
_LONGEST = 4000
_NAMED = 16
# Bytes of text in one int64.
_WORD = 8


def capture_error(function: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """The result of a function and None, or None and its exception, which is to be raised on all ranks."""
    try:
        return function(), None
    except Exception as error:
        return None, error


def describe_error(error: BaseException) -> list[str]:
    """Type name and text of an error, for the other ranks; raises nothing, even where str() of the error does.

    The text of an error without one, such as that of a bare assert, is the line that raised it.
    """
    text = _text_of(error)
    if not text and error.__traceback__ is not None:
        line = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{Path(line.filename).name}, line {line.lineno}, in {line.name}"
    if len(text) > _LONGEST:
        text = f"{text[:_LONGEST]}… and {len(text) - _LONGEST} more characters"
    return [type(error).__name__, text]


def _text_of(error: BaseException) -> str:
    try:
        text = str(error.args[0] if isinstance(error, KeyError) and error.args else error)
    except Exception as broken:
        text = f"its text is not available: str() of it raises {type(broken).__name__}"
    # A lone surrogate, which a file name may contain, cannot be encoded as UTF-8.
    return text.encode(errors="backslashreplace").decode()


def first_line(error: BaseException) -> str:
    """The first line of an error's text, without torch's and gloo's source positions and C++ frames."""
    text = re.sub(r"^(Gloo .* with )?\[[^\]\s]+:\d+\]\s*", r"\1", _text_of(error).strip())
    # gloo's advice is dropped: messages here end in their own.
    return re.split(r"\n|\. This is typically", text)[0] or type(error).__name__


def gather_strings(text: str, gather: Callable[[np.ndarray], np.ndarray]) -> list[str]:
    """Gather one string from each rank.

    `gather` is called twice, and gathers int64 `(n,)` of every rank into `(world_size, n)`.
    """
    encoded = text.encode(errors="backslashreplace")  # a lone surrogate cannot be encoded as UTF-8
    sizes = gather(np.array([len(encoded)]))[:, 0]
    words = max(-(-int(sizes.max()) // _WORD), 1)
    padded = bytearray(encoded.ljust(words * _WORD))  # writable: torch warns of read-only memory
    rows = gather(np.frombuffer(padded, dtype=np.int64))
    return [rows[rank].tobytes()[:size].decode() for rank, size in enumerate(sizes)]


def raise_on_all(error: Exception | None, names: Sequence[int], gather: Callable[[np.ndarray], np.ndarray]) -> None:
    """Raise the errors of all ranks on every rank as one error, if any rank has one; called by all ranks together.

    It is a ValueError, TypeError or KeyError if the first rank's error is one. An error that this function has raised
    on all ranks before, such as the error of a window, is raised unchanged. The attribute `failed_ranks` of a new error
    lists the ranks with an error; its cause is this rank's own error. Messages call the ranks by `names`; for `gather`
    see `gather_strings`.
    """
    texts = gather_strings("" if error is None else json.dumps(describe_error(error)), gather)
    ranks_with = _ranks_by((rank, tuple(json.loads(described))) for rank, described in zip(names, texts) if described)
    if not ranks_with:
        return
    if error is not None and hasattr(error, "failed_ranks") and len(ranks_with) == 1 and all(texts):
        raise error
    first = next(iter(ranks_with))[0]
    raised = _USER_ERRORS.get(first)
    parts = [
        f"rank {ranks[0]}: {text if text and raised and kind == first else f'{kind}: {text}' if text else kind}"
        + (f" (and on {name_ranks(ranks[1:])})" if ranks[1:] else "")
        for (kind, text), ranks in list(ranks_with.items())[:_NAMED]
    ]
    if len(ranks_with) > _NAMED:
        parts.append(f"and {len(ranks_with) - _NAMED} other errors")
    common = (raised or RuntimeError)("; ".join(parts))
    common.failed_ranks = [rank for ranks in ranks_with.values() for rank in ranks]  # type: ignore[attr-defined]
    raise common from error


def name_ranks(ranks: Sequence[int]) -> str:
    """Ranks in words, such as "rank 3" or "ranks 1, 2 and 30 more"."""
    return f"rank{'s' * (len(ranks) > 1)} {listed(ranks)}"


def name_errors(text_of_rank: Mapping[int, str]) -> str:
    """Errors in words, such as "rank 1: no route; ranks 0, 2: timed out"; "" if no rank has a text."""
    ranks_with = _ranks_by(text_of_rank.items())
    return listed([f"{name_ranks(ranks)}: {text}" for text, ranks in ranks_with.items() if text], "; ")


def _ranks_by(values: Iterable[tuple[int, T]]) -> dict[T, list[int]]:
    """The ranks with each value, from pairs of a rank and its value; values in the order of their first ranks."""
    ranks_with: dict[T, list[int]] = {}
    for rank, value in values:
        ranks_with.setdefault(value, []).append(rank)
    return ranks_with


def listed(each: Sequence[Any], separator: str = ", ") -> str:
    """The first few items, and how many more there are."""
    more = f" and {len(each) - _NAMED} more" if len(each) > _NAMED else ""
    return separator.join(map(str, each[:_NAMED])) + more


def raise_first_difference(calls: Sequence[tuple[str, dict[str, Any]]], names: Sequence[int]) -> None:
    """Raise the same ValueError on all ranks if they make different calls, or one call with different options."""
    callers = _ranks_by(zip(names, (call for call, _ in calls)))
    if len(callers) > 1:
        made = " and ".join(
            f"{name_ranks(ranks)} {'calls' if len(ranks) == 1 else 'call'} {call}" for call, ranks in callers.items()
        )
        raise ValueError(f"{made}; all ranks make the same calls in the same order: correct the program")
    for name in dict.fromkeys(itertools.chain.from_iterable(options for _, options in calls)):
        values: list[Any] = [options.get(name) for _, options in calls]
        verb = "is"
        if all(isinstance(value, dict) for value in values):
            keys = dict.fromkeys(itertools.chain.from_iterable(values))
            unlike = [key for key in keys if any(value.get(key) != values[0].get(key) for value in values)]
            values, verb = [{key: value.get(key) for key in unlike} for value in values], "are"
        ranks_with = _ranks_by(zip(names, map(repr, values)))
        if len(ranks_with) > 1 and any(value != values[0] for value in values):  # 1 is equal to 1.0, NaN reads as NaN
            what = listed([f"{value} on {name_ranks(ranks)}" for value, ranks in ranks_with.items()], " and ")
            raise ValueError(f"{name} {verb} {what} in {calls[0][0]}; all ranks pass the same: make them equal")
