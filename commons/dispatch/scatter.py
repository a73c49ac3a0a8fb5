"""One rank has the batch, all compute: shares of even work out, results back in the batch's order.

source: batch ─► deal ─► share of each rank ─► trim ─► bytes ─┐ one all-to-all: each rank receives its own share
rank:                           share ◄─ batch of its type ◄──┘
rank:   results of its rows ─► bytes ─► source (or all ranks): rows in the order of the batch
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

from commons.dispatch.channel import DEFAULT_TIMEOUT, DispatchChannel
from commons.dispatch.chunks import part_indices, take_part
from commons.dispatch.dealing import Deal, deal_balanced
from commons.dispatch.gather import compact_indices, gather_results, results_message
from commons.dispatch.trim import Trim, Window, as_path, as_trims, trim_batch, trim_to_json, untrim
from commons.distributed.control import open_channel
from commons.perf_model.partitioner.inputs import as_count
from commons.sequence_batch.batch_tree import path_name
from commons.sequence_batch.rows import Rows, count_rows
from commons.sequence_batch.wire import MessageBuffer, decode, encode

B = TypeVar("B")
R = TypeVar("R")

# What the source says with its call: there is no batch any more; its bytes are on the host; on the device.
_ENDED, _ON_HOST, _ON_DEVICE = 0, 1, 2


@dataclass(frozen=True)
class Origin:
    """Where shares come from, so that their results find the way back.

    Attributes:
        src: the source, as a rank of the group.
        group: the ranks, as the caller named them.
        timeout: seconds after which a rank that does not take part is reported.
        trims: how padded sequences were cut.
    """

    src: int
    group: dist.ProcessGroup | None
    timeout: float
    trims: tuple[Trim, ...] = ()


@dataclass(frozen=True, eq=False)
class BalancedShare(Generic[B]):
    """The rows of a batch that one rank computes.

    Attributes:
        batch: the rows, of the type of the whole batch; padding comes last.
        indices: int64 `(rows,)` on the CPU: the row of the whole batch that each row is, ascending, and -1 for padding.
        imbalance: largest load of a rank divided by the mean, minus 1.
        bytes_received: what came over the network for this share; 0 on the source.
    """

    batch: B
    indices: torch.Tensor
    imbalance: float
    bytes_received: int
    _origin: Origin
    _windows: Sequence[Window] = ()
    _source: SourceBatch | None = field(default=None, repr=False)

    def __repr__(self) -> str:
        padding = int(self.is_padding.sum())
        rows = f"{len(self.indices)} rows" + (f", {padding} of them padding" if padding else "")
        return f"BalancedShare({rows}, largest load of a rank {1 + self.imbalance:.4g} × the mean)"

    @property
    def is_padding(self) -> torch.Tensor:
        """Bool `(rows,)`: which rows are padding."""
        return self.indices < 0

    def untrim(self, values: R, mask: Any = None, fill: float = 0) -> R:
        """Results per token as wide as the sequences of the whole batch, so that those of all ranks can be joined.

        Args:
            values: a tensor or array `(rows, width of the share, ...)`, or a batch of these.
            mask: the mask or lengths of the trim that cut them; not needed where there was one trim.
            fill: the value of the columns that come back.

        Raises:
            KeyError: no trim by that field.
            ValueError: values of another width.
        """
        trims = self._origin.trims
        for trim, window in zip(trims, self._windows):
            if path_name(as_path(mask)) == trim.name or (mask is None and len(trims) == 1):
                return untrim(values, window, fill)
        names = [trim.name for trim in trims]
        raise KeyError(
            f"mask is {mask!r}, the batch was trimmed by {names}; results come back as wide: name one of them"
        )

    def with_pinned_batch(self) -> BalancedShare[B]:
        """The same share with its batch in pinned host memory."""
        return dataclasses.replace(self, batch=Rows.of(self.batch).pin().batch)

    def scatter_more(self, batch: Any | None, *, trim: Trim | Sequence[Trim] | None = None) -> Any:
        """Deal out more of the same rows, such as advantages computed from what came back; each goes where it went.

        All ranks of the group call this together.

        Args:
            batch: on the source, anything with a row per row of the whole batch; None on the other ranks.
            trim: which of its fields are padded sequences.

        Returns:
            What belongs to the rows of this share, padded as they are.

        Raises:
            ValueError: on all ranks: no batch on the source, one on another rank, or one with other rows.
            TypeError, KeyError: on all ranks, as `scatter_balanced`.
            RankMissingError: a rank did not take part in time.
        """
        origin = self._origin
        with open_channel(origin.group, origin.timeout, DispatchChannel) as channel:
            options, error, trims = check_options({"src": origin.src}, trim, channel.world_size)

            def source_batch() -> SourceBatch | None:
                _require_role({"batch": batch}, {}, channel.rank, origin.src)
                return None if self._source is None else self._source.with_batch(batch)

            more = scatter_source(
                channel, "scatter_more", options, dataclasses.replace(origin, trims=trims), source_batch, error
            )
            assert more is not None  # noqa: S101  only a loader's data end
            return more.batch

    def gather_back(self, results: R, *, to_all: bool = False) -> R | None:
        """Bring the results of all ranks together, in the order of the whole batch and without padding.

        All ranks of the group call this together.

        Args:
            results: a tensor or any other batch with a row per row of this share, such as predictions.
            to_all: give them to all ranks, not to the source alone.

        Returns:
            The results of all rows; None on the ranks that do not get them.

        Raises:
            ValueError: results with another number of rows than the share, or that cannot be joined, on any rank.
            TypeError: results that cannot be sent.
            RankMissingError: a rank did not take part in time.
        """
        origin = self._origin
        with open_channel(origin.group, origin.timeout, DispatchChannel) as channel:
            message, error = None, None
            try:
                message = results_message(results, self.indices)
            except Exception as caught:
                error = caught
            return gather_results(channel, origin.src, to_all, message, error)


@dataclass(frozen=True)
class SourceBatch:
    """What the source deals out.

    Attributes:
        batch: the whole batch.
        deal: which rows go to which rank.
        pad: whether shares are padded to one size.
    """

    batch: Any
    deal: Deal
    pad: bool

    def with_batch(self, batch: Any) -> SourceBatch:
        """The same deal of another batch; ValueError for one with other rows."""
        rows, dealt = count_rows(batch), sum(map(len, self.deal.rows))
        if rows not in (dealt, self.deal.num_rows):
            raise ValueError(
                f"the batch has {rows} rows, {dealt} were dealt; more of the same rows has a row for each: match them"
            )
        return dataclasses.replace(self, batch=batch)

    def share(self, rank: int, trims: Sequence[Trim]) -> tuple[Any, torch.Tensor, list[Window]]:
        """A rank's rows, which they are, and the columns that were kept."""
        rows, windows = trim_batch(take_part(self.batch, self.deal, rank, self.pad), trims)
        return rows, part_indices(self.deal, rank, self.pad), windows


