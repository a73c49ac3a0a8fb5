"""`evenrank doctor`: what is installed, whether it fits together, and what mends it."""

from __future__ import annotations

import platform
import shutil
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module, metadata

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from commons.perf_model.partitioner.native_core import PLANS
from commons.perf_model.peak_rates import peak_flops
from commons.trainer.cuda_check import device_problem, driver_problem
from commons.version import __version__

# torch, torchrec and fbgemm are released together: those of a torch, and of any other the newest.
_RELEASES = {"2.11": "1.6", "2.12": "1.7", "2.13": "1.8"}
_NEWEST = "1.8"
_MEGATRON = 'pip install "megatron-core>=0.16,<0.17"'
_FBGEMM = ("fbgemm-gpu", "fbgemm-gpu-cpu", "fbgemm-gpu-nightly")
_OK, _NOTE, _WRONG = "ok", "note", "wrong"
_STYLES = {_OK: "green", _NOTE: "yellow", _WRONG: "bold red"}


@dataclass(frozen=True)
class Finding:
    """One line of the answer.

    Attributes:
        name: what was looked at.
        state: "ok"; "note": training starts all the same; "wrong": it does not.
        found: what there is.
        remedy: what mends it, a command where there is one; empty if nothing needs to be.
    """

    name: str
    state: str
    found: str
    remedy: str = ""


@dataclass
class Doctor:
    """Look at what is installed, whether it fits together, and what mends it.

    Ends with status 1 if training could not start.

    For example:
      evenrank doctor
    """

    def run(self) -> int:
        """Look, and print; returns the exit status."""
        findings = examine()
        print_findings(findings)
        return int(any(finding.state == _WRONG for finding in findings))


def examine() -> list[Finding]:
    """All findings, in the order in which things depend on each other."""
    looks: tuple[Callable[[], Iterator[Finding]], ...] = (
        _python,
        _torch,
        _torchrec,
        _megatron,
        _native_core,
        _backends,
        _driver,
        _devices,
    )
    return [finding for look in looks for finding in look()]


def print_findings(findings: list[Finding]) -> None:
    """Print a table, and the remedies below it, each on lines of its own to copy."""
    console = Console(highlight=False)
    table = Table(box=None, pad_edge=False, show_header=False)
    for finding in findings:
        table.add_row(Text(finding.name), Text(finding.state, style=_STYLES[finding.state]), Text(finding.found))
    console.print(table)
    for finding in findings:
        if finding.remedy:
            console.print(Text(f"{finding.name}: {finding.remedy}"), soft_wrap=True)


def _python() -> Iterator[Finding]:
    yield Finding("evenrank", _OK, f"{__version__} on Python {platform.python_version()}, {platform.system()}")


def _torch() -> Iterator[Finding]:
    built = "without CUDA" if torch.version.cuda is None else f"for CUDA {torch.version.cuda}"
    yield Finding("torch", _OK, f"{torch.__version__}, built {built}")


def _torchrec() -> Iterator[Finding]:
    """Whether TorchRec and fbgemm are there, import, and are of the torch that is installed."""
    of_torch = _minor(torch.__version__)
    wanted = _RELEASES.get(of_torch, _NEWEST)
    build = "fbgemm-gpu-cpu" if torch.version.cuda is None else "fbgemm-gpu"
    builds = [name for name in _FBGEMM if _version(name) is not None]
    found = ", ".join(f"{name} {_version(name)}" for name in builds) or "not installed"
    mended = f"pip install --force-reinstall --no-deps {build}=={wanted}.*"
    if not builds:
        yield Finding("fbgemm", _WRONG, found, mended)
    elif len(builds) > 1:  # they share one folder
        yield Finding("fbgemm", _WRONG, found, f"pip uninstall -y {' '.join(builds)} && {mended}")
    else:
        yield _imported("fbgemm", "fbgemm_gpu", found, mended)
    version = _version("torchrec")
    mended = f"pip install --force-reinstall --no-deps torchrec=={wanted}.*"
    if version is None:
        yield Finding("torchrec", _WRONG, "not installed", mended)
        return
    yield _imported("torchrec", "torchrec", version, mended)
    releases = {_minor(str(_version(name))) for name in ("torchrec", *builds)}
    if releases != {wanted} or of_torch not in _RELEASES:
        yield Finding(
            "releases",
            _NOTE,
            f"torch {of_torch} was not released with torchrec and fbgemm {' and '.join(sorted(releases))}",
            f"pip install --no-deps torchrec=={wanted}.* {build}=={wanted}.*",
        )


