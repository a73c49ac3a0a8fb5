"""A collective of the model's own that fails: how long it waits, and which ranks torch's error does not name."""

from __future__ import annotations

import contextlib
import datetime
import re
from collections.abc import Callable, Iterator, Sequence

import torch.distributed as dist

from commons.distributed.batch_shuffler import BaseTaskBalancedBatchShuffler
from commons.distributed.errors import first_line
from commons.distributed.group_pool import number_channel
from commons.distributed.missing_ranks import Attendance, FailedChannel
from commons.distributed.named_collectives import RankMissingError, out_of_reach
from commons.distributed.store import StoreUnavailableError
from commons.trainer.collectives import ended_with, failure_of

# gloo's errors are plain RuntimeErrors, most of which tell the place in its sources.
_OF_GLOO = re.compile(r"/gloo/|Timed out waiting \d+ms|caused pair closure|(closed|reset) by peer")
# How much longer the model's own collectives may take than the shuffler's, which know who is missing.
_GRACE_SECONDS = 5.0


def limit_collectives(timeout: float) -> None:
    """Let collectives of the ranks' own group, which this run has made, fail five seconds after those of the shuffler.

    Called when the group is connected: until then ranks wait for those that start late.

    Args:
        timeout: of the shuffler, in seconds.
    """
    limit = datetime.timedelta(seconds=timeout + _GRACE_SECONDS)
    dist.distributed_c10d._set_pg_timeout(limit, dist.group.WORLD)


@contextlib.contextmanager
def missing_ranks_named(
    step: Callable[[], int], shufflers: Sequence[BaseTaskBalancedBatchShuffler] = ()
) -> Iterator[None]:
    """Around a run: if a collective of the model fails, the error names the ranks in which none has failed.

    These are gone or stand still; or they wait for a neighbour still, as gloo lets them where a rank has died.

    A shuffler of the run that knows who is missing says it instead, and ends the trainer's own collectives.

    Args:
        step: number of the step that is under way, counted from 1.
        shufflers: of the run.

    Raises:
        RankMissingError: instead of torch's own error, which is its cause.
    """
    members = list(range(dist.get_world_size()))
    number = number_channel(members)  # runs and channels are made in the same order on all ranks
    try:
        with ended_with(shufflers):
            yield
    except RuntimeError as error:
        if isinstance(error, RankMissingError) or not _is_of_collective(error) or len(members) == 1:
            raise
        if (known := failure_of(shufflers)) is not None:
            raise known from error
        failed = FailedChannel(f"evenrank/run/{number}", members)
        raise RankMissingError(_describe(error, step(), failed, members)) from error


def _is_of_collective(error: RuntimeError) -> bool:
    """Whether NCCL or gloo has failed."""
    return isinstance(error, dist.DistBackendError) or _OF_GLOO.search(str(error)) is not None


def _describe(error: RuntimeError, step: int, failed: FailedChannel, members: list[int]) -> str:
    what = f"a collective of the model failed in step {step} on rank {dist.get_rank()}"
    said = f"({first_line(error)})"
    try:
        verdict = failed.who_is_missing(Attendance(f"step {step}"))
    except StoreUnavailableError as unavailable:
        return f"{what} and {unavailable}{out_of_reach(members)} {said}"
    if not verdict.missing:
        return f"{what} and on all others {said}"
    names = ", ".join(map(str, verdict.missing[:16])) + (", …" if len(verdict.missing) > 16 else "")
    return f"{what} and was not noticed on rank{'s' * (len(verdict.missing) > 1)} {names}: see there {said}"
