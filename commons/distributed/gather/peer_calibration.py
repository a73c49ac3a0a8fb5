"""Tensor-parallel peers: measured numbers, calibrations and speeds, must be equal on all of them.

The ranks of a tensor-parallel group belong to different data-parallel groups, which plan by themselves and must come to
the same plan. What they gather is the same; what they read from a file or have timed may not be.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from dataclasses import asdict

import torch.distributed as dist

from commons.distributed.channel.store import StoreGather, ask_store
from commons.perf_model.calibration import Calibration

_UNREADABLE = "unreadable"
# Seconds between two looks for a peer's speed.
_PAUSE_SECONDS = 0.002


def require_equal_among_peers(calibration: Calibration | None, generation: int, timeout: float) -> None:
    """Raise, on all tensor-parallel peers, unless they read the same calibration; a store lookup, no collective.

    Args:
        calibration: this rank's; None where it could not be read, which this rank says itself.
        generation: tells shufflers from one another; the same on all peers.
        timeout: seconds to wait for a peer, well below those after which a gather fails.

    Raises:
        ValueError: peers have different calibrations.
        RuntimeError: a peer did not say what it has in time, or the store does not answer.
    """
    peers = _tensor_parallel_ranks()
    if len(peers) < 2:
        return
    own = _UNREADABLE if calibration is None else _digest(calibration)
    gather = StoreGather(f"evenrank/calibration/{'_'.join(map(str, peers))}/{generation}", peers)
    gather.write(own)
    if silent := gather.await_others(timeout):
        raise RuntimeError(
            f"ranks {silent} of the tensor-parallel group {peers} did not say which calibration they use within "
            f"{timeout:g} s; all of them must shuffle alike: see the log there"
        )
    digests = gather.read(peers)
    if unreadable := [rank for rank in peers if digests[rank] == _UNREADABLE]:
        raise ValueError(
            f"ranks {unreadable} of the tensor-parallel group {peers} have no usable calibration; peers must make the "
            "same plan: see their message, and copy one file to all machines"
        )
    if differing := [rank for rank in peers if digests[rank] != digests[peers[0]]]:
        raise ValueError(
            f"ranks {differing} have another calibration than rank {peers[0]} of their tensor-parallel group; peers "
            "must make the same plan: copy one file to all machines"
        )


def slowest_of_peers(generation: int, timeout: float, number: int, look: int) -> int:
    """The least number of the tensor-parallel peers, on all of them; lookups in the store, no collective.

    Args:
        generation: tells shufflers from one another; the same on all peers.
        timeout: seconds to wait for a peer.
        number: of this rank.
        look: counts the calls. A peer may be one call ahead and no more, so two keys serve in turn.

    Raises:
        RuntimeError: a peer did not call in time, or the store does not answer.
    """
    peers = _tensor_parallel_ranks()
    if len(peers) < 2:
        return number
    keys = [f"evenrank/speeds/{'_'.join(map(str, peers))}/{generation}/{look % 2}/{rank}" for rank in peers]
    ask_store(lambda store: store.set(keys[peers.index(dist.get_rank())], f"{look} {number}"))
    deadline = time.monotonic() + timeout
    while True:
        if ask_store(lambda store: store.check(keys)):
            found = [tuple(map(int, text.split())) for text in ask_store(lambda store: store.multi_get(keys))]
            if all(at == look for at, _ in found):
                return min(each for _, each in found)
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"a rank of the tensor-parallel group {peers} has not given its speed within {timeout:g} s; all "
                "of them must shuffle alike: see the log there"
            )
        time.sleep(_PAUSE_SECONDS)


def _tensor_parallel_ranks() -> list[int]:
    """Global ranks of this rank's tensor-parallel group, ascending; empty without megatron-core."""
    parallel_state = sys.modules.get("megatron.core.parallel_state")
    if parallel_state is None or not parallel_state.model_parallel_is_initialized():
        return []
    return sorted(dist.get_process_group_ranks(parallel_state.get_tensor_model_parallel_group()))


def _digest(calibration: Calibration) -> str:
    return hashlib.blake2b(json.dumps(asdict(calibration), sort_keys=True).encode(), digest_size=16).hexdigest()
