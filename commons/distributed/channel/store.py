"""STORE: calls of torch's key-value store, none of which outlasts its deadline.

A call of a TCPStore waits for the reply without a limit, whatever the store's timeout says: if the process that
hosts it stands still, so does every caller. So one daemon thread makes all calls of ours, one after another, and the
caller waits for the thread. A call that nobody waits for any more is not begun.
"""

from __future__ import annotations

import concurrent.futures
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.rendezvous import _torchelastic_use_agent_store

from commons.distributed.channel.connections import shut_down
from commons.distributed.engine.worker import DaemonWorker
from commons.distributed.errors import first_line

T = TypeVar("T")

# Seconds that the store may take to reply; a healthy one takes milliseconds.
ANSWER_SECONDS = 3.0
# Most seconds that one look of a KeyWatch takes.
_GLANCE_SECONDS = 0.2
# Most seconds that a call takes to notice that its connection is gone.
_BREAK_SECONDS = 1.0
# Seconds that a host that ends mostly takes to close its connections.
_CLOSING_SECONDS = 0.005
# Seconds between two looks at a count: of a few ranks, and more for every rank, since all of them look.
_PAUSE_SECONDS = 0.05
_PAUSE_PER_RANK = 0.0002
_STDERR = 2
_RANK_0 = "rank 0"


class StoreUnavailableError(RuntimeError):
    """The store does not answer in time, or has ended with the process that hosts it; says which process that is."""


def ask_store(question: Callable[[dist.Store], T], seconds: float = ANSWER_SECONDS) -> T:
    """Call the default process group's store.

    Args:
        question: one call of the store, which must need no other process' doing, unlike `get` of a key that is not set.
        seconds: how long to wait for the reply.

    Raises:
        StoreUnavailableError: there is none in time, or the host has ended.
    """
    answer = begin_asking(question)
    try:
        return answer.result(seconds)
    except concurrent.futures.TimeoutError:
        answer.cancel()
        host = _describe_host()
        remedy = "" if host is None else f"; {host} hosts it and has stopped or is overloaded: see there"
        raise StoreUnavailableError(f"the store does not answer{remedy}") from None


def begin_asking(question: Callable[[dist.Store], T]) -> Future[T]:
    """Call the store without waiting; the future raises StoreUnavailableError if the host has ended."""
    store = dist.distributed_c10d._get_default_store()

    def ask() -> T:
        try:
            _require_listening(store)
            return question(store)
        except (RuntimeError, ConnectionError) as error:
            host = _describe_host()
            remedy = f": {first_line(error)}" if host is None else f"; {host} hosts it and has ended: see the log there"
            raise StoreUnavailableError(f"the store cannot be reached{remedy}") from None

    return _WORKER.submit(ask)


class KeyWatch:
    """Looks for a key again and again; a store that does not answer is left alone until it does.

    Args:
        key: to look for.

    Attributes:
        silent_seconds: the longest time that a look has waited for a reply.
    """

    def __init__(self, key: str) -> None:
        self.silent_seconds = 0.0
        self._key = key
        self._asked: Future[bool] | None = None
        self._asked_at = 0.0

    def is_set(self) -> bool:
        """Whether the key is known to be set, or the store to have ended; takes a fraction of a second at most."""
        if self._asked is None:
            self._asked, self._asked_at = begin_asking(lambda store: store.check([self._key])), time.monotonic()
        try:
            found = self._asked.result(_GLANCE_SECONDS)
        except concurrent.futures.TimeoutError:
            self.silent_seconds = max(self.silent_seconds, time.monotonic() - self._asked_at)
            return False
        except StoreUnavailableError:
            return True
        self._asked = None
        return found


class StoreGather:
    """Texts of ranks in the store: each writes its own, waits some seconds for the others', and reads what is there.

    Args:
        key: of the gather; the same on all ranks, and of no other one.
        ranks: global numbers of those that take part.
    """

    def __init__(self, key: str, ranks: Sequence[int]) -> None:
        self._key, self._ranks = key, ranks
        self._pause = _PAUSE_SECONDS + _PAUSE_PER_RANK * len(ranks)
        self._given_up = threading.Event()

    def write(self, text: str) -> None:
        """Write this rank's text.

        Raises, as all of this class: StoreUnavailableError: the store does not answer, or has ended.
        """
        ask_store(lambda store: store.set(self._key_of(dist.get_rank()), text))
        self.count("present")

    def await_others(self, seconds: float) -> list[int]:
        """Wait for the others' texts; the ranks that have not written within `seconds`."""
        self.await_count("present", len(self._ranks), seconds)
        return self._without_text(self._ranks)

    def read(self, ranks: Sequence[int]) -> dict[int, str]:
        """The texts of ranks that have written, by rank."""
        texts = ask_store(lambda store: store.multi_get([self._key_of(rank) for rank in ranks]))
        return {rank: each.decode() for rank, each in zip(ranks, texts)}

    def count(self, name: str) -> None:
        """Count this rank among those that have come to a point of the gather."""
        ask_store(lambda store: store.add(f"{self._key}/count of {name}", 1))

    def await_count(self, name: str, number: int, seconds: float) -> None:
        """Wait until so many ranks have counted themselves, the time is over, or `give_up` is called."""
        deadline, key = time.monotonic() + seconds, f"{self._key}/count of {name}"
        while ask_store(lambda store: store.add(key, 0)) < number and time.monotonic() < deadline:
            if self._given_up.wait(self._pause):
                return

    def give_up(self) -> None:
        """End waits of this rank, now and later; from any thread."""
        self._given_up.set()

    def _key_of(self, rank: int) -> str:
        return f"{self._key}/{rank}"

    def _without_text(self, ranks: Sequence[int]) -> list[int]:
        """Which of the ranks have written none; by halves, since few have not and each call takes its time."""
        if ask_store(lambda store: store.check([self._key_of(rank) for rank in ranks])):
            return []
        half = len(ranks) // 2
        return list(ranks) if half == 0 else self._without_text(ranks[:half]) + self._without_text(ranks[half:])


