"""Padded sequences: cuts the columns that are padding in every row, and pads them again.

So each rank's share is as wide as its own longest row, instead of the longest row of all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar, get_args

import numpy as np
import torch

from commons.checks import kind_of
from commons.sequence_batch.fields import Path, path_name
from commons.sequence_batch.row_fields import ArrayField, DenseField
from commons.sequence_batch.row_leaves import tensor_kind
from commons.sequence_batch.rows import Rows

B = TypeVar("B")
Key: TypeAlias = str | Path
Side: TypeAlias = Literal["right", "left", "both"]
_Leaves: TypeAlias = Mapping[Path, Any]


@dataclass(frozen=True)
class Trim:
    """The fields of a batch that are padded sequences, and the mask or lengths of their tokens.

    A field is named by its key, or by the tuple of keys of its path: "input_ids", ("inputs", "ids").

    Raises:
        ValueError: neither or both of mask and lengths, lengths without fields or with side "both", an unknown side.
    """

    # The field `(rows, width)` that is not zero where a row has a token; give either `mask` or `lengths`.
    mask: Key | None = None
    lengths: Key | None = None  # the field of integers `(rows,)` with the number of tokens of each row
    # Tensors or arrays `(rows, width, ...)` to cut; the mask is always cut. None with `mask` for every field whose
    # first two dimensions are those of the mask: give the list if a field has this shape by chance, or if several
    # trims may have one width. Required with `lengths`.
    fields: Sequence[Key] | None = None
    side: Side = "right"  # the side of the padding: "right", "left", or with a mask "both"
    # The padding value by field, used when rows are widened. By default it is the field's value after the last token of
    # a row (with "left", before the first token) on any rank, and 0 for the mask. Required if these values differ, or
    # if no row of any rank has padding.
    fill: Mapping[Key, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (self.mask is None) == (self.lengths is None):
            raise ValueError(
                f"mask is {self.mask!r} and lengths is {self.lengths!r}; exactly one of them must be given: give one"
            )
        if isinstance(self.fields, str) or (self.lengths is not None and not self.fields):
            raise ValueError(f"fields is {self.fields!r}; it must be a list of the fields to cut: name them")
        if self.side not in get_args(Side) or (self.side == "both" and self.mask is None):
            raise ValueError(
                f"side is {self.side!r} with mask {self.mask!r}; it must be 'right', 'left', or with a mask 'both': "
                "choose one"
            )
        if self.fields is not None:
            object.__setattr__(self, "fields", tuple(self.fields))  # ranks compare the repr

    @property
    def name(self) -> str:
        """The name of the mask or lengths field, for messages."""
        return path_name(as_path(self.mask if self.mask is not None else self.lengths))

    @property
    def stated(self) -> dict[Path, Any]:
        """Padding values that do not depend on the rows: of the mask and of `fill`."""
        stated: dict[Path, Any] = {} if self.mask is None else {as_path(self.mask): 0}
        return stated | {as_path(key): value for key, value in self.fill.items()}


class Window(NamedTuple):
    """The columns `[start, stop)` that a trim keeps."""

    name: str  # `Trim.name`
    start: int  # first column
    stop: int  # last column + 1
    width: int  # number of columns before the trim
    fields: tuple[Path, ...] = ()  # the trimmed fields


class Trimmed:
    """Base class of rows with trimmed sequences, which can widen results per token again."""

    _windows: Sequence[Window]

    def untrim(self, values: B, mask: Any = None, fill: float = 0) -> B:
        """Widen results per token to the widest sequences of any rank, so that results of all ranks can be joined.

        Args:
            values: a tensor or array `(rows, width of the batch, ...)`, or a batch of these.
            mask: the mask or lengths field of the trim; None if there was one trim.
            fill: the value of the added columns.

        Raises:
            KeyError: no trim by this field.
            ValueError: values of another width.
        """
        for window in self._windows:
            if path_name(as_path(mask)) == window.name or (mask is None and len(self._windows) == 1):
                return untrim(values, window, fill)
        names = [window.name for window in self._windows]
        raise KeyError(
            f"mask is {mask!r}, the batch was trimmed by {names}; results are widened by one trim: name one of them"
        )


def as_trims(trim: Trim | Sequence[Trim] | None, *, one_sided: bool = False) -> tuple[Trim, ...]:
    """The caller's trims as a tuple; TypeError for anything else, ValueError for side "both" with `one_sided`."""
    trims = () if trim is None else tuple(trim) if isinstance(trim, Iterable) else (trim,)
    for each in trims:
        if not isinstance(each, Trim):
            raise TypeError(f"trim contains {kind_of(each)}; it must be a Trim or a list of Trims: build one")
        if one_sided and each.side == "both":
            raise ValueError(
                f"sequences of {each.name!r} are padded on both sides; rows of different ranks are aligned at one "
                "side: trim 'right' or 'left'"
            )
    return trims