def _imported(name: str, module: str, found: str, remedy: str) -> Finding:
    """Whether a module can be imported: a build for another torch fails only then."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what else could be installed
            import_module(module)
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        return Finding(name, _WRONG, f"{found}, cannot be imported ({reason})", remedy)
    return Finding(name, _OK, found)


def _megatron() -> Iterator[Finding]:
    version = _version("megatron-core")
    if version is None:
        yield Finding("megatron-core", _NOTE, "not installed; SID-GR needs it", _MEGATRON)
    else:
        yield _imported("megatron-core", "megatron.core", version, _MEGATRON)


def _native_core() -> Iterator[Finding]:
    try:
        from commons.perf_model.partitioner import _native
    except ImportError:
        compiler = next((name for name in ("c++", "g++", "clang++") if shutil.which(name)), None)
        first = "" if compiler else "install a C++ compiler, such as g++; then "
        yield Finding(
            "native core",
            _NOTE,
            f"not built; plans are made in numpy, the same ones, slower. Compiler: {compiler or 'none'}",
            f"{first}install evenrank again, in a checkout: pip install --no-deps -e .",
        )
        return
    if _native.PLANS != PLANS:
        yield Finding(
            "native core",
            _NOTE,
            f"built for plans {_native.PLANS}, the sources make plans {PLANS}; numpy plans instead, slower",
            "pip install --no-deps --no-build-isolation -e .",
        )
    else:
        yield Finding("native core", _OK, "built")


def _backends() -> Iterator[Finding]:
    if not torch.distributed.is_available():
        yield Finding("torch.distributed", _WRONG, "this build of torch has none", "install a build that has it")
        return
    there = {"gloo": torch.distributed.is_gloo_available(), "nccl": torch.distributed.is_nccl_available()}
    found = ", ".join(f"{name} {'yes' if has else 'no'}" for name, has in there.items())
    if not there["gloo"]:
        yield Finding("backends", _WRONG, found, "ranks agree over gloo: install a build of torch that has it")
    elif torch.version.cuda is not None and not there["nccl"]:
        yield Finding("backends", _WRONG, found, "GPUs exchange over NCCL: install a build of torch that has it")
    else:
        yield Finding("backends", _OK, found)


def _driver() -> Iterator[Finding]:
    problem = driver_problem()
    if problem is not None:
        yield Finding("driver", _WRONG, "too old for this torch", problem)
    elif torch.cuda.is_available():
        yield Finding("driver", _OK, f"serves CUDA {torch.version.cuda}")
    elif shutil.which("nvidia-smi") is not None and torch.version.cuda is None:
        yield Finding(
            "driver",
            _NOTE,
            "nvidia-smi is here, and torch is built without CUDA",
            "install the CUDA builds of torch and fbgemm-gpu, or train on the CPU",
        )
    else:
        yield Finding("driver", _OK, "no GPU; training runs on the CPU, over gloo")


def _devices() -> Iterator[Finding]:
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        device = torch.device("cuda", index)
        name = torch.cuda.get_device_name(device)
        problem = device_problem(device)
        if problem is not None:
            yield Finding(f"GPU {index}", _WRONG, name, problem)
        elif (peak := peak_flops(name, torch.bfloat16)) is None:
            remedy = "MFU is not reported; commons/perf_model/peak_rates.py lists the peaks that are known"
            yield Finding(f"GPU {index}", _NOTE, f"{name}, peak unknown", remedy)
        else:
            yield Finding(f"GPU {index}", _OK, f"{name}, {peak / 1e12:,.0f} TFLOPS in bf16")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _minor(version: str) -> str:
    """The first two numbers of a version.

    >>> _minor("2.13.0+cpu")
    '2.13'

    """
    return ".".join(version.split("+")[0].split(".")[:2])
