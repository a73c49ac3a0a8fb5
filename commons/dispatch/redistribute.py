"""Redistribution of rows between ranks to even work, with results sent home.

rank: workloads ─► one gather ─► plan, the same on every rank ─► rows that move ─► exchange ─► batch
rank: results of the rows it computed ─► exchange ─► results of its own rows, in their order

Gradients move in the opposite directions: of results to the ranks that computed them, of rows to their home ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Generic

import numpy as np
import torch
import torch.distributed as dist
from typing_extensions import TypeVar

from commons.checks import as_boolean
from commons.dispatch.exchange import DEFAULT_TIMEOUT, DispatchChannel, Piece, exchange
from commons.dispatch.home import differentiable_leaves, follow_gradients, result_rows
from commons.dispatch.own_rows import AllRows, OwnRows, gather_rows
from commons.dispatch.planning import as_int64_ids, plan_redistribution
from commons.dispatch.trim import Trim, Trimmed, Window, as_trims, trim_rows
from commons.dispatch.widen import join_trimmed
from commons.distributed.errors import capture_error
from commons.perf_model.loads import imbalance
from commons.perf_model.partitioner import as_int64_workloads
from commons.perf_model.partitioner.inputs import as_slack
from commons.perf_model.shuffle_plan import ShufflePlan
from commons.sequence_batch.rows import Rows

B = TypeVar("B", default=Any)
R = TypeVar("R", default=Any)

_CALL = "redistribute_balanced"  # name in messages


@dataclass(frozen=True, eq=False)
class Routes:
    """Moves rows of any kind by a plan, from their home ranks or back."""

    plan: ShufflePlan  # the rank that computes every row
    rank: int  # this rank
    group: dist.ProcessGroup | None  # `group` as the caller passed it
    timeout: float  # seconds after which a missing rank is reported

    @property
    def destination(self) -> np.ndarray:
        """The rank that computes each of this rank's own rows, int64 `(own rows,)`."""
        return self.plan.destination[self.plan.gathered.home == self.rank]

    def out(self, call: str, rows: Rows[R] | None) -> Rows[R] | None:
        """Move this rank's own rows, in their original order, to the ranks that compute them."""
        return self._move(call, rows, self.destination)

    def home(
        self, call: str, rows: Rows[R] | None, options: dict[str, Any] | None = None, error: Exception | None = None
    ) -> Rows[R] | None:
        """Move the rows that this rank computes, in their order here, to their home ranks; None without own rows."""
        home = self.plan.gathered.home[self.plan.rows_for(self.rank)]
        order = np.argsort(np.argsort(self.destination, kind="stable"))
        return self._move(call, rows, home, order, options, error)

    def _move(
        self,
        call: str,
        rows: Rows[R] | None,
        receiver: np.ndarray,
        order: np.ndarray | None = None,
        options: dict[str, Any] | None = None,
        error: Exception | None = None,
    ) -> Rows[R] | None:
        def in_order(pieces: list[Piece | None]) -> Rows[R] | None:
            present = [piece.rows for piece in pieces if piece is not None]
            if not present or order is None:
                return Rows.concat(present) if present else None
            return Rows.concat(present).select(order)

        size = 0 if rows is None else rows.nbytes
        with closing(DispatchChannel(self.group, self.timeout)) as channel:
            moved, *_ = exchange(
                channel, call, options or {}, error, _pieces(rows, receiver), in_order, expected_bytes=size
            )
        return moved


