"""Questions to the store: an answer, or an error within the deadline that names the host."""

from __future__ import annotations

import threading
from unittest import mock

import pytest
import torch.distributed as dist

from commons.distributed.channel import store as store_module
from commons.distributed.channel.store import KeyWatch, StoreUnavailableError, ask_store
from commons.distributed.errors import first_line


@pytest.fixture
def store():
    """A store as torch's default group has it."""
    made = dist.PrefixStore("default_pg", dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False))
    with mock.patch.object(dist.distributed_c10d, "_get_default_store", lambda: made):
        yield made


def _becomes_set(watch):
    """Within many looks, each of which a loaded machine may cut short."""
    return any(watch.is_set() for _ in range(100))


def test_answers_come_from_the_default_store(store):
    store.set("key", "value")
    assert ask_store(lambda each: each.get("key")) == b"value"
    assert _becomes_set(KeyWatch("key")) and not KeyWatch("other").is_set()


def test_a_store_that_does_not_answer_is_given_up_and_used_again_later(store):
    go_on, watch = threading.Event(), KeyWatch("key")
    with pytest.raises(StoreUnavailableError, match="does not answer; rank 0 hosts it and has stopped"):
        ask_store(lambda each: go_on.wait(), seconds=0.1)  # would never come back
    assert not watch.is_set()  # unknown
    go_on.set()
    store.set("key", "")
    assert ask_store(lambda each: each.check(["key"]), seconds=30)
    # The first look was on its way before the key was set.
    assert _becomes_set(watch)


def test_a_host_that_has_ended_is_named_without_a_call_of_the_store(store):
    with mock.patch.object(store_module.socket, "create_connection", side_effect=ConnectionRefusedError):
        asked = mock.Mock()
        with pytest.raises(StoreUnavailableError, match="cannot be reached; rank 0 hosts it and has ended"):
            ask_store(asked)
        assert _becomes_set(KeyWatch("key"))
    asked.assert_not_called()


@pytest.mark.parametrize("same_port, host", [(True, "torchrun's agent on the first host"), (False, "rank 0")])
def test_under_torchrun_its_agent_hosts_the_store_unless_the_program_made_one(store, monkeypatch, same_port, host):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_PORT", str(store.underlying_store.port if same_port else 1))
    assert store_module._describe_host() == host


@pytest.mark.parametrize(
    "text, first",
    [
        ("[/a/pair.cc:553] Connection closed by peer [::1]:7. This is typically", "Connection closed by peer [::1]:7"),
        ("Broken pipe\nframe #0: c10::Error", "Broken pipe"),
        ("", "RuntimeError"),
    ],
)
def test_of_torchs_errors_the_first_line_is_kept(text, first):
    assert first_line(RuntimeError(text)) == first
