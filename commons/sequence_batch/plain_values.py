"""JSON of plain Python values that keeps types: tuples stay tuples, keys keep their type.

Classes are sent by name. A receiver looks a name up among registered classes and in the modules that it has imported;
it never imports a module for a name.
"""

from __future__ import annotations

import base64
import enum
import functools
import json
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from commons.checks import kind_of, with_article
from commons.sequence_batch.fields import Path, path_name

K = TypeVar("K")
V = TypeVar("V")

# Most characters of a value in a message.
_SHOWN = 200

_REGISTERED: dict[str, type] = {}


def encode_plain(value: Any, path: Path) -> Any:
    """Convert a value to data for json.dumps.

    The value may be None, bool, int, float, complex, str, bytes, numpy scalar, torch.dtype, torch.device, torch.Size, a
    member of an enum, or a list, tuple, namedtuple, dict or OrderedDict of these; TypeError, with its path in the
    batch, for anything else.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        return [encode_plain(item, path) for item in value]
    # Other values are JSON objects with one entry, kind → content.
    kind, content = _parts(value, path)
    return {kind: encode_plain(content, path)}


def _parts(value: Any, path: Path) -> tuple[str, Any]:
    """The kind of a value, and its content, a list or text, from which `_MAKERS` makes the value."""
    held = type(value)
    if held is tuple or held is torch.Size:
        return "tuple" if held is tuple else "size", list(value)
    if held is dict or held is OrderedDict:
        return "dict" if held is dict else "ordered", [list(item) for item in value.items()]
    if held is complex:
        return "complex", [value.real, value.imag]
    if held is bytes:
        return "bytes", base64.b64encode(value).decode("ascii")
    if isinstance(value, enum.Enum):
        return "enum", [type_name(held, path_name(path)), value.value]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return "namedtuple", [type_name(held, path_name(path)), *value]
    if isinstance(value, torch.dtype):
        return "dtype", str(value).removeprefix("torch.")
    if isinstance(value, torch.device):
        return "device", str(value)
    if isinstance(value, np.generic) and value.dtype.kind in "biufSU" and held is not np.longdouble:
        return "numpy", [value.dtype.str, value.item()]
    raise TypeError(
        f"{path_name(path)!r} holds {kind_of(value)}; values other than tensors are sent as JSON: use None, "
        "numbers, strings, bytes, enums, and lists, tuples and dicts of these, or a tensor with an entry per row"
    )


_MAKERS: dict[str, Callable[[Any], Any]] = {
    "tuple": tuple,
    "size": torch.Size,
    "dict": dict,
    "ordered": OrderedDict,
    "complex": lambda parts: complex(*parts),
    "bytes": base64.b64decode,
    "enum": lambda parts: known_type(parts[0], (enum.Enum,))(parts[1]),
    "namedtuple": lambda parts: known_type(parts[0], (tuple,))._make(parts[1:]),
    "dtype": functools.partial(getattr, torch),
    "device": torch.device,
    "numpy": lambda parts: np.dtype(parts[0]).type(parts[1]),
}


def decode_plain(data: Any) -> Any:
    """The value that `encode_plain` converted to `data`; KeyError for an enum or namedtuple not imported here."""
    if isinstance(data, list):
        return [decode_plain(item) for item in data]
    if not isinstance(data, dict):
        return data
    ((kind, content),) = data.items()
    return _MAKERS[kind](decode_plain(content))


@dataclass(frozen=True, eq=False)
class PlainField:
    """The description of a value without rows, which is equal on all ranks unless it is declared `per_rank`."""

    path: Path
    json: str  # JSON text of `encode_plain`; empty for a `per_rank` value that JSON cannot hold
    per_rank: bool = False  # see `register_batch_type`

    def __eq__(self, other: object) -> bool:
        """Whether path and value are equal, types included; dicts are equal in any order of their items."""
        if not isinstance(other, PlainField):
            return NotImplemented
        if self.path != other.path or self.per_rank != other.per_rank:
            return False
        return self.per_rank or self.json == other.json or self.canonical() == other.canonical()

    def __hash__(self) -> int:
        return hash(self.path)

    def value(self) -> Any:
        """The described value; KeyError for a class that is not imported here."""
        return decode_plain(json.loads(self.json))

    def canonical(self) -> str:
        """JSON text that is equal for equal values of equal types; Python's 1, 1.0 and True would compare equal."""
        return json.dumps(json.loads(self.json, object_hook=_sorted))

    def summary(self) -> str:
        """The text for messages."""
        try:
            text = repr(self.value()) if self.json else "a value"
        except Exception:  # a class that is not imported here, or another version of it
            text = self.json
        text = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
        return f"{text} of this rank" if self.per_rank else text


def differences(first: Mapping[K, V], other: Mapping[K, V]) -> list[tuple[K, V | None, V | None]]:
    """The names at which two descriptions of batches differ, with both values; None for an absent value."""
    return [
        (name, first.get(name), other.get(name)) for name in {**first, **other} if first.get(name) != other.get(name)
    ]


def register_type(named: type) -> None:
    """Register a class under its name, for classes that are not attributes of their module, such as local classes."""
    _REGISTERED[name_of(named)] = named


def name_of(named: type) -> str:
    """The name of a class, `module:qualname`."""
    return f"{named.__module__}:{named.__qualname__}"


def type_name(named: type, where: str) -> str:
    """`name_of` a class at `where` in a batch; TypeError if `find_type` would not find the class by this name."""
    if find_type(name_of(named)) is not named:
        raise TypeError(
            f"{where!r} is {with_article(named.__qualname__)}, which is not found under that name in module "
            f"{named.__module__}; receivers look classes up by name: define it at the top level of a module"
        )
    return name_of(named)


def find_type(name: str) -> type | None:
    """The class of that name; None if there is none."""
    module, _, qualname = name.partition(":")
    found: object = _REGISTERED.get(name)
    if found is None:
        found = functools.reduce(
            lambda outer, part: getattr(outer, part, None), qualname.split("."), sys.modules.get(module)
        )
    return found if isinstance(found, type) else None


def known_type(name: str, kinds: tuple[type, ...]) -> Any:
    """The class of that name, a subclass of one of `kinds`; KeyError if this process has not imported it."""
    found = find_type(name)
    if found is not None and issubclass(found, kinds):
        return found
    module, _, qualname = name.partition(":")
    raise KeyError(
        f"class {qualname} of module {module} is unknown on this rank; every rank needs the classes of a batch: import "
        f"{module} on every rank, or decorate it with commons.sequence_batch.schema.register_batch_type"
    )


def _sorted(data: dict[str, Any]) -> dict[str, Any]:
    """A result of `_parts` with the items of a dict sorted, so that equal dicts give equal results."""
    return {kind: sorted(content, key=json.dumps) if kind == "dict" else content for kind, content in data.items()}
