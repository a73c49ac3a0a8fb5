"""What an installed wheel must hold: `python check_installed.py CHECKOUT`, with the Python of a clean environment.

Run by ci/test_wheel.sh.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys
from importlib import metadata
from pathlib import Path

NOT_INSTALLED = {"tests", "benchmarks"}
FRAMEWORKS = {"lightning", "transformers"}  # that modules of `integrations` import
KERNELS = "hstu.model.kernels"  # of Triton
CORE = "commons/perf_model/partitioner/libevenrank.so"  # a library, no module


def main() -> None:
    """Compare the installed files with those of the checkout; ends the program with what is wrong."""
    if len(sys.argv) != 2 or not Path(sys.argv[1], "pyproject.toml").is_file():
        sys.stderr.write("error: one argument is needed, a checkout: python check_installed.py CHECKOUT\n")
        sys.exit(2)
    checkout = Path(sys.argv[1])
    packages = {path.parent.name for path in checkout.glob("*/__init__.py")} - NOT_INSTALLED
    files = {str(path) for path in metadata.files("evenrank") or ()}
    top = {path.split("/")[0] for path in files if "/" in path}
    found = {name for name in top if name != ".." and not name.endswith(".dist-info")}
    expect(found == packages, f"the wheel installs {sorted(found)} instead of {sorted(packages)}")
    wanted = [path for package in packages for path in (checkout / package).rglob("*.py*") if path.suffix != ".pyc"]
    wanted += [path for package in packages for path in (checkout / package).rglob("*.toml")]
    wanted += [path for package in packages for path in (checkout / package).rglob("*.jinja")]
    lacking = {CORE} | {str(path.relative_to(checkout)) for path in wanted}
    lacking |= {f"{package}/py.typed" for package in packages}
    lacking -= files
    expect(not lacking, f"the wheel lacks {sorted(lacking)}")
    sources = [path for path in files if path.endswith((".cpp", ".hpp"))]
    expect(not sources, f"the wheel has sources: {sources}")
    modules = modules_of(packages)
    for name in modules:
        file = Path(importlib.import_module(name).__file__ or "")
        expect(file.is_relative_to(sys.prefix), f"{name} is imported from {file}, outside {sys.prefix}")
    print(f"{len(files)} files, {len(modules)} modules that can be imported")  # noqa: T201


def modules_of(packages: set[str]) -> list[str]:
    """The modules of the installed packages; less those that need an extra or Triton, where that is missing."""
    without_megatron = importlib.util.find_spec("megatron") is None
    without_triton = importlib.util.find_spec("triton") is None  # as with the CPU builds of torch
    names: list[str] = []
    for package in sorted(packages):
        found = pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}.")
        importable = (each.name for each in found if not CORE.startswith(each.name.replace(".", "/") + "."))
        names += [package, *(name for name in importable if package != "sid_gr" or not without_megatron)]
    if without_triton:
        names = [name for name in names if not name.startswith(f"{KERNELS}.")]
    return [name for name in names if not _needs_framework(name)]


def _needs_framework(name: str) -> bool:
    """Whether it is the integration of a framework, of the same name, that is missing."""
    folder, _, framework = name.rpartition(".")
    return folder.endswith(".integrations") and framework in FRAMEWORKS and importlib.util.find_spec(framework) is None


def expect(holds: bool, otherwise: str) -> None:
    """End the program with a message unless something holds."""
    if not holds:
        sys.exit(f"error: {otherwise}")


if __name__ == "__main__":
    main()
