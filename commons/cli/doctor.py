"""`evenrank doctor`: checks whether all packages are installed and compatible, and prints remedies.

It runs without any other package: it imports packages only to check them, and a missing or broken package is a finding,
never an error.
"""

from __future__ import annotations

import contextlib
import logging
import platform
import re
import shutil
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from commons.console import make_console
from commons.releases import (
    DEFAULT_TORCH,
    LEAST_DRIVER,
    NEWEST_TORCH,
    OLDEST_TORCH,
    RELEASES,
    index_option,
    minor,
    old_driver_command,
)
from commons.version import __version__

OK, NOTE, WRONG = "ok", "note", "wrong"
_STYLES = {OK: "green", NOTE: "yellow", WRONG: "bold red"}

_CORE = "commons.perf_model.partitioner.core"
_KERNEL_MODULE = Path("/proc/driver/nvidia/version")
_MEGATRON = 'pip install "megatron-core>=0.16,<0.17"'
_FBGEMM = ("fbgemm-gpu", "fbgemm-gpu-cpu", "fbgemm-gpu-nightly")
# Modules with another name than their package.
_MODULES = {"pyyaml": "yaml", "scikit-learn": "sklearn"}
# Packages that are not checked without torch, because they import torch.
_OF_TORCH = ("fbgemm", "torchrec", "megatron-core")


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    name: str  # name of the check
    state: str  # "ok"; "note": training can start anyway; "wrong": training cannot start
    found: str  # the result
    remedy: str = ""  # the remedy, a command if possible; empty if none is needed


@dataclass
class Doctor:
    """Check whether all packages are installed and compatible, and print commands that repair the installation.

    The exit status is 1 if training cannot start.

    For example:
      evenrank doctor
    """

    def run(self) -> int:
        """Check and print; returns the exit status."""
        findings = [*examine()]
        _print(findings)
        return int(any(finding.state == WRONG for finding in findings))


def examine() -> Iterator[Finding]:
    """Yield all findings; a package comes after the packages that it needs."""
    packages = Packages()
    yield Finding("evenrank", OK, f"{__version__} on Python {platform.python_version()}, {platform.system()}")
    yield from packages.check()
    yield from _native_core()
    if packages.torch is not None:
        yield _backends(packages.torch)
    yield from _driver(packages.torch)
    if packages.torch is not None:
        yield from _devices(packages.torch)


def _native_core() -> Iterator[Finding]:
    try:
        core = import_module(_CORE)
    except ModuleNotFoundError as error:  # a package that the planner needs, which has a finding of its own
        yield Finding("native core", NOTE, f"not checked ({error})")
    except ImportError as error:
        found, _, remedy = str(error).rpartition(": ")
        yield Finding("native core", WRONG, found, remedy)
    else:
        yield Finding("native core", OK, f"built by {core.COMPILER}, sources {core.SOURCES}")


def _backends(torch: Any) -> Finding:
    """Check gloo, which all ranks need, and NCCL, which GPUs need."""
    has_any = torch.distributed.is_available()
    available = {name: has_any and getattr(torch.distributed, f"is_{name}_available")() for name in ("gloo", "nccl")}
    found = ", ".join(f"{name} {'yes' if has else 'no'}" for name, has in available.items())
    needed = ("gloo",) if torch.version.cuda is None else ("gloo", "nccl")
    missing = [name for name in needed if not available[name]]
    remedy = f"install a build of torch that has {' and '.join(missing)}" if missing else ""
    return Finding("backends", WRONG if missing else OK, found, remedy)


def _driver(torch: Any) -> Iterator[Finding]:
    version = _driver_version()
    here = "no NVIDIA driver" if version is None else f"NVIDIA {version}"
    is_old = version is not None and version[0].isdigit() and int(version.split(".")[0]) < LEAST_DRIVER
    builds_needed = "" if not is_old else f"; builds for CUDA 13 need {LEAST_DRIVER}"
    if torch is None:
        remedy = f"update the driver, or {old_driver_command(DEFAULT_TORCH)}" if is_old else ""
        yield Finding("driver", NOTE if is_old else OK, here + builds_needed, remedy)
        return
    check = _cuda_check()
    problem = None if check is None else check.driver_problem()
    if problem is not None:
        yield Finding("driver", WRONG, f"{here}; torch cannot use the GPUs", problem)
    elif torch.cuda.is_available():
        yield Finding("driver", OK, f"{here}, serves CUDA {torch.version.cuda}")
    elif version is None and shutil.which("nvidia-smi") is None:
        yield Finding("driver", OK, f"{here}; training runs on the CPU, over gloo")
    else:
        why = "is built without CUDA" if torch.version.cuda is None else "sees no GPU"
        remedy = "install the CUDA builds of torch and fbgemm-gpu, or train on the CPU"
        if is_old:
            remedy = f"update the driver, or {old_driver_command(torch.__version__)}, or train on the CPU"
        if torch.version.cuda is not None:
            remedy = (
                "nvidia-smi -L lists the GPUs of this machine; CUDA_VISIBLE_DEVICES may hide them, and a container has "
                "only the GPUs that it was started with"
            )
        yield Finding("driver", NOTE, f"{here}, and torch {why}; training runs on the CPU", remedy)


