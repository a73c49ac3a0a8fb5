"""Checks of the planner's arguments: each becomes int64, or a ValueError names the value, the rule and the remedy."""

from __future__ import annotations

import math
import operator
from typing import Any

import numpy as np

from commons.checks import kind_of, require_unmasked
from commons.perf_model.partitioner import core

INT64_MAX = 2**63 - 1
# Largest sum of workloads or tokens, so that loads fit into int64 even if a slack of 1 doubles them.
MOST_LOAD = 2**62 - 1
MOST_SPEED = 2**31 - 1


def as_int64_workloads(values: Any, name: str = "workloads", num_rows: int | None = None) -> np.ndarray:
    """Workloads, token counts or any other non-negative integers per row, as a one-dimensional int64 array.

    Args:
        values: list, array or CPU tensor `(n,)` of any integer type, or of floats without a fractional part.
        name: of the argument, for messages.
        num_rows: the required length; None for any.

    Returns:
        int64 `(n,)`; shares memory with `values` if that is a contiguous int64 array.

    Raises:
        ValueError: not one-dimensional, the wrong length, a value that is negative, NaN, infinite or has a fractional
            part, or a sum of 2^62 or more.

    >>> as_int64_workloads([3, 1.0, 2])
    array([3, 1, 2])
    >>> as_int64_workloads([3, -1])
    Traceback (most recent call last):
        ...
    ValueError: workloads[1] is -1; values must be non-negative integers: correct the cost model or the data
    """
    array = _as_int64(values, name, num_rows)
    if core.all_within(array, INT64_MAX, MOST_LOAD):
        return array
    if int(array.min()) < 0:
        raise _bad_value(name, int(np.argmax(array < 0)), int(array[np.argmax(array < 0)]))
    raise ValueError(
        f"the sum of {name} is {sum(array.tolist())}; it must be below 2^62, {MOST_LOAD + 1}: scale the values down"
    )


def _as_int64(values: Any, name: str, num_rows: int | None) -> np.ndarray:
    array = as_array(values, name)
    if array.ndim == 0:
        what = repr(values) if values is None or np.isscalar(values) else kind_of(values)
        raise ValueError(f"{name} is {what}; one value per row is needed: pass a list, an array or a tensor")
    if array.ndim != 1:
        raise ValueError(f"{name} has shape {array.shape}; one value per row is needed: flatten it to one dimension")
    if num_rows is not None and len(array) != num_rows:
        raise ValueError(
            f"{name} has {len(array)} entries, there are {num_rows} rows; one per row is needed: match them"
        )
    if array.dtype == np.int64:
        return np.ascontiguousarray(array)
    if array.size == 0:
        return np.empty(0, np.int64)
    kind = array.dtype.kind
    if kind == "u" and array.dtype.itemsize == 8:
        _reject_first(array > INT64_MAX, array, name)
    elif kind == "f":
        array = array.astype(np.float64)
        # 2**63 is a float, but not an int64.
        _reject_first(~((array >= 0) & (array < 2.0**63) & (np.floor(array) == array)), array, name)
    elif kind == "O":
        return _objects_as_int64(array, name)
    elif kind not in "iu":
        raise ValueError(f"{name} has dtype {array.dtype}; values must be non-negative integers: convert them to int64")
    return array.astype(np.int64)


def as_array(values: Any, name: str) -> np.ndarray:
    """Values from a user, an entry per row, as an array; ValueError for what numpy cannot read, and masked values."""
    require_unmasked(name, values)
    device = getattr(values, "device", None)
    if getattr(device, "type", "cpu") != "cpu":
        raise ValueError(f"{name} is on {device}; the planner works on the CPU: pass {name}.cpu()")
    if getattr(values, "is_nested", False):
        raise ValueError(f"{name} is a nested tensor; one value per row is needed: pass a list, an array or a tensor")
    if hasattr(values, "detach"):
        values = values.detach()
        if values.is_floating_point():
            values = values.double()  # numpy has no bfloat16
    try:
        return np.asarray(values)
    except (ValueError, OverflowError, TypeError, RuntimeError) as error:  # RuntimeError: a tensor of a subclass
        raise ValueError(
            f"{name} is not a one-dimensional list of integers ({error}); pass one integer per row"
        ) from error


