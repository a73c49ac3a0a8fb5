"""What a process holds: memory, threads, file descriptors and process groups; and whether they grow."""

from __future__ import annotations

import ctypes
import gc
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch.distributed as dist
from scipy.stats import theilslopes

_PROCESS = Path("/proc/self")
COUNTS = ("threads", "descriptors", "groups")
# Fields of glibc's struct mallinfo2, all size_t (malloc.h).
_MALLINFO2 = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"


class _MallInfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in _MALLINFO2.split()]


@dataclass(frozen=True)
class Footprint:
    """One look at a process."""

    step: int  # when
    # Memory that malloc has given out in all of its arenas, after a garbage collection: tensors, arrays, and whatever
    # native code holds. What leaks grows it.
    in_use_kib: int
    blocks: int  # of Python's own allocator in use: small objects, which malloc does not see
    # Resident, after malloc_trim: also pages that hold little, since every thread takes memory from an arena of its own
    # and pieces in between are freed; and code that has run.
    resident_kib: int
    threads: int  # native ones too
    descriptors: int  # open files and sockets
    groups: int  # process groups

    @classmethod
    def now(cls, step: int) -> Footprint:
        """Look at this process; Linux with glibc, 2.33 or later."""
        gc.collect()
        libc = ctypes.CDLL(None)
        libc.malloc_trim(0)
        libc.mallinfo2.restype = _MallInfo
        info = libc.mallinfo2()
        status = dict(line.split(":", 1) for line in (_PROCESS / "status").read_text().splitlines())
        return cls(
            step=step,
            in_use_kib=(info.uordblks + info.hblkhd) // 1024,
            blocks=sys.getallocatedblocks(),
            resident_kib=int(status["VmRSS"].split()[0]),
            threads=int(status["Threads"]),
            descriptors=len(list((_PROCESS / "fd").iterdir())),
            groups=len(dist.distributed_c10d._world.pg_names),
        )


def after_warm_up(looks: list[Footprint]) -> list[Footprint]:
    """Those of the last three quarters: before, caches fill and the pool of process groups grows to what is needed."""
    return [look for look in looks if look.step >= looks[-1].step / 4]


def per_10k(looks: list[Footprint], name: str) -> float:
    """Growth of one of the numbers per 10,000 steps after the warm-up.

    The median of the slopes between all pairs of looks (Theil 1950, Sen 1968), which single peaks do not bend.
    """
    steps, values = ([getattr(look, each) for look in after_warm_up(looks)] for each in ("step", name))
    return float(theilslopes(values, steps).slope) * 10_000 if len(set(steps)) > 1 else 0.0


def growth(looks: list[Footprint]) -> dict[str, int]:
    """How many more threads, descriptors and groups there are at the end than at any look of the second quarter."""
    later = after_warm_up(looks)
    before = [look for look in later if look.step <= looks[-1].step / 2] or later[:1]
    return {name: asdict(later[-1])[name] - max(asdict(look)[name] for look in before) for name in COUNTS}
