"""Which releases of torch, torchrec and fbgemm belong together, and which driver their builds need."""

from __future__ import annotations

# For each release of torch that evenrank supports, the release of torchrec and fbgemm (table: fbgemm_gpu/__init__.py).
RELEASES = {"2.11": "1.6", "2.12": "1.7", "2.13": "1.8", "2.14": "1.9"}
OLDEST_TORCH, *_, NEWEST_TORCH = RELEASES
OLDEST_TORCHREC, *_, NEWEST_TORCHREC = RELEASES.values()
# The release of the extras "cpu" and "cuda" and of the pins.
DEFAULT_TORCH = "2.13"
# The oldest NVIDIA driver for CUDA 13, which the builds on the package index need.
LEAST_DRIVER = 580


def minor(version: str) -> str:
    """The first two numbers of a version."""
    return ".".join(version.split("+")[0].split(".")[:2])


def index_option(cuda: str | None) -> str:
    """The option of pip for builds for CUDA 12; "" for other versions, whose builds are on the package index."""
    if cuda is None or not cuda.startswith("12."):
        return ""
    return f" --index-url https://download.pytorch.org/whl/cu{cuda.replace('.', '')}"


def old_driver_command(torch_version: str) -> str:
    """The command that installs torch, and the fbgemm that fits it, for a driver that supports CUDA 12 only."""
    torch = minor(torch_version) if minor(torch_version) in RELEASES else DEFAULT_TORCH
    return f'pip install --force-reinstall "torch=={torch}.*" "fbgemm-gpu=={RELEASES[torch]}.*"{index_option("12.6")}'