def scatter_balanced(
    batch: Any | None,
    workloads: Any | None,
    *,
    src: int = 0,
    group: dist.ProcessGroup | None = None,
    equal_size: bool = True,
    pad: bool = False,
    group_ids: Any = None,
    trim: Trim | Sequence[Trim] | None = None,
    timeout: float = DEFAULT_TIMEOUT,
) -> BalancedShare[Any]:
    """Deal out the batch of one rank so that all ranks carry equal work; each receives its share alone.

    All ranks of the group call this together. Padding that the batch states is not dealt.

    Args:
        batch: on the source, anything with rows (`commons.sequence_batch.rows`); None on the other ranks.
        workloads: on the source, non-negative integers `(rows,)`; None on the other ranks.
        src: the source, as a rank of the group.
        group: ranks that share the batch; default megatron-core's data-parallel group where parallel_state is
            initialised, else all ranks. Without torch.distributed the share is the whole batch.
        equal_size: ranks' numbers of rows differ by at most one; with `group_ids`, their numbers of groups do.
        pad: pad all shares to one number of rows. Padding is -1 in `indices`, and below `actual_batch_size` where the
            batch has that.
        group_ids: on the source, integers or strings `(rows,)`: rows with one id stay together.
        trim: which fields are padded sequences: each share becomes as wide as its own longest row.
        timeout: seconds after which a rank that does not take part is reported.

    Returns:
        This rank's share; tensors of a CUDA batch are on the current CUDA device, others on the host.

    Raises:
        ValueError: on all ranks: a source without batch or workloads, these on another rank, an empty batch, fields of
            different numbers of rows, wrong workloads, more ranks than rows (unless `pad` is set), or ranks that pass a
            different `src`, `equal_size`, `pad` or `trim`.
        TypeError: on all ranks: a batch that cannot be sent, because it holds objects that are no plain values.
        KeyError: on all ranks: a field to trim that is not there, or a class that a rank has not imported.
        RankMissingError: a rank did not take part in time.
    """
    with open_channel(group, timeout, DispatchChannel) as channel:
        options, error, trims = check_options(
            {"src": src, "equal_size": equal_size, "pad": pad}, trim, channel.world_size
        )

        def source_batch() -> SourceBatch | None:
            _require_role({"batch": batch, "workloads": workloads}, {"group_ids": group_ids}, channel.rank, src)
            if channel.rank != src:
                return None
            deal = deal_balanced(
                workloads,
                channel.world_size,
                num_rows=count_rows(batch),
                real_rows=Rows.of(batch).real,
                equal_size=equal_size,
                group_ids=group_ids,
                may_be_empty=pad,
            )
            return SourceBatch(batch, deal, pad)

        origin = Origin(src, group, timeout, trims)
        share = scatter_source(channel, "scatter_balanced", options, origin, source_batch, error)
        assert share is not None  # noqa: S101  only a loader's data end
        return share


