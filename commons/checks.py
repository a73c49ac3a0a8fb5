"""Checks of integers, booleans, names and files from users."""

from __future__ import annotations

import difflib
import operator
import sys
import types
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np

_MOST = 2**63 - 1

# Types of fields with a limit, which `require_field_types` checks: integers of at least 1 or 0, and positive numbers.
Count = Annotated[int, "at least 1"]
Natural = Annotated[int, "at least 0"]
Positive = Annotated[float, "positive"]


def require_at_least(name: str, value: Any, least: int, *, optional: bool = False) -> None:
    """Raise ValueError unless `value` is an `int` from `least` to 2^63 − 1; for fields that become JSON.

    `optional`: the message adds that the field may be left out; the caller has handled None.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise _no_integer(name, value, least, ", or leave it out" if optional else "")
    if value > _MOST:
        raise ValueError(f"{name} is {value!r}; it must be an integer of at least {least} and below 2**63: lower it")


def require_positive(name: str, value: Any, rule: str, most: float = sys.float_info.max) -> None:
    """Raise ValueError unless a value is a number above 0 and at most `most`; `rule` is the message's rule and remedy.

    >>> require_positive("lr", float("nan"), "a learning rate is positive: raise it")
    Traceback (most recent call last):
        ...
    ValueError: lr is nan; a learning rate is positive: raise it
    """
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not (is_number and 0 < value <= most):
        raise ValueError(f"{name} is {value!r}; {rule}")


def take_python_scalars(settings: Any) -> None:
    """Replace numpy's scalars in the fields of a dataclass, also a frozen one, by Python's: JSON has only those.

    Also those in a field's dict, list or tuple. ValueError for a field of type bool with another value than True or
    False.
    """
    for each in fields(settings):
        if not hasattr(settings, each.name):  # a subclass sets it later
            continue
        value = getattr(settings, each.name)
        if isinstance(value, np.generic):
            object.__setattr__(settings, each.name, value.item())
        elif type(value) is dict:
            object.__setattr__(settings, each.name, {key: _python_scalar(item) for key, item in value.items()})
        elif type(value) in (list, tuple):
            object.__setattr__(settings, each.name, type(value)(map(_python_scalar, value)))
        if each.type in ("bool", bool):
            as_boolean(value, each.name)


def _python_scalar(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def as_boolean(value: Any, name: str) -> bool:
    """True or False, also numpy's, as a `bool`; ValueError for other values: Python takes any text, also "no", as true.

    >>> as_boolean("no", "equal_size")
    Traceback (most recent call last):
        ...
    ValueError: equal_size is 'no'; it is True or False: choose one
    """
    if not isinstance(value, (bool, np.bool_)):
        raise ValueError(f"{name} is {value!r}; it is True or False: choose one")
    return bool(value)


def as_count(value: Any, name: str, least: int) -> int:
    """Any integer, numpy's included, as an `int`; ValueError for other types, booleans and integers below `least`.

    >>> as_count(2.0, "num_chunks", 1)
    Traceback (most recent call last):
        ...
    ValueError: num_chunks is 2.0; it must be an integer of at least 1: correct it
    """
    if isinstance(value, (bool, np.bool_)):  # before numpy 2.3, operator.index() accepts np.bool_
        raise _no_integer(name, value, least)
    try:
        integer = operator.index(value)
    except TypeError:
        raise _no_integer(name, value, least) from None
    if integer < least:
        raise _no_integer(name, integer, least)
    return integer


def require_unmasked(name: str, values: Any) -> None:
    """Raise ValueError for an array of numpy.ma with a masked value, because np.asarray drops the mask."""
    if np.ma.is_masked(values):
        row = int(np.ma.getmaskarray(values).argmax())
        raise ValueError(f"{name}[{row}] is masked; every row needs a value: fill the array, or leave the row out")


def require_name(name: Any, what: str, example: str) -> None:
    """Raise TypeError or ValueError unless `name`, the name of a `what`, is a string that is not empty."""
    if not isinstance(name, str) or not name:
        kind = ValueError if isinstance(name, str) else TypeError
        raise kind(f"the name of a {what} is {name!r}; it must be a string that is not empty: use, e.g., {example!r}")


def require_names(argument: str, names: Any) -> list[str]:
    """The names as a list; TypeError for one string, whose letters would be the names, and for what is no name.

    The caller keeps the list: an iterator, such as a generator, can be read only once.
    """
    if isinstance(names, str) or not isinstance(names, Iterable):
        remedy = f"write [{names!r}]" if isinstance(names, str) else "correct it"
        raise TypeError(f"{argument} is {names!r}; it must be a list of names: {remedy}")
    listed = list(names)
    if not all(isinstance(name, str) for name in listed):
        raise TypeError(f"{argument} is {listed!r}; names are strings: correct it")
    return listed


def require_file(path: Path, rule: str) -> None:
    """Raise IsADirectoryError or FileNotFoundError unless `path` is a file; `rule` is the rest of the message."""
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; {rule}")
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; {rule}")


def require_one_of(name: str, value: Any, choices: Iterable[str]) -> None:
    """Raise ValueError, with the most similar name, unless `value` is one of the strings `choices`."""
    known = list(choices)
    if value not in known:
        close = difflib.get_close_matches(str(value), known, n=1)
        remedy = f"write {close[0]!r}" if close else "choose one"
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(map(repr, known))}: {remedy}")


def require_field_types(settings: Any) -> None:
    """Check the fields of a dataclass by their types.

    Raises:
        ValueError: the type is a Literal, and the value is none of its choices; or it has a limit, such as Count.
        TypeError: the type is a dataclass, and the value is not one of it.
    """
    for name, hint in get_type_hints(type(settings), include_extras=True).items():
        options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
        value, is_optional = getattr(settings, name, None), type(None) in options
        if value is None and (is_optional or not hasattr(settings, name)):  # a subclass may set it later
            continue
        if Positive in options:
            or_else = ", or leave it out" if is_optional else ""
            require_positive(name, value, f"it must be a positive and finite number: correct it{or_else}")
        elif Count in options or Natural in options:
            require_at_least(name, value, int(Count in options), optional=is_optional)
        if get_origin(hint) is Literal:
            require_one_of(name, value, get_args(hint))
        if isinstance(hint, type) and is_dataclass(hint) and not isinstance(value, hint):
            raise TypeError(f"{name} is {value!r}; it must be {with_article(hint.__name__)}: make one, or leave it out")


def kind_of(value: Any) -> str:
    """The type of a value with its article, for messages; "numpy." because type names of numpy and Python may be equal.

    >>> kind_of(3), kind_of({}), kind_of(np.int8(3))
    ('an int', 'a dict', 'a numpy.int8')
    """
    name = type(value).__name__
    return with_article(f"numpy.{name}" if isinstance(value, np.generic) else name)


def with_article(name: str) -> str:
    """A type's name with "a" or "an"; "an ndarray", because its first letter is spoken, but "a uint8".

    >>> with_article("ndarray"), with_article("uint8"), with_article("Tensor")
    ('an ndarray', 'a uint8', 'a Tensor')
    """
    return f"{'an' if name.lower().startswith(('a', 'e', 'i', 'o', 'nd')) else 'a'} {name}"


def _no_integer(name: str, value: Any, least: int, or_else: str = "") -> ValueError:
    return ValueError(f"{name} is {value!r}; it must be an integer of at least {least}: correct it{or_else}")
