"""Checks of CUDA before a run: a driver that torch cannot use, a library without code for the GPU."""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata

import torch

from commons.releases import LEAST_DRIVER, old_driver_command

# Parts of CUDA's error messages about a kernel that was built only for other architectures.
_NO_CODE = ("no kernel image", "not compiled for", "invalid device function")
# The same of torch's errors about GPUs that are there and have failed.
_FAILED = ("Unexpected error from cudaGetDeviceCount", "CUDA unknown error")


def driver_problem() -> str | None:
    """The reason why torch cannot use the driver of this machine's GPUs, and the remedy, in one line.

    None if the driver works, without a driver or a GPU, in a process whose parent has used CUDA, and with a build of
    torch without CUDA.
    """
    if torch.version.cuda is None or torch.cuda.is_available():
        return None
    try:
        torch.cuda.init()
    except RuntimeError as error:  # also raised without a driver, that is without a GPU
        if any(words in str(error) for words in _FAILED) and "stub library" not in str(error):
            return (
                f"torch cannot use this machine's GPUs: {' '.join(str(error).split())}; the driver or a GPU has "
                "failed: see nvidia-smi and dmesg, or choose device 'cpu'"
            )
        if "too old" not in str(error):
            return None
        numbers = [int(word) for word in str(error).replace(")", " ").split() if word.isdigit()]
        found = "".join(f"{number // 1000}.{number % 1000 // 10}" for number in numbers)  # CUDA's 12040 is 12.4
        fitting = ""
        if torch.version.cuda.startswith("13.") and found.startswith("12."):
            fitting = f" run `{old_driver_command(torch.__version__)}`,"
        needed = f", which needs driver {LEAST_DRIVER}" if torch.version.cuda.startswith("13.") else ""
        return (
            f"the NVIDIA driver supports CUDA {found or 'of an earlier version'}, torch {torch.__version__} is built "
            f"for CUDA {torch.version.cuda}{needed}; a driver supports its own version and earlier ones: update it,"
            f"{fitting} or choose device 'cpu'"
        )
    return None


def device_problem(device: torch.device) -> str | None:
    """The reason why a CUDA device cannot run torch or fbgemm, and the remedy, in one line; None if it can.

    Runs one small operation of each library on the device, and synchronises.
    """
    for name, packages, operation in (
        ("torch", ("torch",), _run_torch),
        ("fbgemm", ("fbgemm-gpu", "fbgemm-gpu-nightly", "fbgemm-gpu-cpu"), _run_fbgemm),
    ):
        why = _failure(operation, device)
        if why is None:
            continue
        major, minor = torch.cuda.get_device_capability(device)
        built_for = "the wheels of the package index for sm_80, sm_90 and sm_100"  # fbgemm has no list of its targets
        if name == "torch":
            built_for = ", ".join(torch.cuda.get_arch_list()) or "no GPU"
        return (
            f"{torch.cuda.get_device_name(device)} has compute capability {major}.{minor}, and "
            f"{_installed(packages) or name} {why}; a library has code only for its build targets ({built_for}): "
            f"install a build of {name} for this GPU, use another GPU, or choose device 'cpu'"
        )
    return None


def _failure(operation: Callable[[torch.device], None], device: torch.device) -> str | None:
    try:
        operation(device)
        torch.cuda.synchronize(device)
    except NotImplementedError:  # the dispatcher has no CUDA kernel for the operation
        return "is a build without CUDA"
    except RuntimeError as error:
        if any(words in str(error) for words in _NO_CODE):
            return "has no code for it"
        raise
    return None


def _run_torch(device: torch.device) -> None:
    torch.ones(2, device=device).cumsum(0)


def _run_fbgemm(device: torch.device) -> None:
    import fbgemm_gpu  # noqa: F401  registers its operations

    torch.ops.fbgemm.asynchronous_complete_cumsum(torch.ones(2, dtype=torch.int64, device=device))


def _installed(packages: tuple[str, ...]) -> str | None:
    """Name and version of the first of these packages that is installed."""
    for package in packages:
        try:
            return f"{package} {metadata.version(package)}"
        except metadata.PackageNotFoundError:
            continue
    return None
