"""Collectives of the trainer's own over the ranks' groups: where the host waits for one, a missing rank is named."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from commons.distributed.batch_shuffler import BaseTaskBalancedBatchShuffler
from commons.distributed.named_collectives import NamedCollectives, RankMissingError


class _TrainerCollectives(NamedCollectives):
    remedy = "see the log there, or raise the timeout of init_process_group"

    def _known_failure(self) -> RankMissingError | None:
        return failure_of(_SHUFFLERS)


# By group, which ends with its entry.
_BY_GROUP: weakref.WeakKeyDictionary[dist.ProcessGroup, NamedCollectives] = weakref.WeakKeyDictionary()
# Of the run that is under way.
_SHUFFLERS: list[BaseTaskBalancedBatchShuffler] = []


@contextlib.contextmanager
def ended_with(shufflers: Sequence[BaseTaskBalancedBatchShuffler]) -> Iterator[None]:
    """Around a run: a collective is not waited for once a worker thread of its shufflers knows that a rank is missing.

    The group of the ranks may have a longer timeout than the shuffler, and a rank may wait for one that stands still.
    """
    _SHUFFLERS.extend(shufflers)
    try:
        yield
    finally:
        _SHUFFLERS.clear()


def failure_of(shufflers: Sequence[BaseTaskBalancedBatchShuffler]) -> RankMissingError | None:
    """Which rank is missing, if one of the shufflers knows."""
    return next((each.failure for each in shufflers if each.failure is not None), None)


def all_reduce(
    tensor: torch.Tensor,
    what: str,
    *,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    step: int | None = None,
) -> None:
    """Reduce a tensor over the ranks in place, on all of them together.

    Args:
        tensor: on the host, which waits for the result, or on a device, whose stream does.
        what: names the collective in messages.
        op: how.
        group: the ranks; default all.
        step: of the run, in messages, where it belongs to one.

    Raises:
        RankMissingError: a rank did not take part; names it.
    """
    group = group or dist.distributed_c10d._get_default_group()
    named, on_host = _named(group), tensor.device.type == "cpu"
    with named.collective(step, what):
        work = dist.all_reduce(tensor, op=op, group=group, async_op=on_host)
    if on_host:
        named.wait(work, step, what)


def broadcast(tensor: torch.Tensor, what: str, src: int) -> None:
    """Give one rank's tensor to all ranks, in place; as `all_reduce`."""
    named, on_host = _named(dist.distributed_c10d._get_default_group()), tensor.device.type == "cpu"
    with named.collective(None, what):
        work = dist.broadcast(tensor, src=src, async_op=on_host)
    if on_host:
        named.wait(work, None, what)


def _named(group: dist.ProcessGroup) -> NamedCollectives:
    if group not in _BY_GROUP:
        _BY_GROUP[group] = _TrainerCollectives(group)
    return _BY_GROUP[group]
