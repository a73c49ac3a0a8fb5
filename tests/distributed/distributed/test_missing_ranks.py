"""A rank dies, stops or fails, or the host of the store does: the others end in time, and say who and where it was.

With the exact words; tests/distributed/test_programmes.py has more cases. Where a device hangs, the payload group is
one of Python's, whose all-to-all blocks its caller until the group is aborted, as in NCCL.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from commons.dispatch.exchange import EXCHANGE, DispatchChannel
from commons.distributed.channel import agree
from commons.distributed.channel.absence import FailedChannel
from commons.distributed.channel.agree import ControlChannel
from commons.distributed.engine import window
from commons.distributed.engine.shuffle_session import ShuffleSession
from commons.distributed.exchange.row_exchange import RowExchange
from commons.distributed.options import ShufflerOptions
from commons.pipeline import windowed_iter
from commons.trainer.optimize.updates import FiniteLossGuard
from tests.faults.rank import be_agent, start_process
from tests.helpers.jobs.programs import run_program
from tests.helpers.pipelines.shuffled_pipelines import CubicShuffler
from tests.helpers.ranks.faults import NAMES_SECONDS, error_of, limit_waits, my_batch, on_rank, own_groups
from tests.helpers.ranks.on_ranks import of_all, on
from tests.helpers.ranks.stopped_ranks import fault, port_of, run_with_fault, wait_for

# Survivors learn of a death by their connections, and end long before a timeout.
PATIENT = 600.0
# Where they learn of a fault by waiting, all but the one at fault.
TIMEOUT = 2.0
# Seconds from the fault to the end of a process; far fewer than torch's store waits.
LIMIT = 60.0


def _used_shuffler():
    shuffler = CubicShuffler(ShufflerOptions(timeout=PATIENT))
    shuffler.shuffle(my_batch())
    return shuffler


# ---------------------------------------------------------------------------- a rank, or the host of the store, is gone


def _die(folder):
    dist.barrier()
    limit_waits(PATIENT, names=0.5)
    if dist.get_rank() == 1:
        fault(folder, signal.SIGKILL)


def _exchange(folder):
    shuffler, send_rows = _used_shuffler(), ShuffleSession.send_rows
    with mock.patch.object(ShuffleSession, "send_rows", lambda *rest: (_die(folder), send_rows(*rest))):
        shuffler.shuffle(my_batch(1))


def _look_at_losses(folder):
    guard = FiniteLossGuard(torch.device("cpu"))
    guard.record(7, torch.ones(()))
    guard.check()
    _die(folder)
    guard.record(8, torch.ones(()))
    guard.check()


def _shuffle(folder, number):
    """One step, the fault of rank 0, which hosts the store, and another step."""
    shuffler = CubicShuffler()
    shuffler.shuffle(my_batch())
    dist.barrier()
    limit_waits(0.5)
    if dist.get_rank() == 0:
        fault(folder, number)
    shuffler.shuffle(my_batch(1))


def _construct(folder):
    """Rank 1 cannot make its groups, and goes on; rank 0 waits for it in torch's client of the store."""
    if dist.get_rank() == 1:
        with mock.patch.object(dist, "new_group", side_effect=OSError("Too many open files")), pytest.raises(OSError):
            CubicShuffler(ShufflerOptions(timeout=PATIENT))
        fault(folder)
        time.sleep(LIMIT)
    CubicShuffler(ShufflerOptions(timeout=PATIENT))


HOST = "rank 0 hosts it and has "


@pytest.mark.parametrize(
    "work, args, survivor, said",
    [
        (_exchange, (), 0, "rank 1 did not take part in the exchange of step 1 (ranks [0, 1]); "),
        (_look_at_losses, (), 0, "rank 1 did not take part in the check of the losses of step 8 (ranks [0, 1]); "),
        (_construct, (), 0, "rank 1 failed in the connection of step 0: OSError: Too many open files"),
        (_shuffle, (signal.SIGSTOP,), 1, "gather of step 1 failed on rank 1 and the store does not answer; " + HOST),
        (_shuffle, (signal.SIGKILL,), 1, HOST + "ended"),
    ],
)
def test_a_rank_that_is_gone_is_named_without_a_line_of_torchs(tmp_path, work, args, survivor, said):
    ended = run_with_fault(tmp_path, work, *args, waits_for=[survivor], limit=LIMIT, world_size=2)[survivor]
    assert ended.status == 1, ended
    assert ended.error.startswith("RankMissingError: ") and said in ended.error
    assert "frame #" not in ended.stderr and ended.stderr.count("Traceback") == 1  # the program's