def trim_batch(batch: B, trim: Trim | Sequence[Trim]) -> tuple[B, list[Window]]:
    """Cut the columns that are padding in every row of a batch; at least one column is kept.

    Args:
        batch: any batch.
        trim: the fields to cut; several Trims for sequences with different masks or lengths.

    Returns:
        The batch, and the columns that each trim kept.

    Raises:
        KeyError: a field that the batch does not have, or a field in `fill` that is not cut.
        ValueError: a mask or lengths of the wrong shape, fields of different widths, a field cut by two trims, or a
            `fill` that a field's dtype does not hold.

    Examples:
        >>> ids, mask = torch.tensor([[5, 6, 0, 0], [7, 0, 0, 0]]), torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0]])
        >>> trim_batch({"ids": ids, "mask": mask}, Trim("mask"))[0]["ids"]
        tensor([[5, 6],
                [7, 0]])
    """
    trimmed, windows = trim_rows(Rows.of(batch), as_trims(trim))
    return trimmed.batch, windows


def trim_rows(rows: Rows[B], trims: Sequence[Trim]) -> tuple[Rows[B], list[Window]]:
    """`trim_batch` of a parsed batch."""
    windows = find_windows(rows, trims)
    window_of = {path: window for window in windows for path in window.fields}

    def cut(path: Path, value: Any) -> Any:
        kept = window_of.get(path)
        if kept is None or kept.stop - kept.start == kept.width:
            return value
        columns = value[:, kept.start : kept.stop]
        return columns.copy() if isinstance(value, np.ndarray) else columns.clone(memory_format=torch.contiguous_format)

    return (rows.map(cut) if trims else rows), windows


def untrim(values: B, window: Window, fill: float = 0) -> B:
    """`Trimmed.untrim` by the window of a trim."""

    def widen(path: Path, value: Any) -> Any:
        kept = window.stop - window.start
        if not _has_columns(value) or value.shape[1] != kept:
            raise ValueError(
                f"{path_name(path)!r} is {kind_of(value)} of shape {tuple(getattr(value, 'shape', ()))}; "
                f"results per token have {kept} columns, as the trimmed sequences: pass only such results"
            )
        return pad_columns(value, window.start, window.width - window.stop, fill)

    return Rows.of(values).map(widen).batch


def find_windows(rows: Rows[Any], trims: Sequence[Trim]) -> list[Window]:
    """The columns of a batch that each trim keeps; KeyError and ValueError as for `trim_batch`."""
    windows = [_window(trim, rows.leaves) for trim in trims]
    window_of: dict[Path, Window] = {}
    for window in windows if rows.count else ():  # a batch of 0 rows may have sequences of any width
        for path in window.fields:
            if (other := window_of.setdefault(path, window)) is not window:
                raise ValueError(
                    f"field {path_name(path)!r} is {window.width} wide, and the trims by {other.name!r} and by "
                    f"{window.name!r} both cut it; a field has one trim, and so has a mask: name the fields of each in "
                    "Trim.fields"
                )
    return windows


def as_path(key: Key | None) -> Path:
    """The path of a field."""
    return key if isinstance(key, tuple) else (key,)


def _window(trim: Trim, leaves: _Leaves) -> Window:
    fields = _cut_fields(trim, leaves)
    for key, fill in trim.fill.items():
        if as_path(key) not in fields:
            known = ", ".join(repr(path_name(path)) for path in fields)
            raise KeyError(
                f"fill names {path_name(as_path(key))!r}, the trim by {trim.name!r} cuts {known}; only fields that "
                "are cut can be filled: name one of these"
            )
        if not _holds(fields[as_path(key)], fill):
            raise ValueError(
                f"fill of {path_name(as_path(key))!r} is {fill!r}, the field has dtype {fields[as_path(key)].dtype}; "
                "padding is a value of the field: state one that this dtype holds"
            )
    widths = {path_name(path): value.shape[1] for path, value in fields.items()}
    width = next(iter(widths.values()))
    if any(other != width for other in widths.values()):
        raise ValueError(
            f"fields trimmed by {trim.name!r} have different widths {widths}; they are cut at the same columns: use "
            "one Trim per width"
        )
    used = tokens_of(trim, leaves, width).any(dim=0).nonzero()[:, 0]
    first, last = (int(used[0]), int(used[-1])) if used.numel() else (width, -1)
    start, stop = (0 if trim.side == "right" else first), (width if trim.side == "left" else last + 1)
    if start >= stop and width > 0:  # no row has a token: keep one column, which models need
        start, stop = (width - 1, width) if trim.side == "left" else (0, 1)
    return Window(trim.name, start, stop, width, tuple(fields))


