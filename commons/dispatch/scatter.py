"""Scatter of one rank's batch to all ranks in shares of even work, with results gathered in the batch's order.

source: batch ─► plan ─► share of each rank ─► trim ─► exchange: each rank receives its own share
rank:   results of its rows ─► exchange ─► source (or all ranks): rows in the order of the batch
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Generic

import torch
import torch.distributed as dist
from typing_extensions import TypeVar

from commons.checks import as_boolean, as_count, take_python_scalars
from commons.dispatch.exchange import DEFAULT_TIMEOUT, DispatchChannel, Piece, exchange
from commons.dispatch.home import in_order, result_rows
from commons.dispatch.planning import Split, split_rows
from commons.dispatch.trim import Trim, Trimmed, Window, as_trims, find_windows
from commons.dispatch.widen import Padding, padding_of, trim_share
from commons.distributed.errors import capture_error
from commons.sequence_batch.rows import Rows

B = TypeVar("B", default=Any)
R = TypeVar("R", default=Any)


@dataclass(frozen=True)
class Source:
    """The source of shares, which `gather_back` sends results to."""

    rank: int  # the source, as a rank of the group
    group: dist.ProcessGroup | None  # `group` as the caller passed it
    timeout: float  # seconds after which a missing rank is reported

    def __post_init__(self) -> None:
        take_python_scalars(self)  # ranks compare the source as JSON


@dataclass(frozen=True, eq=False)
class BalancedShare(Trimmed, Generic[B]):
    """The rows of a batch that one rank computes."""

    batch: B  # the rows, of the type of the whole batch; padding comes last
    # int64 `(rows,)` on the CPU: the number of each row in the whole batch, ascending; -1 for padding.
    indices: torch.Tensor
    imbalance: float  # largest load of a rank divided by the mean, minus 1
    bytes_received: int  # bytes received for this share; 0 on the source
    _source: Source
    _windows: Sequence[Window] = ()
    _split: Split | None = field(default=None, repr=False)

    def __repr__(self) -> str:
        padding = int(self.is_padding.sum())
        rows = f"{len(self.indices)} rows" + (f", {padding} of them padding" if padding else "")
        return f"BalancedShare({rows}, largest load of a rank {1 + self.imbalance:.4g} × the mean)"

    @property
    def is_padding(self) -> torch.Tensor:
        """Bool `(rows,)`: which rows are padding."""
        return self.indices < 0

    def scatter_more(self, batch: R | None, *, trim: Trim | Sequence[Trim] | None = None) -> R:
        """Scatter another batch with the same rows, such as advantages of gathered results, in the same split.

        All ranks of the group call this together.

        Args:
            batch: on the source, anything with one row per row of the whole batch; None on the other ranks.
            trim: the fields that are padded sequences.

        Returns:
            The rows of this share from `batch`, with the same padding.

        Raises:
            ValueError: on all ranks: no batch on the source, a batch on another rank, or another number of rows.
            TypeError, KeyError: on all ranks, as for `scatter_balanced`.
            RankMissingError: a rank is missing after the timeout.
        """
        source = self._source
        with closing(DispatchChannel(source.group, source.timeout)) as channel:

            def more() -> tuple[Rows[Any], Split] | None:
                _require_role({"batch": batch}, {}, channel, source.rank)
                if self._split is None:
                    return None
                rows, split = Rows.of(batch), self._split
                dealt = sum(int((indices >= 0).sum()) for indices in split.indices)
                if rows.count not in (dealt, split.num_rows):
                    raise ValueError(
                        f"the batch has {rows.count} rows, {dealt} were scattered; scatter_more needs a row for each: "
                        "match them"
                    )
                return rows, split

            share = scatter_rows(channel, "scatter_more", {"src": source.rank}, source, trim, more)
            assert share is not None  # noqa: S101  only a SingleRankLoader reaches the end of data
            return share.batch

    def gather_back(self, results: R, *, to_all: bool = False) -> R | None:
        """Gather the results of all ranks, without gradients, in the order of the batch and without padding.

        All ranks of the group call this together.

        Args:
            results: a tensor or any other batch with one row per row of this share, such as predictions.
            to_all: whether all ranks receive the results, and not only the source.

        Returns:
            The results of all rows; None on ranks that do not receive them.

        Raises:
            ValueError: on any rank, results with another number of rows than the share, or that cannot be joined, or a
                `to_all` that is not True or False.
            TypeError: results that cannot be sent.
            RankMissingError: a rank is missing after the timeout.
        """
        source = self._source
        with closing(DispatchChannel(source.group, source.timeout)) as channel:
            receivers = range(channel.world_size) if to_all else (source.rank,)

            def own_results() -> Piece:
                as_boolean(to_all, "to_all")
                with torch.no_grad():  # selected once for all receivers
                    rows = result_rows(results, self.indices, "the share")
                    return Piece(rows.select(range(rows.count)), self.indices[self.indices >= 0])

            own, error = capture_error(own_results)

            def collect(pieces: list[Piece | None]) -> R | None:
                if channel.rank not in receivers:
                    return None
                received = [piece for piece in pieces if piece is not None]
                numbers = [piece.indices for piece in received if piece.indices is not None]
                return in_order([piece.rows for piece in received], numbers)

            gathered, *_ = exchange(
                channel,
                "gather_back",
                {"src": source.rank, "to_all": bool(to_all)},
                error,
                lambda rank: own if rank in receivers else None,
                collect,
                expected_bytes=0 if own is None else own.rows.nbytes * len(receivers),
            )
            return gathered


def scatter_balanced(
    batch: B | None,
    workloads: Any | None,
    *,
    src: int = 0,
    group: dist.ProcessGroup | None = None,
    equal_size: bool = True,
    pad: bool = False,
    groups: Any = None,
    trim: Trim | Sequence[Trim] | None = None,
    timeout: float = DEFAULT_TIMEOUT,
) -> BalancedShare[B]:
    """Scatter the batch of one rank so that all ranks have equal work; each rank receives only its share.

    All ranks of the group call this together. Stated padding of the batch is dropped.
    Shares are without gradients; `redistribute_balanced`, with None on the other ranks, sends gradients back.

    Args:
        batch: on the source, anything with rows (`commons.sequence_batch.rows`); None on the other ranks.
        workloads: on the source, non-negative integers `(rows,)`; None on the other ranks.
        src: the source, as a rank of the group.
        group: the ranks; None for megatron-core's data-parallel group if parallel_state is initialised, else all ranks.
            Without torch.distributed the share is the whole batch.
        equal_size: numbers of rows per rank differ by at most one; with `groups`, which must then have equal sizes,
            numbers of groups per rank differ by at most one.
        pad: pad all shares to one number of rows. Padding rows have -1 in `indices`, and come after
            `actual_batch_size` if the batch has this field; otherwise, padding rows of trimmed fields have the field's
            own padding value.
        groups: on the source, integers or strings `(rows,)`: rows with equal ids stay together.
        trim: the fields that are padded sequences: each share is as wide as its own longest row.
        timeout: seconds after which a missing rank is reported.

    Returns:
        This rank's share; tensors of a CUDA batch are on the current CUDA device, others on the host.

    Raises:
        ValueError: on all ranks: no batch or workloads on the source, either on another rank, an empty batch, fields of
            different numbers of rows, wrong workloads, more ranks than rows (unless `pad` is set), or different values
            of `src`, `equal_size`, `pad` or `trim` on the ranks.
        TypeError: on all ranks: a batch that cannot be sent, because it has objects that are not plain values.
        KeyError: on all ranks: a field to trim that the batch does not have, or a class that a rank has not imported.
        RankMissingError: a rank is missing after the timeout.
    """
    source = Source(src, group, timeout)
    with closing(DispatchChannel(group, timeout)) as channel:

        def source_rows() -> tuple[Rows[Any], Split] | None:
            _require_role({"batch": batch, "workloads": workloads}, {"groups": groups}, channel, src)
            if channel.rank != src:
                return None
            rows = Rows.of(batch)
            return rows, split_rows(rows, workloads, channel.world_size, equal_size=equal_size, groups=groups, pad=pad)

        options = {"src": source.rank, "equal_size": equal_size, "pad": pad}
        share = scatter_rows(channel, "scatter_balanced", options, source, trim, source_rows)
        assert share is not None  # noqa: S101  only a SingleRankLoader reaches the end of data
        return share


def scatter_rows(
    channel: DispatchChannel,
    call: str,
    options: dict[str, Any],
    source: Source,
    trim: Trim | Sequence[Trim] | None,
    source_rows: Callable[[], tuple[Rows[Any], Split] | None],
) -> BalancedShare[Any] | None:
    """Send each rank its share of the source's batch; all ranks call this together.

    `source_rows` returns the batch and its split on the source, and None on other ranks. If it returns None on the
    source too, the data have ended and the result is None on all ranks. `options` are as for `check_options`; an error
    on any rank is raised on all.
    """
    checked, error = capture_error(lambda: check_options(options, trim, channel.world_size))
    described, trims = checked or (None, ())
    loaded = None
    if error is None:
        loaded, error = capture_error(source_rows)
    rows, split = loaded or (None, None)

    @cache
    def padding() -> Padding:
        assert rows is not None  # noqa: S101  only the source calls it
        return Padding.of({channel.members[source.rank]: padding_of(rows, trims, find_windows(rows, trims))})

    def share_of(rank: int) -> Piece:
        assert rows is not None and split is not None  # noqa: S101  only the source calls it
        indices = split.indices[rank]
        share, windows = trim_share(split.take(rows, rank), int((indices >= 0).sum()), trims, padding)
        return Piece(share, indices, [split.plan.imbalance, windows])

    def as_share(pieces: list[Piece | None]) -> BalancedShare[Any]:
        piece = pieces[source.rank]
        assert piece is not None and piece.indices is not None  # noqa: S101  the source has one for every rank
        imbalance, windows = piece.extra
        return BalancedShare(piece.rows.batch, piece.indices, imbalance, 0, source, windows, split)

    size, pieces = (0, None) if rows is None else (rows.nbytes, share_of)
    share, _, received = exchange(channel, call, described, error, pieces, as_share, expected_bytes=size)
    return None if share is None else dataclasses.replace(share, bytes_received=received)


def check_options(
    options: dict[str, Any], trim: Trim | Sequence[Trim] | None, world_size: int
) -> tuple[dict[str, Any], tuple[Trim, ...]]:
    """The options that must be equal on all ranks, as data for JSON, and the trims.

    Raises:
        ValueError: `options["src"]` is not a rank of the group, or another option is not True or False.
        TypeError: a `trim` that is not a Trim.
    """
    trims = as_trims(trim)
    if as_count(options["src"], "src", 0) >= world_size:
        raise ValueError(
            f"src is {options['src']}, the group has {world_size} ranks; the source is a rank of the group, counted "
            "from 0: name one of them"
        )
    flags = {name: as_boolean(value, name) for name, value in options.items() if name != "src"}
    return options | flags | {"trim": [repr(each) for each in trims]}, trims


def _require_role(data: dict[str, Any], extra: dict[str, Any], channel: DispatchChannel, src: int) -> None:
    """Raise ValueError unless the source, and no other rank, has data."""
    given = [name for name, value in (data | extra).items() if value is not None]
    if channel.rank != src and given:
        raise ValueError(
            f"this rank passes {' and '.join(given)}, the source is rank {channel.members[src]}; only the source has "
            "data: pass None on the other ranks, or use redistribute_balanced if all ranks have rows"
        )
    missing = [name for name, value in data.items() if value is None]
    if channel.rank == src and missing:
        raise ValueError(
            f"this rank is the source and passes no {' and no '.join(missing)}; the source has all data: pass it "
            "there, or name another src"
        )
