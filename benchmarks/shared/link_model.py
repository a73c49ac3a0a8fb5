"""A model of network times for hosts whose ranks share one link, with its parameters and their sources.

Latency is the time of one of gloo's messages between two processes, over TCP. The defaults describe a cluster whose
hosts use TCP over an ordinary Ethernet interface beside the fabric of the accelerators:

- Between hosts 40 µs, half of a round trip in a quiet cluster. Loaded data centres take longer: Guo et al., "Pingmesh"
  (SIGCOMM 2015), found 268 µs per round trip between pods at the median, which is 134 µs per message.
- Within a host 20 µs: a message through the loopback device and the wake-up of a thread.
- 100 µs before the first message of a collective, until torch and gloo have passed it to their threads: assumed, for
  hosts with idle cores. On two shared cores a gather of two ranks took 270 µs (10th percentile) to 670 (median).
- One TCP connection between hosts carries 10 Gbit/s: Amazon's documentation of network bandwidth, for a cluster
  placement group (docs.aws.amazon.com/AWSEC2/latest/UserGuide/ec2-instance-network-bandwidth). A host carries 100
  Gbit/s, a common interface.
- One connection within a host carries 24 Gbit/s, with a copy into the kernel and a copy out of it.
- Rows are sent over the accelerators' fabric: 50 Gbyte/s per rank between hosts (a 400 Gbit/s interface per rank), 20
  µs per collective and 2 µs for every rank that receives rows from a rank.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import numpy as np

_GBIT = 1e9 / 8


@dataclass(frozen=True)
class LinkModel:
    """Parameters of message times; the module has the sources of the defaults."""

    ranks_per_host: int = 8  # ranks that share a host and its link
    hop_us: float = 40.0  # microseconds of a message from one host to another, over TCP
    host_hop_us: float = 20.0  # the same within a host
    collective_us: float = 100.0  # microseconds until a collective sends its first message
    connection_gbit: float = 10.0  # gigabits per second of one TCP connection between hosts
    link_gbit: float = 100.0  # of all TCP connections of a host together
    host_gbit: float = 24.0  # of one TCP connection within a host
    rows_gbyte: float = 50.0  # gigabytes per second that one rank can exchange with other hosts' ranks
    rows_us: float = 20.0  # fixed microseconds of an exchange of rows
    peer_us: float = 2.0  # microseconds for each rank that rows go to

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            is_rate = name.endswith(("gbit", "gbyte"))
            if not math.isfinite(value) or value < 0 or (is_rate and not value) or self.ranks_per_host < 1:
                raise ValueError(
                    f"{name} is {value:g}; rates are above 0, times at least 0, and a host has a rank: correct it"
                )

    def ring_ms(self, ranks: int, message: float, stride: int = 1) -> float:
        """Milliseconds of a ring all-gather of every `stride`-th rank, while the other ranks form such rings too.

        After `collective_us`, every message passes the whole ring in W − 1 hops, over links within and between hosts.
        The time is the sum of these hops, or the time of the slowest link for all messages if that is longer.

        Args:
            ranks: ranks of a ring, W.
            message: bytes that each rank sends.
            stride: distance between the numbers of neighbours.
        """
        if ranks == 1:
            return 0.0
        stays = max(1, self.ranks_per_host // stride)  # neighbours that share a host
        between = ranks - 1 if stays == 1 else min(math.ceil(ranks / stays), ranks - 1) - (ranks <= stays)
        within = ranks - 1 - between
        # Rings that cross from one host to the next at the same time share its link.
        rings = min(stride, self.ranks_per_host)
        host_s = message / (self.host_gbit * _GBIT)
        net_s = message / (min(self.connection_gbit, self.link_gbit / rings) * _GBIT)
        path = within * (self.host_hop_us * 1e-6 + host_s) + between * (self.hop_us * 1e-6 + net_s)
        slowest = net_s if between else host_s
        return self.collective_us * 1e-3 + max(path, (ranks - 1) * slowest) * 1e3

    def gather_ms(self, message: float, rings: tuple[int, ...]) -> float:
        """Milliseconds of a gather in rings of these sizes, one after another."""
        total, stride = 0.0, 1
        for size in rings:
            total += self.ring_ms(size, stride * message, stride)
            stride *= size
        return total

    def rows_ms(self, sent: np.ndarray, received: np.ndarray, peers: int) -> float:
        """Milliseconds of an all-to-all: that of the rank with most bytes to send or to receive.

        `sent` and `received`: bytes of each rank; `peers`: most ranks that one rank sends to or receives from.
        """
        largest = float(max(sent.max(initial=0), received.max(initial=0)))
        return self.rows_us * 1e-3 + peers * self.peer_us * 1e-3 + largest / (self.rows_gbyte * 1e9) * 1e3

    def described(self) -> str:
        return ", ".join(f"{name} {value:g}" for name, value in dataclasses.asdict(self).items())


def connections(rings: tuple[int, ...]) -> int:
    """Connections of one rank in a gather: gloo connects every two ranks of a group."""
    return sum(rings) - len(rings)
