"""CONNECTIONS: the sockets of gloo groups, which can be broken although torch does not offer it.

A collective of gloo that waits for a rank ends when that comes, by its timeout or with a connection; `abort` of a gloo
group does nothing. So the connections are found when a group is made: those opened meanwhile, one end of which is a
port at which a rank of the group listens.
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
# Most sockets of a process that began to listen while a group was made; one of them is the group's.
_MOST_LISTENING = 4


def open_sockets() -> frozenset[int]:
    """Inodes of this process' sockets, none of which a later one has; none where the system does not list them."""
    return frozenset(inode for inode, _ in _sockets())


def connections_of(group: dist.ProcessGroup, before: frozenset[int]) -> frozenset[int]:
    """Inodes of the connections of a gloo group; called by its ranks together when it has been made.

    Args:
        group: for host tensors.
        before: the sockets that were open before it was made.
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
    """Let everything fail that waits for data of these connections, on both ends; from any thread.

    A group's listening socket stays: gloo ends the process when that one fails.
    """
    shut_down(lambda inode, _: inode in inodes)


def shut_down(chosen: Callable[[int, socket.socket], bool]) -> None:
    """Shut down those of this process' sockets that are chosen by inode and socket; one that has no peer is left."""
    for inode, each in _sockets():
        with contextlib.suppress(OSError):
            if chosen(inode, each):
                each.shutdown(socket.SHUT_RDWR)


def _sockets() -> Iterator[tuple[int, socket.socket]]:
    """This process' internet sockets by inode; duplicates, each closed when the next one is taken."""
    for descriptor in list(_DESCRIPTORS.iterdir()) if _DESCRIPTORS.is_dir() else ():
        with contextlib.suppress(OSError):  # closed meanwhile
            copy = os.dup(int(descriptor.name))
            found = os.fstat(copy)
            if not stat.S_ISSOCK(found.st_mode):
                os.close(copy)
                continue
            with socket.socket(fileno=copy) as duplicate:
                if duplicate.family in (socket.AF_INET, socket.AF_INET6):
                    yield found.st_ino, duplicate
