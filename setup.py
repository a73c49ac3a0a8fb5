"""Builds the planner's native core; everything else is in pyproject.toml.

The core is optional: without a C++ compiler the build goes on and the planner runs in numpy, with the same plans.
"""

from pathlib import Path

from setuptools import Extension, setup

SOURCES = Path("commons/perf_model/partitioner/native")

setup(
    ext_modules=[
        Extension(
            "commons.perf_model.partitioner._native",
            sources=[str(SOURCES / "module.cpp")],
            depends=sorted(str(header) for header in SOURCES.glob("*.hpp")),
            language="c++",
            extra_compile_args=["-std=c++17", "-O3", "-g0", "-Wall", "-Wextra"],
            optional=True,
        )
    ]
)
