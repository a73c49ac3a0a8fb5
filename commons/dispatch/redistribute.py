"""Rows that lie unevenly on the ranks, moved to even work, and their results sent home.

rank: workloads ─► one gather ─► plan, the same on every rank ─► rows that move ─► exchange ─► batch
rank: results of the rows it computed ─► exchange ─► results of its own rows, in their order
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from commons.dispatch.channel import DEFAULT_TIMEOUT, DispatchChannel
from commons.dispatch.exchange import Piece, exchange
from commons.dispatch.planning import as_int64_ids, plan_redistribution
from commons.dispatch.trim import Trim, Trimmed, Window, as_trims, find_windows, join_trimmed, trim_rows
from commons.distributed.control import open_channel
from commons.distributed.errors import attempt
from commons.perf_model.loads import imbalance
from commons.perf_model.partitioner import as_int64_workloads
from commons.perf_model.partitioner.inputs import as_slack
from commons.perf_model.shuffle_plan import ShufflePlan
from commons.sequence_batch.plain_values import differences
from commons.sequence_batch.rows import Rows

B = TypeVar("B")
R = TypeVar("R")


@dataclass(frozen=True, eq=False)
class RedistributedRows(Trimmed, Generic[B]):
    """The rows that one rank computes, some of its own and some of others.

    Attributes:
        batch: the rows, without padding, in ascending order of `indices`.
        indices: int64 `(rows,)` on the CPU: the global number of each row: real rows of the ranks before, plus the row.
        home: int64 `(rows,)` on the CPU: the rank that each row comes from.
        loads_before: int64 `(ranks,)`: the workload of each rank as the rows lay.
        loads_after: int64 `(ranks,)`: the workload of each rank now.
        num_moved: rows of all ranks that changed rank.
        bytes_sent: what this rank sent.
        bytes_received: what it received.
    """

    batch: B
    indices: torch.Tensor
    home: torch.Tensor
    loads_before: torch.Tensor
    loads_after: torch.Tensor
    num_moved: int
    bytes_sent: int
    bytes_received: int
    _plan: ShufflePlan = field(repr=False)
    _rank: int
    _group: dist.ProcessGroup | None
    _timeout: float
    _windows: Sequence[Window] = ()

    def __repr__(self) -> str:
        moved = int((self.home != self._rank).sum())
        before, after = (1 + imbalance(loads.numpy()) for loads in (self.loads_before, self.loads_after))
        return (
            f"RedistributedRows({len(self.indices)} rows, {moved} of them from other ranks, largest load "
            f"{before:.4g} → {after:.4g} × the mean)"
        )

    def send_home(self, results: R) -> R | None:
        """Bring results to the ranks that the rows come from, in the order in which these had them.

        All ranks of the group call this together.

        Args:
            results: a tensor or any other batch with a row per row of `batch`, such as rewards.

        Returns:
            Results of this rank's own real rows; None if it had no rows.

        Raises:
            ValueError: on all ranks: results with another number of rows than the batch, or that cannot be joined.
            TypeError: on all ranks: results that cannot be sent.
            RankMissingError: a rank did not take part in time.
        """
        with open_channel(self._group, self._timeout, DispatchChannel) as channel:
            rows, error = attempt(lambda: self._checked(results))

            def in_order(pieces: list[Piece | None]) -> R | None:
                present = [piece.rows for piece in pieces if piece is not None]
                if not present:
                    return None
                computed_by = self._plan.destination[self._plan.gathered.home == self._rank]
                return Rows.concat(present).select(np.argsort(np.argsort(computed_by, kind="stable"))).batch

            exchanged = exchange(
                channel,
                "send_home",
                {},
                error,
                lambda rank: _piece_of(rows, np.flatnonzero(self.home.numpy() == rank)),
                in_order,
                expected_bytes=0 if rows is None else rows.nbytes,
            )
            assert exchanged is not None  # noqa: S101  every rank has results
            return exchanged.result

    def _checked(self, results: R) -> Rows[R]:
        rows = Rows.of(results)
        if rows.count != len(self.indices):
            raise ValueError(
                f"results have {rows.count} rows, the batch has {len(self.indices)}; they have a row per row of the "
                "batch: keep all rows"
            )
        return rows


@dataclass(frozen=True, eq=False)
class _OwnRows:
    """What one rank brings.

    Attributes:
        rows: its real rows; None for none at all.
        workloads: int64 `(rows,)`.
        group_ids: int64 `(rows,)`; None for no groups.
        windows: what each trim would keep of the whole.
        schema: what must be equal on all ranks; None without a batch.
    """

    rows: Rows[Any] | None
    workloads: np.ndarray
    group_ids: np.ndarray | None = None
    windows: Sequence[Window] = ()
    schema: dict[str, Any] | None = None


def redistribute_balanced(
    batch: Any | None,
    workloads: Any | None,
    *,
    group: dist.ProcessGroup | None = None,
    equal_size: bool = True,
    group_ids: Any = None,
    slack: float = 0.01,
    trim: Trim | Sequence[Trim] | None = None,
    timeout: float = DEFAULT_TIMEOUT,
) -> RedistributedRows[Any]:
    """Move rows between ranks so that all carry equal work; rows that stay do not travel.

    All ranks of the group call this together, each with the rows that it has, such as the rollouts it has generated.
    Ranks may bring different numbers of rows, none included. Padding that a batch states is left out.

    Args:
        batch: this rank's rows, anything with rows (`commons.sequence_batch.rows`); None for none.
        workloads: non-negative integers `(rows,)`; None with a batch of None.
        group: the ranks; default megatron-core's data-parallel group where parallel_state is initialised, else all.
        equal_size: numbers of rows differ by at most one afterwards; with `group_ids`, numbers of groups do.
        group_ids: integers or strings `(rows,)`: rows with one id come together, even from different ranks.
        slack: fraction of the best load that may be given up to keep rows where they are.
        trim: which fields are padded sequences: they may differ in width between ranks, and become as wide as the
            longest row that a rank ends with.
        timeout: seconds after which a rank that does not take part is reported.

    Returns:
        The rows that this rank computes, at least one.

    Raises:
        ValueError: on all ranks: fields of different numbers of rows, wrong workloads, no rows at all or fewer (or
            fewer groups) than ranks, batches that differ between ranks, or ranks that pass different options.
        TypeError: on all ranks: a batch that cannot be sent.
        KeyError: on all ranks: a field to trim that is not there, or a class that a rank has not imported.
        RankMissingError: a rank did not take part in time.
    """
    with open_channel(group, timeout, DispatchChannel) as channel:
        own, options, error = None, None, None
        trims: tuple[Trim, ...] = ()
        try:
            trims = _one_sided(as_trims(trim))
            shown = [repr(each) for each in trims]
            options = {"equal_size": equal_size, "slack": as_slack(slack), "trim": shown}
            own = _own_rows(batch, workloads, group_ids, trims)
        except Exception as caught:
            error = caught
        num_own = 0 if own is None else len(own.workloads)
        rows_per_rank = np.array(channel.begin("redistribute_balanced", options, error, num_own)[0])
        assert own is not None  # noqa: S101  begin raised the error
        all_workloads, all_ids, widths = _gather_rows(channel, own, rows_per_rank, len(trims))
        plan = plan_redistribution(all_workloads, rows_per_rank, equal_size=equal_size, group_ids=all_ids, slack=slack)
        return _carry_out(channel, own, plan, trims, widths, group, timeout)


def _one_sided(trims: tuple[Trim, ...]) -> tuple[Trim, ...]:
    for trim in trims:
        if trim.side == "both":
            raise ValueError(
                f"sequences of {trim.name!r} are padded on both sides; rows of different ranks line up at one side: "
                "trim 'right' or 'left'"
            )
    return trims


def _own_rows(batch: Any, workloads: Any, group_ids: Any, trims: tuple[Trim, ...]) -> _OwnRows:
    if batch is None:
        if workloads is not None and len(workloads):
            raise ValueError(
                f"batch is None and there are {len(workloads)} workloads; a rank without rows has neither: pass the "
                "batch, or None for both"
            )
        return _OwnRows(None, np.empty(0, dtype=np.int64))
    rows = Rows.of(batch)
    if workloads is None:
        raise ValueError(f"workloads is None, the batch has {rows.count} rows; one per row is needed: pass them")
    weights = as_int64_workloads(workloads, num_rows=rows.count)[: rows.real]
    ids = None if group_ids is None else as_int64_ids(group_ids, rows.count)[: rows.real]
    windows = find_windows(rows, trims)
    schema = rows.schema(varying=[path for window in windows for path in window.fields])
    return _OwnRows(rows if rows.real == rows.count else rows.select(range(rows.real)), weights, ids, windows, schema)


def _gather_rows(
    channel: DispatchChannel, own: _OwnRows, rows_per_rank: np.ndarray, num_trims: int
) -> tuple[np.ndarray, np.ndarray | None, list[int]]:
    """Workloads and group ids of the rows of all ranks, and for each trim the widest sequences of any rank."""
    rows, most = len(own.workloads), int(rows_per_rank.max())
    head = np.zeros(2 + num_trims, dtype=np.int64)
    head[1] = 2 if not rows else int(own.group_ids is not None)  # 2: neither with nor without
    if own.schema is not None:
        text = json.dumps(own.schema, sort_keys=True).encode()
        head[0] = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1 | 1
        head[2:] = [window.width for window in own.windows]
    table = np.zeros((2, most), dtype=np.int64)
    table[0, :rows] = own.workloads
    if own.group_ids is not None:
        table[1, :rows] = own.group_ids
    gathered = channel.gather(np.concatenate([head, table.ravel()]), channel.step, "gather of workloads")
    digests, has_ids = gathered[:, 0], gathered[:, 1]
    if len(np.unique(digests[digests > 0])) > 1:
        _raise_for_difference([json.loads(text) for text in channel.gather_text(json.dumps(own.schema), channel.step)])
    if (has_ids == 1).any() and (has_ids == 0).any():
        raise ValueError(
            f"group_ids are given on rank {int(np.argmax(has_ids == 1))} and not on rank "
            f"{int(np.argmax(has_ids == 0))}; groups are formed over all ranks: pass them on all, or on none"
        )
    tables = gathered[:, len(head) :].reshape(channel.world_size, 2, most)
    is_row = np.arange(most) < rows_per_rank[:, None]
    group_ids = tables[:, 1][is_row] if (has_ids == 1).any() else None
    return tables[:, 0][is_row], group_ids, gathered[:, 2 : len(head)].max(axis=0).tolist()


def _carry_out(
    channel: DispatchChannel,
    own: _OwnRows,
    plan: ShufflePlan,
    trims: tuple[Trim, ...],
    widths: Sequence[int],
    group: dist.ProcessGroup | None,
    timeout: float,
) -> RedistributedRows[Any]:
    home = plan.gathered.home
    destination_of_own = plan.destination[home == channel.rank]

    def piece_for(rank: int) -> Piece | None:
        piece = _piece_of(own.rows, np.flatnonzero(destination_of_own == rank))
        if piece is None or not trims:
            return piece
        rows, windows = trim_rows(piece.rows, trims)
        return Piece(rows, extra=[[window.start, window.stop, window.width, window.fields] for window in windows])

    def join(pieces: list[Piece | None]) -> tuple[Rows[Any], list[Window]]:
        present = [piece for piece in pieces if piece is not None]
        cut = [[Window(trim.name, *each) for trim, each in zip(trims, piece.extra or ())] for piece in present]
        return join_trimmed([piece.rows for piece in present], cut, trims, widths)

    sent = int((destination_of_own != channel.rank).sum())
    exchanged = exchange(
        channel,
        "redistribute_balanced",
        {},
        None,
        piece_for,
        join,
        expected_bytes=own.rows.nbytes * sent // own.rows.count if own.rows is not None and sent else 0,
    )
    assert exchanged is not None  # noqa: S101  every rank has pieces, if only empty ones
    rows, windows = exchanged.result
    indices = plan.rows_for(channel.rank)
    return RedistributedRows(
        batch=rows.batch,
        indices=torch.from_numpy(indices),
        home=torch.from_numpy(home[indices]),
        loads_before=torch.from_numpy(plan.loads_before),
        loads_after=torch.from_numpy(plan.loads_after),
        num_moved=plan.num_moved,
        bytes_sent=exchanged.bytes_sent,
        bytes_received=exchanged.bytes_received,
        _plan=plan,
        _rank=channel.rank,
        _group=group,
        _timeout=timeout,
        _windows=windows,
    )


def _piece_of(rows: Rows[Any] | None, indices: np.ndarray) -> Piece | None:
    return Piece(rows.select(indices)) if rows is not None and len(indices) else None


def _raise_for_difference(schemas: list[dict[str, Any] | None]) -> None:
    """Raise ValueError for ranks whose batches differ; None stands for a rank without a batch."""
    (first_rank, first), *others = ((rank, schema) for rank, schema in enumerate(schemas) if schema is not None)
    for rank, other in others:
        different = differences(first, other)
        if different:
            raise ValueError(
                f"the batches of ranks {first_rank} and {rank} differ: {'; '.join(different[:3])}; rows can be mixed "
                "where type, keys, dtypes, shapes of rows and metadata are the same on all ranks: make them equal, or "
                "name what differs in width in Trim.fields"
            )