def _start_without_waiting(folder):
    """Two shuffles are under way when the other rank dies, and nobody waits for them until the log has it."""
    shuffler, handles = _used_shuffler(), []
    if dist.get_rank() == 0:
        handles = [shuffler.start_shuffle(my_batch(step)) for step in (1, 2)]
    _die(folder)
    wait_for(lambda: "rank 1 did not" in (folder / "stderr0").read_text(), LIMIT)
    first, second = (error_of(handle.has_ended) for handle in reversed(handles))  # which wait for the gather
    assert first == second
    shuffler.shuffle(my_batch(3))  # it stays broken, and says why


def test_the_worker_logs_once_that_a_rank_is_missing_before_anyone_waits(tmp_path):
    ended = run_with_fault(tmp_path, _start_without_waiting, waits_for=[0], limit=LIMIT, world_size=2)[0]
    said = "rank 1 did not take part in the gather of step 1 (ranks [0, 1])"
    before, _, after = ended.stderr.partition("Traceback")
    assert before.count(f"rank 0: {said}") == 1 and f"rank 0: {said}" not in after
    assert ended.error.startswith(f"RankMissingError: {said}")


class OnDevice:
    """Stands for a tensor of a device, whose collective gloo carries out."""

    device = torch.device("cuda")

    def __init__(self, tensor):
        self.tensor = tensor

    def new_empty(self, size):
        return torch.empty(size, dtype=torch.uint8)


def _send_from_device(folder, fails_before):
    """The second exchange of bytes lacks a rank: it dies, or has posted that it fails before, and stays."""
    channel = DispatchChannel(dist.group.WORLD, PATIENT)
    send, sent = dist.all_to_all_single, []

    def on_the_host(received, outgoing, *args, **keywords):
        sent.append(keywords["group"])
        return send(received, outgoing.tensor, *args, **keywords)

    def exchange():
        own = torch.full((4,), dist.get_rank(), dtype=torch.uint8)
        with mock.patch.object(dist, "all_to_all_single", on_the_host):
            return torch.stack(channel.send_bytes(OnDevice(own), [2, 2], [2, 2])).tolist()

    assert exchange() == [[0, 0], [1, 1]] and sent == [channel.payload_group]
    channel.step = 1
    if fails_before and dist.get_rank() == 1:
        fault(folder)
        with pytest.raises(ValueError), channel.failures_posted(1, EXCHANGE):
            raise ValueError("no memory for it")
        time.sleep(LIMIT)
    if not fails_before:
        _die(folder)
    exchange()


@pytest.mark.parametrize(
    "fails_before, said",
    [
        pytest.param(False, "did not take part in the exchange of rows of step 1 (", marks=pytest.mark.slow, id="dies"),
        pytest.param(True, "failed in the exchange of rows of step 1: ValueError: no memory for it", id="fails before"),
    ],
)
def test_dispatch_names_a_rank_on_a_device_too(tmp_path, fails_before, said):
    ended = run_with_fault(tmp_path, _send_from_device, fails_before, waits_for=[0], limit=LIMIT, world_size=2)[0]
    assert ended.status == 1, ended
    assert ended.error.startswith(f"RankMissingError: rank 1 {said}")


def _stop(folder):
    """Rank 2 stops before a gather, and goes on when the others look who is missing."""
    shuffler, who_is_missing = _used_shuffler(), FailedChannel.who_is_missing
    dist.barrier()
    limit_waits(1.5 * TIMEOUT)

    def noted(*arguments):
        (folder / f"gave up {dist.get_rank()}").touch()
        return who_is_missing(*arguments)

    def others_have_given_up():
        while len(list(folder.glob("gave up *"))) < 3:
            time.sleep(0.05)
        time.sleep(1.0)  # it has stalled for longer than a slow rank

    with mock.patch.object(FailedChannel, "who_is_missing", noted), mock.patch.object(*NAMES_SECONDS, LIMIT):
        if dist.get_rank() == 2:
            fault(folder, signal.SIGSTOP, others_have_given_up)
        shuffler.start_shuffle(my_batch(1)).has_ended()  # waits for the gather


def test_a_rank_that_comes_back_while_the_others_look_for_names_is_named(tmp_path):
    for each in run_with_fault(tmp_path, _stop, waits_for=[0, 1, 2, 3], limit=LIMIT):
        assert each.status == 1
        said = "RankMissingError: rank 2 reached the gather of step 1 only after the others gave up"
        assert each.error.startswith(said), each.error
        assert "raise ShufflerOptions.timeout" in each.error


PROGRAM = """
import atexit, os, signal, sys, time
import torch.distributed as dist
from commons.distributed.channel.store import StoreUnavailableError, call_store

host, port = int(sys.argv[1]), int(sys.argv[2])

def let_the_host_go_on():  # the last hook of all, registered before the product's
    if os.fork() == 0:
        time.sleep(0.1)
        os.kill(host, signal.SIGCONT)
        os._exit(0)

atexit.register(let_the_host_go_on)
dist.init_process_group("gloo", store=dist.TCPStore("127.0.0.1", port), rank=0, world_size=1)
call_store(lambda store: store.set("key", "value"))
os.kill(host, signal.SIGSTOP)
while open(f"/proc/{host}/stat").read().rsplit(")", 1)[1].split()[0] != "T":
    time.sleep(0.01)
try:
    call_store(lambda store: store.check(["key"]), seconds=0.5)
except StoreUnavailableError:
    sys.exit(7)
"""


