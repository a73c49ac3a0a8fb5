"""Whom survivors name where the host of the store was silent for a while."""

from __future__ import annotations

import json
from unittest import mock

import pytest
import torch.distributed as dist

from commons.distributed.channel import absence
from commons.distributed.channel.absence import FailedChannel
from commons.distributed.channel.store import ask_store


@pytest.fixture
def hosts_the_store():
    """This process is rank 0 of one, and hosts the store."""
    dist.init_process_group("gloo", store=dist.TCPStore("127.0.0.1", 0, is_master=True), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("silent, is_named", [(5.0, True), (0.2, False)])
def test_a_host_of_the_store_that_was_silent_comes_before_those_that_gave_up_on_it(hosts_the_store, silent, is_named):
    channel, key = FailedChannel(f"test/{silent}", [0, 1, 2]), f"test/{silent}"
    # Rank 2 has waited, without an answer for some seconds; rank 1 has gone home meanwhile.
    ask_store(lambda store: store.set(f"{key}/2", json.dumps(["gather of step 3", 7.0, 0.0, silent])))
    ask_store(lambda store: store.add(f"{key}/count of present", 1))
    with mock.patch.multiple(absence, _RECORDS_SECONDS=0.2, _READERS_SECONDS=0.2):
        verdict = channel.who_is_missing(channel.attend("gather", 3))
    assert verdict.missing == [1] and verdict.failure is None
    named = ["rank 0, which hosts the store, stood still for 5 s, in which others may have given up"]
    assert verdict.late == (named if is_named else [])
