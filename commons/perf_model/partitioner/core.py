"""The native core: the planner, packed rows and the exchange of a plan, as functions on int64 arrays.

It is a plain C library (native/core.cpp), loaded with ctypes: one file serves every Python version. A call releases the
GIL, unless it is so short that getting the GIL back would take longer than the work. The core relies on arguments.py to
have checked the arguments of a plan. It checks messages from other ranks and descriptions of tables itself: a number
out of its range is a ValueError, and no memory outside the arrays is touched.
"""

from __future__ import annotations

import contextlib
import ctypes
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from commons.perf_model.partitioner.sources import NATIVE, hash_of_sources

if TYPE_CHECKING:
    from commons.perf_model.shuffle_plan import GatheredRows

LIBRARY = Path(__file__).with_name("libevenrank.so")
METHODS = ("karmarkar_karp", "lpt", "refined", "snake")  # in the order of Method in native/plan.hpp
# Calls that process fewer numbers keep the GIL: getting it back would take longer than the work.
FEW_NUMBERS = 1 << 15
_ERROR_SIZE = 256
_REMEDY = "install evenrank again (in a checkout, `make install`)"
_INT = ctypes.c_int64
_POINTER = ctypes.c_void_p
_NOTHING: Any = ctypes.c_char * 0
_ErrorText: Any = ctypes.c_char * _ERROR_SIZE


class PlanArguments(ctypes.Structure):
    """The checked arguments of `make_plan` and `refine`, see arguments.py. Arrays are int64, by address or None."""

    _fields_ = (
        *((name, _POINTER) for name in ("workloads", "tokens", "home", "home_step", "groups", "speeds")),
        *((name, _INT) for name in ("num_rows", "num_parts", "method", "equal_size", "has_cap", "max_tokens")),
        *((name, _INT) for name in ("ranks_per_node", "num_steps", "seed")),
        ("slack", ctypes.c_double),
    )


class _TableArguments(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("words", "first", "real_rows")),
        *((name, _INT) for name in ("num_ranks", "stride", "num_words", "num_places", "num_columns")),
    )


class ShuffleArguments(ctypes.Structure):
    """The arguments of `shuffle`, see native/shuffle.hpp. Arrays are int64, by address or None."""

    _fields_ = (
        *((name, _POINTER) for name in ("messages", "rows", "real_rows", "workloads", "tokens", "first", "words")),
        *((name, _POINTER) for name in ("destination", "parts", "speeds")),
        *((name, _INT) for name in ("num_ranks", "steps", "stride", "num_words", "capacity", "num_keys", "num_kept")),
        *((name, _INT) for name in ("num_parts", "rank", "all_gather", "has_plan", "method", "equal_size", "has_cap")),
        *((name, _INT) for name in ("max_tokens", "ranks_per_node", "carry_out", "pads", "has_groups")),
        *((name, ctypes.c_double) for name in ("slack", "min_gain")),
    )


class _OwnRows(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("workloads", "fields", "kept", "counted")),
        *((name, _INT) for name in ("num_fields", "num_kept", "num_counted", "rows", "real_rows")),
    )


_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "sources": (ctypes.c_char_p, ()),
    "compiler": (ctypes.c_char_p, ()),
    "plan": (ctypes.c_int, (_POINTER, _POINTER, _POINTER, _POINTER, _POINTER)),
    "lower_bound": (ctypes.c_int, (_POINTER, _POINTER, _POINTER)),
    "padded_groups": (ctypes.c_int, (_POINTER, _INT, _INT, _INT, _INT, _INT, _POINTER, _POINTER, _POINTER)),
    "refine": (ctypes.c_int, (_POINTER, _POINTER, _POINTER)),
    "shuffle": (ctypes.c_int, (_POINTER, _POINTER, _INT, _POINTER, _INT, _POINTER)),
    "encode_rows": (ctypes.c_int, (_POINTER, _POINTER, _INT, _POINTER, _POINTER)),
    "permute_words": (ctypes.c_int, (*(_POINTER, _INT) * 3, _INT, _POINTER)),
    "read_columns": (ctypes.c_int, (_POINTER, _POINTER, _INT, _INT, _POINTER, _POINTER)),
    "all_within": (_INT, (_POINTER, _INT, _INT, _INT)),
    "hold_thread": (None, ()),
}


def _load(kind: type[ctypes.CDLL]) -> dict[str, Any]:
    """Load the library's functions, by name without their prefix.

    Raises:
        ImportError: the library has not been built, or cannot be loaded.
    """
    if not LIBRARY.exists():
        raise ImportError(f"the native core {LIBRARY.name} is missing; evenrank plans with it: {_REMEDY}")
    try:
        library = kind(str(LIBRARY))
        functions = {name: getattr(library, f"evenrank_{name}") for name in _SIGNATURES}
    except (OSError, AttributeError) as error:
        raise ImportError(f"the native core {LIBRARY} cannot be loaded ({error}): {_REMEDY}") from error
    for name, (result, arguments) in _SIGNATURES.items():
        functions[name].restype, functions[name].argtypes = result, arguments
    return functions


