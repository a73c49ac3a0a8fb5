"""torchrun without its own traceback: takes the same arguments and returns the exit status of the rank that failed.

    python -m commons.trainer.torchrun --standalone --nproc_per_node=2 -m hstu.train --config hstu/configs/random.toml

torchrun prints fifty lines of its own below the error of a failed rank. Here the rank's error is the last line.
"""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Sequence

import torch.distributed.run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError


def torchrun(argv: Sequence[str]) -> int:
    """Start ranks with torchrun's arguments and wait for them.

    Returns:
        0, or the exit status of the rank that failed first; 128 + n if signal n ended a rank or this process, as in a
        shell: 130 after Ctrl-C; 1 if the hosts' rendezvous fails.
    """
    # The failed rank prints its own error; torchrun's log would only repeat it.
    logging.disable(logging.ERROR)
    try:
        torch.distributed.run.main(list(argv))
    except ChildFailedError as error:
        return _exit_status(error)
    except SignalException as stop:
        return 128 + int(stop.sigval)
    except RendezvousError as error:
        reason = f"{type(error).__name__}: {error}".removesuffix(": ")
        sys.stderr.write(f"error: the hosts' rendezvous failed ({reason}): look at the host of --rdzv-endpoint\n")
        return 1
    finally:
        logging.disable(logging.NOTSET)
    return 0


def _exit_status(error: ChildFailedError) -> int:
    first, first_failure = error.get_first_failure()
    # torchrun sends SIGTERM to the peers of a failed rank; only if the first failure is a SIGTERM, another sent it.
    ended = [
        (rank, failure)
        for rank, failure in sorted(error.failures.items())
        if failure.exitcode < 0 and (rank == first or failure.exitcode != -signal.SIGTERM)
    ]
    if not ended:
        return first_failure.exitcode
    rank, failure = ended[0]
    # A process that a signal ends cannot report that itself.
    sys.stderr.write(f"error: rank {rank} was ended by {failure.signal_name()}\n")
    return 128 - failure.exitcode


if __name__ == "__main__":
    sys.exit(torchrun(sys.argv[1:]))