def ends_with_rank() -> int | None:
    """The rank with which the store ends; None where it outlives all of them."""
    return 0 if _describe_host() == _RANK_0 else None


def is_beside_host() -> bool:
    """Whether the process that hosts the default store runs on this rank's host; False where that is not known."""
    if not dist.is_initialized() or _describe_host() is None:
        return False
    try:
        return ask_store(lambda store: _LINE.is_local)
    except StoreUnavailableError:
        return False


def break_off() -> None:
    """Let every call of the store fail that is under way; for the end of a program, which uses the store no more.

    A host that stands still leaves a thread in torch's C++, and if it came back after the interpreter's end, it would
    abort the process. So the connections to the host are shut down, which torch does not offer.
    """
    peer = _LINE.peer
    if peer is None:
        return
    silent, stderr = os.open(os.devnull, os.O_WRONLY), os.dup(_STDERR)
    sys.stderr.flush()
    os.dup2(silent, _STDERR)  # forty lines of C++ about each
    try:
        shut_down(lambda _, connection: _peer_of(connection) == peer)
        _WORKER.stop(_BREAK_SECONDS)
    finally:
        os.dup2(stderr, _STDERR)
        os.close(silent)
        os.close(stderr)


# A thread that waits for a host that stands still is not waited for when the program ends.
_WORKER = DaemonWorker("evenrank-store", exit_seconds=1.0, break_off=break_off)


def _describe_host() -> str | None:
    """The process that hosts the default store; None where it is no process of its own, but files for example."""
    store = _tcp_store(dist.distributed_c10d._get_default_store())
    if store is None:
        return None
    # Under torchrun a program may have made a store of its own, at another port.
    by_agent = _torchelastic_use_agent_store() and str(store.port) == os.environ.get("MASTER_PORT")
    return "torchrun's agent on the first host" if by_agent else _RANK_0


def _tcp_store(store: dist.Store) -> dist.TCPStore | None:
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store if isinstance(store, dist.TCPStore) else None


def _require_listening(store: dist.Store) -> None:
    """Raise ConnectionError if the store's host has ended: torch would print forty lines of C++ about it."""
    tcp = _tcp_store(store)
    if tcp is not None:
        _LINE.require_whole(tcp.host, tcp.port)
        # A process that is being ended closes one connection after another, and this one perhaps last.
        time.sleep(_CLOSING_SECONDS)
        _LINE.require_whole(tcp.host, tcp.port)


class _Line:
    """An idle connection to the store's host, which breaks when the host ends; used by the store's thread.

    It stays open: torch's server has one thread, which ends, and the store with it, if a connection is closed before
    the server has looked at it.
    """

    def __init__(self) -> None:
        self._address: tuple[str, int] | None = None
        self._socket: socket.socket | None = None

    @property
    def peer(self) -> tuple[str, int] | None:
        """Address and port of the host; None where there is no connection."""
        try:
            return None if self._socket is None else _peer_of(self._socket)
        except OSError:
            return None

    @property
    def is_local(self) -> bool:
        """Whether both ends have one address."""
        peer = self.peer
        return self._socket is not None and peer is not None and _address_of(self._socket.getsockname()) == peer[0]

    def require_whole(self, host: str, port: int) -> None:
        """Raise ConnectionError if the host has ended."""
        if self._address != (host, port):
            self._socket = self._connect(host, port)
            self._address = (host, port)
        elif self._is_broken():  # which may be an earlier host's, if process groups have been made anew
            line = self._connect(host, port)
            if line is None:
                raise ConnectionResetError("the host has closed the connection")
            self._socket = line

    def _is_broken(self) -> bool:
        try:
            return self._socket is not None and not self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:  # nothing to read, as it should be
            return False
        except ConnectionError:
            return True

    @staticmethod
    def _connect(host: str, port: int) -> socket.socket | None:
        try:
            line = socket.create_connection((host, port), timeout=ANSWER_SECONDS)
        except ConnectionRefusedError:
            raise
        except OSError:  # a busy host, or a name that Python resolves in another way: torch's client finds out
            return None
        line.setblocking(False)
        return line


_LINE = _Line()


def _peer_of(connection: socket.socket) -> tuple[str, int]:
    """Address and port of the other end."""
    peer = connection.getpeername()
    return _address_of(peer), peer[1]


def _address_of(name: tuple[str, int]) -> str:
    """The address of a socket's name; torch speaks IPv6 to an IPv4 address."""
    return name[0].removeprefix("::ffff:")
