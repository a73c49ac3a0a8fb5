"""A check that memory suffices for what a user requests, before any of it is allocated."""

from __future__ import annotations

import contextlib
from pathlib import Path

_GIB = 1 << 30


def require_memory(num_bytes: int, request: str, remedy: str) -> None:
    """Raise ValueError if this machine has less available memory than `num_bytes`.

    Args:
        num_bytes: estimate of the bytes needed.
        request: the setting that needs them, with its value: "num_users is 5".
        remedy: the end of the message: what the user should do.
    """
    available = available_memory()
    if available is not None and num_bytes > available:
        raise ValueError(
            f"{request}; that takes about {num_bytes / _GIB:,.1f} GiB of memory, {available / _GIB:,.1f} GiB are "
            f"available: {remedy}"
        )


def available_memory() -> int | None:
    """Bytes that a process can allocate without swapping, within its container's limit; None if neither is known."""
    found = []
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        found.append(int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]) << 10)
    # The limits of cgroup v2 and v1; without a limit the file contains "max", which int() rejects.
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            found.append(int(Path(limit).read_text()))
    return min(found, default=None)
