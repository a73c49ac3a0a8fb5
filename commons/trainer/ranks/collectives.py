"""Collectives of the trainer; if one of them, or of the model, fails, the error names the missing ranks."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import json
import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist

from commons.distributed.batch_shuffler import BaseTaskBalancedBatchShuffler
from commons.distributed.channel.absence import NamedCollectives, RankMissingError
from commons.distributed.channel.groups import out_of_reach
from commons.distributed.channel.store import StoreUnavailableError
from commons.distributed.errors import capture_error, describe_error, first_line, gather_strings, name_ranks

R = TypeVar("R")

# gloo raises plain RuntimeErrors; most of them contain a path of its sources.
_OF_GLOO = re.compile(r"/gloo/|Timed out waiting \d+ms|caused pair closure|(closed|reset) by peer")
# Seconds by which the model's timeout exceeds the shuffler's, whose error, which names the missing ranks, comes first.
_GRACE_SECONDS = 5.0


class _TrainerCollectives(NamedCollectives):
    remedy = "see the log there, or raise trainer.shuffler.timeout (in your own process group, its timeout)"

    def _known_failure(self) -> RankMissingError | None:
        return _failure_of_shufflers() or self.failure


# One object per process group; an entry is removed with its group.
_BY_GROUP: weakref.WeakKeyDictionary[dist.ProcessGroup, NamedCollectives] = weakref.WeakKeyDictionary()
# The shufflers of the current run, a sequence that may still grow; empty without a run.
_SHUFFLERS: list[Sequence[BaseTaskBalancedBatchShuffler]] = []


def _failure_of_shufflers() -> RankMissingError | None:
    shufflers = itertools.chain.from_iterable(_SHUFFLERS)
    return next((each.failure for each in shufflers if each.failure is not None), None)


def all_reduce(
    tensor: torch.Tensor, what: str, *, group: dist.ProcessGroup | None = None, step: int | None = None
) -> None:
    """Sum a tensor over the ranks, in place; called on all ranks of the group together.

    Args:
        tensor: on the host, the call waits for the result; on a device, only the current stream does.
        what: name of the collective in messages.
        group: the ranks; None for all ranks.
        step: step of the run in messages; None outside of steps.

    Raises:
        RankMissingError: a rank did not call it in time; the error names the rank.
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
    """Gather numbers `(n,)` of all ranks of a group as `(ranks, n)` on the host; arguments as `all_reduce`."""
    table = own.new_zeros(dist.get_world_size(group), len(own))
    table[dist.get_rank(group)] = own
    all_reduce(table, what, group=group, step=step)  # the other ranks' rows are zero here
    return table.cpu()


def gather_texts(text: str, device: torch.device) -> list[str]:
    """Gather a text from every rank, in the order of ranks; `device` must suit the backend of the group."""

    def gather(own: np.ndarray) -> np.ndarray:
        return gather_numbers(torch.from_numpy(own).to(device), "gather of texts").numpy()

    return gather_strings(text, gather)


def gather_values(value: Any, device: torch.device) -> list[Any]:
    """Gather a JSON-ready value from every rank; a collective call."""
    return [json.loads(text) for text in gather_texts(json.dumps(value), device)]


def first_text(text: str, device: torch.device) -> tuple[int, str]:
    """The first rank with a text that is not empty, and the text; -1 and "" without one; a collective call."""
    return next(((rank, each) for rank, each in enumerate(gather_texts(text, device)) if each), (-1, ""))


def on_all_ranks(work: Callable[[], R], device: torch.device) -> R:
    """Call a function on every rank and return this rank's result; a collective call.

    `work` must not contain a collective, unless an error in it is raised on every rank.

    Raises:
        ValueError: on all ranks, with the first rank that failed and its error.
    """
    result, error = capture_error(work)  # a damaged file may end in any error
    rank, problem = first_text("" if error is None else str(error) or type(error).__name__, device)
    if problem:
        raise ValueError(f"rank {rank}: {problem}")
    return cast(R, result)


