"""The build backend: setuptools, and a compiler from the package index where the machine has none.

The native core is C++17 without dependencies. g++ or clang++ compile it; where both are missing, the build asks for
`ziglang`, a wheel that holds clang. `-C target=x86_64` or `-C target=aarch64` builds a manylinux wheel of that
architecture with it, on any machine:

    pip wheel . --no-deps -C target=aarch64
"""

from __future__ import annotations

import importlib.util
import platform
import shutil
import sys
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import build_sdist, get_requires_for_build_sdist, prepare_metadata_for_build_wheel

ZIGLANG = "ziglang==0.15.2"
# The C library of the oldest systems that torch's own wheels run on.
_GLIBC = "2.17"
_ARCHITECTURES = ("x86_64", "aarch64")
_target: str | None = None  # of the wheel that is being built

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]
prepare_metadata_for_build_editable = build_meta.prepare_metadata_for_build_editable


def get_requires_for_build_wheel(config_settings: dict[str, Any] | None = None) -> list[str]:
    """What a build needs beside pyproject.toml's list."""
    asked = _architecture(config_settings) is not None
    return [*build_meta.get_requires_for_build_wheel(), *([ZIGLANG] if asked or _installed_compiler() is None else [])]


def get_requires_for_build_editable(config_settings: dict[str, Any] | None = None) -> list[str]:
    """What a build needs beside pyproject.toml's list."""
    return get_requires_for_build_wheel()


def build_wheel(
    wheel_directory: str, config_settings: dict[str, Any] | None = None, metadata_directory: str | None = None
) -> str:
    """Build the wheel, of this machine or of `target`."""
    global _target  # setuptools runs setup.py in this process and passes no settings on
    _target = _architecture(config_settings)
    return build_meta.build_wheel(wheel_directory, None, metadata_directory)


def build_editable(
    wheel_directory: str, config_settings: dict[str, Any] | None = None, metadata_directory: str | None = None
) -> str:
    """Install the checkout in place."""
    return build_meta.build_editable(wheel_directory, None, metadata_directory)


def compile_command() -> list[str]:
    """The compiler and what it needs for this machine, or for the wheel's target.

    Raises:
        SystemExit: there is no compiler.
    """
    if _target is not None:
        return [*_zig(), "-target", f"{_target}-linux-gnu.{_GLIBC}"]
    installed = _installed_compiler()
    if installed is not None:
        return [installed]
    if importlib.util.find_spec("ziglang") is None:
        sys.exit(
            "error: there is no C++ compiler, and ziglang is not installed; evenrank's core is C++: "
            f"pip install {ZIGLANG}, or install g++"
        )
    if sys.platform == "linux" and platform.machine() in _ARCHITECTURES:
        return [*_zig(), "-target", f"{platform.machine()}-linux-gnu.{_GLIBC}"]
    return _zig()


def platform_tag(own: str) -> str:
    """The platform of a wheel's name; `own` is that of this machine."""
    return own if _target is None else f"manylinux_{_GLIBC.replace('.', '_')}_{_target}"


def _zig() -> list[str]:
    return [sys.executable, "-m", "ziglang", "c++"]


def _installed_compiler() -> str | None:
    return next((name for name in ("g++", "clang++") if shutil.which(name)), None)


def _architecture(config_settings: dict[str, Any] | None) -> str | None:
    target = (config_settings or {}).get("target")
    if target is not None and target not in _ARCHITECTURES:
        sys.exit(f"error: target is {target!r}; wheels are built for {' and '.join(_ARCHITECTURES)}: choose one")
    return target
