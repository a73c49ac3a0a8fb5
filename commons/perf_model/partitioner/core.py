"""The native core: the planner, and what follows from a plan, as functions on int64 arrays.

It is a plain C library (native/core.cpp), loaded with ctypes: one file serves every Python. A call releases the GIL,
unless it is so short that waiting to get the GIL back would take longer than the work. Arguments are those that callers
have checked; what the core finds out of its range is a ValueError, and no memory outside the arrays is touched.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from commons.perf_model.partitioner.request import Plan, Request
from commons.perf_model.partitioner.sources import NATIVE, hash_of_sources

if TYPE_CHECKING:
    from commons.perf_model.row_table import RowTable

LIBRARY = Path(__file__).with_name("libevenrank.so")
METHODS = ("karmarkar_karp", "lpt", "refined", "snake")  # in the order of Method in native/plan.hpp
# Calls that go over fewer numbers keep the GIL: waiting to get it back would hold up the caller for longer.
FEW_NUMBERS = 1 << 15
_ERROR_SIZE = 256
_REMEDY = "install evenrank again (in a checkout, `make install`)"
_INT = ctypes.c_int64
_POINTER = ctypes.c_void_p


class _PlanArguments(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("workloads", "tokens", "home", "home_step")),
        *((name, _INT) for name in ("num_rows", "num_parts", "method", "equal_size", "has_cap", "max_tokens")),
        *((name, _INT) for name in ("ranks_per_node", "num_steps")),
        ("slack", ctypes.c_double),
    )


class _TableArguments(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("words", "first", "real_rows")),
        *((name, _INT) for name in ("num_ranks", "stride", "num_words", "num_places", "num_columns")),
    )


class _RouteArguments(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("rows", "real_rows", "destination", "parts")),
        ("table", _TableArguments),
        *((name, _INT) for name in ("num_places", "num_rows", "num_keys", "num_parts")),
        *((name, _INT) for name in ("steps", "rank", "all_gather", "pads")),
    )


class _OwnRows(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("workloads", "lengths", "keys", "sums", "kept", "counted")),
        *((name, _INT) for name in ("num_fields", "num_kept", "num_counted", "rows", "real_rows")),
    )


_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "sources": (ctypes.c_char_p, ()),
    "compiler": (ctypes.c_char_p, ()),
    "plan": (ctypes.c_int, (_POINTER, _POINTER, _POINTER, _POINTER, _POINTER)),
    "lower_bound": (ctypes.c_int, (_POINTER, _INT, _INT, _INT, _POINTER, _POINTER)),
    "refine": (ctypes.c_int, (_POINTER, _POINTER, _POINTER)),
    "route_rows": (ctypes.c_int, (_POINTER, _POINTER, _POINTER, _POINTER)),
    "take_routes": (None, (_POINTER, _POINTER, _POINTER)),
    "encode_rows": (ctypes.c_int, (_POINTER, _POINTER, _INT, _POINTER, _POINTER)),
    "read_columns": (ctypes.c_int, (_POINTER, _POINTER, _INT, _INT, _POINTER, _POINTER)),
    "read_rows": (ctypes.c_int, (_POINTER, _POINTER, _INT, _INT, _INT, _POINTER, _POINTER)),
    "place_of_rows": (ctypes.c_int, (_POINTER, _INT, _INT, _POINTER, _POINTER)),
    "sum_at": (ctypes.c_int, (_POINTER, _POINTER, _INT, _POINTER, _INT, _POINTER)),
    "count_moves": (ctypes.c_int, (_POINTER, _POINTER, _POINTER, _INT, _INT, _INT, _POINTER, _POINTER)),
    "digest": (_INT, (_POINTER, _POINTER, _INT)),
    "all_within": (_INT, (_POINTER, _INT, _INT, _INT)),
}


def _load(kind: type[ctypes.CDLL]) -> dict[str, Any]:
    """The functions of the library, by name without their prefix.

    Raises:
        ImportError: it has not been built, or cannot be loaded here.
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
# Which sources the core was built from, 12 hexadecimal digits of a hash without comments: the version of plans, routes
# and messages, which ranks and checkpoints compare.
SOURCES: str = _LOCKED["sources"]().decode()
COMPILER: str = _LOCKED["compiler"]().decode()
if NATIVE.is_dir() and hash_of_sources() != SOURCES:
    raise ImportError(f"the native core {LIBRARY} was built from other sources than those beside it: {_REMEDY}")


