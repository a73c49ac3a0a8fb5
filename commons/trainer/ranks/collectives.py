"""Collectives of a run: where one fails, of the trainer's own or of the model, the ranks that are missing are named."""

from __future__ import annotations

import contextlib
import datetime
import json
import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from commons.distributed.batch_shuffler import BaseTaskBalancedBatchShuffler
from commons.distributed.channel.absence import FailedChannel, NamedCollectives, RankMissingError, out_of_reach
from commons.distributed.channel.groups import number_channel
from commons.distributed.channel.store import StoreUnavailableError
from commons.distributed.errors import attempt, first_line, name_ranks

R = TypeVar("R")

# gloo's errors are plain RuntimeErrors, most of which name a place in its sources.
_OF_GLOO = re.compile(r"/gloo/|Timed out waiting \d+ms|caused pair closure|(closed|reset) by peer")
# Seconds that the model's own collectives may take longer than the shuffler's, which know who is missing.
_GRACE_SECONDS = 5.0


class _TrainerCollectives(NamedCollectives):
    remedy = "see the log there, or raise the timeout of init_process_group"

    def _known_failure(self) -> RankMissingError | None:
        return _failure_of(_SHUFFLERS) or self.failure


# By group, which ends with its entry.
_BY_GROUP: weakref.WeakKeyDictionary[dist.ProcessGroup, NamedCollectives] = weakref.WeakKeyDictionary()
# Of the run that is under way.
_SHUFFLERS: list[BaseTaskBalancedBatchShuffler] = []


def _failure_of(shufflers: Sequence[BaseTaskBalancedBatchShuffler]) -> RankMissingError | None:
    return next((each.failure for each in shufflers if each.failure is not None), None)


def all_reduce(
    tensor: torch.Tensor, what: str, *, group: dist.ProcessGroup | None = None, step: int | None = None
) -> None:
    """Sum a tensor over the ranks in place, on all of them together.

    Args:
        tensor: on the host, which waits for the result, or on a device, whose stream does.
        what: names the collective in messages.
        group: the ranks; default all.
        step: of the run, in messages, where it belongs to one.

    Raises:
        RankMissingError: a rank did not take part; names it.
    """
    group = group or dist.distributed_c10d._get_default_group()
    if group not in _BY_GROUP:
        _BY_GROUP[group] = _TrainerCollectives(group)
    named, on_host = _BY_GROUP[group], tensor.device.type == "cpu"
    with named.collective(step, what):
        work = dist.all_reduce(tensor, group=group, async_op=on_host)
    if on_host:
        named.wait(work, step, what)


def gather_numbers(
    own: torch.Tensor, what: str, *, group: dist.ProcessGroup | None = None, step: int | None = None
) -> torch.Tensor:
    """Numbers `(n,)` of all ranks of a group (default all), `(ranks, n)` on the host; called on all of them together.

    `what` names the collective in messages, and so does `step`, where it belongs to one.
    """
    table = own.new_zeros(dist.get_world_size(group), len(own))
    table[dist.get_rank(group)] = own
    all_reduce(table, what, group=group, step=step)  # the others add zeros
    return table.cpu()


def gather_texts(text: str, device: torch.device, group: dist.ProcessGroup | None = None) -> list[str]:
    """The texts of all ranks of a group (default all), in their order; called on all of them together.

    The group serves `device`, which is this rank's.
    """
    encoded = text.encode(errors="backslashreplace")
    own = torch.tensor([len(encoded)], device=device)
    sizes = gather_numbers(own, "gather of text sizes", group=group)[:, 0].tolist()
    texts = torch.zeros(sum(sizes), dtype=torch.uint8, device=device)
    texts.split(sizes)[dist.get_rank(group)].copy_(torch.tensor(list(encoded), dtype=torch.uint8))
    if texts.numel():
        all_reduce(texts, "gather of texts", group=group)
    return [bytes(part.tolist()).decode() for part in texts.cpu().split(sizes)]


