"""The store: an answer or an error within the deadline that names the host, alive, silent or ended; who is missing."""

import json
import math
import socket
import threading
from unittest import mock

import pytest
import torch.distributed as dist

from commons.distributed.channel import absence, groups
from commons.distributed.channel import store as store_module
from commons.distributed.channel.absence import (
    CollectiveWait,
    FailedChannel,
    NamedCollectives,
    RankMissingError,
    Verdict,
)
from commons.distributed.channel.store import StoreUnavailableError, call_store
from commons.distributed.errors import capture_error, describe_error, first_line, raise_first_difference


@pytest.fixture
def store():
    """A store as torch's default group has it."""
    made = dist.PrefixStore("default_pg", dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False))
    with mock.patch.object(dist.distributed_c10d, "_get_default_store", lambda: made):
        yield made


def _fails(wait):
    """Within many looks, each of which a loaded machine may cut short."""
    return any(wait.has_failed_elsewhere() for _ in range(100))


def test_answers_come_from_the_default_store(store):
    store.set("key", "value")
    assert call_store(lambda each: each.get("key")) == b"value"
    assert _fails(CollectiveWait("gather", "key")) and not CollectiveWait("gather", "other").has_failed_elsewhere()


def test_calls_do_not_wait_until_their_own_client_is_connected(store):
    """Connecting waits for the name server; until then, calls go to torch's client."""
    name_is_known = threading.Event()

    def clone(given):
        name_is_known.wait(30)
        return given.clone()

    with mock.patch.object(store_module, "_clone", clone):
        assert call_store(lambda each: each) is store
        assert call_store(lambda each: each.check(["key"]), seconds=20) is False
        name_is_known.set()
        assert store_module._CONNECTOR.drain(30)
        own = call_store(lambda each: each)
    assert own is not store and own is call_store(lambda each: each) and len(store_module._OWN_CLIENTS[store]) == 1
    own.set("key", "value")
    assert store.get("key") == b"value"


def test_a_users_store_without_clones_is_called_itself(store):
    with mock.patch.object(type(store), "clone", side_effect=KeyError("clone")):
        assert call_store(lambda each: each) is store
        assert store_module._CONNECTOR.drain(30)
        assert call_store(lambda each: each) is store


def test_a_store_that_does_not_answer_is_given_up_and_used_again_later(store):
    go_on, wait = threading.Event(), CollectiveWait("gather", "key")
    with pytest.raises(StoreUnavailableError, match="does not answer; rank 0 hosts it and has stopped"):
        call_store(lambda each: go_on.wait(), seconds=0.1)  # would never come back
    assert not wait.has_failed_elsewhere()  # unknown
    places, waited, _, silent, cause = json.loads(wait.record(["exchange", "gather"], "timed out"))
    assert (places, cause) == (["gather", "exchange"], "timed out") and waited >= silent >= 0.2
    go_on.set()
    store.set("key", "")
    assert call_store(lambda each: each.check(["key"]), seconds=30)
    # The first look was on its way before the key was set.
    assert _fails(wait)
    later = wait._seen + absence.POLL_SECONDS + 4.0  # the process was stopped for so long
    for now in (later, later + absence.POLL_SECONDS):
        with mock.patch.object(absence, "time", mock.Mock(monotonic=mock.Mock(return_value=now))):
            assert wait.has_failed_elsewhere()
    *_, still, _, cause = json.loads(wait.record([], "timed out"))
    assert still == pytest.approx(4.0) and cause == ""  # it failed because another rank had given up


def test_a_host_that_has_ended_is_named_without_a_call_of_the_store(store):
    with mock.patch.object(store_module.socket, "create_connection", side_effect=ConnectionRefusedError):
        asked = mock.Mock()
        with pytest.raises(StoreUnavailableError, match="cannot be reached; rank 0 hosts it and has ended"):
            call_store(asked)
        assert _fails(CollectiveWait("gather", "key"))
    asked.assert_not_called()


@pytest.mark.parametrize("same_port, host", [(True, "torchrun's agent on the first host"), (False, "rank 0")])
def test_under_torchrun_its_agent_hosts_the_store_unless_the_program_made_one(store, monkeypatch, same_port, host):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "3")
    monkeypatch.setenv("MASTER_PORT", str(store.underlying_store.port if same_port else 1))
    assert store_module._describe_host() == host
    assert store_module.attempt_of_store() == ("3" if same_port else "0")  # the program's own is of this attempt alone


