"""The exit status of the quiet torchrun: that of the rank that failed first, or of the signal that ended it."""

from __future__ import annotations

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from commons.trainer.torchrun import _exit_status


def failed(*exits):
    """Ranks that ended in this order, each (rank, status); a negative status is a signal."""
    failures = {}
    for when, (rank, status) in enumerate(exits):
        failure = ProcessFailure(local_rank=rank, pid=1, exitcode=status, error_file="/nowhere")
        failure.timestamp = when
        failures[rank] = failure
    return ChildFailedError("program", failures)


@pytest.mark.parametrize(
    ("exits", "status", "said"),
    [
        ([(1, 2), (0, -15)], 2, ""),  # torchrun ends the peers of a failed rank
        ([(1, -15), (0, 1)], 143, "error: rank 1 was ended by SIGTERM\n"),  # and here somebody else ended one
        ([(0, 1), (1, -9), (2, -15)], 137, "error: rank 1 was ended by SIGKILL\n"),
        ([(0, 1)], 1, ""),
    ],
)
def test_exit_status(exits, status, said, capsys):
    assert _exit_status(failed(*exits)) == status
    assert capsys.readouterr().err == said
