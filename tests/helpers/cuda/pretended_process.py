"""A process whose CPU build of torch takes CUDA for present: no value and no kernel, but devices, streams, autograd.

A few lines of C++ are compiled with torch's headers and loaded before torch is imported, which asks but once what
there is. This module therefore does not import torch.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import multiprocessing
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

_SOURCE = """
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace c10::impl {
// One device with one stream; events are there and do nothing.
struct PretendedGuard final : NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device exchangeDevice(Device) const override { return Device(DeviceType::CUDA, 0); }
  Device getDevice() const override { return Device(DeviceType::CUDA, 0); }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, getDevice()); }
  Stream exchangeStream(Stream) const noexcept override { return Stream(Stream::DEFAULT, getDevice()); }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void recordDataPtrOnStream(const DataPtr&, const Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, PretendedGuard)
}  // namespace c10::impl

namespace at {
// Autograd asks which accelerator there is.
struct CUDAHooks : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
};
REGISTER_CUDA_HOOKS(CUDAHooks)
}  // namespace at
"""


def cannot_pretend() -> str | None:
    """Why CUDA cannot be pretended here; None if it can."""
    if "+cpu" not in importlib.metadata.version("torch"):
        return "needs a CPU build of torch; one for CUDA knows devices of its own, and tests/gpu tests it on them"
    return None if _compiler() else "needs a C++ compiler: g++, c++ or clang++"


def _compiler() -> str | None:
    return next((path for name in ("g++", "c++", "clang++") if (path := shutil.which(name))), None)


def build_library(folder: Path) -> Path:
    """Compile what a CPU build of torch lacks, into a folder.

    Raises:
        RuntimeError: the compiler's message.
    """
    spec, compiler = importlib.util.find_spec("torch"), _compiler()
    assert spec is not None
    assert spec.origin is not None
    assert compiler is not None
    torch = Path(spec.origin).parent
    source, library = folder / "pretended_cuda.cpp", folder / "pretended_cuda.so"
    source.write_text(_SOURCE)
    build = [compiler, "-O1", "-shared", "-fPIC", "-std=c++20", f"-I{torch / 'include'}", str(source)]
    link = ["-o", str(library), f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch / 'lib'}"]
    done = subprocess.run([*build, *link], capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join([*build, *link])}\n{done.stderr}")
    return library


class PretendedProcess:
    """A process in which CUDA is pretended.

    Args:
        library: what `build_library` made.
    """

    def __init__(self, library: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._process = ProcessPoolExecutor(1, mp_context=context, initializer=ctypes.CDLL, initargs=(str(library),))

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 120.0, **kwargs: Any) -> Any:
        """Call a module-level function there; its exceptions are raised here, with its traceback."""
        return self._process.submit(function, *args, **kwargs).result(timeout)

    def stop(self) -> None:
        """End the process."""
        self._process.shutdown(wait=False, cancel_futures=True)