def tokens_of(trim: Trim, leaves: _Leaves, width: int) -> torch.Tensor:
    """The columns in which each row has a token, bool `(rows, width)`; ValueError for invalid lengths."""
    values = _find(trim.lengths if trim.mask is None else trim.mask, leaves)
    # torch reads no array of negative strides, such as a reversed one; as_tensor would copy to torch's default device.
    lengths = values if isinstance(values, torch.Tensor) else torch.from_numpy(np.array(values))
    if trim.mask is not None:
        return lengths != 0
    if lengths.dim() != 1 or lengths.is_floating_point() or lengths.dtype == torch.bool:
        raise ValueError(
            f"lengths {trim.name!r} have shape {tuple(lengths.shape)} and dtype {lengths.dtype}; lengths must be one "
            "integer per row: correct them"
        )
    lengths = lengths.to(torch.int64)  # torch has no maximum of unsigned integers
    if lengths.numel() and (int(lengths.max()) > width or int(lengths.min()) < 0):
        raise ValueError(
            f"lengths {trim.name!r} are in [{int(lengths.min())}, {int(lengths.max())}], the sequences are {width} "
            f"wide; a row has 0 to {width} tokens: correct them"
        )
    columns = torch.arange(width, device=lengths.device)
    return columns >= width - lengths[:, None] if trim.side == "left" else columns < lengths[:, None]


def _cut_fields(trim: Trim, leaves: _Leaves) -> dict[Path, Any]:
    """The fields that a trim cuts; the mask first."""
    fields: dict[Path, Any] = {}
    if trim.mask is not None:
        mask = _find(trim.mask, leaves)
        if not _has_columns(mask) or mask.ndim != 2:
            found = f"has shape {tuple(mask.shape)}" if hasattr(mask, "shape") else f"is {kind_of(mask)}"
            raise ValueError(
                f"mask {trim.name!r} {found}; it must be a tensor or array `(rows, width)`: convert it, or name "
                "another field"
            )
        fields[as_path(trim.mask)] = mask
        if trim.fields is None:
            alike = {path: value for path, value in leaves.items() if _has_columns(value)}
            return fields | {path: value for path, value in alike.items() if value.shape[:2] == mask.shape}
    for key in trim.fields or ():
        value = _find(key, leaves)
        if not _has_columns(value):
            raise ValueError(
                f"{path_name(as_path(key))!r} is {kind_of(value)} of shape {tuple(getattr(value, 'shape', ()))}"
                "; padded sequences must be tensors or arrays `(rows, width, ...)`: leave it out of the trim"
            )
        fields[as_path(key)] = value
    return fields


def _find(key: Key | None, leaves: _Leaves) -> Any:
    path = as_path(key)
    if path not in leaves:
        known = ", ".join(repr(path_name(known)) for known in leaves)
        raise KeyError(
            f"the batch has no field {path_name(path)!r} to trim by; its fields are {known}: name one of them"
        )
    return leaves[path]


def _holds(value: Any, fill: Any) -> bool:
    """Whether the dtype of a tensor or array holds a padding value, except for a float's rounding."""
    is_array = isinstance(value, np.ndarray)
    if fill is None:
        return bool(value.dtype == object)
    try:
        with np.errstate(all="ignore"):
            one = np.full(1, fill, value.dtype) if is_array else value.new_full((1,), fill, device="cpu")
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return False
    is_exact = value.dtype.kind in "iub" if is_array else not (value.is_floating_point() or value.is_complex())
    return bool(one.item() == fill) if is_exact else True


def _has_columns(value: Any) -> bool:
    """Whether a leaf is a tensor or array `(rows, width, ...)`."""
    return tensor_kind(value) in (ArrayField, DenseField) and value.ndim >= 2


def pad_columns(value: Any, left: int, right: int, fill: Any) -> Any:
    """Add `left` and `right` columns of the value `fill` to a tensor or array `(rows, width, ...)`."""
    rows, _, *rest = value.shape
    if isinstance(value, np.ndarray):
        added = [np.full((rows, columns, *rest), fill, dtype=value.dtype) for columns in (left, right)]
        return np.concatenate([added[0], value, added[1]], axis=1)
    before, after = (value.new_full((rows, columns, *rest), fill) for columns in (left, right))
    return torch.cat([before, value, after], dim=1)