@pytest.mark.parametrize(
    "text, first",
    [
        ("[/a/pair.cc:553] Connection closed by peer [::1]:7. This is typically", "Connection closed by peer [::1]:7"),
        (
            "Gloo connectFullMesh failed with [/a/pair.cc:9] Closed by peer",
            "Gloo connectFullMesh failed with Closed by peer",
        ),
        ("Broken pipe\nframe #0: c10::Error", "Broken pipe"),
        ("", "RuntimeError"),
    ],
)
def test_of_torchs_errors_the_first_line_is_kept(text, first):
    assert first_line(RuntimeError(text)) == first


def test_a_host_is_asked_over_one_connection_also_at_the_address_of_one_that_has_ended():
    """As where a program makes its process groups anew at the same port.

    The thread of torch's store ends if a connection is closed before it was accepted.
    """
    line, port = store_module._Line(), 0
    for _ in range(2):
        with socket.create_server(("127.0.0.1", port)) as server:
            port = server.getsockname()[1]
            line.require_whole("127.0.0.1", port)
            accepted, _ = server.accept()
            with accepted:
                line.require_whole("127.0.0.1", port)
                server.setblocking(False)
                with pytest.raises(BlockingIOError):  # there is no other connection
                    server.accept()
    with pytest.raises(ConnectionError):
        line.require_whole("127.0.0.1", port)


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
    call_store(lambda store: store.set(f"{key}/2", json.dumps([["gather of step 3"], 7.0, 0.0, silent, ""])))
    call_store(lambda store: store.add(f"{key}/count of present", 1))
    with mock.patch.multiple(absence, _RECORDS_SECONDS=0.2, _READERS_SECONDS=0.2):
        verdict = channel.who_is_missing(channel.start_wait("gather of step 3"))
    assert verdict.missing == [1] and verdict.failure is None
    named = ["rank 0, which hosts the store, stalled for 5 s, in which others may have given up"]
    assert verdict.late == (named if is_named else [])


def test_every_rank_is_told_the_connections_errors_of_all(hosts_the_store):
    channel, key = FailedChannel("test/broken", [0, 1, 2, 3]), "test/broken"
    for rank, cause in enumerate(["reset", "reset", ""], start=1):
        record = json.dumps([["gather of step 3"], 5.0, 0.0, 0.0, cause])
        call_store(lambda store, rank=rank, record=record: store.set(f"{key}/{rank}", record))
        call_store(lambda store: store.add(f"{key}/count of present", 1))
    own_wait = channel.start_wait("gather of step 3")
    own_wait._entered -= 5.0
    with mock.patch.object(absence, "_READERS_SECONDS", 0.1):
        assert channel.who_is_missing(own_wait) == Verdict([], [], None, "ranks 1, 2: reset")


def test_a_rank_that_leaves_looks_no_longer_for_names(hosts_the_store):
    channel = FailedChannel("test/left", [0, 1])
    leaves = threading.Timer(0.1, channel.leave, ["rank 0 aborted its shuffler"])
    with mock.patch.multiple(absence, _RECORDS_SECONDS=600.0, _READERS_SECONDS=600.0):
        leaves.start()
        assert channel.who_is_missing(channel.start_wait("gather of step 3")).missing == [1]
    leaves.join()


@pytest.mark.parametrize(
    ("beside", "said"), [(None, ""), ([0, 2], ""), ([1], "rank 1 runs"), ([1, 2], "ranks 1, 2 run")]
)
def test_ranks_on_the_host_of_a_store_are_named_on_other_hosts(hosts_the_store, beside, said):
    groups.rank_set([0, 1, 2]).beside_store = beside
    assert groups.out_of_reach([0, 1, 2]) == (f"; {said} on that host, which may be out of reach" if said else "")


def test_a_wait_for_a_device_ends_where_another_rank_has_failed(hosts_the_store):
    channel, never = NamedCollectives(None), mock.NonCallableMock(is_completed=lambda: False)
    channel.failed.post("rank 7 failed")
    with mock.patch.object(absence, "POLL_SECONDS", 0.01), pytest.raises(RankMissingError, match="^rank 7 failed$"):
        channel.wait(never, 3, "exchange", on_host=False)


