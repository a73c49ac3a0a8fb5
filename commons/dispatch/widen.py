"""Joins rows of different widths into one batch, with the padding values that the rows already have.

Padding is 0 in some fields and -100 in labels that a loss ignores. It is read from the rows and never assumed, because
a padding label of 0 instead of -100 would be trained.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch

from commons.dispatch.trim import Trim, Window, pad_columns, tokens_of, trim_rows
from commons.sequence_batch.fields import Path
from commons.sequence_batch.plain_values import decode_plain, encode_plain
from commons.sequence_batch.rows import Rows

B = TypeVar("B")


@dataclass(frozen=True)
class Padding:
    """Widths and padding values of padded sequences over all ranks."""

    widths: Sequence[int] = ()  # for each trim, the width of the widest sequences of any rank
    values: Mapping[str, Any] = field(default_factory=dict)  # the padding value by field, as Trim.fill names the field

    @classmethod
    def of(cls, by_rank: Mapping[int, Any]) -> Padding:
        """Combine the results of `padding_of` on all ranks, by the rank's number in messages.

        Raises:
            ValueError: a field with different values, on one rank or on two.
        """
        agreed: dict[str, tuple[int, Any]] = {}
        found = [(key, rank, values) for rank, (_, each) in by_rank.items() for key, values in each.items()]
        # Ranks with two values first: the error then names such a rank and not the ranks with one value.
        for key, rank, values in sorted(found, key=lambda each: -len(each[2])):
            for value in values:
                first_rank, first = agreed.setdefault(key, (rank, value))
                if json.dumps(value) != json.dumps(first):
                    where = f"rank {rank}" if rank == first_rank else f"ranks {first_rank} and {rank}"
                    raise ValueError(
                        f"{key} is {decode_plain(first)!r} and {decode_plain(value)!r} beyond the tokens of its rows "
                        f"on {where}; rows can be widened with one padding value per field only: state it in Trim, "
                        f"{_remedy([key])}"
                    )
        widths = [max(of_trim) for of_trim in zip(*(widths for widths, _ in by_rank.values()))]
        return cls(widths, {key: decode_plain(value) for key, (_, value) in agreed.items()})


def padding_of(rows: Rows[Any], trims: Sequence[Trim], windows: Sequence[Window]) -> tuple[list[int], dict[str, Any]]:
    """Widths and padding values of a rank's padded sequences, as data for JSON.

    The width of each trim, and for each field, as Trim.fill names it, the first padding value and the first that
    differs from it, if any; fields in `Trim.stated` are left out. `rows` has only real rows, and `windows` are those
    that `find_windows` finds in them. TypeError for values that JSON cannot hold.
    """
    found: dict[str, Any] = {}
    for trim, window in zip(trims, windows):
        unknown = [path for path in window.fields if path not in trim.stated]
        if unknown:
            tokens = tokens_of(trim, rows.leaves, window.width)
            # Gaps between tokens of a mask are not padding: a trim keeps them.
            before, after = tokens.cumsum(1) == 0, tokens.flip(1).cumsum(1).flip(1) == 0
            beyond = before if trim.side == "left" else after if trim.side == "right" else before | after
            for path in unknown:
                found[_shown(path)] = [encode_plain(each, path) for each in _different(rows.leaves[path], beyond)]
    return [window.width for window in windows], found


def join_trimmed(
    parts: Sequence[Rows[B]], cut: Sequence[Sequence[Window]], trims: Sequence[Trim], padding: Padding
) -> tuple[Rows[B], list[Window]]:
    """Join the rows of trimmed batches, as wide as the widest batch; returns the rows and their windows.

    Rows are aligned at the start of their sequences, or at the end with side "left". `cut` has the windows of each
    batch. ValueError if rows must be widened and the padding of a field is unknown.
    """
    windows = []
    for number, (trim, width) in enumerate(zip(trims, padding.widths)):
        kept = [each[number].stop - each[number].start for each in cut]
        fields, widest = cut[0][number].fields, max(kept)
        start = width - widest if trim.side == "left" else 0
        windows.append(Window(trim.name, start, start + widest, width, fields))
        if min(kept) < widest:
            fills = _require_fills(trim, fields, padding, f"rows {min(kept)} to {widest} wide")
            parts = [_widen(rows, widest - columns, fills, trim) for rows, columns in zip(parts, kept)]
    return Rows.concat(parts), windows


def trim_share(
    share: Rows[B], real: int, trims: Sequence[Trim], padding: Callable[[], Padding]
) -> tuple[Rows[B], list[Window]]:
    """`trim_rows` of rows of which the first `real` are real and the others padding.

    In a batch that states padding, padding rows stay zeros; otherwise all their columns are filled with padding values.
    `padding` returns the Padding of the whole batch. ValueError if the padding of a field is unknown.
    """
    trimmed, windows = trim_rows(share, trims)
    if real == share.count or share.states_padding:
        return trimmed, windows
    fills: dict[Path, Any] = {}
    for trim, window in zip(trims, windows):
        fills |= _require_fills(trim, window.fields, padding(), "rows of padding")

    def fill(path: Path, value: Any) -> Any:
        if path in fills:
            value = value.copy() if isinstance(value, np.ndarray) else value.clone()
            value[real:] = fills[path]
        return value

    return trimmed.map(fill), windows


def _different(value: Any, beyond: torch.Tensor) -> list[Any]:
    """The first of the selected values and the first that differs from it; NaN equals NaN, and 0.0 equals -0.0."""
    if isinstance(value, np.ndarray):
        dates = value.dtype.kind in "mM"  # JSON holds them as integers, which numpy converts back
        chosen = (value.view(np.int64) if dates else value)[beyond.cpu().numpy()].ravel()
    else:
        chosen = value.detach()[beyond.to(value.device)].flatten()
    if not len(chosen):
        return []
    first = chosen[0]
    same = (chosen == first) | ((chosen != chosen) & (first != first))
    scalars = [each.item() if hasattr(each, "item") else each for each in (first, *chosen[~same][:1])]
    return [each + 0 if isinstance(each, (float, complex)) else each for each in scalars]  # turns -0.0 into 0.0


def _require_fills(trim: Trim, fields: Sequence[Path], padding: Padding, what: str) -> dict[Path, Any]:
    """The padding of each field, stated or found; ValueError if it is unknown, with `what`, which needs it."""
    values = padding.values
    fills = {path: values[_shown(path)] for path in fields if _shown(path) in values} | trim.stated
    unknown = [_shown(path) for path in fields if path not in fills]
    if unknown:
        raise ValueError(
            f"no row has padding in {', '.join(unknown)}, and {what} need it; rows without padding do not show its "
            f"value: state it in Trim, {_remedy(unknown)}"
        )
    return fills


def _shown(path: Path) -> str:
    """The text of a field as Trim.fill names it."""
    return repr(path[0] if len(path) == 1 else path)


def _remedy(keys: Sequence[str]) -> str:
    stated = ", ".join(f"{key}: {-100 if 'labels' in key else 0}" for key in keys)
    return f"fill={{{stated}}} for example"


def _widen(rows: Rows[B], missing: int, fills: Mapping[Path, Any], trim: Trim) -> Rows[B]:
    left, right = (missing, 0) if trim.side == "left" else (0, missing)
    return rows.map(lambda path, value: pad_columns(value, left, right, fills[path]) if path in fills else value)