def gather_values(value: Any, device: torch.device) -> list[Any]:
    """A value of every rank, as JSON holds it; called on all of them together."""
    return [json.loads(text) for text in gather_texts(json.dumps(value), device)]


def first_text(text: str, device: torch.device) -> tuple[int, str]:
    """The first rank whose text is not empty, and that text, -1 and "" if there is none; on all ranks together."""
    return next(((rank, each) for rank, each in enumerate(gather_texts(text, device)) if each), (-1, ""))


def on_all_ranks(work: Callable[[], R], device: torch.device) -> R:
    """Do something on every rank, and give this rank's result; it is no collective, or its errors reach every rank.

    Raises:
        ValueError: on all ranks, what went wrong on the first that failed.
    """
    result, error = attempt(work)  # a damaged file may end in any error
    if problem := first_text(_problem_of(error), device)[1]:
        raise ValueError(problem)
    return cast(R, result)


def on_rank_0(work: Callable[[], Any], device: torch.device) -> Any:
    """Do something on rank 0 alone, and give its result, as JSON holds it, on all ranks; errors as `on_all_ranks`."""
    result, error = attempt(work) if dist.get_rank() == 0 else (None, None)
    result, problem = gather_values([result, _problem_of(error)], device)[0]
    if problem:
        raise ValueError(problem)
    return result


def _problem_of(error: Exception | None) -> str:
    return "" if error is None else str(error) or type(error).__name__


def limit_collectives(timeout: float) -> None:
    """Let collectives of the ranks' own group, which this run has made, fail five seconds after those of the shuffler.

    Called when the group is connected: until then ranks wait for those that start late. `timeout` is the shuffler's, in
    seconds.
    """
    limit = datetime.timedelta(seconds=timeout + _GRACE_SECONDS)
    dist.distributed_c10d._set_pg_timeout(limit, dist.group.WORLD)


@contextlib.contextmanager
def missing_ranks_named(
    step: Callable[[], int], shufflers: Sequence[BaseTaskBalancedBatchShuffler] = ()
) -> Iterator[None]:
    """Around a run: if a collective of the model fails, the error names the ranks in which none has failed.

    These have exited or stalled, or still wait for a neighbour, as gloo lets them where a rank has died. If a worker
    thread of the run's shufflers knows who is missing, its error is raised instead, and the trainer's own collectives
    end at once: their group may have a longer timeout. `step` gives the number of the step that is under way, from 1.

    Raises:
        RankMissingError: instead of torch's own error, which is its cause.
    """
    members = list(range(dist.get_world_size()))
    number = number_channel(members)  # runs and channels are made in the same order on all ranks
    _SHUFFLERS.extend(shufflers)
    try:
        yield
    except RuntimeError as error:
        is_of_collective = isinstance(error, dist.DistBackendError) or _OF_GLOO.search(str(error)) is not None
        if isinstance(error, RankMissingError) or not is_of_collective or len(members) == 1:
            raise
        if (known := _failure_of(shufflers)) is not None:
            raise known from error
        failed = FailedChannel(f"evenrank/run/{number}", members)
        raise RankMissingError(_describe(error, step(), failed, members)) from error
    finally:
        _SHUFFLERS.clear()


def _describe(error: RuntimeError, step: int, failed: FailedChannel, members: list[int]) -> str:
    what = f"a collective of the model failed in step {step} on rank {dist.get_rank()}"
    said = f"({first_line(error)})"
    try:
        verdict = failed.who_is_missing(failed.attend(f"step {step}"))
    except StoreUnavailableError as unavailable:
        return f"{what} and {unavailable}{out_of_reach(members)} {said}"
    if not verdict.missing:
        return f"{what} and on all others {said}"
    return f"{what}; {name_ranks(verdict.missing)} did not report the failure: check the log there {said}"
