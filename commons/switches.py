"""Boolean flags with a value, such as `--trainer.shuffle-eval False`.

The parser turns a boolean field into the pair `--shuffle-eval` and `--no-shuffle-eval`, which take no value. Users give
a value nevertheless, because boolean fields that may be None, such as `--model.compile False`, need one.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Any

_VALUES = {"true": True, "false": False}


def without_boolean_values(config_class: Any, argv: Sequence[str], *, has_defaults: bool = False) -> list[str]:
    """Replace each boolean flag and its value, True or False, with the flag of the pair that means it.

    Args:
        config_class: the dataclass that the arguments are parsed into.
        argv: arguments without the name of the program.
        has_defaults: whether a config file gives every field a default; the parser requires a value for a boolean field
            without a default, so the flag of such a field is not replaced.

    >>> @dataclasses.dataclass
    ... class Inner:
    ...     is_fast: bool = True
    >>> config_class = dataclasses.make_dataclass("Outer", [("seed", int), ("model", Inner)])
    >>> without_boolean_values(config_class, ["--model.is-fast", "False", "--seed", "3"])
    ['--model.no-is-fast', '--seed', '3']
    """
    pairs = dict(_pairs(config_class, "--", has_defaults))
    written: list[str] = []
    arguments = list(argv)
    while arguments:
        argument = arguments.pop(0)
        name, equals, value = argument.partition("=")
        off = pairs.get(name.replace("_", "-"))
        if off is not None and not equals and arguments:
            value = arguments[0]
        given = _VALUES.get(value.lower())
        if off is None or given is None:
            written.append(argument)
            continue
        written.append(name if given else off)
        if not equals:
            arguments.pop(0)
    return written


def _pairs(config_class: Any, prefix: str, has_defaults: bool) -> Iterator[tuple[str, str]]:
    """The flag that turns a field on, and the one that turns it off, of every boolean field that has a default."""
    hints = typing.get_type_hints(config_class)
    for field in dataclasses.fields(config_class):
        name, hint = field.name.replace("_", "-"), hints[field.name]
        is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
        options = typing.get_args(hint) if is_union else (hint,)
        if hint is bool and field.init and (has_defaults or _has_default(field)):
            yield f"{prefix}{name}", f"{prefix}no-{name}"
        for nested in filter(dataclasses.is_dataclass, options):
            # The parser adds no prefix for fields of this name (options of a command).
            yield from _pairs(nested, prefix if field.name.startswith("of_") else f"{prefix}{name}.", has_defaults)


def _has_default(field: dataclasses.Field[Any]) -> bool:
    return field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
