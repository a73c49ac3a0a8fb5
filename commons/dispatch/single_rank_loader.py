"""SingleRankLoader: one rank runs the dataloader for all.

The source reads a global batch, plans which rows go where and sends every rank its share. All ranks thus make the same
number of steps, the end of the data is the same for all, and an error of the loader is raised on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from commons.dispatch.exchange import DEFAULT_TIMEOUT, DispatchChannel
from commons.dispatch.planning import Split, require_enough, split_in_turn, split_rows
from commons.dispatch.scatter import BalancedShare, Source, check_options, scatter_rows
from commons.dispatch.trim import Trim
from commons.distributed.errors import attempt
from commons.distributed.process_group import resolve_process_group
from commons.sequence_batch.rows import Rows

_CALL = "SingleRankLoader"
_REMEDY = "set drop_last, use a larger batch, or load batches that can state padding, as BaseBatch does"


class SingleRankLoader(Iterable[Any]):
    """Batches of this rank out of the global batches that one rank loads.

    All ranks of the group construct it together, on the main thread, and iterate over it together. Where batches state
    padding (BaseBatch), shares are padded to one size and a last batch of few rows leaves ranks with padding alone;
    other batches are split into shares that differ by at most one row, and must have a row for every rank.

    Args:
        loader: on the source, an iterable of global batches, such as a DataLoader whose batch size is that of a rank
            times the number of ranks. Other ranks may pass None; what they pass is never read, but answers for
            `len()`, `dataset` and `sampler`.
        get_workloads: on the source, a function of a batch that gives non-negative integers `(rows,)`; rows are then
            split evenly. None gives row i to rank `i mod ranks`.
        src: the source, as a rank of the group.
        group: the ranks; default megatron-core's data-parallel group where parallel_state is initialised, else all.
        equal_size: with workloads, ranks' numbers of rows differ by at most one.
        trim: which fields are padded sequences: shares become as wide as their own longest row.
        pin_memory: put shares into pinned host memory.
        timeout: seconds after which a rank that does not take part is reported; the source's loader has to be faster.

    Raises:
        ValueError: on all ranks: no loader on the source, or ranks with different arguments.
        TypeError: on all ranks: a trim that is none.
    """

    def __init__(
        self,
        loader: Iterable[Any] | None,
        get_workloads: Callable[[Any], Any] | None = None,
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
        self._pin_memory = pin_memory
        self._channel = DispatchChannel(resolve_process_group(group), timeout)
        self._batches = 0
        self._resume: dict[str, Any] | None = None
        self._options, error, self._trims = check_options(
            {"src": src, "equal_size": equal_size}, trim, self._channel.world_size
        )
        self._source = Source(src, group, timeout)
        if error is None and loader is None and self.is_source:
            error = ValueError(
                "this rank is the source and passes no loader; the source loads for all ranks: pass it there, or name "
                "another src"
            )
        try:
            self._channel.begin(_CALL, self._options, error)
        except BaseException:
            self.close()  # as ranks do that have made another call: all of them have the same groups free
            raise

    @property
    def is_source(self) -> bool:
        """Whether this rank loads for all."""
        return self._channel.rank == self._source.rank

    @property
    def dataset(self) -> Any:
        """The data set of this rank's loader."""
        return self._own_loader().dataset

    @property
    def sampler(self) -> Any:
        """The sampler of this rank's loader; the source's decides what is loaded."""
        return self._own_loader().sampler

    def __len__(self) -> int:
        return len(self._own_loader())

    def __iter__(self) -> Iterator[Any]:
        return (share.batch for share in self.shares())

    def shares(self) -> Iterator[BalancedShare[Any]]:
        """The same batches with what their results need to find back: `BalancedShare.gather_back`."""
        state, self._resume = self._resume, None
        self._batches = 0 if state is None else state["batches"]
        # Not with the first batch: a DataLoader draws its seed here, as it would if every rank had its own. An error is
        # raised on all ranks with the first batch.
        source, error = attempt(lambda: self._open(state)) if self.is_source else (None, None)
        return self._shares_of(source, error)

    def state_dict(self) -> dict[str, Any]:
        """How far the iteration is: batches handed out, and on the source the state of a loader that has one.

        A loader has one if it has `state_dict`, as torchdata's StatefulDataLoader. No communication; the state of the
        source is enough to go on.
        """
        state = getattr(self.loader, "state_dict", None) if self.is_source else None
        return {"batches": self._batches, "loader": None if state is None else state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iteration go on where `state` was taken.

        A loader without a state of its own reads the batches before once more and leaves them out; it has to give them
        in the same order: choose the sampler's epoch first.

        Args:
            state: of `state_dict` on this rank, or on the source.

        Raises:
            ValueError: something else.
        """
        if set(state) != {"batches", "loader"} or not isinstance(state["batches"], int):
            raise ValueError(
                f"the state has the entries {sorted(state)}; it is what state_dict returned, with 'batches' and "
                "'loader': load that"
            )
        self._resume, self._batches = state, state["batches"]

    def close(self) -> None:
        """Give the process groups back; the loader cannot be used afterwards."""
        self._channel.close()

    def _own_loader(self) -> Any:
        if self.loader is None:
            raise TypeError(
                f"rank {self._channel.rank} has no loader to ask; it can be asked where one was passed: pass the "
                "loader on all ranks, it is read on the source alone"
            )
        return self.loader

    def _shares_of(self, source: Iterator[Any] | None, error: Exception | None) -> Iterator[BalancedShare[Any]]:
        """One pass over the data of the source, on all ranks together."""
        while True:
            share = scatter_rows(
                self._channel, _CALL, self._options, self._source, self._trims, lambda: self._read(source), error
            )
            if share is None:
                self._batches = 0
                return
            self._batches += 1
            if self._pin_memory:
                share = replace(share, batch=Rows.of(share.batch).pin().batch)
            yield share

    def _open(self, state: dict[str, Any] | None) -> Iterator[Any]:
        """The source's data from where `state` was taken."""
        loader: Any = self.loader
        if state is not None and state["loader"] is not None and hasattr(loader, "load_state_dict"):
            loader.load_state_dict(state["loader"])
            return iter(loader)
        source = iter(loader)
        skipped = 0 if state is None else state["batches"]
        for number in range(skipped):
            if next(source, None) is None:
                raise ValueError(
                    f"the state is {skipped} batches into the data, the loader ends after {number}; it is the state of "
                    "other data or of another batch size: load the state that belongs to them"
                )
        return source

    def _read(self, source: Iterator[Any] | None) -> tuple[Rows[Any], Split] | None:
        """The source's next batch and who gets which rows; None at the end, and on the other ranks."""
        batch = None if source is None else next(source, None)
        if batch is None:
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
