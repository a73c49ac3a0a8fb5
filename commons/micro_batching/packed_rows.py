"""PackedRows: the rows of a micro-batch concatenated into one row, so that no padding is computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from commons.checks import as_count, kind_of
from commons.sequence_batch.jagged_fields import ragged_axis

MaskKind = Literal["block_diagonal", "causal"]

# The label that PyTorch's and Hugging Face's losses ignore.
IGNORE_INDEX = -100


@dataclass(frozen=True, eq=False)
class PackedRows:
    """Concatenated rows; T is the number of tokens, including the fill up to a multiple."""

    # The model's arguments: every field with an entry per token as `(1, T, ...)`, `position_ids` int64 `(1, T)`, which
    # begin at 0 in every row, `attention_mask` bool `(1, 1, T, T)` if a mask was requested, and the other fields
    # unchanged.
    inputs: dict[str, Any]
    # int32 `(rows + 1,)`, the start of each row and the end of the last row, as attention kernels for variable lengths
    # take it; one more entry if there is a fill, which counts as a row.
    cu_seqlens: torch.Tensor
    max_seqlen: int  # tokens of the longest row
    # int64 `(tokens,)`, the position of each token in the padded batch, row · width + column; for nested tensors, the
    # position in their values.
    places: torch.Tensor
    shape: tuple[int, int] | None  # rows and width of the padded batch; None for nested tensors
    _fill: int = field(default=0, repr=False)  # tokens of the fill
    _offsets: torch.Tensor | None = field(default=None, repr=False)  # of the nested tensors

    @property
    def num_tokens(self) -> int:
        """Number of tokens without the fill."""
        return self.places.numel()

    def unpack(self, values: torch.Tensor) -> torch.Tensor:
        """Put outputs per token back into the rows of the batch; differentiable.

        Args:
            values: `(1, T, ...)`, such as the logits of the packed row.

        Returns:
            `(rows, width, ...)`, zeros where the batch has padding; a nested tensor if the batch had nested tensors.

        Raises:
            ValueError: another number of tokens.
        """
        length = self.num_tokens + self._fill  # not read from `inputs`, which a caller may change for a model
        if tuple(values.shape[:2]) != (1, length):
            raise ValueError(
                f"values have shape {tuple(values.shape)}, the packed row has shape (1, {length}); there is one value "
                "per token: pass the model's output for this row"
            )
        flat = values[0, : self.num_tokens]
        if self.shape is None:
            return torch.nested.nested_tensor_from_jagged(flat, self._offsets)
        result = flat.new_zeros(self.shape[0] * self.shape[1], *flat.shape[1:])
        return result.index_copy(0, self.places, flat).view(*self.shape, *flat.shape[1:])


def pack_rows(
    batch: Mapping[str, torch.Tensor] | Any,
    *,
    mask: MaskKind | None = None,
    pad_to_multiple_of: int = 1,
    ignore_index: int = IGNORE_INDEX,
) -> PackedRows:
    """Concatenate the rows of a batch into one row.

    Tokens must not attend to other rows: position ids restart in every row, and `cu_seqlens` separates the rows in
    attention, or a mask for models that do not take `cu_seqlens`. The batch's own position ids are replaced; they must
    count up by 1 in every row. The first label of every row becomes `ignore_index`, because a causal model would
    predict it from the last token of the row before. A loss mask of your own is not changed: make it 0 there.

    Args:
        batch: dict or TensorDict of tensors, in one of two forms. Padded, as Hugging Face's models take it:
            `attention_mask` `(rows, width)`, not 0 where there is a token, with padding on either side; fields that
            begin with these two dimensions have an entry per token, the other fields remain unchanged. Or without
            `attention_mask`: fields per token are nested tensors `(rows, tokens, ...)` of layout torch.jagged.
        mask: "block_diagonal" if a token attends to its whole row, "causal" if it attends to itself and earlier tokens
            of its row. It is True where a token attends, as in torch's scaled_dot_product_attention; Hugging Face's
            "eager" attention adds its mask to the scores, and needs `torch.where(mask, 0.0, -torch.inf)` instead. It
            takes T² bytes; None for kernels that take `cu_seqlens`.
        pad_to_multiple_of: T is a multiple of it; the fill, of zeros and ignored labels, is a row of its own.
        ignore_index: label that the loss ignores.

    Raises:
        ValueError: neither an attention mask nor nested tensors, nested tensors of different lengths, ragged in another
            dimension, with gaps or with values outside their rows, a mask that is not `(rows, width)`, no token at all,
            `input_ids` of another form than the tokens, `position_ids` of another form or that do not count up by 1 in
            a row, an unknown kind of mask, or `pad_to_multiple_of` below 1.
        TypeError: the batch is neither a dict nor a TensorDict, or its attention mask is no tensor.

    Examples:
        >>> ids, mask = torch.tensor([[5, 6, 0], [7, 8, 9]]), torch.tensor([[1, 1, 0], [1, 1, 1]])
        >>> packed = pack_rows({"input_ids": ids, "attention_mask": mask})
        >>> packed.inputs["input_ids"].tolist(), packed.inputs["position_ids"].tolist(), packed.cu_seqlens.tolist()
        ([[5, 6, 7, 8, 9]], [[0, 1, 0, 1, 2]], [0, 2, 5])
    """
    if mask not in (None, "block_diagonal", "causal"):
        raise ValueError(f"mask is {mask!r}; it must be 'block_diagonal', 'causal' or None: choose one")
    pad_to_multiple_of = as_count(pad_to_multiple_of, "pad_to_multiple_of", 1)
    if not hasattr(batch, "items"):
        raise TypeError(f"the batch is {kind_of(batch)}; it must be a dict or TensorDict of tensors: name its fields")
    fields = dict(batch.items())
    lengths, places, shape, offsets = _token_places(fields)
    num_tokens = places.numel()
    if num_tokens == 0:
        raise ValueError("the batch has no token; a packed row has at least one: leave out empty batches")
    fill = -num_tokens % pad_to_multiple_of
    if fill:
        lengths = torch.cat([lengths, lengths.new_tensor([fill])])
    ends = lengths.cumsum(0)
    starts = ends - lengths
    row = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
    token = torch.arange(num_tokens + fill, device=lengths.device)

    inputs: dict[str, Any] = {}
    for name, value in fields.items():
        if name in ("attention_mask", "position_ids"):
            continue  # computed below
        if not _is_per_token(value, shape):
            if name == "input_ids" and value is not None:
                what = f"has shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"is {kind_of(value)}"
                tokens = "other fields are nested tensors" if shape is None else f"attention_mask has shape {shape}"
                raise ValueError(f"input_ids {what}, {tokens}; every token has an id: give both the same form")
            inputs[name] = value
            continue
        flat = value.values() if value.is_nested else value.flatten(0, 1).index_select(0, places)
        filler = flat.new_full((fill, *flat.shape[1:]), ignore_index if name == "labels" else 0)
        flat = torch.cat([flat, filler])
        if name == "labels":
            flat[starts[lengths > 0]] = ignore_index  # a copy since torch.cat
        inputs[name] = flat.unsqueeze(0)
    _require_counted_positions(fields.get("position_ids"), shape, places, row[:num_tokens])
    inputs["position_ids"] = (token - starts[row]).unsqueeze(0)
    if mask is not None:
        sees = row.unsqueeze(1) == row.unsqueeze(0)
        if mask == "causal":
            sees &= token.unsqueeze(1) >= token.unsqueeze(0)
        inputs["attention_mask"] = sees.view(1, 1, len(token), len(token))
    return PackedRows(
        inputs=inputs,
        cu_seqlens=torch.cat([ends.new_zeros(1), ends]).to(torch.int32),
        max_seqlen=int(lengths.max()),
        places=places,
        shape=shape,
        _fill=fill,
        _offsets=offsets,
    )


def count_loss_tokens(
    labels: torch.Tensor, attention_mask: torch.Tensor | None = None, *, ignore_index: int = IGNORE_INDEX
) -> torch.Tensor:
    """Number of loss terms of a causal language model in each row: labels except ignored ones and the first token's.

    Args:
        labels: int64 `(rows, width)`, or a nested tensor `(rows, tokens)` of layout torch.jagged.
        attention_mask: `(rows, width)`, not 0 where there is a token; None if there is no padding.
        ignore_index: label that the loss ignores.

    Returns:
        int64 `(rows,)`.

    Raises:
        ValueError: shapes that differ, or labels of a mask's dtype, bool or floating-point.
        TypeError: labels or a mask that are no tensor.

    Examples:
        >>> count_loss_tokens(torch.tensor([[5, 6, 7, -100], [5, -100, 7, 8]])).tolist()
        [2, 2]
    """
    _require_tensor(labels, "labels")
    if attention_mask is not None:
        _require_tensor(attention_mask, "attention_mask")
    if labels.is_nested:
        labels = labels.to_padded_tensor(ignore_index)
    tokens = torch.ones_like(labels, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
    if tokens.dim() != 2 or tokens.shape != labels.shape:
        raise ValueError(
            f"labels have shape {tuple(labels.shape)}, attention_mask has shape {tuple(tokens.shape)}; both are (rows, "
            "width): make them equal"
        )
    if labels.dtype == torch.bool or labels.is_floating_point():
        raise ValueError(
            f"labels have dtype {labels.dtype}; labels are token ids, and {ignore_index} where the loss ignores "
            "them: pass these, or count the terms of a loss mask by its sum over each row"
        )
    follows = tokens.cumsum(1) > 1
    return (tokens & follows & (labels != ignore_index)).sum(1)


def _require_tensor(value: Any, name: str) -> None:
    if not isinstance(value, torch.Tensor):
        raise TypeError(
            f"{name} is {kind_of(value)}; it must be a tensor (rows, width): convert it, or let the tokenizer return "
            "tensors (return_tensors='pt')"
        )


def _require_counted_positions(
    positions: Any, shape: tuple[int, int] | None, places: torch.Tensor, row: torch.Tensor
) -> None:
    """Raise ValueError for position ids that do not count the tokens of a row; `row` `(tokens,)` is each token's."""
    if not isinstance(positions, torch.Tensor):
        return
    flat = positions
    if positions.is_nested:
        flat = positions.values()
    elif shape is not None and tuple(positions.shape) in (shape, (1, shape[1])):
        flat = positions.expand(shape).flatten().index_select(0, places)
    if flat.shape != row.shape:
        raise ValueError(
            f"position_ids have shape {tuple(positions.shape)}; the packed row counts the tokens of every row from 0: "
            "pass other positions under another name, (rows, width, ...), and leave out position_ids"
        )
    # Between neighbours in the padded row: a mask may leave tokens out, such as padding between prompt and response.
    wrong = ((flat.diff() != 1) & (row.diff() == 0) & (places.diff() == 1)).nonzero()
    if len(wrong):
        raise ValueError(
            f"position_ids do not count up by 1 in row {int(row[wrong[0]])}; the packed row counts the tokens of every "
            "row from 0, and attention separates rows: make every sequence a row, or leave out position_ids if a row "
            "is one sequence"
        )


