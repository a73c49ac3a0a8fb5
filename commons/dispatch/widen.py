"""WIDEN: padded sequences of different widths as one batch, filled with the padding that the rows have already.

rows ─► what each field has beyond its tokens ─► one value per field, on all ranks ─► rows as wide as the widest

Padding is 0 in some fields and -100 in labels that a loss leaves out. It is read from the rows, never assumed: a label
0 where -100 belongs would be trained.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch

from commons.dispatch.trim import Key, Trim, Window, as_path, pad_columns, trim_rows
from commons.sequence_batch.fields import Path
from commons.sequence_batch.plain_values import decode_plain, encode_plain
from commons.sequence_batch.row_leaves import LeafType
from commons.sequence_batch.rows import Rows

B = TypeVar("B")
# By field, as Trim.fill names it: the values that are beyond its rows' tokens, the first two that differ.
Found: TypeAlias = dict[str, list[Any]]


@dataclass(frozen=True)
class Widening:
    """What all ranks know of padded sequences."""

    widths: Sequence[int] = ()  # for each trim the widest sequences of any rank
    # By field, as Trim.fill names it, the one value that padding has; no entry where no rank has padding.
    found: Mapping[str, Any] = field(default_factory=dict)


def find_padding(rows: Rows[Any], trims: Sequence[Trim], windows: Sequence[Window]) -> Found:
    """The values that the fields of the trims have beyond the tokens of each row, by field.

    Args:
        rows: without rows that are padding as a whole.
        trims: how their sequences are cut.
        windows: what each trim keeps of them.

    Returns:
        By field, as Trim.fill names it, none, one, or the first two different values; fields that have one by
        themselves are left out: the mask and what `fill` names.

    Raises:
        TypeError: values that no message can hold.
    """
    found: Found = {}
    leaves = {path: value for path, _, value in rows.leaves()}
    for trim, window in zip(trims, windows):
        known = _stated(trim)
        asked = [path for path in window.fields if path not in known]
        if asked:
            beyond = _beyond_tokens(trim, leaves, window.width)
            for path in asked:
                found[_shown(path)] = [encode_plain(each, path) for each in _different(leaves[path], beyond)]
    return found


def agree_on_padding(found_by_rank: Sequence[Found], names: Sequence[int]) -> dict[str, Any]:
    """The one value of each field that any rank has found, a pure function of what all have.

    Args:
        found_by_rank: what `find_padding` returned on each rank.
        names: how the ranks are called.

    Raises:
        ValueError: a field with different values, on one rank or on two.
    """
    agreed: dict[str, tuple[int, Any]] = {}
    each_found = [(key, name, values) for name, found in zip(names, found_by_rank) for key, values in found.items()]
    # A rank with two values is named alone: the others are right.
    for key, name, values in sorted(each_found, key=lambda each: -len(each[2])):
        for value in values:
            rank, first = agreed.setdefault(key, (name, value))
            if json.dumps(value) != json.dumps(first):
                where = f"rank {rank}" if rank == name else f"ranks {rank} and {name}"
                raise ValueError(
                    f"{key} is {decode_plain(first)!r} and {decode_plain(value)!r} beyond the tokens of its rows on "
                    f"{where}; rows become as wide as others with one value per field: state it in Trim, "
                    f"{_remedy([key])}"
                )
    return {key: decode_plain(value) for key, (_, value) in agreed.items()}


def join_trimmed(
    parts: Sequence[Rows[B]], cut: Sequence[Sequence[Window]], trims: Sequence[Trim], widening: Widening
) -> tuple[Rows[B], list[Window]]:
    """The rows of trimmed batches as one, as wide as the widest of them, lined up where their sequences begin or end.

    Args:
        parts: the batches, of one structure.
        cut: the windows of each.
        trims: how all of them were cut, at one side.
        widening: the widths that `untrim` gives back, and what padding is.

    Returns:
        The rows, and the columns that they have of these widths.

    Raises:
        ValueError: rows have to become wider, and nobody knows the padding of a field.
    """
    windows = []
    for number, (trim, width) in enumerate(zip(trims, widening.widths)):
        kept = [each[number].stop - each[number].start for each in cut]
        fills = {}
        if min(kept) < max(kept):
            fills = require_fills(trim, cut[0][number].fields, widening.found, f"rows {min(kept)} to {max(kept)} wide")
        parts = [_widen(rows, max(kept) - columns, fills, trim) for rows, columns in zip(parts, kept)]
        start = width - max(kept) if trim.side == "left" else 0
        windows.append(Window(trim.name, start, start + max(kept), width, cut[0][number].fields))
    return Rows.concat(parts), windows


def require_fills(trim: Trim, fields: Sequence[Path], found: Mapping[str, Any], what: str) -> dict[Path, Any]:
    """The padding of each field of a trim: as stated, else as found.

    Args:
        trim: says it for the mask, and for what `fill` names.
        fields: what is cut.
        found: what `agree_on_padding` returned.
        what: what needs it, in the message.

    Raises:
        ValueError: a field whose padding nobody knows.
    """
    fills = {path: found[_shown(path)] for path in fields if _shown(path) in found} | _stated(trim)
    unknown = [_shown(path) for path in fields if path not in fills]
    if unknown:
        raise ValueError(
            f"no row has padding in {', '.join(unknown)}, and {what} need it; what it is cannot be told from rows "
            f"that are all tokens: state it in Trim, {_remedy(unknown)}"
        )
    return fills


def fill_padding_rows(rows: Rows[B], real: int, fills: Mapping[Path, Any]) -> Rows[B]:
    """The rows from `real` on as rows without a token: padding in every column of the fields."""

    def fill(path: Path, leaf_type: LeafType[Any], value: Any) -> Any:
        if path not in fills:
            return value
        if isinstance(value, np.ndarray):
            beside = np.full((rows.count - real, *value.shape[1:]), fills[path], dtype=value.dtype)
            return np.concatenate([value[:real], beside])
        return torch.cat([value[:real], torch.full_like(value[real:], fills[path])])

    return rows.map(fill)


def trim_share(
    share: Rows[B], real: int, trims: Sequence[Trim], found: Callable[[], Mapping[str, Any]]
) -> tuple[Rows[B], list[Window]]:
    """`trim_rows` of rows that may end with rows of padding, of a batch that cannot say so.

    A batch that states its padding has zeros there, as everywhere else.

    Args:
        share: the rows, those of padding last.
        real: rows that are no padding.
        trims: how their sequences are cut.
        found: says what `agree_on_padding` returned for the whole batch; called where there is padding to fill.

    Raises:
        ValueError: rows of padding, and nobody knows the padding of a field.
    """
    trimmed, windows = trim_rows(share, trims)
    if real < share.count and not share.states_padding:
        for trim, window in zip(trims, windows):
            fills = require_fills(trim, window.fields, found(), "rows of padding")
            trimmed = fill_padding_rows(trimmed, real, fills)
    return trimmed, windows


def _stated(trim: Trim) -> dict[Path, Any]:
    """The padding that needs no look at the rows."""
    stated: dict[Path, Any] = {} if trim.mask is None else {as_path(trim.mask): 0}
    return stated | {as_path(key): value for key, value in trim.fill.items()}


def _shown(path: Path) -> str:
    """A field as Trim.fill names it."""
    key: Key = path[0] if len(path) == 1 else path
    return repr(key)


def _remedy(keys: Sequence[str]) -> str:
    """What to write, with the label that losses leave out as the example where there are labels."""
    stated = ", ".join(f"{key}: {-100 if 'labels' in key else 0}" for key in keys)
    return f"fill={{{stated}}} for example"


def _beyond_tokens(trim: Trim, leaves: Mapping[Path, Any], width: int) -> torch.Tensor:
    """Bool `(rows, width)`: the columns on the trimmed side of all tokens of a row; all of a row without a token."""
    if trim.mask is not None:
        tokens = torch.as_tensor(leaves[as_path(trim.mask)]) != 0
        # A hole in the mask is no padding: the columns from the first or to the last token are kept as they are.
        before, after = tokens.cumsum(1) == 0, tokens.flip(1).cumsum(1).flip(1) == 0
        return before if trim.side == "left" else after if trim.side == "right" else before | after
    lengths = torch.as_tensor(leaves[as_path(trim.lengths)]).unsqueeze(1)
    columns = torch.arange(width, device=lengths.device)
    return columns < width - lengths if trim.side == "left" else columns >= lengths


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
    others = chosen[~same]
    return [_python(each) for each in (first, *others[:1])]


def _python(value: Any) -> Any:
    scalar = value.item() if isinstance(value, (np.generic, torch.Tensor)) else value
    return scalar + 0 if isinstance(scalar, (float, complex)) else scalar  # of -0.0, which is equal to 0.0


def _widen(rows: Rows[B], missing: int, fills: Mapping[Path, Any], trim: Trim) -> Rows[B]:
    if not missing:
        return rows
    left, right = (missing, 0) if trim.side == "left" else (0, missing)

    def widen(path: Path, leaf_type: LeafType[Any], value: Any) -> Any:
        return pad_columns(value, left, right, fills[path]) if path in fills else value

    return rows.map(widen)
