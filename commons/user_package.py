"""Packages of the user's own, which may lie in the working directory."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType


def import_user_module(name: str) -> ModuleType:
    """Import a module by name; one that is not installed is looked for in the working directory.

    A console script does not have that directory on the path, `python -m` has. It is there for this import alone,
    behind everything else: no file of it takes the place of an installed package.

    Args:
        name: "my_package" or "my_package.module".

    Raises:
        ImportError: no such module, or what it imports itself is missing.

    >>> import_user_module("json").__name__
    'json'

    """
    here = str(Path.cwd())
    sys.path.append(here)
    try:
        importlib.invalidate_caches()
        return importlib.import_module(name)
    finally:
        # The last one: the user's module may have changed the path itself.
        with contextlib.suppress(ValueError):
            del sys.path[len(sys.path) - 1 - sys.path[::-1].index(here)]


def import_user_modules(names: Iterable[str]) -> None:
    """Import modules for what they register, such as a batch shuffler.

    Raises:
        ValueError: a name that is none, a module that does not exist or that raises when it is imported.
    """
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")):
            raise ValueError(f"import names {name!r}; it takes importable modules, such as 'my_package': correct it")
        try:
            import_user_module(name)
        except Exception as error:  # the user's module may raise whatever it likes
            if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
                problem = f"is neither installed nor in {Path.cwd()}: correct the name, or install it"
            else:
                problem = f"cannot be imported ({type(error).__name__}: {error}): correct it"
            raise ValueError(f"import names {name!r}, which {problem}") from error
