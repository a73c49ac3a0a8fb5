"""VERIFY: a checksum of every row before and after the exchange, for debugging.

Each field of each row is hashed by content and position. Sums of the hashes over rows and ranks do not depend on the
order of rows; one more sum, over hashes of whole rows, detects fields of different rows in one row. The comparison
waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from commons.distributed.channel.agree import ControlChannel
from commons.distributed.errors import capture_error
from commons.distributed.exchange.payload import Part, PayloadLayout
from commons.sequence_batch.fields import path_name
from commons.sequence_batch.open_batch import row_counts, value_at

# Odd multipliers of splitmix64 (Steele, Lea, Flood 2014), as signed 64-bit integers.
_MULTIPLIERS = (-4658895280553007687, -7723592293110705685)
_CHUNK = 1 << 20  # values that are hashed at once, in about 64 MB
_INTEGER_BY_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _mix(values: torch.Tensor) -> torch.Tensor:
    """Hash int64 values; multiplication wraps around."""
    for multiplier in _MULTIPLIERS:
        values = (values ^ (values >> 30)) * multiplier
    return values ^ (values >> 31)


def _part_hashes(part: Part, batch: Any, rows: int) -> torch.Tensor:
    """int64 `(rows,)`, a hash of the part's content in each row."""
    tensor = part.tensor_of(batch)
    size = part.dtype.itemsize
    # A copy, because a view may be conjugated or negated, or have gaps in memory although it counts as contiguous.
    plain = tensor.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format).flatten()
    integers = plain.view(_INTEGER_BY_SIZE[min(size, 8)])
    entries = torch.ones(rows, device=tensor.device) if part.is_dense else value_at(batch, part.path).lengths()
    lengths = entries.to(torch.int64) * (part.elements * max(1, size // 8))
    ends = torch.cumsum(lengths, 0)
    hashes = torch.zeros(rows, dtype=torch.int64, device=tensor.device)
    for first in range(0, integers.numel(), _CHUNK):
        values = integers[first : first + _CHUNK].to(torch.int64)
        index = torch.arange(first, first + len(values), device=tensor.device)
        segment = torch.searchsorted(ends, index, right=True)
        position = index - (ends - lengths)[segment] + (segment // rows << 32)
        hashes.index_add_(0, segment % rows, _mix(_mix(values) + position))
    return _mix(hashes)


def checksums(batches: Sequence[Any], layout: PayloadLayout) -> torch.Tensor:
    """int64 `(parts + 1,)` on the host: for each part the sum of its hashes over real rows, then that of whole rows."""
    total = torch.zeros(len(layout.parts) + 1, dtype=torch.int64, device="cpu")
    for batch in batches:
        rows, real = row_counts(batch)
        if layout.parts and real:
            hashes = torch.stack([_part_hashes(part, batch, rows)[:real] for part in layout.parts])  # (parts, real)
            order = torch.arange(1, len(layout.parts) + 1, device=hashes.device)
            whole = _mix((hashes * _mix(order)[:, None]).sum(dim=0))
            total += torch.cat([hashes.sum(dim=1), whole.sum().unsqueeze(0)]).cpu()
    return total


def require_same_rows(
    channel: ControlChannel,
    step: int,
    layout: PayloadLayout,
    before: torch.Tensor | None,
    results: Sequence[Any],
    error: Exception | None,
    *,
    on_main: bool,
) -> None:
    """Compare the checksums `before` the exchange, or their `error`, with those of its results, over all ranks.

    All ranks call this together; it waits for the device.

    Raises:
        RuntimeError: the shuffle has changed or mixed rows, or a checksum failed on any rank; on all ranks.
        RankMissingError: a rank did not join in time.
    """
    after, problem = capture_error(lambda: checksums(results, layout))
    changes = [0] * (len(layout.parts) + 1) if before is None or after is None else (after - before).tolist()
    table = channel.agree("comparison of checksums", {}, error or problem, changes, step, on_main=on_main)
    wrong = table.sum(axis=0).tolist()
    damaged = [part for part, value in zip(layout.parts, wrong) if value]
    if damaged:
        names = ", ".join(f"{path_name(part.path)}{' (weights)' if part.weights else ''}" for part in damaged)
        raise RuntimeError(
            f"step {step}: the shuffle changed the content of {names}; every row must arrive unchanged: do not "
            "reorder rows while a batch is copied; if you do not, report this with the batch's schema"
        )
    if wrong[-1]:
        raise RuntimeError(
            f"step {step}: the shuffle put fields of different rows together; every row must arrive unchanged: report "
            "this with the batch's schema"
        )
