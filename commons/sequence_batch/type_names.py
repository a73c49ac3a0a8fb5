"""Classes by name: a sender says which one it means, a receiver looks it up among the modules that it has imported."""

from __future__ import annotations

import functools
import sys


def type_name(named: type, where: str) -> str:
    """The name by which `find_type` gives a class back.

    Args:
        named: the class.
        where: what of the batch is of that class, for the error.

    Raises:
        TypeError: a class that is not at its name, such as one made within a function.
    """
    name = f"{named.__module__}:{named.__qualname__}"
    if _lookup(name) is not named:
        raise TypeError(
            f"{where!r} is a {named.__qualname__}, which is not found under that name in module {named.__module__}; "
            "receivers look classes up by name: define it at the top level of a module"
        )
    return name


def find_type(name: str, kinds: tuple[type, ...]) -> type | None:
    """The class of that name if it is a subclass of one of `kinds`; None if there is none. Imports nothing."""
    found = _lookup(name)
    return found if isinstance(found, type) and issubclass(found, kinds) else None


def unknown_type(name: str) -> KeyError:
    """The error of a receiver that has not imported a class."""
    module, _, qualname = name.partition(":")
    return KeyError(
        f"class {qualname} of module {module} is unknown on this rank; a batch is made again from its classes: import "
        f"{module} on every rank"
    )


def _lookup(name: str) -> object:
    module, _, qualname = name.partition(":")
    return functools.reduce(
        lambda found, part: getattr(found, part, None), qualname.split("."), sys.modules.get(module)
    )
