"""The store is asked whether its host lives without harm to its server, and is told apart from one that has ended."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import socket

import pytest
import torch.distributed as dist

from commons.distributed.channel import store as asked

QUESTIONS = 3_000


def _host(connection):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    connection.send(store.port)
    connection.recv()


@pytest.fixture
def host():
    """A process with a store, its port, and the end of a pipe that ends it."""
    context = multiprocessing.get_context("forkserver")
    connection, theirs = context.Pipe()
    process = context.Process(target=_host, args=(theirs,), daemon=True)
    process.start()
    yield process, connection.recv()
    process.kill()
    process.join()


@pytest.mark.slow
def test_asking_often_leaves_the_server_well(host):
    store = dist.TCPStore("127.0.0.1", host[1], is_master=False)

    def ask():
        for _ in range(QUESTIONS):
            asked._require_listening(store)
            store.add("count", 1)
        return store.add("count", 0)

    pool = concurrent.futures.ThreadPoolExecutor(1)
    try:
        answer = pool.submit(ask)
        assert answer.result(timeout=30) == QUESTIONS
    finally:
        host[0].kill()  # or a thread that waits for an answer would keep the suite
        pool.shutdown()


def test_a_host_that_has_ended_is_noticed(host):
    process, port = host
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    asked._require_listening(store)
    process.kill()
    process.join()
    for _ in range(2):
        with pytest.raises(ConnectionError):
            asked._require_listening(store)


def test_a_host_at_the_address_of_one_that_has_ended_is_asked():
    """As where a program destroys its process groups and makes them anew at the same port."""
    line, port = asked._Line(), 0
    for _ in range(2):
        with socket.create_server(("127.0.0.1", port)) as server:
            port = server.getsockname()[1]
            line.require_whole("127.0.0.1", port)
            accepted, _ = server.accept()
            with accepted:
                line.require_whole("127.0.0.1", port)
    with pytest.raises(ConnectionError):
        line.require_whole("127.0.0.1", port)