def _driver_version() -> str | None:
    """The version of the loaded NVIDIA driver; None without one."""
    try:
        found = re.search(r"Module.*?\s(\d+\.[\d.]+)\s", _KERNEL_MODULE.read_text(encoding="utf-8"))
    except OSError:
        return None
    return "driver of unknown version" if found is None else found[1]


def _devices(torch: Any) -> Iterator[Finding]:
    check = _cuda_check()
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        device = torch.device("cuda", index)
        name = torch.cuda.get_device_name(device)
        problem = None if check is None else check.device_problem(device)
        if problem is not None:
            yield Finding(f"GPU {index}", WRONG, name, problem)
            continue
        peak = import_module("commons.perf_model.peak_rates").peak_flops(name, torch.bfloat16)
        if peak is None:
            remedy = "MFU is not reported; set --trainer.peak-tflops to the peak in the GPU's data sheet"
            yield Finding(f"GPU {index}", NOTE, f"{name}, peak unknown", remedy)
        else:
            yield Finding(f"GPU {index}", OK, f"{name}, {peak / 1e12:,.0f} TFLOPS in bf16")


def _cuda_check() -> Any:
    """The trainer's CUDA checks; None if a package that the trainer needs is missing."""
    try:
        return import_module("commons.trainer.ranks.cuda_check")
    except ImportError:
        return None


def _print(findings: list[Finding]) -> None:
    """Print a table, and below it the remedies, on separate lines to copy."""
    try:
        from rich.table import Table
        from rich.text import Text
    except ImportError:  # already one of the findings
        width = max(len(finding.name) for finding in findings)
        sys.stdout.writelines(f"{each.name:<{width}}  {each.state:<5}  {each.found}\n" for each in findings)
        sys.stdout.writelines(f"{each.name}: {each.remedy}\n" for each in findings if each.remedy)
        return
    console = make_console(highlight=False)
    table = Table(box=None, pad_edge=False, show_header=False)
    for finding in findings:
        table.add_row(Text(finding.name), Text(finding.state, style=_STYLES[finding.state]), Text(finding.found))
    console.print(table)
    for finding in findings:
        if finding.remedy:
            console.print(Text(f"{finding.name}: {finding.remedy}"), soft_wrap=True)


