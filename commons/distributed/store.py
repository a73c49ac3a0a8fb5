"""STORE: questions to torch's key-value store, none of which outlasts its deadline.

A call of a TCPStore waits for the server's reply for ever, whatever the store's timeout says: where the process that
hosts it stands still, so does every caller. All calls of ours run on one daemon thread instead, and who asks waits for
the thread. One call is on its way at a time; a call that nobody waits for any more is not begun.
"""

from __future__ import annotations

import concurrent.futures
import os
import socket
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.rendezvous import _torchelastic_use_agent_store

from commons.distributed.connections import shut_down
from commons.distributed.errors import first_line
from commons.distributed.worker import DaemonWorker

T = TypeVar("T")

# How long the store may take for an answer; those of a store that is well come within milliseconds.
ANSWER_SECONDS = 3.0
# How long a call takes at most to notice that its connection is gone.
_BREAK_SECONDS = 1.0
_STDERR = 2
# How long one look of a KeyWatch takes at most.
_GLANCE_SECONDS = 0.2
_RANK_0 = "rank 0"


def break_off() -> None:
    """Let every call of the store fail that is under way; for the end of a program, which uses the store no more.

    A host that stands still leaves a thread in torch's C++. Coming back after the interpreter's end, it would abort the
    process; so the connections to the host are shut down, which torch does not offer.
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


# How long a host that ends takes to close its connections, mostly.
_CLOSING_SECONDS = 0.005
# A thread that waits for a host that stands still is not waited for when the program ends.
_WORKER = DaemonWorker("evenrank-store", exit_seconds=1.0, break_off=break_off)


class StoreUnavailableError(RuntimeError):
    """The store does not answer in time, or has ended with the process that hosts it; says which process that is."""


def ask_store(question: Callable[[dist.Store], T], seconds: float = ANSWER_SECONDS) -> T:
    """Ask the default process group's store.

    Args:
        question: one call of the store, which must need no other process' doing, unlike `get` of a key that is not set.
        seconds: how long to wait for the answer.

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
    """Ask the store without waiting; the future raises StoreUnavailableError if the host has ended."""
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
    """Looks for keys again and again; a store that does not answer is left alone until it does.

    Args:
        *keys: to look for.

    Attributes:
        silent_seconds: the longest that the store was seen to give no answer.
    """

    def __init__(self, *keys: str) -> None:
        self.silent_seconds = 0.0
        self._keys = keys
        self._asked: Future[bool] | None = None
        self._asked_at = 0.0

    def is_set(self) -> bool:
        """Whether any key is known to be set, or the store to have ended; takes a fraction of a second at most."""
        if self._asked is None:
            self._asked = begin_asking(lambda store: any(store.check([key]) for key in self._keys))
            self._asked_at = time.monotonic()
        try:
            found = self._asked.result(_GLANCE_SECONDS)
        except concurrent.futures.TimeoutError:
            self.silent_seconds = max(self.silent_seconds, time.monotonic() - self._asked_at)
            return False
        except StoreUnavailableError:
            return True
        self._asked = None
        return found


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


def _describe_host() -> str | None:
    """Which process answers for the default store; None where it is no process of its own, but files for example."""
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


def _peer_of(connection: socket.socket) -> tuple[str, int]:
    """Address and port of the other end; torch speaks IPv6 to an IPv4 address."""
    address, port = connection.getpeername()[:2]
    return address.removeprefix("::ffff:"), port


class _Line:
    """A connection to the store's host on which nothing is said: it breaks when the host ends.

    It is kept. One that is closed before torch's server has looked at it ends the server's only thread, and with it the
    store of all ranks.
    """

    def __init__(self) -> None:
        self._address: tuple[str, int] | None = None
        self._socket: socket.socket | None = None

    @property
    def peer(self) -> tuple[str, int] | None:
        """Address and port of the host; None where there is no connection."""
        if self._socket is None:
            return None
        try:
            return _peer_of(self._socket)
        except OSError:
            return None

    @property
    def is_local(self) -> bool:
        """Whether both ends have one address."""
        if self._socket is None or self.peer is None:
            return False
        return self._socket.getsockname()[0].removeprefix("::ffff:") == self.peer[0]

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
        except BlockingIOError:  # nothing said, as it should be
            return False
        except ConnectionError:
            return True

    @staticmethod
    def _connect(host: str, port: int) -> socket.socket | None:
        try:
            line = socket.create_connection((host, port), timeout=ANSWER_SECONDS)
        except ConnectionRefusedError:
            raise
        except OSError:  # a host that is busy, or a name that Python resolves in another way: torch's client will tell
            return None
        line.setblocking(False)
        return line


# Used by the one thread that asks.
_LINE = _Line()


def _require_listening(store: dist.Store) -> None:
    """Raise ConnectionError if the store's host has ended: torch would print forty lines of C++ about it."""
    tcp = _tcp_store(store)
    if tcp is not None:
        _LINE.require_whole(tcp.host, tcp.port)
        # A process that is being ended closes one connection after another, and this one perhaps last.
        time.sleep(_CLOSING_SECONDS)
        _LINE.require_whole(tcp.host, tcp.port)
