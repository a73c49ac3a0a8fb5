"""Classes by name: a sender says which one it means, a receiver looks it up among those that it knows.

It knows what was registered, and what is at its name in a module that it has imported; nothing is imported for a name.
"""

from __future__ import annotations

import functools
import sys

_REGISTERED: dict[str, type] = {}


def register_type(named: type) -> None:
    """Make a class known by name that is not at its name in a module, such as one made within a function."""
    _REGISTERED[name_of(named)] = named


def name_of(named: type) -> str:
    """The name of a class, with a colon after its module."""
    return f"{named.__module__}:{named.__qualname__}"


def type_name(named: type, where: str) -> str:
    """The name by which `find_type` gives a class back.

    Args:
        named: the class.
        where: what of the batch is of that class, for the error.

    Raises:
        TypeError: a class that would not be found, such as one made within a function.
    """
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
        f"{module} on every rank"
    )
