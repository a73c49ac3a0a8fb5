"""CONNECTIONS: finds the sockets of a gloo group, so that a collective can be aborted by shutting them down.

A gloo collective ends when all ranks have joined, at its timeout, or when a connection breaks; torch's `abort` of a
gloo group does nothing. The connections of a group are the sockets that were opened while it was made and that have one
end at a port where a rank of the group listens.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from commons.distributed.process_group import all_gather_single

_DESCRIPTORS = Path("/proc/self/fd")
# Most sockets of a process that may start to listen while a group is made; one of them is the group's.
_MOST_LISTENING = 4


def open_sockets() -> frozenset[int]:
    """Inodes of this process' open sockets; empty on a system without /proc."""
    return frozenset(inode for inode, _ in _sockets())


def connections_of(group: dist.ProcessGroup, before: frozenset[int]) -> frozenset[int]:
    """Inodes of the connections of a new gloo group; called by all of its ranks together.

    `before` is the result of `open_sockets` before the group was made.
    """
    listening: list[int] = []
    ends: dict[int, tuple[int, int]] = {}
    for inode, each in _sockets():
        if inode in before:
            continue
        own = each.getsockname()[1]
        if each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            listening.append(own)
        else:
            with contextlib.suppress(OSError):  # not connected
                ends[inode] = own, each.getpeername()[1]
    own_ports = torch.tensor((listening + [0] * _MOST_LISTENING)[:_MOST_LISTENING])
    all_ports = own_ports.new_empty(dist.get_world_size(group) * _MOST_LISTENING)
    all_gather_single(all_ports, own_ports, group=group)
    ports = set(all_ports.tolist())
    return frozenset(inode for inode, (own, other) in ends.items() if own in listening or other in ports)


def break_connections(inodes: frozenset[int]) -> None:
    """Shut down connections, so that every wait for their data fails, on both ends; from any thread.

    A group's listening socket stays open: gloo ends the process when that socket fails.
    """
    shut_down(lambda inode, _: inode in inodes)


def shut_down(chosen: Callable[[int, socket.socket], bool]) -> None:
    """Shut down this process' connected sockets for which `chosen(inode, socket)` is true."""
    for inode, each in _sockets():
        with contextlib.suppress(OSError):
            if chosen(inode, each):
                each.shutdown(socket.SHUT_RDWR)


def _sockets() -> Iterator[tuple[int, socket.socket]]:
    """Inode and a duplicate of each internet socket of this process; a duplicate is closed at the next iteration."""
    for descriptor in list(_DESCRIPTORS.iterdir()) if _DESCRIPTORS.is_dir() else ():
        with contextlib.suppress(OSError):  # closed by another thread
            copy = os.dup(int(descriptor.name))
            found = os.fstat(copy)
            if not stat.S_ISSOCK(found.st_mode):
                os.close(copy)
                continue
            with socket.socket(fileno=copy) as duplicate:
                if duplicate.family in (socket.AF_INET, socket.AF_INET6):
                    yield found.st_ino, duplicate