def _is_per_token(value: Any, shape: tuple[int, int] | None) -> bool:
    if not isinstance(value, torch.Tensor):
        return False
    return value.is_nested or (shape is not None and tuple(value.shape[:2]) == shape)


def _token_places(
    fields: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor, tuple[int, int] | None, torch.Tensor | None]:
    """Tokens of each row `(rows,)`, position of each token `(tokens,)`, padded shape, and offsets of nested tensors."""
    nested: dict[str, Any] = {
        name: value for name, value in fields.items() if isinstance(value, torch.Tensor) and value.is_nested
    }
    if nested:
        for name, value in nested.items():
            is_contiguous = value.layout == torch.jagged and value.lengths() is None
            ends = value.offsets()[[0, -1]].tolist() if is_contiguous else []
            if not is_contiguous or ragged_axis(value) != 1 or ends != [0, value.values().shape[0]]:
                raise ValueError(
                    f"field {name!r} is a nested tensor of layout {value.layout}; it must be of layout torch.jagged, "
                    "with the tokens of a row along dimension 1 and no values between or around the rows: make it again"
                )
        offsets: dict[str, torch.Tensor] = {name: value.offsets() for name, value in nested.items()}
        first = next(iter(offsets))
        for name, other in offsets.items():
            if not torch.equal(other, offsets[first]):
                raise ValueError(
                    f"fields {first!r} and {name!r} are nested tensors of different lengths; they have an entry per "
                    "token of the same rows: make them equal, or pack them apart"
                )
        lengths = offsets[first].diff()
        return lengths, torch.arange(int(offsets[first][-1]), device=lengths.device), None, offsets[first]
    if "attention_mask" not in fields:
        raise ValueError(
            f"the batch has the fields {', '.join(fields)}; attention_mask (rows, width) is needed to find the tokens: "
            "add it, or pass nested tensors"
        )
    tokens = fields["attention_mask"]
    _require_tensor(tokens, "attention_mask")
    if tokens.dim() != 2:
        raise ValueError(
            f"attention_mask has shape {tuple(tokens.shape)}; it must be (rows, width), not 0 where there is a token: "
            "pass the mask of the tokenizer"
        )
    lengths = (tokens != 0).sum(1)
    return lengths, (tokens != 0).flatten().nonzero().squeeze(1), (tokens.shape[0], tokens.shape[1]), None
