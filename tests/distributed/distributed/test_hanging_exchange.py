"""A rank fails after the plan: the others, which wait for its rows, quote its error, also where a device hangs.

There the payload group is one of Python's, whose all-to-all blocks its caller until the group is aborted, as in NCCL.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from unittest import mock

import torch
import torch.distributed as dist

from commons.distributed.channel import groups
from commons.distributed.channel.agree import ControlChannel
from commons.distributed.exchange.row_exchange import RowExchange
from commons.distributed.options import ShufflerOptions
from tests.helpers.pipelines.shuffled_pipelines import CubicShuffler
from tests.helpers.ranks.faults import my_batch, on_rank, raised_by

# Far above what the test may take, which the pool limits.
TIMEOUT = 300.0


class _Done(dist.Work):
    def wait(self, timeout=None):
        return True

    def is_completed(self):
        return True


class HangingGroup(dist.ProcessGroup):
    """Once connected, a collective that not all ranks call never ends; abort() lets it return as if all were well."""

    def __init__(self, rank, size):
        super().__init__(rank, size)
        self.aborted, self.hangs = threading.Event(), False

    def getBackendName(self):
        return "hanging"

    def all_gather_single(self, output, source, options=None):
        return _Done()

    def all_to_all_single(self, output, source, output_splits, input_splits, options=None):
        if self.hangs:
            self.aborted.wait(TIMEOUT)
        return _Done()

    _allgather_base, alltoall_base = all_gather_single, all_to_all_single

    def abort(self):
        self.aborted.set()


def _fails_after_the_plan(hangs_in_the_call):
    """Rank 1 has too little memory for the exchange of step 0; the worker threads of the others gather for step 1.

    Their main threads hang in the call of the exchange, or the call returns and the rows never come.
    """
    made = []

    def hanging(pair, group, timeout):
        made.append(HangingGroup(dist.get_rank(), dist.get_world_size()))
        return pair._replace(payload=made[0])

    def issue(self, buffer, sent, group, *, async_op):  # as on a device, where the host does not wait for the work
        return send_rows(self, buffer, sent, group, async_op=False)

    send_rows = RowExchange.send_rows
    with (
        mock.patch.object(groups, "_WORLDS", weakref.WeakKeyDictionary()),
        mock.patch("commons.distributed.channel.agree.with_payload", hanging),
        mock.patch.object(ControlChannel, "_try", lambda channel, pair, all_to_all: True),
        mock.patch.object(RowExchange, "send_rows", issue),
    ):
        shuffler = CubicShuffler(ShufflerOptions(timeout=TIMEOUT))
        made[0].hangs = hangs_in_the_call
        handle = shuffler.start_shuffle(batch := my_batch(1))
        handle.prepared()
        following = shuffler.start_shuffle(my_batch(2)) if dist.get_rank() != 1 else None
        error = torch.OutOfMemoryError("tried to allocate 7 GiB")
        with on_rank(1, mock.patch.object(RowExchange, "_select", side_effect=error)):
            text = raised_by(lambda: shuffler.finish_shuffle(batch, handle))
        if following is not None and not hangs_in_the_call:
            assert text == "no error"
            text = raised_by(following.prepared)
        with contextlib.suppress(RuntimeError):
            shuffler.close()
    return text, made[0].aborted.is_set()


def test_ranks_that_wait_for_rows_end_with_the_error_of_the_one_that_failed(own_ranks):
    """The group is aborted where that frees a thread, and not where a stream would go on with rows that never came."""
    for hangs_in_the_call in (True, False):
        answers = own_ranks.run(_fails_after_the_plan, hangs_in_the_call, timeout=90)
        for rank, (text, aborted) in enumerate(answers):
            if rank == 1:
                assert text == "OutOfMemoryError: tried to allocate 7 GiB" and not aborted
            else:
                quoted = "rank 1 failed in the exchange of step 0: OutOfMemoryError: tried to allocate 7 GiB"
                assert text == f"RankMissingError: {quoted}" and aborted == hangs_in_the_call


def _finishes_another_batch():
    shuffler = CubicShuffler(ShufflerOptions(timeout=TIMEOUT))
    handle = shuffler.start_shuffle(own := my_batch())
    batch = my_batch(1, rows=5) if dist.get_rank() == 1 else own
    return raised_by(lambda: shuffler.finish_shuffle(batch, handle))


def test_a_rank_that_fails_alone_is_quoted_by_the_others(ranks):
    answers = ranks.run(_finishes_another_batch, timeout=100)  # a third of the shuffler's
    assert answers[1].startswith("ValueError: the handle of step 0 was started with")
    for text in (answers[0], *answers[2:]):
        assert text.startswith(
            "RankMissingError: rank 1 failed in the exchange of step 0: ValueError: the handle of st"
        )
