"""A rank under torchrun whose agent stands still: `python -m tests.helpers.frozen_agent FAULT FOLDER`.

Both ranks shuffle before the agent is stopped, and after it: nobody needs the store then. With the fault `a rank stops`
rank 1 stands still too, with `a shuffler is made` the store is needed by all. FOLDER/said<r> has what a rank raises.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from commons.distributed.options import ShufflerOptions
from tests.helpers.faults import limit_waits, my_batch
from tests.helpers.pipelines import CubicShuffler

TIMEOUT = 2.0
A_RANK_STOPS, A_SHUFFLER_IS_MADE = "a rank stops", "a shuffler is made"


def _run(fault: str, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    shuffler = CubicShuffler()
    shuffler.shuffle(my_batch())
    dist.barrier()
    if rank == 0:
        os.kill(os.getppid(), signal.SIGSTOP)
    dist.barrier()
    shuffler.shuffle(my_batch(1))
    limit_waits(TIMEOUT)
    if fault == A_RANK_STOPS and rank == 1:
        (folder / f"pid{rank}").write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        if fault == A_SHUFFLER_IS_MADE:
            CubicShuffler(ShufflerOptions(timeout=TIMEOUT)).connect()
        shuffler.shuffle(my_batch(2))
    except Exception as error:
        (folder / f"writing{rank}").write_text(f"{type(error).__name__}: {error}")
        (folder / f"writing{rank}").rename(folder / f"said{rank}")
        raise


if __name__ == "__main__":
    _run(sys.argv[1], Path(sys.argv[2]))