def _objects_as_int64(array: np.ndarray, name: str) -> np.ndarray:
    """Convert an array of objects, which numpy makes of integers beyond 64 bits and of values that are not numbers."""
    result = np.empty(len(array), np.int64)
    for index, value in enumerate(array):
        try:
            integer = int(value) if isinstance(value, float) and value.is_integer() else operator.index(value)
        except TypeError:
            raise _bad_value(name, index, value) from None
        if not 0 <= integer <= INT64_MAX:
            raise _bad_value(name, index, value)
        result[index] = integer
    return result


def _reject_first(wrong: np.ndarray, array: np.ndarray, name: str) -> None:
    if wrong.any():
        index = int(np.argmax(wrong))
        raise _bad_value(name, index, array[index])


def _bad_value(name: str, index: int, value: Any) -> ValueError:
    rule = "values must be non-negative integers"
    if isinstance(value, (int, float, np.number)) and 2**63 <= value < math.inf:
        rule = f"values must be at most {INT64_MAX}"
    return ValueError(f"{name}[{index}] is {value}; {rule}: correct the cost model or the data")


def as_home(home: Any, num_rows: int, number: int, name: str = "home", place: str = "partition") -> np.ndarray:
    """The present partition (or step) of each row as int64 `(n,)`; ValueError unless each is in `[0, number)`."""
    array = _as_int64(home, name, num_rows)
    if not core.all_within(array, min(number - 1, INT64_MAX), INT64_MAX):
        index = int(np.argmax((array < 0) | (array >= number)))
        raise ValueError(f"{name}[{index}] is {int(array[index])}; a home is a {place} in [0, {number}): correct it")
    return array


def as_groups(groups: Any, num_rows: int) -> np.ndarray:
    """The group of each row as int64 `(n,)`: any integers, equal for rows that stay together.

    Raises:
        ValueError: not one-dimensional, the wrong length, or a value that is not a 64-bit integer.
    """
    array = as_array(groups, "groups")
    if array.ndim != 1 or len(array) != num_rows:
        raise ValueError(
            f"groups has shape {array.shape}, there are {num_rows} rows; each has the number of its group: pass "
            f"int64 ({num_rows},)"
        )
    if num_rows and not (array.dtype.kind == "i" or (array.dtype.kind == "u" and int(array.max()) <= INT64_MAX)):
        raise ValueError(f"groups has dtype {array.dtype}; groups are numbered by integers of 64 bits: convert it")
    return np.ascontiguousarray(array, np.int64)


def as_speeds(speeds: Any, number: int, workloads: np.ndarray, parts_name: str) -> np.ndarray | None:
    """The speed of each partition as int64 `(k,)`; None if all are equal.

    Args:
        speeds: positive integers below 2^31: list, array or CPU tensor.
        number: number of partitions.
        workloads: int64 `(n,)`, checked.
        parts_name: name of the number of partitions, for messages.

    Raises:
        ValueError: the wrong length, a value that is not a positive integer below 2^31, or workloads whose time on the
            slowest partition needs more than 61 bits.
    """
    array = as_array(speeds, "speeds")
    if array.shape != (number,):
        raise ValueError(
            f"speeds has shape {array.shape}, {parts_name} is {number}; each has one speed: pass {number} positive "
            "integers"
        )
    is_checked = array.dtype.kind in "iu" and array.min(initial=1) > 0 and array.max(initial=1) <= MOST_SPEED
    for index, value in enumerate(() if is_checked else array.tolist()):
        is_number = isinstance(value, (int, float, np.number)) and not isinstance(value, bool)
        if not is_number or not 0 < value <= MOST_SPEED or value != int(value):
            raise ValueError(
                f"speeds[{index}] is {value}; a speed is a positive integer below 2^31: scale all of them by one "
                "factor and round"
            )
    values = array.astype(np.int64)
    slowest, fastest = int(values.min()), int(values.max())
    if slowest == fastest:
        return None
    if not core.all_within(workloads, INT64_MAX, ((MOST_LOAD // 2 + 1) * slowest - 1) // fastest):
        raise ValueError(
            f"the workloads sum up to {workloads.sum()}, speeds go from {slowest} to {fastest}; sum × largest ÷ "
            "smallest speed must be below 2^61: scale the workloads down"
        )
    return values


def as_slack(slack: Any) -> float:
    """A number in [0, 1]; ValueError otherwise."""
    try:
        number = float(slack)
    except (TypeError, ValueError):
        raise ValueError(f"slack is {slack!r}; it must be a number such as 0.01: pass one") from None
    if not 0 <= number <= 1:
        raise ValueError(f"slack is {slack}; it must be at least 0 and at most 1: pass a fraction such as 0.01")
    return number
