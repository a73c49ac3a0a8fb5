"""Rows that lie unevenly on the ranks, moved to even work, and their results sent home.

rank: workloads ─► one gather ─► plan, the same on every rank ─► rows that move ─► one all-to-all ─► batch
rank: results of the rows it computed ─► one all-to-all ─► results of its own rows, in their order
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from commons.dispatch.channel import DEFAULT_TIMEOUT, EXCHANGE, DispatchChannel
from commons.dispatch.moves import Moves, as_int64_ids, plan_moves
from commons.dispatch.structure import describe_structure, raise_for_difference, structure_digest
from commons.dispatch.trim import (
    Trim,
    Window,
    as_path,
    as_trims,
    trim_batch,
    trim_from_json,
    trim_to_json,
    untrim,
    widen_to_common,
    width_of,
    with_stated_fields,
)
from commons.distributed.control import open_channel
from commons.distributed.stats import imbalance
from commons.perf_model.partitioner import as_int64_workloads
from commons.perf_model.partitioner.inputs import as_slack
from commons.sequence_batch.batch_tree import path_name
from commons.sequence_batch.rows import Rows, concat_rows, count_rows, select_rows
from commons.sequence_batch.wire import MessageBuffer, decode, encode

B = TypeVar("B")
R = TypeVar("R")

# Where the bytes of a rank are: on the host, on its device, or it has none to send.
_ON_HOST, _ON_DEVICE, _NOTHING = 0, 1, 2


@dataclass(frozen=True, eq=False)
class RedistributedRows(Generic[B]):
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
    _moves: Moves = field(repr=False)
    _rank: int
    _group: dist.ProcessGroup | None
    _timeout: float
    _windows: Sequence[tuple[str, Window]] = ()

    def __repr__(self) -> str:
        moved = int((self.home != self._rank).sum())
        before, after = (1 + imbalance(loads.numpy()) for loads in (self.loads_before, self.loads_after))
        return (
            f"RedistributedRows({len(self.indices)} rows, {moved} of them from other ranks, largest load "
            f"{before:.4g} → {after:.4g} × the mean)"
        )

    def untrim(self, values: R, mask: Any = None, fill: float = 0) -> R:
        """Results per token as wide as the widest sequences of any rank were, so that those of all ranks can be joined.

        Args:
            values: a tensor or array `(rows, width of the batch, ...)`, or a batch of these.
            mask: the mask or lengths of the trim that cut them; not needed where there was one trim.
            fill: the value of the columns that come back.

        Raises:
            KeyError: no trim by that field.
            ValueError: values of another width.
        """
        for name, window in self._windows:
            if path_name(as_path(mask)) == name or (mask is None and len(self._windows) == 1):
                return untrim(values, window, fill)
        names = [name for name, _ in self._windows]
        raise KeyError(
            f"mask is {mask!r}, the batch was trimmed by {names}; results come back as wide: name one of them"
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
            pieces: list[Any] = [None] * channel.world_size
            error: Exception | None = None
            try:
                rows = count_rows(results)
                if rows != len(self.indices):
                    raise ValueError(
                        f"results have {rows} rows, the batch has {len(self.indices)}; they have a row per row of the "
                        "batch: keep all rows"
                    )
                for rank in range(channel.world_size):
                    mine = torch.nonzero(self.home == rank)[:, 0]
                    pieces[rank] = select_rows(results, mine) if mine.numel() else None
            except Exception as caught:
                error = caught
            pieces, _, _ = _exchange_pieces(channel, "send_home", pieces, error)
            joined = None
            try:
                present = [piece for piece in pieces if piece is not None]
                if present:
                    own = self._moves.destination[self._moves.home == self._rank]
                    joined = select_rows(concat_rows(present), np.argsort(np.argsort(own, kind="stable")))
            except Exception as caught:
                error = caught
            channel.confirm(error)
            return joined


@dataclass(frozen=True, eq=False)
class _OwnRows:
    """What one rank brings.

    Attributes:
        batch: its real rows; None for none at all.
        workloads: int64 `(rows,)`.
        group_ids: int64 `(rows,)`; None for no groups.
        trims: with the fields that they cut.
        structure: what must be equal on all ranks; None without a batch.
    """

    batch: Any | None
    workloads: np.ndarray
    group_ids: np.ndarray | None
    trims: tuple[Trim, ...]
    structure: dict[str, Any] | None


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
        try:
            trims = _one_sided(as_trims(trim))
            described = [trim_to_json(each) for each in trims]
            options = {"equal_size": equal_size, "slack": as_slack(slack), "trim": described}
            own = _own_rows(batch, workloads, group_ids, trims)
        except Exception as caught:
            error = caught
        num_own = 0 if own is None else len(own.workloads)
        _, rows_per_rank = channel.begin("redistribute_balanced", options, error, note=num_own)
        assert own is not None  # noqa: S101  begin raised the error
        moves, trims, widest = _agree_on_moves(channel, own, np.array(rows_per_rank), equal_size, slack)
        return _carry_out(channel, own, moves, trims, widest, group, timeout)


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
        return _OwnRows(None, np.empty(0, dtype=np.int64), None, trims, None)
    rows, real = count_rows(batch), Rows.of(batch).real
    if workloads is None:
        raise ValueError(f"workloads is None, the batch has {rows} rows; one per row is needed: pass them")
    weights = as_int64_workloads(workloads, num_rows=rows)[:real]
    ids = None if group_ids is None else as_int64_ids(group_ids, rows)[:real]
    stated = tuple(with_stated_fields(trim, batch) for trim in trims)
    varying = [as_path(key) for trim in stated for key in trim.fields or ()]
    kept = batch if real == rows else select_rows(batch, torch.arange(real))
    return _OwnRows(kept, weights, ids, stated, describe_structure(batch, varying))


def _agree_on_moves(
    channel: DispatchChannel, own: _OwnRows, rows_per_rank: np.ndarray, equal_size: bool, slack: float
) -> tuple[Moves, tuple[Trim, ...], list[int]]:
    """The plan, the trims with their fields, and how wide the widest sequences of any rank are."""
    rows, most, num_trims = len(own.workloads), int(rows_per_rank.max()), len(own.trims)
    head = np.zeros(2 + num_trims, dtype=np.int64)
    if own.batch is not None:
        has_ids = 2 if not rows else int(own.group_ids is not None)  # 2: neither with nor without
        widths = [width_of(trim, own.batch) for trim in own.trims]
        head[:] = (structure_digest(own.structure or {}), has_ids, *widths)
    else:
        head[1] = 2
    table = np.zeros((2, most), dtype=np.int64)
    table[0, :rows] = own.workloads
    if own.group_ids is not None:
        table[1, :rows] = own.group_ids
    gathered = channel.gather(np.concatenate([head, table.ravel()]), channel.step, "gather of workloads")
    digests, has_ids_of = gathered[:, 0], gathered[:, 1]
    with_batch = np.flatnonzero(digests)
    if len(np.unique(digests[with_batch])) > 1:
        said = channel.gather_text(json.dumps(own.structure), channel.step)
        raise_for_difference([json.loads(text) for text in said])
    stated_ids = has_ids_of[has_ids_of < 2]
    if len(np.unique(stated_ids)) > 1:
        raise ValueError(
            f"group_ids are given on rank {int(np.argmax(has_ids_of == 1))} and not on rank "
            f"{int(np.argmax(has_ids_of == 0))}; groups are formed over all ranks: pass them on all, or on none"
        )
    trims = own.trims
    if num_trims and len(with_batch) < channel.world_size:  # a rank without a batch learns which fields are cut
        said = channel.gather_text(json.dumps([trim_to_json(trim) for trim in trims]), channel.step)
        trims = tuple(trim_from_json(data) for data in json.loads(said[int(with_batch[0])])) if len(with_batch) else ()
    tables = gathered[:, len(head) :].reshape(channel.world_size, 2, most)
    is_row = np.arange(most) < rows_per_rank[:, None]
    moves = plan_moves(
        tables[:, 0][is_row],
        rows_per_rank,
        equal_size=equal_size,
        group_ids=tables[:, 1][is_row] if (stated_ids == 1).any() else None,
        slack=slack,
    )
    return moves, trims, gathered[:, 2 : 2 + num_trims].max(axis=0).tolist()


def _carry_out(
    channel: DispatchChannel,
    own: _OwnRows,
    moves: Moves,
    trims: tuple[Trim, ...],
    widest: list[int],
    group: dist.ProcessGroup | None,
    timeout: float,
) -> RedistributedRows[Any]:
    pieces: list[Any] = [None] * channel.world_size
    error: Exception | None = None
    bytes_sent = bytes_received = 0
    try:
        for rank in range(channel.world_size):
            rows = moves.local_rows(channel.rank, rank)
            if len(rows):
                pieces[rank] = trim_batch(select_rows(own.batch, rows), trims)[0]
    except Exception as caught:
        error = caught
    if moves.moves.any():  # the same on all ranks
        pieces, bytes_sent, bytes_received = _exchange_pieces(channel, "redistribute_balanced", pieces, error)
    joined, windows = None, []
    try:
        if error is None:
            joined = concat_rows(widen_to_common([piece for piece in pieces if piece is not None], trims))
            windows = [
                (trim.name, _window_at(trim, width_of(trim, joined), width)) for trim, width in zip(trims, widest)
            ]
    except Exception as caught:
        error = caught
    channel.confirm(error)
    indices = np.flatnonzero(moves.destination == channel.rank)
    return RedistributedRows(
        batch=joined,
        indices=torch.from_numpy(indices),
        home=torch.from_numpy(moves.home[indices]),
        loads_before=torch.from_numpy(moves.loads_before),
        loads_after=torch.from_numpy(moves.loads_after),
        num_moved=int(moves.moves.sum()),
        bytes_sent=bytes_sent,
        bytes_received=bytes_received,
        _moves=moves,
        _rank=channel.rank,
        _group=group,
        _timeout=timeout,
        _windows=windows,
    )


def _window_at(trim: Trim, width: int, widest: int) -> Window:
    return Window(widest - width, widest, widest) if trim.side == "left" else Window(0, width, widest)


def _exchange_pieces(
    channel: DispatchChannel, call: str, pieces: list[Any], error: Exception | None
) -> tuple[list[Any], int, int]:
    """Send `pieces[r]` to rank r.

    Args:
        channel: over the ranks.
        call: name of the call.
        pieces: batches by receiver; None for those that get none. This rank's own piece stays as it is.
        error: what is wrong on this rank already.

    Returns:
        Batches by sender, None from those that sent none; the bytes sent; the bytes received.

    Raises:
        Exception: what went wrong on any rank.
    """
    messages: list[Any] = []
    try:
        messages = [encode(p) if p is not None and r != channel.rank else None for r, p in enumerate(pieces)]
    except Exception as caught:
        error = error or caught
    sizes = [0 if message is None else message.nbytes for message in messages]
    sent = [message for message in messages if message is not None]
    place = _NOTHING if not sent else _ON_HOST
    if sent and channel.can_send_from_device() and any(message.on_accelerator for message in sent):
        place = _ON_DEVICE
    incoming, places = channel.begin(call, {}, error, sizes, place)
    with channel.failures_posted(channel.step, EXCHANGE):
        outgoing = MessageBuffer(sum(sizes), on_accelerator=_ON_DEVICE in places and _ON_HOST not in places)
        for message in messages:
            outgoing.append(message)
    received = channel.send_bytes(outgoing.bytes, sizes, incoming).split(incoming)
    result: list[Any] = list(pieces)
    try:
        for rank, part in enumerate(received):
            if rank != channel.rank:
                result[rank] = decode(part)[0][0] if part.numel() else None
    except Exception as caught:
        error = caught
    channel.confirm(error)
    return result, sum(sizes), sum(incoming)
