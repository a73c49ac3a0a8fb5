"""A program in which the store has not answered ends with its own status, also if the host goes on just then."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tests.helpers.programs import run_program

PROGRAM = """
import atexit, os, signal, sys, time
import torch.distributed as dist
from commons.distributed.channel.store import StoreUnavailableError, ask_store

host, port = int(sys.argv[1]), int(sys.argv[2])

def let_the_host_go_on():  # the last hook of all, registered before the product's
    if os.fork() == 0:
        time.sleep(0.1)
        os.kill(host, signal.SIGCONT)
        os._exit(0)

atexit.register(let_the_host_go_on)
dist.init_process_group("gloo", store=dist.TCPStore("127.0.0.1", port), rank=0, world_size=1)
ask_store(lambda store: store.set("key", "value"))
os.kill(host, signal.SIGSTOP)
while open(f"/proc/{host}/stat").read().rsplit(")", 1)[1].split()[0] != "T":
    time.sleep(0.01)
try:
    ask_store(lambda store: store.check(["key"]), seconds=0.5)
except StoreUnavailableError:
    sys.exit(7)
"""
HOST = """
import time
import torch.distributed as dist

store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_a_program_ends_with_its_own_status_though_the_store_does_not_answer():
    with subprocess.Popen([sys.executable, "-c", HOST], stdout=subprocess.PIPE, text=True) as host:
        try:
            port = host.stdout.readline().strip()
            ended = run_program(sys.executable, "-c", PROGRAM, host.pid, port)
        finally:
            os.kill(host.pid, signal.SIGCONT)
            host.kill()
    assert ended.returncode == 7, ended
    assert "terminate called" not in ended.stderr and "frame #" not in ended.stderr
