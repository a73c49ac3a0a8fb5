"""Builds the native core, a plain C library that every Python loads; everything else is in pyproject.toml."""

import runpy
import subprocess
import sys
from pathlib import Path

from evenrank_build import compile_command, platform_tag  # ci/build_backend, the backend that runs this file
from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

PARTITIONER = Path("commons/perf_model/partitioner")
SOURCE = PARTITIONER / "native" / "core.cpp"
FLAGS = ["-O3", "-g0", "-std=c++17", "-shared", "-fPIC", "-fvisibility-inlines-hidden", "-Wall", "-Wextra"]


class BuildCore(build_ext):
    """Compiles a library that is no module of Python."""

    def get_ext_filename(self, fullname: str) -> str:
        """The same name on every Python."""
        return str(Path(*fullname.split(".")).with_suffix(".so"))

    def build_extension(self, ext: Extension) -> None:
        """One call of the compiler."""
        library = Path(self.get_ext_fullpath(ext.name))
        library.parent.mkdir(parents=True, exist_ok=True)
        sources = runpy.run_path(str(PARTITIONER / "sources.py"))["hash_of_sources"](SOURCE.parent)
        compiler = compile_command()
        name = "zig" if "ziglang" in compiler else compiler[0]
        names = [f'-DEVENRANK_SOURCES="{sources}"', f'-DEVENRANK_COMPILER="{name}"']
        command = [*compiler, *FLAGS, *names, str(SOURCE), "-o", str(library)]
        if subprocess.run(command, check=False).returncode:  # noqa: S603  a compiler of this machine
            sys.exit(f"error: the native core cannot be compiled by {compiler[0]}: its messages are above")


class AnyPython(bdist_wheel):
    """A wheel for every Python of one platform."""

    def get_tag(self) -> tuple[str, str, str]:
        """No version of Python, no ABI of it."""
        return "py3", "none", platform_tag(super().get_tag()[2])


setup(
    ext_modules=[
        Extension(
            "commons.perf_model.partitioner.libevenrank",
            sources=[str(SOURCE)],
            depends=sorted(str(header) for header in SOURCE.parent.glob("*.hpp")),
        )
    ],
    cmdclass={"build_ext": BuildCore, "bdist_wheel": AnyPython},
)