@dataclass(frozen=True, eq=False)
class RedistributedRows(Trimmed, Generic[B]):
    """The rows that one rank computes, its own and those of other ranks."""

    batch: B  # the rows, without padding, in ascending order of `indices`
    # int64 `(rows,)` on the CPU: the global number of each row: real rows of all lower ranks, plus the number on its
    # home rank.
    indices: torch.Tensor
    home: torch.Tensor  # int64 `(rows,)` on the CPU: the home rank of each row
    loads_before: torch.Tensor  # int64 `(ranks,)`: the workload of each rank before the exchange
    loads_after: torch.Tensor  # int64 `(ranks,)`: the workload of each rank after the exchange
    num_moved: int  # number of rows that changed rank, over all ranks
    bytes_sent: int  # bytes that this rank sent
    bytes_received: int  # bytes that this rank received
    _routes: Routes = field(repr=False)
    _windows: Sequence[Window] = ()

    def __repr__(self) -> str:
        moved = int((self.home != self._routes.rank).sum())
        before, after = (1 + imbalance(loads.numpy()) for loads in (self.loads_before, self.loads_after))
        return (
            f"RedistributedRows({len(self.indices)} rows, {moved} of them from other ranks, largest load "
            f"{before:.4g} → {after:.4g} × the mean)"
        )

    def send_home(self, results: R) -> R | None:
        """Send results to the home ranks of their rows, in the rows' original order.

        All ranks of the group call this together. Dense tensors that require grad are differentiable once; a second
        differentiation is torch's error on every rank that had a batch. Their backward is a collective of all ranks, so
        every rank's loss must depend on the returned results, also on a rank that had no rows. `torch.autograd.grad`
        skips this collective on a rank whose batch was None, because no path leads to its inputs: use `backward`, or
        pass a batch of 0 rows with the same graph on that rank.

        Args:
            results: a tensor or any other batch with one row per row of `batch`, such as rewards or features.

        Returns:
            Results of this rank's own real rows. For a rank without rows: a batch of 0 rows if the results require
            grad, else None.

        Raises:
            ValueError: on all ranks: results with another number of rows than the batch, or that cannot be joined;
                results that require grad on some ranks only, or in a jagged tensor.
            TypeError: on all ranks: results that cannot be sent.
            RankMissingError: a rank is missing after the timeout.
        """
        return self.send_home_made_by(lambda: results)

    def send_home_made_by(self, make: Callable[[], R]) -> R | None:
        """`send_home` the results that `make` returns; an error of `make` on any rank is raised on all ranks.

        Args:
            make: returns results with one row per row of `batch`.

        Returns, Raises: as for `send_home`; also the errors of `make`.
        """
        made, error = capture_error(lambda: self._checked(make()))
        rows, numbers = made or (None, [])
        home = self._routes.home("send_home", rows, {"gradients": numbers}, error)
        if rows is None or (home is None and not numbers):
            return None
        home = rows.select([]) if home is None else home
        back = functools.partial(self._routes.out, "backward of send_home")
        return follow_gradients(home, rows, numbers, back).batch

    def _checked(self, results: R) -> tuple[Rows[R], list[int]]:
        rows = result_rows(results, self.indices, "the batch")
        return rows, differentiable_leaves(rows)


def redistribute_balanced(
    batch: B | None,
    workloads: Any | None,
    *,
    group: dist.ProcessGroup | None = None,
    equal_size: bool = True,
    groups: Any = None,
    slack: float = 0.01,
    trim: Trim | Sequence[Trim] | None = None,
    timeout: float = DEFAULT_TIMEOUT,
) -> RedistributedRows[B]:
    """Move rows between ranks so that all ranks have equal work; only rows that change rank are sent.

    All ranks of the group call this together, each with its own rows, such as the rollouts that it generated. Ranks may
    have different numbers of rows, or none. Stated padding of a batch is dropped. Gradients of dense tensors that
    require grad move back to the home ranks of the rows; see `RedistributedRows.send_home` for the conditions.

    Args:
        batch: this rank's rows, anything with rows (`commons.sequence_batch.rows`); None for no rows.
        workloads: non-negative integers `(rows,)`; None if `batch` is None.
        group: the ranks; None for megatron-core's data-parallel group if parallel_state is initialised, else all ranks.
        equal_size: afterwards, numbers of rows per rank differ by at most one; with `groups`, which must then have
            equal sizes, numbers of groups per rank differ by at most one.
        groups: integers or strings `(rows,)`: rows with equal ids go to one rank, even from different ranks.
        slack: fraction of the best load that may be given up to keep rows on their ranks.
        trim: the fields that are padded sequences: their widths may differ between ranks. On each rank the result is as
            wide as its longest row, filled with the field's own padding value (`Trim.fill`).
        timeout: seconds after which a missing rank is reported.

    Returns:
        The rows that this rank computes, at least one.

    Raises:
        ValueError: on all ranks: fields of different numbers of rows, wrong workloads, no rows or fewer rows (or
            groups) than ranks, batches that differ between ranks, sequences to widen with several padding values, a
            field that requires grad and is jagged or trimmed, or options that differ between ranks.
        TypeError: on all ranks: a batch that cannot be sent unchanged, for example with masked arrays or subclasses of
            tensors.
        KeyError: on all ranks: a field to trim that the batch does not have, or a class that a rank has not imported.
        RankMissingError: a rank is missing after the timeout.
    """

    def columns_of(rows: Rows[Any]) -> dict[str, np.ndarray | None]:
        if workloads is None:
            raise ValueError(f"workloads is None, the batch has {rows.count} rows; one per row is needed: pass them")
        ids = None if groups is None else as_int64_ids(groups, rows.count)
        return {"workloads": as_int64_workloads(workloads, num_rows=rows.count), "groups": ids}

    with closing(DispatchChannel(group, timeout)) as channel:
        own, options, error = None, None, None
        try:
            trims = as_trims(trim, one_sided=True)
            equal_size = as_boolean(equal_size, "equal_size")
            options = {"equal_size": equal_size, "slack": as_slack(slack), "trim": [repr(each) for each in trims]}
            own = OwnRows.of(batch, {"workloads": workloads, "groups": groups}, columns_of, trims)
        except Exception as caught:
            error = caught
        num_own = 0 if own is None else own.count
        rows_per_rank = np.array(channel.begin(_CALL, options, error, num_own))
        assert own is not None  # noqa: S101  begin raised the error
        gathered = gather_rows(channel, own, rows_per_rank)
        columns, no_rows = gathered.columns, np.empty(0, dtype=np.int64)
        plan = plan_redistribution(
            no_rows if columns["workloads"] is None else columns["workloads"],
            rows_per_rank,
            equal_size=equal_size,
            groups=columns["groups"],
            slack=slack,
        )
        return carry_out(channel, _CALL, own, Routes(plan, channel.rank, group, timeout), gathered)