class Packages:
    """Checks packages one after another; a package that needs a missing package is not checked."""

    def __init__(self) -> None:
        self.torch: Any = None  # the module, if it can be imported
        self._absent: set[str] = set()  # modules that are missing or cannot be imported

    def check(self) -> Iterator[Finding]:
        """Check all packages; a package comes after the packages that it needs."""
        yield self._torch()
        yield from self._dependencies()
        yield from self._fbgemm_and_torchrec()
        absent = Finding("megatron-core", NOTE, "not installed; SID-GR needs it", _MEGATRON)
        yield self._package("megatron-core", "megatron.core", _MEGATRON, absent=absent)

    def _torch(self) -> Finding:
        version, mended = installed("torch"), f'pip install "torch=={DEFAULT_TORCH}.*"'
        again = f'pip install --force-reinstall "torch=={minor(version or "")}.*"'
        finding = self._package("torch", "torch", mended if version is None else again)
        if finding.state != OK:
            return finding
        self.torch = import_module("torch")
        cuda = self.torch.version.cuda
        found = f"{self.torch.__version__}, built {'without CUDA' if cuda is None else f'for CUDA {cuda}'}"
        if minor(self.torch.__version__) in RELEASES:
            return Finding("torch", OK, found)
        found += f"; evenrank supports {OLDEST_TORCH} to {NEWEST_TORCH}"
        return Finding("torch", NOTE, found, f"{mended}, and then the commands below")

    def _dependencies(self) -> Iterator[Finding]:
        """Check whether evenrank's other requirements are installed, of a required version, and can be imported."""
        needed = {name: need for name, need in _requirements("evenrank").items() if name != "torch"}
        if not needed:
            found = "unknown, because evenrank runs from a folder and is not installed"
            yield Finding("dependencies", NOTE, found, "in evenrank's folder: pip install --no-deps -e .")
            return
        missing = {name: requirement for name, requirement in needed.items() if installed(name) is None}
        self._absent |= set(map(_module, missing))
        if missing:
            quoted = " ".join(f'"{requirement}"' for requirement in missing.values())
            names = ", ".join(map(_name, missing.values()))
            yield Finding("dependencies", WRONG, f"not installed: {names}", f"pip install {quoted}")
        else:
            yield Finding("dependencies", OK, f"{len(needed)} installed")
        for name in (name for name in needed if name not in missing):
            finding = self._package(name, _module(name), f'pip install --force-reinstall --no-deps "{needed[name]}"')
            yield from [finding] if finding.state != OK else _too_old(name, needed[name], "evenrank")

    def _fbgemm_and_torchrec(self) -> Iterator[Finding]:
        """Check whether both are installed, can be imported, and fit the installed torch."""
        of_torch = DEFAULT_TORCH if self.torch is None else minor(self.torch.__version__)
        wanted = RELEASES.get(of_torch, RELEASES[DEFAULT_TORCH])
        cuda = shutil.which("nvidia-smi") if self.torch is None else self.torch.version.cuda
        if _driver_version() is None and shutil.which("nvidia-smi") is None:
            cuda = None  # fbgemm's CUDA build loads a library of the driver; the CPU build works with every torch
        build = "fbgemm-gpu-cpu" if cuda is None else "fbgemm-gpu"
        builds = [name for name in _FBGEMM if installed(name) is not None]
        found = ", ".join(f"{name} {installed(name)}" for name in builds) or "not installed"
        mended = f'pip install --force-reinstall --no-deps "{build}=={wanted}.*"{index_option(cuda)}'
        if any(name != build for name in builds):  # other builds must be removed, because all builds share one folder
            mended = f"pip uninstall -y {' '.join(builds)} && {mended}"
        if len(builds) == 1:
            yield self._package("fbgemm", "fbgemm_gpu", mended, found)
        else:
            if not builds:
                self._absent.add("fbgemm_gpu")
            yield Finding("fbgemm", WRONG, found, mended)
        mended = f'pip install --force-reinstall --no-deps "torchrec=={wanted}.*"'
        yield self._package("torchrec", "torchrec", mended)
        if installed("torchrec") is None:
            return
        for name, requirement in _requirements("torchrec").items():
            yield from _too_old(name, requirement, "torchrec")
        releases = {minor(str(installed(name))) for name in ("torchrec", *builds)}
        if releases != {wanted}:
            yield Finding(
                "releases",
                NOTE,
                f"torch {of_torch} does not fit torchrec and fbgemm {' and '.join(sorted(releases))}",
                f'pip install --no-deps "torchrec=={wanted}.*" "{build}=={wanted}.*"{index_option(cuda)}',
            )

    def _package(
        self, name: str, module: str, remedy: str, found: str | None = None, absent: Finding | None = None
    ) -> Finding:
        """Check that a package is installed and its module can be imported, which fails with another torch."""
        found = found or installed(name)
        if found is None:
            self._absent.add(module)
            return absent or Finding(name, WRONG, "not installed", remedy)
        if "torch" in self._absent and name in _OF_TORCH:
            return Finding(name, NOTE, f"{found}; not checked, because torch cannot be imported")
        problem = _import_problem(module)
        if problem is None:
            return Finding(name, OK, found)
        missing = re.search(r"No module named '(\w+)", problem)
        needed = missing[1] if missing else module.split(".")[0]
        if needed in self._absent:
            return Finding(name, NOTE, f"{found}; not checked, because {needed} cannot be imported")
        self._absent.add(module.split(".")[0])
        if needed != module.split(".")[0]:
            remedy = f"pip install {_missing_needs(name, needed)}"
        return Finding(name, WRONG, f"{found}, cannot be imported ({problem})", remedy)


def installed(package: str) -> str | None:
    """The version of a package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _import_problem(module: str) -> str | None:
    """The reason why a module cannot be imported, in one line; None if it can."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)  # packages mostly log and warn about optional packages
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import_module(module)
    except Exception as error:  # a broken package may raise anything
        return next(iter(str(error).strip().splitlines()), type(error).__name__)
    finally:
        logging.disable(disabled)
    return None


def _missing_needs(package: str, module: str) -> str:
    """The missing requirements of an installed package, including that of `module`, as arguments of pip."""
    needs = {name: need for name, need in _requirements(package).items() if name not in _FBGEMM}
    found = [name for name in needs if _module(name) == module or installed(name) is None]
    return " ".join(f'"{needs[name]}"' for name in found) or module.replace("_", "-")


def _requirements(package: str) -> dict[str, str]:
    """The requirements of an installed package without its extras, by name in lower case."""
    try:
        needs = metadata.requires(package) or []
    except metadata.PackageNotFoundError:
        return {}
    return {_name(need).lower(): need for need in needs if ";" not in need}  # ";": for extras, or for an old Python


def _module(name: str) -> str:
    """The module of a package, given the package's name in lower case."""
    return _MODULES.get(name, name.replace("-", "_"))


def _name(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0]


def _too_old(name: str, requirement: str, of: str) -> Iterator[Finding]:
    """Yield a finding if an installed package does not meet another package's requirement."""
    version = installed(name)
    with contextlib.suppress(ImportError):  # without packaging, this cannot be checked
        from packaging.requirements import Requirement

        if version is not None and not Requirement(requirement).specifier.contains(version, prereleases=True):
            yield Finding(name, NOTE, f"{version}; {of} requires {requirement}", f'pip install "{requirement}"')
