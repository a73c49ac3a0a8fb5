"""SingleRankLoader: one rank runs the dataloader for all ranks.

The source reads a global batch, plans the split and sends every rank its share. So all ranks have the same number of
steps, their data end in the same step, and an error of the loader is raised on every rank.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import TypeVar

from commons.checks import as_boolean
from commons.dispatch.exchange import DEFAULT_TIMEOUT, DispatchChannel
from commons.dispatch.planning import Split, require_enough, split_in_turn, split_rows
from commons.dispatch.scatter import BalancedShare, Source, check_options, scatter_rows
from commons.dispatch.trim import Trim
from commons.distributed.errors import capture_error
from commons.distributed.process_group import resolve_process_group
from commons.sequence_batch.rows import Rows

B = TypeVar("B", default=Any)
_CALL = "SingleRankLoader"
_END = object()
_REMEDY = "set drop_last, use a larger batch, or load batches that can state padding, as BaseBatch does"


class SingleRankLoader(Iterable[B]):
    """An iterable of this rank's shares of the global batches that one rank loads.

    All ranks of the group construct it together, on the main thread, and iterate over it together. If batches state
    padding (BaseBatch), shares are padded to one size, and in a last batch with few rows some ranks have only padding.
    Other batches are split into shares that differ by at most one row, and must have a row for every rank. An error of
    the loader or in a batch is raised on all ranks; the next call continues with the loader's next batch.

    Args:
        loader: on the source, an iterable of global batches, such as a DataLoader whose batch size is that of a rank
            times the number of ranks. Other ranks may pass None, or a loader that is never read but gives `len()`,
            `dataset` and `sampler` on that rank.
        get_workloads: on the source, a function that returns the workloads of a batch, non-negative integers `(rows,)`,
            to split rows evenly; None to assign row i to rank `i mod ranks`.
        src: the source, as a rank of the group.
        group: the ranks; None for megatron-core's data-parallel group if parallel_state is initialised, else all ranks.
        equal_size: with workloads, numbers of rows per rank differ by at most one.
        trim: the fields that are padded sequences: each share is as wide as its own longest row.
        pin_memory: put shares into pinned host memory; without effect on a machine without a GPU.
        timeout: seconds after which a missing rank is reported; the source must load a batch in less time.

    Raises:
        ValueError: on all ranks: no loader on the source, or arguments that differ between ranks.
        TypeError: on all ranks: a `trim` that is not a Trim.
    """

    def __init__(
        self,
        loader: Iterable[B] | None,
        get_workloads: Callable[[B], Any] | None = None,
        *,
        src: int = 0,
        group: dist.ProcessGroup | None = None,
        equal_size: bool = True,
        trim: Trim | list[Trim] | None = None,
        pin_memory: bool = False,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> None:
        self.loader = loader
        self._get_workloads = get_workloads
        self._equal_size = equal_size
        self._pin_memory = pin_memory and torch.cuda.is_available()  # torch raises an error without a GPU
        self._channel = DispatchChannel(resolve_process_group(group), timeout)
        # Ranks close the loader at other times, or let it be garbage-collected without close().
        self._when_collected = weakref.finalize(self, self._channel.close, ordered=False)
        self._when_collected.atexit = False
        self._batches = 0
        self._closed = False
        self._resume: dict[str, Any] | None = None
        self._source = Source(src, group, timeout)
        self._options = {"src": self._source.rank, "equal_size": equal_size}

        def check() -> tuple[dict[str, Any], tuple[Trim, ...]]:
            as_boolean(pin_memory, "pin_memory")
            checked = check_options(self._options, trim, self._channel.world_size)
            if loader is None and self.is_source:
                raise ValueError(
                    "this rank is the source and passes no loader; the source loads for all ranks: pass it there, or "
                    "name another src"
                )
            return checked

        checked, error = capture_error(check)
        self._trims = () if checked is None else checked[1]  # a later change of the caller's list has no effect
        try:
            self._channel.begin(_CALL, None if checked is None else checked[0], error)
        except BaseException:
            self._channel.close()  # so that all ranks free their groups, also ranks that made another call
            raise

    @property
    def is_source(self) -> bool:
        """Whether this rank loads for all ranks."""
        return self._channel.rank == self._source.rank

    @property
    def dataset(self) -> Any:
        """The data set of this rank's loader."""
        return self._own_loader().dataset

    @property
    def sampler(self) -> Any:
        """The sampler of this rank's loader; only the source's sampler is used."""
        return self._own_loader().sampler

    def __len__(self) -> int:
        return len(self._own_loader())

    def __iter__(self) -> Iterator[B]:
        return map(operator.attrgetter("batch"), self.shares())

    def shares(self) -> Iterator[BalancedShare[B]]:
        """Iterate over the shares themselves, which can gather results (`BalancedShare.gather_back`)."""
        state, self._resume = self._resume, None
        self._batches = 0 if state is None else state["batches"]
        # Open the loader here and not with the first batch, so that a DataLoader draws its seed at the same point as
        # without a SingleRankLoader. An error is raised on all ranks with the first batch.
        source, error = capture_error(lambda: self._open(state)) if self.is_source else (None, None)
        # Not a generator, which would end with the first error.
        return iter(lambda: self._next_share(source, error), None)

    def state_dict(self) -> dict[str, Any]:
        """The state of the iteration: batches that were returned or raised an error, and the source's loader's state.

        A loader has a state if it has `state_dict`, like torchdata's StatefulDataLoader. No communication; the source's
        state is enough to resume on all ranks.
        """
        if self._resume is not None:  # the loader gets it with the next iteration
            return dict(self._resume)
        state = getattr(self.loader, "state_dict", None) if self.is_source else None
        return {"batches": self._batches, "loader": None if state is None else state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume the next iteration from `state`.

        With a loader that has no state, the earlier batches are read again and skipped. They must come in the same
        order: set the sampler's epoch first.

        Args:
            state: a result of `state_dict` on this rank, or on the source.

        Raises:
            ValueError: not a result of `state_dict`.
        """
        if set(state) != {"batches", "loader"} or not isinstance(state["batches"], int):
            raise ValueError(
                f"the state has the entries {sorted(state)}; a state has 'batches' and 'loader': load the result of "
                "state_dict"
            )
        self._resume, self._batches = state, state["batches"]

    def close(self) -> None:
        """Release the process groups; the loader cannot be used afterwards."""
        self._closed = True
        self._when_collected()

    def _own_loader(self) -> Any:
        if self.loader is None:
            raise TypeError(
                f"rank {self._channel.members[self._channel.rank]} has no loader; len(), dataset and sampler need one: "
                "pass the loader on all ranks, only the source reads it"
            )
        return self.loader

    def _next_share(self, source: Iterator[Any] | None, error: Exception | None) -> BalancedShare[Any] | None:
        """The share of the source's next batch, on all ranks together; None at the end of the data."""
        if self._closed:  # without the groups, the other ranks' data would seem to end
            raise RuntimeError("the SingleRankLoader is closed; it cannot be read again: make a new one")
        try:
            share = scatter_rows(
                self._channel, _CALL, self._options, self._source, self._trims, lambda: self._read(source, error)
            )
        finally:  # also for a batch with an error, which a resumed iteration skips too; not if no batch could be read
            self._batches += error is None
        if share is None:
            self._batches = 0
        elif self._pin_memory:
            share = replace(share, batch=Rows.of(share.batch).pin().batch)
        return share

    def _open(self, state: dict[str, Any] | None) -> Iterator[Any]:
        """Iterate over the source's data from `state` on."""
        loader: Any = self.loader
        if state is not None and state["loader"] is not None and hasattr(loader, "load_state_dict"):
            loader.load_state_dict(state["loader"])
            return iter(loader)
        source, failed = iter(loader), None
        skipped = 0 if state is None else state["batches"]
        for number in range(skipped):
            batch, error = capture_error(lambda: next(source, _END))
            failed = error or failed  # not raised again, unless the loader, as a generator, ends with it
            if batch is _END:
                raise failed or ValueError(
                    f"the state is {skipped} batches into the data, the loader ends after {number}; the state belongs "
                    "to other data or to another batch size: load the state of this loader"
                )
        return source

    def _read(self, source: Iterator[Any] | None, error: Exception | None) -> tuple[Rows[Any], Split] | None:
        """The source's next batch and its split; None at the end of the data, and on the other ranks."""
        if error is not None:
            raise error
        batch: Any = _END if source is None else next(source, _END)
        if batch is _END:
            return None
        rows = Rows.of(batch)
        num_ranks, pads = self._channel.world_size, rows.states_padding
        require_enough(num_ranks, rows.real, "rows", pads, _REMEDY)
        if self._get_workloads is None:
            return rows, split_in_turn(rows, num_ranks, pads)
        workloads = self._get_workloads(batch)
        if isinstance(workloads, torch.Tensor):
            workloads = workloads.cpu()
        return rows, split_rows(rows, workloads, num_ranks, equal_size=self._equal_size, pad=pads)
