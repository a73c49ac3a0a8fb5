"""STORE: calls of torch's key-value store with a deadline.

A call of a TCPStore waits for the reply without a limit, whatever the store's timeout is: if the process that hosts the
store is stopped, every caller blocks. So one daemon thread makes all calls, one after another, and the caller waits for
the thread up to a deadline. A call whose caller has given up before its turn is skipped.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import socket
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.rendezvous import _torchelastic_use_agent_store

from commons.distributed.channel.connections import shut_down
from commons.distributed.engine.worker import DaemonWorker
from commons.distributed.errors import first_line

T = TypeVar("T")

# By store, another client of it for the thread here, at most one; None if the store has none. A client makes one call
# at a time, and while torch makes groups it waits in its own client for the other ranks.
_OWN_CLIENTS: weakref.WeakKeyDictionary[dist.Store, list[Future[dist.Store | None]]] = weakref.WeakKeyDictionary()

# Seconds that the store may take to reply; it usually takes milliseconds.
REPLY_SECONDS = 3.0
# Most seconds until a call fails after its connection was shut down.
_BREAK_SECONDS = 1.0
# Seconds in which an ending host usually closes all of its connections.
_CLOSING_SECONDS = 0.005
_PAUSE_SECONDS, _PAUSE_PER_RANK = 0.01, 0.0002
_STDERR = 2
_RANK_0, _AGENT = "rank 0", "torchrun's agent on the first host"
_ANY_KEY = "evenrank"


class StoreUnavailableError(RuntimeError):
    """The store did not reply in time, or its host process has ended; the message names that process."""


def call_store(call: Callable[[dist.Store], T], seconds: float = REPLY_SECONDS) -> T:
    """Call the default process group's store, and wait up to `seconds` for the reply.

    `call` must not wait for another process, as `get` of a missing key does.

    Raises:
        StoreUnavailableError: no reply in time, or the host has ended.
    """
    reply = submit_call(call)
    try:
        return reply.result(seconds)
    except concurrent.futures.TimeoutError:
        reply.cancel()
        host = _describe_host()
        remedy = "" if host is None else f"; {host} hosts it and has stopped or is overloaded: see there"
        raise StoreUnavailableError(f"the store does not answer{remedy}") from None


def submit_call(call: Callable[[dist.Store], T]) -> Future[T]:
    """Call the store without waiting; the future raises StoreUnavailableError if the host has ended."""
    store = dist.distributed_c10d._get_default_store()
    own = _OWN_CLIENTS.setdefault(store, [])

    def run() -> T:
        try:
            _require_listening(store)
            if not own:
                own.append(_CONNECTOR.submit(lambda: _clone(store)))
            client = own[0].result() if own[0].done() else None
            reply = call(client or store)
            if client is None:  # `set` does not wait for its reply, and the next call may be by another client
                store.check([_ANY_KEY])
            return reply
        except (RuntimeError, ConnectionError) as error:
            host = _describe_host()
            remedy = f": {first_line(error)}" if host is None else f"; {host} hosts it and has ended: see the log there"
            raise StoreUnavailableError(f"the store cannot be reached{remedy}") from None

    return _WORKER.submit(run)


def pause_of(num_ranks: int) -> float:
    """Seconds between two reads of a key, if so many ranks wait for it and read it."""
    return _PAUSE_SECONDS + _PAUSE_PER_RANK * num_ranks


def _clone(store: dist.Store) -> dist.Store | None:
    try:
        return store.clone()  # type: ignore[attr-defined]  # torch's stubs lack it
    except Exception:  # of a user's own store; or the host has ended
        return None


def ends_with_rank() -> int | None:
    """The rank that hosts the store, which ends with it; None if another process hosts it."""
    return 0 if _describe_host() == _RANK_0 else None


def attempt_of_torchrun() -> str:
    """How often torchrun has restarted its ranks.

    Agents of two hosts count differently: one that restarts its ranks because the other has done so counts no attempt.
    """
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def attempt_of_store(store: dist.Store | None = None) -> str:
    """The attempt of torchrun if its agent hosts the store, which outlasts attempts; "0" for other stores.

    None is the default process group's store.
    """
    return attempt_of_torchrun() if _describe_host(store) == _AGENT else "0"


def is_beside_host() -> bool:
    """Whether the host process of the default store runs on this rank's machine; False if that is not known."""
    if not dist.is_initialized() or _describe_host() is None:
        return False
    try:
        return call_store(lambda store: _LINE.is_local)
    except StoreUnavailableError:
        return False


