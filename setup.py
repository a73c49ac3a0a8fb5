"""Builds the native core of the planner and of the exchange; everything else is in pyproject.toml.

The core is optional: without a C++ compiler the build goes on and the planner runs in numpy, with the same plans.
"""

from pathlib import Path

from pybind11.setup_helpers import Pybind11Extension
from setuptools import setup

SOURCES = Path("commons/perf_model/partitioner/native")

setup(
    ext_modules=[
        Pybind11Extension(
            "commons.perf_model.partitioner._native",
            sources=[str(SOURCES / "module.cpp")],
            depends=sorted(str(header) for header in SOURCES.glob("*.hpp")),
            cxx_std=17,
            extra_compile_args=["-O3", "-g0", "-Wall", "-Wextra"],
            optional=True,
        )
    ]
)
