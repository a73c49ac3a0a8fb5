"""Which releases of torch, torchrec and fbgemm belong together, and what their builds need of the driver."""

from __future__ import annotations

# By release of torch that of torchrec and fbgemm (fbgemm_gpu/__init__.py has the table); those evenrank runs with.
RELEASES = {"2.11": "1.6", "2.12": "1.7", "2.13": "1.8"}
NEWEST_TORCH = "2.13"
# What the package index has is built for CUDA 13, which every NVIDIA driver from this one on serves.
LEAST_DRIVER = 580
# The builds for CUDA 12.6 that all these releases have too run with every driver from this one on.
LEAST_OLD_DRIVER = 525


def minor(version: str) -> str:
    """The first two numbers of a version."""
    return ".".join(version.split("+")[0].split(".")[:2])


def index_option(cuda: str | None) -> str:
    """What pip needs to find builds for a version of CUDA; "" for those of the package index."""
    if cuda is None or not cuda.startswith("12."):
        return ""
    return f" --index-url https://download.pytorch.org/whl/cu{cuda.replace('.', '')}"


def old_driver_command(torch_version: str) -> str:
    """Installs torch, and the fbgemm that fits it, for a driver that serves CUDA 12 only."""
    torch = minor(torch_version) if minor(torch_version) in RELEASES else NEWEST_TORCH
    return f'pip install --force-reinstall "torch=={torch}.*" "fbgemm-gpu=={RELEASES[torch]}.*"{index_option("12.6")}'