_UNLOCKED, _LOCKED = _load(ctypes.CDLL), _load(ctypes.PyDLL)
# The hash of the sources that the core was built from, see sources.py: the version of plans and messages, which ranks
# and checkpoints compare.
SOURCES: str = _LOCKED["sources"]().decode()
COMPILER: str = _LOCKED["compiler"]().decode()
if NATIVE.is_dir() and hash_of_sources() != SOURCES:
    raise ImportError(f"the native core {LIBRARY} was built from other sources than those beside it: {_REMEDY}")


def make_plan(given: PlanArguments) -> tuple[np.ndarray, np.ndarray, int, int]:
    """Plan a batch or a grid.

    Returns:
        int64 `(n,)`, the partition (in a grid, the cell) of each sample; int64 `(k,)`, the loads of partitions or
        cells; the lower bound of the largest load, in a grid of its sum over the steps; and `max_tokens`, or the most
        tokens of a partition if no plan that keeps the cap was found; 0 without a cap.
    """
    assignment = np.empty(given.num_rows, np.int64)
    loads, numbers = np.empty(given.num_parts * given.num_steps, np.int64), np.empty(2, np.int64)
    _call("plan", ctypes.byref(given), _at(assignment), _at(loads), _at(numbers))
    bound, most_tokens = numbers.tolist()
    return assignment, loads, bound, most_tokens


def lower_bound(given: PlanArguments) -> int:
    """The lower bound of the largest load."""
    bound = ctypes.c_int64()
    _call("lower_bound", ctypes.byref(given), ctypes.byref(bound))
    return bound.value


def refine(given: PlanArguments) -> np.ndarray:
    """Swap samples of `home`, under the cap, until its largest load is near the bound; int64 `(n,)`."""
    refined = np.empty(given.num_rows, np.int64)
    _call("refine", ctypes.byref(given), _at(refined))
    return refined


def padded_groups(costs: np.ndarray, num_groups: int, max_cost: int, max_rows: int, steps: int) -> np.ndarray:
    """Sizes, int64 `(k,)`, of consecutive groups of `costs`, int64 `(n,)` in descending order.

    A group costs its size · its first cost; the largest cost is minimal. With `num_groups` 0 the groups are the fewest
    within `max_cost`; no group has more than `max_rows` rows. With several steps of equally many groups, the sum of
    the steps' largest costs is lowered too.
    """
    sizes, count = np.empty(len(costs), np.int64), ctypes.c_int64()
    numbers = (len(costs), num_groups, max_cost, max_rows, steps)
    _call("padded_groups", _at(_int64(costs)), *numbers, _at(sizes), ctypes.byref(count))
    return sizes[: count.value]


# The first numbers of an answer of `shuffle`, in the order of Head in native/gathered_shuffle.hpp.
SHUFFLE_HEAD = (
    *("other_steps", "steps", "most_words", "num_rows", "room", "index_room", "bound", "gated", "excess_tokens"),
    *("digest", "changes", "moves", "block_words", "sent_words", "own_segments", "buffer_segments", "sent_segments"),
)


def shuffle(arguments: ShuffleArguments, answer: np.ndarray, indices: int | None, index_room: int) -> dict[str, int]:
    """Read the messages of all ranks, plan, and make the exchange of one rank, without the GIL.

    Args:
        arguments: the settings and the messages.
        answer: int64, written: the head, then the plan and the exchange, see `shuffle_plan`.
        indices: address of the index array, which is written; None for no exchange.
        index_room: size of the index array.

    Returns:
        The head by name. "room" and "index_room" are the sizes that the answer and the index array need. If one of them
        is larger than the array, nothing but the head has been written.
    """
    _call("shuffle", ctypes.byref(arguments), _at(_int64(answer)), len(answer), indices, index_room)
    return dict(zip(SHUFFLE_HEAD, answer[: len(SHUFFLE_HEAD)].tolist()))