def scatter_source(
    channel: DispatchChannel,
    call: str,
    options: dict[str, Any] | None,
    origin: Origin,
    source_batch: Callable[[], SourceBatch | None],
    error: Exception | None,
) -> BalancedShare[Any] | None:
    """Send each rank its share of what the source has; called on all ranks together.

    Args:
        channel: over the ranks.
        call: name of the call.
        options: what all ranks must pass alike; None where `error` is about these.
        origin: the source, and how it trims.
        source_batch: makes what is dealt out; None on other ranks than the source, and there where the data have ended.
        error: what is wrong on this rank already.

    Returns:
        This rank's share; None if the source has no batch.

    Raises:
        Exception: what went wrong on any rank.
    """
    src, share, outgoing, note = origin.src, None, MessageBuffer(0, on_accelerator=False), _ENDED
    if error is None:
        try:
            source = source_batch()
            if source is not None:
                outgoing, note = _pack(source, channel, origin.trims)
                rows, indices, windows = source.share(channel.rank, origin.trims)
                # The deal is kept for more of the same rows; the whole batch is not.
                kept = dataclasses.replace(source, batch=None)
                share = BalancedShare(rows, indices, source.deal.imbalance, 0, origin, windows, kept)
        except Exception as caught:
            error = caught
    incoming, notes = channel.begin(call, options, error, outgoing.sizes, note)
    if notes[src] == _ENDED:
        return None
    if channel.rank != src:
        outgoing = MessageBuffer(0, on_accelerator=notes[src] == _ON_DEVICE)
        outgoing.sizes = [0] * channel.world_size
    received = channel.send_bytes(outgoing.bytes, outgoing.sizes, incoming)
    if channel.rank != src:
        try:
            share = _unpack(received, origin)
        except Exception as caught:
            error = caught
    channel.confirm(error)
    return share


def _pack(source: SourceBatch, channel: DispatchChannel, trims: Sequence[Trim]) -> tuple[MessageBuffer, int]:
    """The shares of the other ranks as bytes, and where these are. One share at a time exists beside them."""
    on_device = channel.can_send_from_device() and Rows.of(source.batch).on_device
    outgoing = MessageBuffer(Rows.of(source.batch).nbytes, on_accelerator=on_device)
    for rank in range(channel.world_size):
        if rank == channel.rank:
            outgoing.append(None)
            continue
        rows, indices, windows = source.share(rank, trims)
        columns = [[window.start, window.stop, window.width] for window in windows]
        outgoing.append(encode(rows, compact_indices(indices), extra=[source.deal.imbalance, columns]))
    return outgoing, _ON_DEVICE if on_device else _ON_HOST


def _unpack(received: torch.Tensor, origin: Origin) -> BalancedShare[Any]:
    (rows, indices), (imbalance, columns) = decode(received)
    windows = [Window(*each) for each in columns]
    return BalancedShare(rows, indices.to(torch.int64), imbalance, received.numel(), origin, windows)


def _require_rank(src: Any, world_size: int) -> None:
    """Raise ValueError unless `src` is a rank of a group of `world_size`."""
    if as_count(src, "src", 0) >= world_size:
        raise ValueError(
            f"src is {src}, the group has {world_size} ranks; the source is a rank of the group, counted from 0: name "
            "one of them"
        )


def check_options(
    options: dict[str, Any], trim: Trim | Sequence[Trim] | None, world_size: int
) -> tuple[dict[str, Any] | None, Exception | None, tuple[Trim, ...]]:
    """What all ranks must pass alike, as JSON holds it; what is wrong with it; and the trims."""
    described: dict[str, Any] | None = None
    try:
        trims = as_trims(trim)
        described = options | {"trim": [trim_to_json(each) for each in trims]}
        _require_rank(options["src"], world_size)
    except Exception as error:
        return described, error, ()
    return described, None, trims


def _require_role(data: dict[str, Any], extra: dict[str, Any], rank: int, src: int) -> None:
    """Raise ValueError unless the source, and no other rank, has data."""
    given = [name for name, value in (data | extra).items() if value is not None]
    if rank != src and given:
        raise ValueError(
            f"this rank passes {' and '.join(given)}, the source is rank {src}; the source alone has data: pass None "
            "on the other ranks, or use redistribute_balanced where all ranks have rows"
        )
    missing = [name for name, value in data.items() if value is None]
    if rank == src and missing:
        raise ValueError(
            f"this rank is the source and passes no {' and no '.join(missing)}; the source has all data: pass it "
            "there, or name another src"
        )
