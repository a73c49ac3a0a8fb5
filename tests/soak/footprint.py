"""What a process holds: memory, threads, file descriptors and process groups; and whether they grow."""

from __future__ import annotations

import ctypes
import gc
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch.distributed as dist

_PROCESS = Path("/proc/self")
COUNTS = ("threads", "descriptors", "groups")


@dataclass(frozen=True)
class Footprint:
    """One look at a process.

    Attributes:
        step: when.
        kib: memory that is resident, after a garbage collection and malloc_trim: what is held, and not what the
            allocator keeps for later.
        threads: native ones too.
        descriptors: open files and sockets.
        groups: process groups.
    """

    step: int
    kib: int
    threads: int
    descriptors: int
    groups: int

    @classmethod
    def now(cls, step: int) -> Footprint:
        """Look at this process; Linux with glibc."""
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        status = dict(line.split(":", 1) for line in (_PROCESS / "status").read_text().splitlines())
        return cls(
            step=step,
            kib=int(status["VmRSS"].split()[0]),
            threads=int(status["Threads"]),
            descriptors=len(list((_PROCESS / "fd").iterdir())),
            groups=len(dist.distributed_c10d._world.pg_names),
        )


def after_warm_up(looks: list[Footprint]) -> list[Footprint]:
    """Those of the last three quarters: before, caches fill and the pool of process groups grows to what is needed."""
    return [look for look in looks if look.step >= looks[-1].step / 4]


def kib_per_10k(looks: list[Footprint]) -> float:
    """Growth of the memory in KiB per 10,000 steps after the warm-up.

    The median of the slopes between all pairs of looks (Theil 1950, Sen 1968), which single peaks do not bend.
    """
    steps, kib = (np.array([getattr(look, name) for look in after_warm_up(looks)]) for name in ("step", "kib"))
    first, second = np.triu_indices(len(steps), k=1)
    apart = steps[second] != steps[first]
    slopes = (kib[second] - kib[first])[apart] / (steps[second] - steps[first])[apart]
    return float(np.median(slopes)) * 10_000 if len(slopes) else 0.0


def growth(looks: list[Footprint]) -> dict[str, int]:
    """How many more threads, descriptors and groups there are at the end than at any look of the second quarter."""
    later = after_warm_up(looks)
    before = [look for look in later if look.step <= looks[-1].step / 2] or later[:1]
    return {name: asdict(later[-1])[name] - max(asdict(look)[name] for look in before) for name in COUNTS}
