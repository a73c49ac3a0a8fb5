"""torchrun without its own traceback: the same arguments, and the exit status of the rank that failed.

    python -m commons.trainer.torchrun --standalone --nproc_per_node=2 -m hstu.train --config hstu/configs/demo.toml

torchrun prints fifty lines of its own below what a failed rank has printed. Here the rank's own line is the last one.
"""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Sequence

import torch.distributed.run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError


def torchrun(argv: Sequence[str]) -> int:
    """Start ranks with torchrun's arguments and wait for them.

    Returns:
        0, or the exit status of the rank that failed first; 128 + n if signal n ended a rank, or this process, as a
        shell does it: 130 after Ctrl-C.
    """
    # The rank itself reports its failure; torchrun's log adds nothing to it and the exit status.
    logging.disable(logging.ERROR)
    try:
        torch.distributed.run.main(list(argv))
    except ChildFailedError as error:
        return _exit_status(error)
    except SignalException as stop:
        return 128 + int(stop.sigval)
    finally:
        logging.disable(logging.NOTSET)
    return 0


def _exit_status(error: ChildFailedError) -> int:
    first, first_failure = error.get_first_failure()
    # SIGTERM is torchrun's own, for the peers of a failed rank; where it came first, somebody else has sent it.
    ended = [
        (rank, failure)
        for rank, failure in sorted(error.failures.items())
        if failure.exitcode < 0 and (rank == first or failure.exitcode != -signal.SIGTERM)
    ]
    if not ended:
        return first_failure.exitcode
    rank, failure = ended[0]
    sys.stderr.write(f"error: rank {rank} was ended by {failure.signal_name()}\n")  # it could not report that itself
    return 128 - failure.exitcode


if __name__ == "__main__":
    sys.exit(torchrun(sys.argv[1:]))
