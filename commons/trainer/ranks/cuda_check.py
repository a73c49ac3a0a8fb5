"""Whether CUDA works here, checked before a run begins: a driver too old for torch, a GPU without code in a library."""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata

import torch

from commons.releases import LEAST_DRIVER, old_driver_command

# In CUDA's errors about a kernel that was built for other architectures only.
_NO_CODE = ("no kernel image", "not compiled for", "invalid device function")


def driver_problem() -> str | None:
    """Why torch cannot use the GPUs of this machine because of their driver, and the remedy, in one line.

    None where the driver serves, where there is none, and with a build of torch without CUDA.
    """
    if torch.version.cuda is None or torch.cuda.is_available():
        return None
    try:
        torch.cuda.init()
    except RuntimeError as error:  # also where there is no driver, that is no GPU
        if "too old" not in str(error):
            return None
        numbers = [int(word) for word in str(error).replace(")", " ").split() if word.isdigit()]
        found = "".join(f"{number // 1000}.{number % 1000 // 10}" for number in numbers)  # CUDA's 12040 is 12.4
        fitting = ""
        if torch.version.cuda.startswith("13.") and found.startswith("12."):
            fitting = f" run `{old_driver_command(torch.__version__)}`,"
        needed = f", which needs driver {LEAST_DRIVER}" if torch.version.cuda.startswith("13.") else ""
        return (
            f"the NVIDIA driver serves CUDA {found or 'of an earlier version'}, torch {torch.__version__} is built for "
            f"CUDA {torch.version.cuda}{needed}; a driver serves its own version and those before: update it,{fitting} "
            "or choose device 'cpu'"
        )
    return None


def device_problem(device: torch.device) -> str | None:
    """Why a CUDA device cannot run what training needs of torch and fbgemm, and the remedy, in one line; else None.

    Runs one small operation of each on the device, and waits for them.
    """
    for name, packages, operation in (
        ("torch", ("torch",), _run_torch),
        ("fbgemm", ("fbgemm-gpu", "fbgemm-gpu-nightly", "fbgemm-gpu-cpu"), _run_fbgemm),
    ):
        why = _failure(operation, device)
        if why is None:
            continue
        major, minor = torch.cuda.get_device_capability(device)
        built_for = "the wheels of the package index for sm_80, sm_90 and sm_100"  # fbgemm has no list of them
        if name == "torch":
            built_for = ", ".join(torch.cuda.get_arch_list()) or "no GPU"
        return (
            f"{torch.cuda.get_device_name(device)} has compute capability {major}.{minor}, and "
            f"{_installed(packages) or name} {why}; a library has code for what it is built for ({built_for}): "
            f"install a build of {name} for this one, take another GPU, or choose device 'cpu'"
        )
    return None


def _failure(operation: Callable[[torch.device], None], device: torch.device) -> str | None:
    try:
        operation(device)
        torch.cuda.synchronize(device)
    except NotImplementedError:  # the dispatcher knows no such operation for CUDA
        return "is a build without CUDA"
    except RuntimeError as error:
        if any(words in str(error) for words in _NO_CODE):
            return "has no code for it"
        raise
    return None


def _run_torch(device: torch.device) -> None:
    torch.ones(2, device=device).cumsum(0)


def _run_fbgemm(device: torch.device) -> None:
    import fbgemm_gpu  # noqa: F401  its operations; not needed by who trains without tables

    torch.ops.fbgemm.asynchronous_complete_cumsum(torch.ones(2, dtype=torch.int64, device=device))


def _installed(packages: tuple[str, ...]) -> str | None:
    """Name and version of the first of these packages that is installed."""
    for package in packages:
        try:
            return f"{package} {metadata.version(package)}"
        except metadata.PackageNotFoundError:
            continue
    return None