def encode_rows(
    workloads: np.ndarray,
    lengths: Sequence[np.ndarray],
    sums: Sequence[int],
    kept: Sequence[np.ndarray],
    counted: Sequence[int] | np.ndarray,
    rows: int,
    real_rows: int,
) -> np.ndarray | None:
    """The packed words of a rank's rows, see `GatheredRows`; None if a number or a size is wrong."""
    if workloads.shape != (rows,) or any(each.shape != (rows,) for each in kept):
        return None
    arrays: list[np.ndarray] = []
    numbers = array("q")
    num_columns = 2 + len(kept)
    for each, total in zip(lengths, sums, strict=True):
        if each.ndim != 2 or each.shape[1] != rows:
            return None
        arrays.append(read := np.ascontiguousarray(each, np.int64))
        numbers.extend((_at(read), len(read), total))
        num_columns += len(read)
    for each in kept:
        arrays.append(read := np.ascontiguousarray(each, np.int64))
        numbers.append(_at(read))
    counts, fields = np.asarray(counted, np.int64), numbers.buffer_info()[0]
    own = _OwnRows(
        *(_at(_int64(workloads)), fields, fields + 3 * numbers.itemsize * len(lengths), _at(counts)),
        *(len(lengths), len(kept), len(counts), rows, real_rows),
    )
    # For every column a code of one byte, and at most eight bytes per row.
    words = np.empty((num_columns + 7) // 8 + num_columns * max(0, real_rows), np.int64)
    written = ctypes.c_int64()
    _call("encode_rows", ctypes.byref(own), _at(words), len(words), ctypes.byref(written), numbers=len(words))
    return None if written.value < 0 else words[: written.value]


def permute_words(
    lengths: int,
    num_segments: int,
    order: int,
    num_ordered: int,
    read: Sequence[tuple[int, int]],
    written: Sequence[tuple[int, int]],
) -> None:
    """Concatenate segments of 4-byte words in a new order.

    Args:
        lengths: address of int64 `(num_segments,)`, words of every segment.
        num_segments: number of segments to read.
        order: address of int32 `(num_ordered,)`, the segments to write, in order.
        num_ordered: number of segments to write.
        read: address and words of each array that has segments, in order; no segment spans two arrays.
        written: address and words of each array to write, in order.
    """
    pieces = np.array([*read, *written], np.int64).reshape(-1, 2)
    numbers = sum(words for _, words in written)
    _call(
        "permute_words",
        *(lengths, num_segments, order, num_ordered),
        *(_at(pieces), len(read), len(pieces)),
        numbers=numbers,
    )


def read_columns(table: GatheredRows, columns: Sequence[int]) -> np.ndarray:
    """Read some columns of all gathered rows, int64 `(len(columns), N)`."""
    first, real_rows, wanted = _int64(table.first), _int64(table.real_rows), np.array(columns, np.int64)
    if len(first) != len(real_rows):
        raise ValueError("a gathered table: sizes do not match")
    where, stride, num_words = rows_of_words(table.words)
    sizes = (len(table.words), stride, num_words, len(first), table.num_columns)
    given = _TableArguments(where, _at(first), _at(real_rows), *sizes)
    numbers = np.empty((len(wanted), int(table.real_rows.sum())), np.int64)
    arguments = (ctypes.byref(given), _at(wanted), len(wanted), numbers.shape[1], _at(numbers))
    _call("read_columns", *arguments, numbers=numbers.size)
    return numbers


def all_within(values: np.ndarray, largest: int, largest_sum: int) -> bool:
    """Whether all of `values`, int64 `(n,)`, are in `[0, largest]` and their sum in `[0, largest_sum]`."""
    library = _LOCKED if len(values) <= FEW_NUMBERS else _UNLOCKED
    return bool(library["all_within"](_at(_int64(values)), len(values), largest, largest_sum))


def hold_unwound_threads() -> None:
    """From now on, block for ever each thread that Python unwinds at exit; C++ would abort the process otherwise.

    The main thread, and a thread with an exception of C++, abort as before.
    """
    with contextlib.suppress(OSError, AttributeError):  # another C++ library than torch's on Linux
        set_terminate = ctypes.CDLL("libstdc++.so.6")._ZSt13set_terminatePFvvE
        set_terminate(ctypes.cast(_UNLOCKED["hold_thread"], _POINTER))


def _call(name: str, *arguments: Any, numbers: int = FEW_NUMBERS + 1) -> None:
    error = _ErrorText()
    library = _LOCKED if numbers <= FEW_NUMBERS else _UNLOCKED
    if library[name](*arguments, error):
        message = error.value.decode()
        raise MemoryError(message) if message == "out of memory" else ValueError(message)


def address(values: np.ndarray) -> int:
    """The address of an int64 array; TypeError for another array."""
    return _at(_int64(values, values.ndim))


def _int64(values: np.ndarray, dimensions: int = 1) -> np.ndarray:
    """The array itself; TypeError unless the core can read it as a contiguous int64 array."""
    is_array = isinstance(values, np.ndarray)
    if not is_array or values.dtype != np.int64 or not values.flags.c_contiguous or values.ndim != dimensions:
        what = f"{values.dtype} array of shape {values.shape}" if is_array else type(values).__name__
        raise TypeError(
            f"the native core was given a {what}; it reads contiguous int64 arrays of {dimensions}-d: convert it"
        )
    return values


def _at(values: np.ndarray) -> int:
    try:
        return ctypes.addressof(_NOTHING.from_buffer(values))  # several times faster than values.ctypes
    except TypeError:  # a read-only array
        return values.__array_interface__["data"][0]


def rows_of_words(words: np.ndarray) -> tuple[int, int, int]:
    """Address, row stride and n of an int64 array `(num_ranks, n)`; ValueError unless each row is contiguous."""
    is_table = words.dtype == np.int64 and words.ndim == 2 and words.strides[0] % 8 == 0
    if not is_table or (words.shape[1] > 1 and words.strides[1] != 8):
        raise ValueError(f"words are {words.dtype} {words.shape}; they are int64 (num_ranks, n): sizes do not match")
    return _at(words[0]) if len(words) else 0, words.strides[0] // 8, words.shape[1]