def make_plan(request: Request, *, grid: bool = False) -> Plan:
    """Plan a batch, or a grid of `request.num_steps`."""
    steps = request.num_steps if grid else 0
    given = _plan_arguments(request, steps)
    assignment = np.empty(given.num_rows, np.int64)
    loads, numbers = np.empty(given.num_parts * max(1, steps), np.int64), np.empty(2, np.int64)
    _call("plan", ctypes.byref(given), _at(assignment), _at(loads), _at(numbers))
    return Plan(assignment, loads, *numbers.tolist())


def lower_bound(workloads: np.ndarray, num_parts: int, equal_size: bool) -> int:
    """Lower bound of the largest load."""
    bound = np.empty(1, np.int64)
    _call("lower_bound", _at(_int64(workloads)), len(workloads), num_parts, equal_size, _at(bound))
    return int(bound[0])


def refine(request: Request, assignment: np.ndarray) -> np.ndarray:
    """`assignment`, int64 `(n,)`, after swaps that bring its largest load near the bound under the cap it keeps."""
    given, refined = _plan_arguments(request, 0), np.array(assignment, np.int64)
    if len(refined) != given.num_rows:
        raise ValueError(f"assignment has {len(refined)} entries, there are {given.num_rows} rows: one each is needed")
    _call("refine", ctypes.byref(given), _at(refined))
    return refined


def route_rows(
    rows: np.ndarray,
    real_rows: np.ndarray,
    destination: np.ndarray,
    table: RowTable,
    parts: np.ndarray,
    *,
    steps: int,
    rank: int,
    all_gather: bool,
    pads: bool,
) -> tuple[np.ndarray, np.ndarray]:
    """`Routes.indices`, and the numbers beside it one after another; see routes.py."""
    rows, real_rows, destination = (_int64(each) for each in (rows, real_rows, destination))
    if len(rows) != len(real_rows) or parts.shape[1:] != (3,):
        raise ValueError("route_rows takes a plan: sizes do not match")
    parts = _int64(parts, 2)
    given = _RouteArguments(
        *map(_at, (rows, real_rows, destination, parts)),
        _table_arguments(table),
        *(len(rows), len(destination), table.num_keys, len(parts), steps, rank, all_gather, pads),
    )
    result, sizes = ctypes.c_void_p(), np.empty(2, np.int64)
    # Those of an all-to-all concern few rows but the rank's own.
    numbers = len(destination) * (int(parts[:, 1].sum()) if all_gather else 1)
    _call("route_rows", ctypes.byref(given), ctypes.byref(result), _at(sizes), numbers=numbers)
    indices, beside = (np.empty(size, np.int64) for size in sizes.tolist())
    _LOCKED["take_routes"](result, _at(indices), _at(beside))
    return indices, beside