@pytest.mark.slow
def test_a_program_ends_with_its_own_status_though_the_store_does_not_answer(tmp_path):
    (tmp_path / "tmp").mkdir()
    host = start_process(tmp_path, "store", be_agent, tmp_path)
    try:
        ended = run_program(sys.executable, "-c", PROGRAM, host.pid, port_of(tmp_path))
    finally:
        host.kill()
        host.join()
    assert ended.returncode == 7, ended
    assert "terminate called" not in ended.stderr and "frame #" not in ended.stderr


# ------------------------------------------------------------------------------------------ rank 1 fails after the plan


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
            self.aborted.wait(PATIENT)
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
        own_groups(),
        mock.patch("commons.distributed.channel.agree.with_payload", hanging),
        mock.patch.object(ControlChannel, "_try", lambda channel, pair, all_to_all: True),
        mock.patch.object(RowExchange, "send_rows", issue),
        mock.patch("commons.distributed.exchange.row_exchange.serves", return_value=True),
    ):
        shuffler = CubicShuffler(ShufflerOptions(timeout=PATIENT))
        made[0].hangs = hangs_in_the_call
        handle = shuffler.start_shuffle(batch := my_batch(1))
        handle.prepared()
        following = shuffler.start_shuffle(my_batch(2)) if dist.get_rank() != 1 else None
        error = torch.OutOfMemoryError("tried to allocate 7 GiB")
        with on_rank(1, mock.patch.object(RowExchange, "_select", side_effect=error)):
            text = error_of(shuffler.finish_shuffle, batch, handle)
        if following is not None and not hangs_in_the_call:
            assert text == "no error"
            text = error_of(following.prepared)
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


@on("ranks", timeout=100)  # a sixth of the shuffler's
def test_a_collective_that_cannot_be_called_is_reported_on_every_rank():
    """With TORCH_DISTRIBUTED_DEBUG=DETAIL, torch compares the calls of the ranks before it starts a collective."""
    shuffler = _used_shuffler()
    with on_rank(1, mock.patch.object(agree, "all_gather_single", side_effect=RuntimeError("ranks call differently"))):
        said = error_of(shuffler.shuffle, my_batch(1))
    assert said == "RankMissingError: rank 1 failed in the gather of step 1: ranks call differently"
    assert said == error_of(shuffler.shuffle, my_batch(2))
    shuffler.close()


@on("ranks", timeout=100)  # a sixth of the shuffler's
def test_a_rank_that_fails_alone_is_quoted_by_the_others():
    shuffler = CubicShuffler(ShufflerOptions(timeout=PATIENT))
    handle = shuffler.start_shuffle(own := my_batch())
    batch = my_batch(1, rows=5) if dist.get_rank() == 1 else own
    quoted = "" if dist.get_rank() == 1 else "RankMissingError: rank 1 failed in the exchange of step 0: "
    said = error_of(shuffler.finish_shuffle, batch, handle)
    assert said.startswith(f"{quoted}ValueError: the handle of step 0 was started with"), said
    assert (shuffler.failure is None) if dist.get_rank() == 1 else (said == f"RankMissingError: {shuffler.failure}")
    shuffler.close()
    with contextlib.closing(CubicShuffler(ShufflerOptions(timeout=PATIENT))) as following:  # with groups of its own
        assert sum(of_all([following.shuffle(my_batch(2)).actual_batch_size])) == 6 * dist.get_world_size()


@on("ranks", timeout=100)  # a sixth of the shuffler's
def test_a_rank_that_cannot_pin_the_rows_of_a_window_is_quoted_by_the_others():
    """It has taken part in the exchange, and the others wait in the next window."""
    failing = mock.patch.object(type(my_batch()), "pin_memory", side_effect=RuntimeError("no pinned memory"))
    pinned = mock.patch.object(type(my_batch()), "pin_memory", lambda batch: batch)
    with mock.patch.object(window, "_are_pinned", lambda schema, batches: True), pinned, on_rank(1, failing):
        shuffler = CubicShuffler(ShufflerOptions(timeout=PATIENT))
        said = error_of(list, windowed_iter(iter(my_batch(step) for step in range(6)), shuffler, 2))
        shuffler.close()
    quoted = "" if dist.get_rank() == 1 else "RankMissingError: rank 1 failed in the exchange of step 0: "
    assert said == f"{quoted}RuntimeError: no pinned memory"
