"""Import of the user's own packages, which may be in the working directory."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType


def import_user_module(name: str) -> ModuleType:
    """Import a module by name, from the working directory if it is not installed.

    `python -m` has the working directory on sys.path, a console script has not. For this import the directory is the
    last entry, so that no file in it hides an installed package.

    Args:
        name: "my_package" or "my_package.module".

    Raises:
        ImportError: the module, or a module that it imports, does not exist.

    >>> import_user_module("json").__name__
    'json'
    """
    here = str(Path.cwd())
    sys.path.append(here)
    try:
        importlib.invalidate_caches()
        return importlib.import_module(name)
    finally:
        # Remove the last occurrence, because the user's module may have changed the path.
        with contextlib.suppress(ValueError):
            del sys.path[len(sys.path) - 1 - sys.path[::-1].index(here)]


def import_user_modules(names: Iterable[str]) -> None:
    """Import modules that register something, such as a batch shuffler.

    Raises:
        ValueError: an invalid name, or a module that does not exist or raises when it is imported.
    """
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")):
            raise ValueError(f"import names {name!r}; it takes importable modules, such as 'my_package': correct it")
        try:
            import_user_module(name)
        except Exception as error:  # the user's module may raise anything
            if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
                problem = f"is neither installed nor in {Path.cwd()}: correct the name, or install it"
            else:
                problem = f"cannot be imported ({type(error).__name__}: {error}): correct it"
            raise ValueError(f"import names {name!r}, which {problem}") from error
