"""Plain Python values as JSON that gives them back as they were: tuples stay tuples, keys keep their type.

Classes travel by name. A receiver looks a name up among the classes that were registered and in the modules that it has
imported; nothing is imported for a name.
"""

from __future__ import annotations

import base64
import enum
import functools
import json
import sys
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from commons.sequence_batch.fields import Path, path_name

K = TypeVar("K")
V = TypeVar("V")

# A JSON object has one entry: its key says what the value is. Lists and scalars stand for themselves.
_TUPLE, _DICT, _BYTES, _DTYPE, _DEVICE, _NUMPY = "tuple", "dict", "bytes", "dtype", "device", "numpy"
_SIZE, _ORDERED, _NAMED_TUPLE, _ENUM, _COMPLEX = "size", "ordered", "namedtuple", "enum", "complex"

# Characters of a value in a message.
_SHOWN = 200

_REGISTERED: dict[str, type] = {}


def encode_plain(value: Any, path: Path) -> Any:
    """A value that json.dumps takes.

    It may be None, bool, int, float, complex, str, bytes, numpy scalar, torch.dtype, torch.device, torch.Size, a member
    of an enum, or a list, tuple, namedtuple, dict or OrderedDict of these; TypeError, with its path in the batch, for
    anything else.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        return [encode_plain(item, path) for item in value]
    if type(value) is tuple or type(value) is torch.Size:
        return {_TUPLE if type(value) is tuple else _SIZE: [encode_plain(item, path) for item in value]}
    if type(value) is dict or type(value) is OrderedDict:
        items = [[encode_plain(key, path), encode_plain(item, path)] for key, item in value.items()]
        return {_DICT if type(value) is dict else _ORDERED: items}
    if type(value) is complex:
        return {_COMPLEX: [value.real, value.imag]}
    if type(value) is bytes:
        return {_BYTES: base64.b64encode(value).decode("ascii")}
    if isinstance(value, enum.Enum):
        return {_ENUM: [type_name(type(value), path_name(path)), encode_plain(value.value, path)]}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {_NAMED_TUPLE: [type_name(type(value), path_name(path)), *(encode_plain(item, path) for item in value)]}
    if isinstance(value, torch.dtype):
        return {_DTYPE: str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {_DEVICE: str(value)}
    if isinstance(value, np.generic) and value.dtype.kind in "biufSU":
        return {_NUMPY: [value.dtype.str, encode_plain(value.item(), path)]}
    raise TypeError(
        f"{path_name(path)!r} holds a {type(value).__name__}; what is not moved with the rows travels as JSON: use "
        "None, numbers, strings, bytes, enums, and lists, tuples and dicts of these, or a tensor of its own for rows"
    )


def decode_plain(data: Any) -> Any:
    """The value that `encode_plain` took; KeyError for an enum or namedtuple that this process has not imported."""
    if isinstance(data, list):
        return [decode_plain(item) for item in data]
    if not isinstance(data, dict):
        return data
    ((kind, content),) = data.items()
    if kind in (_TUPLE, _SIZE):
        items = tuple(decode_plain(item) for item in content)
        return items if kind == _TUPLE else torch.Size(items)
    if kind in (_DICT, _ORDERED):
        pairs = ((decode_plain(key), decode_plain(item)) for key, item in content)
        return dict(pairs) if kind == _DICT else OrderedDict(pairs)
    if kind == _COMPLEX:
        return complex(*content)
    if kind == _BYTES:
        return base64.b64decode(content)
    if kind in (_ENUM, _NAMED_TUPLE):
        name, *items = content
        found: Any = find_type(name, (enum.Enum if kind == _ENUM else tuple,))
        if found is None:
            raise unknown_type(name)
        values = [decode_plain(item) for item in items]
        return found(values[0]) if kind == _ENUM else found._make(values)
    if kind == _DTYPE:
        return getattr(torch, content)
    if kind == _DEVICE:
        return torch.device(content)
    dtype, item = content
    return np.dtype(dtype).type(decode_plain(item))


def canonical_plain(data: Any) -> Any:
    """What `encode_plain` gave, with the items of dicts sorted: equal dicts give equal results."""
    if isinstance(data, list):
        return [canonical_plain(item) for item in data]
    if not isinstance(data, dict):
        return data
    ((kind, content),) = data.items()
    content = canonical_plain(content)
    return {kind: sorted(content, key=json.dumps) if kind == _DICT else content}


def show_plain(data: Any) -> str:
    """What `encode_plain` gave, as messages show it; needs no class to be known."""
    if isinstance(data, list):
        return f"[{_listed(data)}]"
    if not isinstance(data, dict):
        return repr(data)
    ((kind, content),) = data.items()
    if kind == _TUPLE:
        return f"({_listed(content)}{',' * (len(content) == 1)})"
    if kind == _DICT:
        return "{" + ", ".join(f"{show_plain(key)}: {show_plain(item)}" for key, item in content) + "}"
    if kind in (_ENUM, _NAMED_TUPLE):
        return f"{content[0].rpartition(':')[2]}({_listed(content[1:])})"
    return f"{kind}({_listed(content) if isinstance(content, list) else content})"


@dataclass(frozen=True, eq=False)
class PlainField:
    """A value that holds no rows: it must be the same on all ranks, or is declared to be each rank's own."""

    path: Path
    json: str  # the value as `encode_plain` writes it, as JSON text; empty for one per rank that JSON cannot hold
    per_rank: bool = False  # see `register_batch_type`

    def __eq__(self, other: object) -> bool:
        """Whether path and value are the same, types included; dicts are equal in any order of their items."""
        if not isinstance(other, PlainField):
            return NotImplemented
        if self.path != other.path or self.per_rank != other.per_rank:
            return False
        return self.per_rank or self.json == other.json or self.canonical() == other.canonical()

    def __hash__(self) -> int:
        return hash(self.path)

    @functools.cached_property
    def _data(self) -> Any:
        return json.loads(self.json)

    def value(self) -> Any:
        """The value, equal to what was described; KeyError for a class that is not imported here."""
        return decode_plain(self._data)

    def canonical(self) -> str:
        """The value as JSON text that equal ones have; as text, because 1, 1.0 and True are equal in Python."""
        return json.dumps(canonical_plain(self._data))

    def summary(self) -> str:
        """What messages show of it."""
        text = show_plain(self._data) if self.json else "a value"
        text = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
        return f"{text} of this rank" if self.per_rank else text