def test_a_failure_in_which_no_rank_is_missing_or_late_says_so(hosts_the_store):
    nobody = mock.patch.object(FailedChannel, "who_is_missing", return_value=Verdict([], [], None, "rank 7: no route"))
    said = r"^the gather of step 3 failed although all of a single process took part \(rank 7: no route\)$"
    with nobody, pytest.raises(RankMissingError, match=said), NamedCollectives(None).collective(3, "gather"):
        raise absence._FailedElsewhereError


def test_an_error_without_text_is_described_by_its_line():
    def fail():
        raise AssertionError

    _, error = capture_error(fail)
    kind, text = describe_error(error)
    assert kind == first_line(error) == "AssertionError"
    assert text.startswith("test_store.py, line ") and text.endswith(", in fail")
    assert describe_error(ValueError()) == ["ValueError", ""]  # which was not raised


def test_an_option_that_only_a_later_rank_has_is_a_difference():
    """Of a newer version of evenrank, for example. NaN on all ranks is none, nor is 1 beside 1.0."""
    equal = {"rate": math.nan, "src": {"at": math.nan}}
    calls = [("split", equal | {"n": 1}), ("split", equal | {"n": 1.0}), ("split", equal | {"n": 1, "pad": True})]
    raise_first_difference(calls[:2], [4, 5])
    with pytest.raises(ValueError, match="^pad is None on ranks 4, 5 and True on rank 6 in split; all ranks pass"):
        raise_first_difference(calls, [4, 5, 6])


GATHER, EXCHANGE, NEXT = "gather of step 3", "exchange of step 2", "gather of step 4"


def of_rank(waited, still=0.0, silent=0.0, cause="", places=(GATHER,)):
    return [list(places), waited, still, silent, cause]


RECORDS = {
    "failed because the others gave up": (
        [of_rank(0.1, cause="closed by peer"), of_rank(3.1, cause="timed out"), of_rank(3.0)],
        [f"rank 0 reached the {GATHER} only after the others gave up"],
    ),
    "failed by itself": (
        [of_rank(0.1, cause="closed by peer"), of_rank(3.1), of_rank(3.0)],
        f"rank 0 failed in the {GATHER}: closed by peer",
    ),
    "late: under half as long as the longest, and two seconds": (
        [of_rank(2.9), of_rank(1.4), of_rank(1.5)],
        [f"rank 1 reached the {GATHER} only after the others gave up"],
    ),
    "not late: two seconds": ([of_rank(8.0), of_rank(2.0)], []),
    "stalled: a second and a half": (
        [of_rank(3.0), of_rank(3.0, still=1.5), of_rank(3.0, still=1.4)],
        [f"rank 1 stalled for 2 s in the {GATHER}, until the others gave up"],
    ),
    "stalled: a quarter of the longest": (
        [of_rank(16.0), of_rank(16.0, still=4.0), of_rank(16.0, still=3.9)],
        [f"rank 1 stalled for 4 s in the {GATHER}, until the others gave up"],
    ),
    "stalled, came late and failed": (
        [of_rank(3.0), of_rank(0.1, still=5.0, cause="closed by peer")],
        [f"rank 1 stalled for 5 s in the {GATHER}, until the others gave up"],
    ),
    "in other collectives": (
        [of_rank(3.0), of_rank(3.0, places=(EXCHANGE, GATHER)), of_rank(3.0, places=(EXCHANGE, NEXT))],
        [f"rank 2 waited in the {EXCHANGE} and the {NEXT}, not in the {GATHER}"],
    ),
}


@pytest.mark.parametrize(("records", "said"), RECORDS.values(), ids=RECORDS)
def test_of_ranks_that_all_have_a_record_those_at_fault_are_named(records, said):
    expected = ([], said) if isinstance(said, str) else (said, None)
    assert absence._late(dict(enumerate(records)), GATHER, False) == expected


@pytest.mark.parametrize("host", [None, 3], ids=["no rank", "a missing rank"])
def test_a_silent_store_is_no_stall_of_a_rank_that_does_not_host_it_or_is_missing(host):
    with mock.patch.object(absence, "ends_with_rank", lambda: host):
        assert absence._late({0: of_rank(7.0, silent=5.0)}, GATHER, True) == ([], None)