def raised_on_all_ranks(work: Callable[[], R], device: torch.device) -> R:
    """Call a function on every rank and return this rank's result; a collective call, as `on_all_ranks`.

    Raises:
        ValueError: on a rank that has not failed, with the error of the first rank that has failed.
        Exception: on a rank that has failed, its own error.
    """
    result, error = capture_error(work)
    rank, problem = first_text("" if error is None else ": ".join(describe_error(error)), device)
    if error is not None:
        raise error
    if problem:
        raise ValueError(f"rank {rank}: {problem}")
    return cast(R, result)


def on_rank_0(work: Callable[[], Any], device: torch.device) -> Any:
    """Call a function on rank 0 only and return its JSON-ready result on all ranks; errors as `on_all_ranks`."""
    is_first = dist.get_rank() == 0

    def from_rank_0(own: np.ndarray) -> np.ndarray:
        numbers = torch.from_numpy(own * is_first).to(device)
        all_reduce(numbers, "result of rank 0")  # the other ranks' numbers are zero here
        return numbers.cpu().numpy()[np.newaxis]

    result = on_all_ranks(lambda: work() if is_first else None, device)
    (text,) = gather_strings(json.dumps(result) if is_first else "", from_rank_0)
    return json.loads(text)


def limit_collectives(timeout: float, group: dist.ProcessGroup | None = None) -> None:
    """Set the timeout of a group to the shuffler's timeout, in seconds, plus five seconds; for a group of this run.

    The default group is WORLD. It is limited after it has connected: until then, ranks wait for late ranks with the
    longer default timeout.
    """
    limit = datetime.timedelta(seconds=timeout + _GRACE_SECONDS)
    dist.distributed_c10d._set_pg_timeout(limit, dist.group.WORLD if group is None else group)


@contextlib.contextmanager
def missing_ranks_named(
    step: Callable[[], int], shufflers: Sequence[BaseTaskBalancedBatchShuffler] = ()
) -> Iterator[None]:
    """A context around a run, entered by all ranks: an error of one rank reaches the others.

    If a collective of the model fails, an error that names the missing ranks is raised. These are the ranks without a
    failed collective: they have exited or stalled, or gloo still lets them wait for a neighbour after a rank has died.
    If a shuffler's worker thread has found missing ranks, its error is raised instead, and the trainer's own
    collectives fail immediately: their group may have a longer timeout. Any other error of this rank is posted: the
    other ranks raise it in the trainer's collectives within a second, and in the model's when these fail.

    `step` returns the number of the current step, from 1; `shufflers` may grow during the run.

    Raises:
        RankMissingError: instead of torch's own error, which is its cause.
    """
    run = NamedCollectives(dist.group.WORLD)
    _SHUFFLERS.append(shufflers)
    try:
        yield
    except RankMissingError:
        raise
    except Exception as error:
        if not _is_of_collective(error) or len(run.members) == 1:
            # At once: the rank that hosts the store waits in each call, until the others have read the error.
            with ThreadPoolExecutor() as pool:
                for channel in (run, *_BY_GROUP.values()):
                    pool.submit(channel.post_failure, step(), "training", error)
            raise
        if (known := _failure_of_shufflers()) is not None:
            raise known from error
        raise RankMissingError(_describe(error, step(), run)) from error
    finally:
        _SHUFFLERS.clear()
        _BY_GROUP.clear()  # channels that have failed: a next run in these groups makes others


def _is_of_collective(error: Exception) -> bool:
    from_gloo = isinstance(error, RuntimeError) and _OF_GLOO.search(str(error)) is not None
    return from_gloo or isinstance(error, dist.DistBackendError)


def _describe(error: Exception, step: int, run: NamedCollectives) -> str:
    what = f"a collective of the model failed in step {step} on rank {dist.get_rank()}"
    reason = f"({first_line(error)})"
    try:
        verdict = run.failed.who_is_missing(run.failed.start_wait(f"step {step}"))
    except StoreUnavailableError as unavailable:
        return f"{what} and {unavailable}{out_of_reach(run.members)} {reason}"
    if verdict.failure is not None:
        return verdict.failure
    if not verdict.missing:
        return f"{what} and on all others {reason}"
    return f"{what}; {name_ranks(verdict.missing)} did not report the failure: check the log there {reason}"
