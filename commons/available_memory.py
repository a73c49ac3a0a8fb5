"""Whether there is memory for what a user asks for, told before any of it is taken."""

from __future__ import annotations

import contextlib
from pathlib import Path

_GIB = 1 << 30


def require_memory(num_bytes: int, asked: str, remedy: str) -> None:
    """Raise ValueError where this machine has less memory than is needed.

    Args:
        num_bytes: about how many are needed.
        asked: what for, with its value: "num_users is 5".
        remedy: what to do instead.

    """
    available = available_memory()
    if available is not None and num_bytes > available:
        raise ValueError(
            f"{asked}; that takes about {num_bytes / _GIB:,.1f} GiB of memory, {available / _GIB:,.1f} GiB are there: "
            f"{remedy}"
        )


def available_memory() -> int | None:
    """Bytes that a process can take without swapping, or as its container allows; None where nobody tells."""
    found = []
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        found.append(int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]) << 10)
    # Control groups of both versions; "max" is no number.
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            found.append(int(Path(limit).read_text()))
    return min(found, default=None)
