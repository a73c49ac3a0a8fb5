"""`evenrank doctor`: what is installed, whether it fits together, and what mends it.

It runs where nothing is: no package is imported but to see whether it can be.
"""

from __future__ import annotations

import importlib
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from commons.cli.doctor_packages import Packages
from commons.cli.findings import NOTE, OK, WRONG, Finding, print_findings
from commons.cli.interrupts import ended_by_ctrl_c
from commons.version import __version__

_CORE = "commons.perf_model.partitioner.core"
_KERNEL_MODULE = Path("/proc/driver/nvidia/version")


@dataclass
class Doctor:
    """Look at what is installed, whether it fits together, and what mends it.

    Ends with status 1 if training could not start.

    For example:
      evenrank doctor
    """

    def run(self) -> int:
        """Look, and print; returns the exit status."""
        with ended_by_ctrl_c():  # which some packages take for being broken
            findings = examine()
        print_findings(findings)
        return int(any(finding.state == WRONG for finding in findings))


def examine() -> list[Finding]:
    """All findings, in the order in which things depend on each other."""
    packages = Packages()
    looked_at = list(packages.look())
    torch = packages.torch
    return [
        Finding("evenrank", OK, f"{__version__} on Python {platform.python_version()}, {platform.system()}"),
        *looked_at,
        *_native_core(),
        *([] if torch is None else _backends(torch)),
        *_driver(torch),
        *([] if torch is None else _devices(torch)),
    ]


def _native_core() -> Iterator[Finding]:
    compiler = next((name for name in ("g++", "clang++") if shutil.which(name)), None)
    found = "none; to build the native core, one comes from the package index"
    yield Finding("compiler", OK, found if compiler is None else _compiler_version(compiler))
    try:
        core = importlib.import_module(_CORE)
    except ModuleNotFoundError as error:  # of what the planner needs, said above
        yield Finding("native core", NOTE, f"not looked into ({error})")
    except ImportError as error:
        found, _, remedy = str(error).rpartition(": ")
        yield Finding("native core", WRONG, found, remedy)
    else:
        yield Finding("native core", OK, f"built by {core.COMPILER}, sources {core.SOURCES}")


def _compiler_version(name: str) -> str:
    """The first line of what a compiler says of itself."""
    try:
        told = subprocess.run([name, "--version"], capture_output=True, text=True, timeout=10)  # noqa: S603  found in PATH
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{name}, which does not tell its version ({error})"
    return next(iter(told.stdout.splitlines()), name)


def _backends(torch: Any) -> Iterator[Finding]:
    if not torch.distributed.is_available():
        yield Finding("torch.distributed", WRONG, "this build of torch has none", "install a build that has it")
        return
    there = {"gloo": torch.distributed.is_gloo_available(), "nccl": torch.distributed.is_nccl_available()}
    found = ", ".join(f"{name} {'yes' if has else 'no'}" for name, has in there.items())
    if not there["gloo"]:
        yield Finding("backends", WRONG, found, "ranks agree over gloo: install a build of torch that has it")
    elif torch.version.cuda is not None and not there["nccl"]:
        yield Finding("backends", WRONG, found, "GPUs exchange over NCCL: install a build of torch that has it")
    else:
        yield Finding("backends", OK, found)


def _driver(torch: Any) -> Iterator[Finding]:
    version = _driver_version()
    here = "no NVIDIA driver" if version is None else f"NVIDIA {version}"
    if torch is None:
        yield Finding("driver", OK, here)
        return
    check = _cuda_check()
    problem = None if check is None else check.driver_problem()
    if problem is not None:
        yield Finding("driver", WRONG, f"{here}, too old for this torch", problem)
    elif torch.cuda.is_available():
        yield Finding("driver", OK, f"{here}, serves CUDA {torch.version.cuda}")
    elif version is None and shutil.which("nvidia-smi") is None:
        yield Finding("driver", OK, f"{here}; training runs on the CPU, over gloo")
    elif torch.version.cuda is None:
        yield Finding(
            "driver",
            NOTE,
            f"{here}, and torch is built without CUDA; training runs on the CPU",
            "install the CUDA builds of torch and fbgemm-gpu, or train on the CPU",
        )
    else:
        yield Finding(
            "driver",
            NOTE,
            f"{here}, and torch sees no GPU; training runs on the CPU",
            "nvidia-smi -L lists the GPUs of this machine; CUDA_VISIBLE_DEVICES may hide them, and a container has "
            "those that it was started with",
        )


def _driver_version() -> str | None:
    """That of the NVIDIA driver which the kernel has loaded; None for none."""
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
        peak = importlib.import_module("commons.perf_model.peak_rates").peak_flops(name, torch.bfloat16)
        if peak is None:
            remedy = "MFU is not reported; --trainer.peak-tflops gives the peak of its data sheet"
            yield Finding(f"GPU {index}", NOTE, f"{name}, peak unknown", remedy)
        else:
            yield Finding(f"GPU {index}", OK, f"{name}, {peak / 1e12:,.0f} TFLOPS in bf16")


def _cuda_check() -> Any:
    """The checks that the trainer makes, too; None where a package is missing that the trainer needs."""
    try:
        return importlib.import_module("commons.trainer.cuda_check")
    except ImportError:
        return None