def encode_rows(
    workloads: np.ndarray,
    lengths: Sequence[np.ndarray],
    sums: Sequence[int],
    kept: Sequence[np.ndarray],
    counted: Sequence[int],
    rows: int,
    real_rows: int,
) -> np.ndarray | None:
    """The packed words of a rank's rows, see row_table.py; None where a number or a size is not what it must be."""
    if workloads.shape != (rows,) or any(each.shape != (rows,) for each in kept):
        return None
    if len(sums) != len(lengths):
        raise ValueError("encode_rows: sizes do not match")
    if any(each.ndim != 2 or each.shape[1] != rows for each in lengths):
        return None
    fields = [np.ascontiguousarray(each, np.int64) for each in lengths]
    columns = [np.ascontiguousarray(each, np.int64) for each in kept]
    keys, stated, counts = (np.array(each, np.int64) for each in ([len(each) for each in fields], sums, counted))
    of_fields, of_columns = _pointers(fields), _pointers(columns)
    own = _OwnRows(
        _at(_int64(workloads)),
        ctypes.addressof(of_fields),
        *map(_at, (keys, stated)),
        ctypes.addressof(of_columns),
        _at(counts),
        *(len(fields), len(columns), len(counts), rows, real_rows),
    )
    # Of every column a code of one byte, and at most eight bytes per row.
    num_columns = 2 + int(keys.sum()) + len(columns)
    words = np.empty((num_columns + 7) // 8 + num_columns * max(0, real_rows), np.int64)
    written = ctypes.c_int64()
    _call("encode_rows", ctypes.byref(own), _at(words), len(words), ctypes.byref(written), numbers=len(words))
    return None if written.value < 0 else words[: written.value].copy()


def read_columns(table: RowTable, columns: Sequence[int]) -> np.ndarray:
    """int64 `(len(columns), N)`, some columns of all rows."""
    given, wanted = _table_arguments(table), np.array(columns, np.int64)
    numbers = np.empty((len(wanted), _total(table.real_rows, "a gathered table: sizes do not match")), np.int64)
    arguments = (ctypes.byref(given), _at(wanted), len(wanted), numbers.shape[1], _at(numbers))
    _call("read_columns", *arguments, numbers=numbers.size)
    return numbers


def read_rows(table: RowTable, rows: np.ndarray, first_column: int, count: int) -> np.ndarray:
    """int64 `(len(rows), count)`, neighbouring columns of some rows, which are in ascending order."""
    given, wanted = _table_arguments(table), _int64(rows)
    numbers = np.empty((len(wanted), max(0, count)), np.int64)
    arguments = (ctypes.byref(given), _at(wanted), len(wanted), first_column, count, _at(numbers))
    _call("read_rows", *arguments, numbers=numbers.size)
    return numbers


def place_of_rows(real_rows: np.ndarray) -> np.ndarray:
    """int64 `(N,)`, the place of each row, of which place p has `real_rows[p]`."""
    counts = _int64(real_rows)
    num_rows = _total(counts, "place_of_rows takes counts: a number is out of its range")
    places = np.empty(num_rows, np.int64)
    _call("place_of_rows", _at(counts), len(counts), num_rows, _at(places), numbers=num_rows)
    return places


def sum_at(place: np.ndarray, values: np.ndarray | None, num_places: int) -> np.ndarray:
    """int64 `(num_places,)` sums of `values` by place, or how many rows each place has."""
    if num_places < 0 or (values is not None and len(values) != len(place)):
        raise ValueError("sum_at: sizes do not match")
    sums, place = np.empty(num_places, np.int64), _int64(place)
    summed = None if values is None else _at(_int64(values))
    _call("sum_at", _at(place), summed, len(place), _at(sums), num_places, numbers=len(place))
    return sums


def count_moves(
    home: np.ndarray, destination: np.ndarray, tokens: np.ndarray, steps: int, ranks_per_node: int
) -> np.ndarray:
    """What moves, by the step in which it is trained.

    Args:
        home: int64 `(N,)`, the place of each row; rank · steps + step.
        destination: int64 `(N,)`, the place that trains it.
        tokens: int64 `(N,)`.
        steps: of the plan.
        ranks_per_node: ranks that share a node.

    Returns:
        int64 `(6, steps)`: rows and their tokens, those that change rank and theirs, those that leave their node and
        theirs.
    """
    if not len(home) == len(destination) == len(tokens):
        raise ValueError("count_moves takes a plan: sizes do not match")
    counts = np.empty((6, max(0, steps)), np.int64)
    arrays = (_at(_int64(each)) for each in (home, destination, tokens))
    _call("count_moves", *arrays, len(home), steps, ranks_per_node, _at(counts), numbers=len(home))
    return counts


def digest(arrays: Sequence[np.ndarray]) -> int:
    """63 bits over int64 arrays of one dimension: the sum of their numbers, each mixed with its position.

    The mixing is the finalizer of splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
    2014). It tells apart what differs by accident, not by design.
    """
    checked = [_int64(each) for each in arrays]
    sizes = np.array([len(each) for each in checked], np.int64)
    library = _LOCKED if int(sizes.sum()) <= FEW_NUMBERS else _UNLOCKED
    return library["digest"](_pointers(checked), _at(sizes), len(checked))


def all_within(values: np.ndarray, largest: int, largest_sum: int) -> bool:
    """Whether all of `values`, int64 `(n,)`, lie in `[0, largest]`, and their sum, which cannot overflow, too."""
    library = _LOCKED if len(values) <= FEW_NUMBERS else _UNLOCKED
    return bool(library["all_within"](_at(_int64(values)), len(values), largest, largest_sum))


def _call(name: str, *arguments: Any, numbers: int = FEW_NUMBERS + 1) -> None:
    error = ctypes.create_string_buffer(_ERROR_SIZE)
    library = _LOCKED if numbers <= FEW_NUMBERS else _UNLOCKED
    if library[name](*arguments, error):
        message = error.value.decode()
        raise MemoryError(message) if message == "out of memory" else ValueError(message)


def _int64(array: np.ndarray, dimensions: int = 1) -> np.ndarray:
    """The array, which the core may read as it lies."""
    is_array = isinstance(array, np.ndarray)
    if not is_array or array.dtype != np.int64 or not array.flags.c_contiguous or array.ndim != dimensions:
        what = f"{array.dtype} array of shape {array.shape}" if is_array else type(array).__name__
        raise TypeError(
            f"the native core was given a {what}; it reads contiguous int64 arrays of {dimensions}-d: convert it"
        )
    return array


def _total(counts: np.ndarray, otherwise: str) -> int:
    """The sum of counts, which is below 2^31; ValueError where it is not, or a count is negative."""
    if len(counts) and not 0 <= int(counts.min()) <= int(counts.max()) < 2**31:
        raise ValueError(otherwise)
    total = int(counts.sum())
    if total >= 2**31:
        raise ValueError(otherwise)
    return total


def _at(array: np.ndarray) -> int:
    return array.ctypes.data


def _pointers(arrays: Sequence[np.ndarray]) -> Any:
    return (_POINTER * len(arrays))(*map(_at, arrays))


def _plan_arguments(request: Request, steps: int) -> _PlanArguments:
    optional = (request.tokens, request.home, request.home_step if steps else None)
    rows = _int64(request.workloads)
    if any(each is not None and len(each) != len(rows) for each in optional):
        raise ValueError("plan takes checked arguments: sizes do not match")
    return _PlanArguments(
        _at(rows),
        *(None if each is None else _at(_int64(each)) for each in optional),
        *(len(rows), request.num_parts, METHODS.index(request.method), request.equal_size),
        *(request.max_tokens is not None, request.max_tokens or 0, request.ranks_per_node, steps),
        request.slack,
    )


def _table_arguments(table: RowTable) -> _TableArguments:
    words, first, real_rows = table.words, _int64(table.first), _int64(table.real_rows)
    fits = words.dtype == np.int64 and words.ndim == 2 and len(first) == len(real_rows)
    if not fits or (words.shape[1] > 1 and words.strides[1] != 8) or words.strides[0] % 8:
        raise ValueError("a gathered table: sizes do not match")
    sizes = (len(words), words.strides[0] // 8, words.shape[1], len(first), table.num_columns)
    return _TableArguments(_at(words), _at(first), _at(real_rows), *sizes)
