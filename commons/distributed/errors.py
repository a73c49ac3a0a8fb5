"""Errors that travel: what went wrong on one rank, or differs between ranks, raised on all of them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")

# The exception types that travel by name: a user's mistake raises the same type on every rank.
_USER_ERRORS: dict[str, type[Exception]] = {"ValueError": ValueError, "TypeError": TypeError, "KeyError": KeyError}
# Characters of an error's text that travel; how many different errors, and ranks of each, a message names.
_LONGEST = 4000
_NAMED = 16
# Bytes of text that travel as one integer.
_WORD = 8


def attempt(function: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """What a function returns, or its error, which the other ranks wait to know."""
    try:
        return function(), None
    except Exception as error:
        return None, error


def describe_error(error: BaseException) -> list[str]:
    """Type name and text of an error, for the other ranks; never fails, whatever the error is."""
    try:
        text = str(error.args[0] if isinstance(error, KeyError) and error.args else error)
    except Exception as broken:
        text = f"its text cannot be had: str() of it raises {type(broken).__name__}"
    if len(text) > _LONGEST:
        text = f"{text[:_LONGEST]}… and {len(text) - _LONGEST} more characters"
    # A lone surrogate, as a file name may hold, has no UTF-8 and could not be printed.
    return [part.encode(errors="backslashreplace").decode() for part in (type(error).__name__, text)]


def first_line(error: BaseException) -> str:
    """The first line of an error's text, without the place in the sources and the C++ frames of torch and gloo."""
    text = re.sub(r"^\[[^\]\s]+:\d+\]\s*", "", describe_error(error)[1].strip())
    # gloo goes on with advice that is ours to give.
    return re.split(r"\n|\. This is typically", text)[0] or type(error).__name__


def gather_strings(text: str, gather: Callable[[np.ndarray], np.ndarray]) -> list[str]:
    """One string per rank.

    Args:
        text: of this rank.
        gather: gathers int64 `(n,)` of every rank into `(world_size, n)`; called twice.
    """
    encoded = text.encode(errors="backslashreplace")  # of a lone surrogate, which UTF-8 has no bytes for
    sizes = gather(np.array([len(encoded)]))[:, 0]
    words = max(-(-int(sizes.max()) // _WORD), 1)
    padded = bytearray(encoded.ljust(words * _WORD))  # torch warns of memory that it could not write to
    rows = gather(np.frombuffer(padded, dtype=np.int64))
    return [rows[rank].tobytes()[:size].decode() for rank, size in enumerate(sizes)]


def raise_on_all(error: Exception | None, names: Sequence[int], gather: Callable[[np.ndarray], np.ndarray]) -> None:
    """Raise what went wrong on any rank; called by all ranks together, once they know that there may be something.

    Args:
        error: of this rank, if it has one.
        names: how the ranks are called.
        gather: as of `gather_strings`.
    """
    texts = gather_strings("" if error is None else json.dumps(describe_error(error)), gather)
    raise_first_error([json.loads(text) if text else None for text in texts], error, names)


def raise_first_error(
    described: Sequence[list[str] | None], own: Exception | None, names: Sequence[int] | None = None
) -> None:
    """Raise the errors of all ranks as one, of the first failing rank's type where that is a user's mistake.

    One that has been raised on all ranks like this before, such as a window's that a pipeline has met, stays as it is.
    The error's attribute `failed_ranks` lists these ranks; its cause is this rank's own error.

    Args:
        described: `describe_error` of each rank's error; None or nothing for a rank without one.
        own: this rank's error, if it has one.
        names: how the ranks are called; 0, 1, … if not given.
    """
    ranks_with: dict[tuple[str, str], list[int]] = {}
    for rank, item in zip(range(len(described)) if names is None else names, described):
        if item:
            ranks_with.setdefault((item[0], item[1]), []).append(rank)
    if not ranks_with:
        return
    if own is not None and hasattr(own, "failed_ranks") and len(ranks_with) == 1 and all(described):
        raise own
    raised = _USER_ERRORS.get(next(iter(ranks_with))[0])
    parts = [
        f"rank {ranks[0]}: {text if raised and text else f'{kind}: {text}' if text else kind}"
        + (f" (and on {name_ranks(ranks[1:])})" if ranks[1:] else "")
        for (kind, text), ranks in list(ranks_with.items())[:_NAMED]
    ]
    if len(ranks_with) > _NAMED:
        parts.append(f"and {len(ranks_with) - _NAMED} other errors")
    error = (raised or RuntimeError)("; ".join(parts))
    error.failed_ranks = [rank for ranks in ranks_with.values() for rank in ranks]  # type: ignore[attr-defined]
    raise error from own


def name_ranks(ranks: Sequence[int]) -> str:
    """Rank 3, or ranks 1, 2: the first few, and how many more there are."""
    return f"rank{'s' * (len(ranks) > 1)} {listed(ranks)}"


def listed(each: Sequence[Any], separator: str = ", ") -> str:
    """The first few in words, and how many more there are."""
    more = f" and {len(each) - _NAMED} more" if len(each) > _NAMED else ""
    return separator.join(map(str, each[:_NAMED])) + more


def raise_first_difference(calls: Sequence[tuple[str, dict[str, Any]]], names: Sequence[int]) -> None:
    """Raise ValueError, the same on all ranks, if they make different calls or the same with different options.

    Args:
        calls: name and options of every rank's call.
        names: how the ranks are called.
    """
    (_, first), of_first = calls[0], names[0]
    callers: dict[str, list[int]] = {}
    for name_of_rank, (call, _) in zip(names, calls):
        callers.setdefault(call, []).append(name_of_rank)
    if len(callers) > 1:
        made = " and ".join(
            f"{name_ranks(ranks)} {'calls' if len(ranks) == 1 else 'call'} {call}" for call, ranks in callers.items()
        )
        raise ValueError(f"{made}; all ranks make the same calls in the same order: correct the program")
    for name_of_rank, (call, options) in zip(names, calls):
        for name in {**first, **options}:
            mine, other = first.get(name), options.get(name)
            if mine == other:
                continue
            if isinstance(mine, dict) and isinstance(other, dict):
                keys = [key for key in {**mine, **other} if mine.get(key) != other.get(key)]
                mine, other = ({key: each.get(key) for key in keys} for each in (mine, other))
                what = f"{name} differ: rank {of_first} has {mine}, rank {name_of_rank} has {other}"
            else:
                what = f"{name} is {mine!r} on rank {of_first} and {other!r} on rank {name_of_rank}"
            raise ValueError(f"{what} in {call}; all ranks pass the same: make them equal")
