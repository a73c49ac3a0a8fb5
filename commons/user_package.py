"""Packages of the user's own, which may lie in the working directory."""

from __future__ import annotations

import contextlib
import importlib
import sys
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
