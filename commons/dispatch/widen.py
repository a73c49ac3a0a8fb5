"""Rows of different widths as one batch, filled with the padding that they have already.

Padding is 0 in some fields and -100 in labels that a loss leaves out. It is read from the rows, never assumed: a label
0 where -100 belongs would be trained.
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
    """What all ranks know of padded sequences."""

    widths: Sequence[int] = ()  # for each trim the widest sequences of any rank
    values: Mapping[str, Any] = field(default_factory=dict)  # the one of each field, as Trim.fill names it

    @classmethod
    def of(cls, by_rank: Mapping[int, Any]) -> Padding:
        """Put together what `padding_of` returned on each rank, by what messages call it.

        Raises:
            ValueError: a field with different values, on one rank or on two.
        """
        agreed: dict[str, tuple[int, Any]] = {}
        found = [(key, rank, values) for rank, (_, each) in by_rank.items() for key, values in each.items()]
        # A rank with two values is named alone: the others are right.
        for key, rank, values in sorted(found, key=lambda each: -len(each[2])):
            for value in values:
                first_rank, first = agreed.setdefault(key, (rank, value))
                if json.dumps(value) != json.dumps(first):
                    where = f"rank {rank}" if rank == first_rank else f"ranks {first_rank} and {rank}"
                    raise ValueError(
                        f"{key} is {decode_plain(first)!r} and {decode_plain(value)!r} beyond the tokens of its rows "
                        f"on {where}; rows become as wide as others with one value per field: state it in Trim, "
                        f"{_remedy([key])}"
                    )
        widths = [max(of_trim) for of_trim in zip(*(widths for widths, _ in by_rank.values()))]
        return cls(widths, {key: decode_plain(value) for key, (_, value) in agreed.items()})


def padding_of(rows: Rows[Any], trims: Sequence[Trim], windows: Sequence[Window]) -> tuple[list[int], dict[str, Any]]:
    """What JSON holds of padded sequences: the width of each trim, and by field the values beyond the tokens of rows.

    These are the first two that differ, of fields as Trim.fill names them, but for those that `Trim.stated` knows. The
    rows are real ones. TypeError for values that no message can hold.
    """
    found: dict[str, Any] = {}
    for trim, window in zip(trims, windows):
        unknown = [path for path in window.fields if path not in trim.stated]
        if unknown:
            tokens = tokens_of(trim, rows.leaves, window.width)
            # A hole in a mask is no padding: the columns from the first or to the last token are kept as they are.
            before, after = tokens.cumsum(1) == 0, tokens.flip(1).cumsum(1).flip(1) == 0
            beyond = before if trim.side == "left" else after if trim.side == "right" else before | after
            for path in unknown:
                found[_shown(path)] = [encode_plain(each, path) for each in _different(rows.leaves[path], beyond)]
    return [window.width for window in windows], found


def join_trimmed(
    parts: Sequence[Rows[B]], cut: Sequence[Sequence[Window]], trims: Sequence[Trim], padding: Padding
) -> tuple[Rows[B], list[Window]]:
    """The rows of trimmed batches as one, as wide as the widest of them, and the columns that they have of all.

    They line up where their sequences begin, or end with side "left". `cut` has the windows of each batch. ValueError
    where rows have to become wider and the padding of a field is unknown.
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
    """`trim_rows` of rows of which those from `real` on are padding.

    In a batch that states its padding they stay zeros; in another one they are padding in every column. `padding`
    returns that of the whole batch. ValueError where the padding of a field is unknown.
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
    """The first of the chosen values and the first that differs from it; NaN is like NaN, and 0.0 like -0.0."""
    if isinstance(value, np.ndarray):
        dates = value.dtype.kind in "mM"  # no plain values, but integers that become them again
        chosen = (value.view(np.int64) if dates else value)[beyond.cpu().numpy()].ravel()
    else:
        chosen = value.detach()[beyond.to(value.device)].flatten()
    if not len(chosen):
        return []
    first = chosen[0]
    same = (chosen == first) | ((chosen != chosen) & (first != first))
    scalars = [each.item() if hasattr(each, "item") else each for each in (first, *chosen[~same][:1])]
    return [each + 0 if isinstance(each, (float, complex)) else each for each in scalars]  # -0.0 as 0.0


def _require_fills(trim: Trim, fields: Sequence[Path], padding: Padding, what: str) -> dict[Path, Any]:
    """The padding of each field, as stated, else as found; ValueError, with what needs it, where it is unknown."""
    values = padding.values
    fills = {path: values[_shown(path)] for path in fields if _shown(path) in values} | trim.stated
    unknown = [_shown(path) for path in fields if path not in fills]
    if unknown:
        raise ValueError(
            f"no row has padding in {', '.join(unknown)}, and {what} need it; what it is cannot be told from rows "
            f"that are all tokens: state it in Trim, {_remedy(unknown)}"
        )
    return fills


def _shown(path: Path) -> str:
    """A field as Trim.fill names it."""
    return repr(path[0] if len(path) == 1 else path)


def _remedy(keys: Sequence[str]) -> str:
    stated = ", ".join(f"{key}: {-100 if 'labels' in key else 0}" for key in keys)
    return f"fill={{{stated}}} for example"


def _widen(rows: Rows[B], missing: int, fills: Mapping[Path, Any], trim: Trim) -> Rows[B]:
    left, right = (missing, 0) if trim.side == "left" else (0, missing)
    return rows.map(lambda path, value: pad_columns(value, left, right, fills[path]) if path in fills else value)