def carry_out(
    channel: DispatchChannel,
    call: str,
    own: OwnRows,
    routes: Routes,
    gathered: AllRows,
) -> RedistributedRows[Any]:
    """Move the rows as planned, at least one to every rank; all ranks call this together."""
    plan, destination = routes.plan, routes.destination
    untrimmed = _pieces(own.rows, destination)

    def piece_for(rank: int) -> Piece | None:
        piece = untrimmed(rank)
        if piece is None or not own.trims:
            return piece
        rows, windows = trim_rows(piece.rows, own.trims)
        return Piece(rows, extra=windows)

    def join(pieces: list[Piece | None]) -> tuple[Rows[Any], list[Window]]:
        present = [piece for piece in pieces if piece is not None]
        cut = [piece.extra or [] for piece in present]
        joined, windows = join_trimmed([piece.rows for piece in present], cut, own.trims, gathered.padding)
        return joined.with_own_of(own.rows), windows

    share_sent = float(np.mean(destination != channel.rank)) if len(destination) else 0.0
    size = 0 if own.rows is None else int(own.rows.nbytes * share_sent)
    # By another plan, rows would meet the indices and results of other rows.
    options = {"plans": {"digest": plan.digest()}}
    result, bytes_sent, bytes_received = exchange(channel, call, options, None, piece_for, join, expected_bytes=size)
    assert result is not None  # noqa: S101  every rank has pieces, if only empty ones
    rows, windows = result
    back = functools.partial(routes.home, f"backward of {call}")
    rows, indices = follow_gradients(rows, own.rows, gathered.differentiable, back), plan.rows_for(channel.rank)
    return RedistributedRows(
        batch=rows.batch,
        indices=torch.from_numpy(indices),
        home=torch.from_numpy(plan.gathered.home[indices]),
        loads_before=torch.from_numpy(plan.loads_before),
        loads_after=torch.from_numpy(plan.loads_after),
        num_moved=plan.num_moved,
        bytes_sent=bytes_sent,
        bytes_received=bytes_received,
        _routes=routes,
        _windows=windows,
    )


def _pieces(rows: Rows[Any] | None, receiver: np.ndarray) -> Callable[[int], Piece | None]:
    """The `pieces` for `exchange`: the rows for each rank, by their `receiver`, int64 `(rows,)`."""

    def piece_for(rank: int) -> Piece | None:
        indices = np.flatnonzero(receiver == rank)
        return Piece(rows.select(indices)) if rows is not None and len(indices) else None

    return piece_for