@contextlib.contextmanager
def break_off() -> Iterator[None]:
    """Make every store call under way fail, those of torch's own client too; used at the end of the program.

    If the store's host is stopped, threads wait in torch's C++; returning after the interpreter's end would abort the
    process. So this shuts down the connections to the host; torch has no function for it. Within this context nothing
    is written to stderr: torch prints forty lines of C++ for each connection.
    """
    peer = _LINE.peer
    if peer is None:
        yield
        return
    silent, stderr = os.open(os.devnull, os.O_WRONLY), os.dup(_STDERR)
    sys.stderr.flush()
    os.dup2(silent, _STDERR)
    try:
        shut_down(lambda _, connection: _peer_of(connection) == peer)
        for worker in (_WORKER, _CONNECTOR):
            worker.stop(_BREAK_SECONDS)
        yield
    finally:
        os.dup2(stderr, _STDERR)
        os.close(silent)
        os.close(stderr)


# The end of the program waits at most a second for a thread whose host does not reply.
_WORKER = DaemonWorker("evenrank-store", exit_seconds=1.0, break_off=break_off)
# Connects the own clients: torch resolves the host's name, which takes seconds where no DNS server replies.
_CONNECTOR = DaemonWorker("evenrank-store-client", exit_seconds=1.0, break_off=break_off)


def _describe_host(store: dist.Store | None = None) -> str | None:
    """Which process hosts a store (None: the default one), in words; None if no process does, as with a FileStore."""
    store = _tcp_store(store or dist.distributed_c10d._get_default_store())
    if store is None:
        return None
    # Under torchrun a program may have made its own store, at another port.
    by_agent = _torchelastic_use_agent_store() and str(store.port) == os.environ.get("MASTER_PORT")
    return _AGENT if by_agent else _RANK_0


def _tcp_store(store: dist.Store) -> dist.TCPStore | None:
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store if isinstance(store, dist.TCPStore) else None


def _require_listening(store: dist.Store) -> None:
    """Raise ConnectionError if the store's host has ended: torch would print forty lines of C++ about it."""
    tcp = _tcp_store(store)
    if tcp is not None:
        _LINE.require_whole(tcp.host, tcp.port)
        # A process that ends closes its connections one after another, perhaps this one last.
        time.sleep(_CLOSING_SECONDS)
        _LINE.require_whole(tcp.host, tcp.port)


class _Line:
    """An idle connection to the store's host, which shows that the host has ended; used by the store's thread.

    It stays open: torch's server has one thread, and that thread ends, with the store, if a connection is closed before
    the server has accepted it.
    """

    def __init__(self) -> None:
        self._address: tuple[str, int] | None = None
        self._socket: socket.socket | None = None

    @property
    def peer(self) -> tuple[str, int] | None:
        """Address and port of the host; None without a connection."""
        try:
            return None if self._socket is None else _peer_of(self._socket)
        except OSError:
            return None

    @property
    def is_local(self) -> bool:
        """Whether both ends have the same address."""
        peer = self.peer
        return self._socket is not None and peer is not None and _address_of(self._socket.getsockname()) == peer[0]

    def require_whole(self, host: str, port: int) -> None:
        """Raise ConnectionError if the host has ended."""
        if self._address != (host, port):
            self._socket = self._connect(host, port)
            self._address = (host, port)
        elif self._is_broken():  # may be the connection of an earlier host at the same port
            line = self._connect(host, port)
            if line is None:
                raise ConnectionResetError("the host has closed the connection")
            self._socket = line

    def _is_broken(self) -> bool:
        try:
            return self._socket is not None and not self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:  # open: there is nothing to read
            return False
        except ConnectionError:
            return True

    @staticmethod
    def _connect(host: str, port: int) -> socket.socket | None:
        try:
            line = socket.create_connection((host, port), timeout=REPLY_SECONDS)
        except ConnectionRefusedError:
            raise
        except OSError:  # a busy host, or a name that only torch resolves: left to torch's client
            return None
        line.setblocking(False)
        return line


_LINE = _Line()


def _peer_of(connection: socket.socket) -> tuple[str, int]:
    """Address and port of the other end."""
    peer = connection.getpeername()
    return _address_of(peer), peer[1]


def _address_of(name: tuple[str, int]) -> str:
    """The address in a socket's name, as IPv4 where torch uses IPv6 for an IPv4 address."""
    return name[0].removeprefix("::ffff:")
