"""Collectives that the main thread waits for name the rank that is missing; the worker says so before it is asked."""

from __future__ import annotations

import signal
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from commons.dispatch.exchange import EXCHANGE, DispatchChannel
from commons.distributed import verification
from commons.distributed.options import ShufflerOptions
from commons.trainer.optimize.updates import FiniteLossGuard
from commons.trainer.ranks.collectives import broadcast_text
from tests.helpers.faults import limit_waits, my_batch
from tests.helpers.pipelines import CubicShuffler
from tests.helpers.stopped_ranks import fault, run_with_fault

# Survivors learn of a death by their connections, and end long before a timeout.
TIMEOUT = 600.0
LIMIT = 60.0


def _die(folder):
    dist.barrier()
    limit_waits(TIMEOUT, names=0.5)
    if dist.get_rank() == 1:
        fault(folder, signal.SIGKILL)


def _realign(folder):
    shuffler = CubicShuffler(ShufflerOptions(timeout=TIMEOUT))
    shuffler.shuffle(my_batch())
    _die(folder)
    shuffler.engine.realign()


def _compare_checksums(folder):
    shuffler = CubicShuffler(ShufflerOptions(timeout=TIMEOUT, verify=True))
    computed, checksums = [], verification.checksums

    def last_words(*args):
        computed.append(1)
        if len(computed) == 2 and dist.get_rank() == 1:  # of the rows that have come
            time.sleep(0.5)  # the others have theirs too
            fault(folder, signal.SIGKILL)
        return checksums(*args)

    with mock.patch.object(verification, "checksums", last_words):
        shuffler.shuffle(my_batch())


def _look_at_losses(folder):
    guard = FiniteLossGuard(torch.device("cpu"))
    guard.look(7, torch.ones(()))
    guard.check()
    _die(folder)
    guard.look(8, torch.ones(()))
    guard.check()


def _broadcast(folder):
    broadcast_text("text", torch.device("cpu"), src=1)
    _die(folder)
    broadcast_text("text", torch.device("cpu"), src=1)


@pytest.mark.parametrize(
    "work, what",
    [
        pytest.param(_realign, "realignment of step 1", marks=pytest.mark.slow),
        pytest.param(_compare_checksums, "comparison of checksums of step 0", marks=pytest.mark.slow),
        (_look_at_losses, "look at the losses of step 8"),
        pytest.param(_broadcast, "broadcast of a text's size", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_has_died_is_named(tmp_path, work, what):
    ended = run_with_fault(tmp_path, work, waits_for=[0], limit=LIMIT, world_size=2)[0]
    assert ended.status == 1, ended
    assert ended.error.startswith(f"RankMissingError: rank 1 did not take part in the {what} (ranks [0, 1]); ")
    assert "frame #" not in ended.stderr


def _start_without_asking(folder):
    """Two shuffles are under way when the other rank dies, and nobody asks for them until the log has it."""
    shuffler = CubicShuffler(ShufflerOptions(timeout=TIMEOUT))
    shuffler.shuffle(my_batch())
    handles = []
    if dist.get_rank() == 0:
        handles = [shuffler.start_shuffle(my_batch(step)) for step in (1, 2)]
    _die(folder)
    deadline = time.monotonic() + LIMIT
    while "rank 1 did not" not in (folder / "stderr0").read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    for handle in reversed(handles):
        handle.has_ended()  # waits for the gather


class OnDevice:
    """Stands for a tensor of a device, whose collective gloo carries out."""

    device = torch.device("cuda")

    def __init__(self, tensor):
        self.tensor = tensor

    def new_empty(self, size):
        return torch.empty(size, dtype=torch.uint8)


def _send_from_device(folder, fails_before):
    """The second exchange of bytes lacks a rank: it dies, or has told that it fails before, and stays."""
    channel = DispatchChannel(dist.group.WORLD, TIMEOUT)
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
        pytest.param(
            False,
            "rank 1 did not take part in the exchange of rows of step 1 (ranks [0, 1]); ",
            id="dies",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            True, "rank 1 failed in the exchange of rows of step 1: ValueError: no memory for it", id="fails before"
        ),
    ],
)
def test_dispatch_names_a_rank_on_a_device_too(tmp_path, fails_before, said):
    ended = run_with_fault(tmp_path, _send_from_device, fails_before, waits_for=[0], limit=LIMIT, world_size=2)[0]
    assert ended.status == 1, ended
    assert ended.error.startswith(f"RankMissingError: {said}")


def test_the_worker_says_once_that_a_rank_is_missing_before_it_is_asked(tmp_path):
    ended = run_with_fault(tmp_path, _start_without_asking, waits_for=[0], limit=LIMIT, world_size=2)[0]
    said = "rank 1 did not take part in the gather of step 1 (ranks [0, 1])"
    before, _, after = ended.stderr.partition("Traceback")
    assert before.count(f"rank 0: {said}") == 1 and f"rank 0: {said}" not in after
    assert ended.error.startswith(f"RankMissingError: {said}")