def differences(first: Mapping[K, V], other: Mapping[K, V]) -> list[tuple[K, V | None, V | None]]:
    """Where two descriptions of batches differ, and what both say there; None stands for what is absent."""
    return [
        (name, first.get(name), other.get(name)) for name in {**first, **other} if first.get(name) != other.get(name)
    ]


def register_type(named: type) -> None:
    """Make a class known by name that is not at its name in a module, such as one made within a function."""
    _REGISTERED[name_of(named)] = named


def name_of(named: type) -> str:
    """The name of a class, with a colon after its module."""
    return f"{named.__module__}:{named.__qualname__}"


def type_name(named: type, where: str) -> str:
    """`name_of` a class at `where` in a batch; TypeError for one that `find_type` would not find by it."""
    if find_type(name_of(named)) is not named:
        raise TypeError(
            f"{where!r} is a {named.__qualname__}, which is not found under that name in module {named.__module__}; "
            "receivers look classes up by name: define it at the top level of a module"
        )
    return name_of(named)


def find_type(name: str, kinds: tuple[type, ...] = (object,)) -> type | None:
    """The class of that name if it is a subclass of one of `kinds`; None if there is none."""
    module, _, qualname = name.partition(":")
    found: object = _REGISTERED.get(name)
    if found is None:
        found = functools.reduce(
            lambda outer, part: getattr(outer, part, None), qualname.split("."), sys.modules.get(module)
        )
    return found if isinstance(found, type) and issubclass(found, kinds) else None


def unknown_type(name: str) -> KeyError:
    """The error of a receiver that has not imported a class."""
    module, _, qualname = name.partition(":")
    return KeyError(
        f"class {qualname} of module {module} is unknown on this rank; a batch is made again from its classes: import "
        f"{module} on every rank, or decorate it with commons.sequence_batch.schema.register_batch_type"
    )


def _listed(items: list[Any]) -> str:
    return ", ".join(map(show_plain, items))
