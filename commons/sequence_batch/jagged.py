"""TorchRec's jagged tensors, in code that has to run without TorchRec too, and selecting their rows.

Whoever has such a tensor has imported TorchRec: its classes are looked up, and imported only to make a tensor of them.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from commons.sequence_batch.host_copies import attach_host_copy, host_copy

if TYPE_CHECKING:
    from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

_MODULE = "torchrec.sparse.jagged_tensor"
# permute_1D_sparse_data has CPU kernels for these alone; other dtypes travel as bit-identical views of one of them.
_VIEW_BY_ITEMSIZE = {8: torch.int64, 4: torch.int32, 2: torch.float16}


def is_type_of(value_type: type, name: str) -> bool:
    """Whether a type is TorchRec's class of that name, or a subclass."""
    return issubclass(value_type, getattr(sys.modules.get(_MODULE), name, ()))


def new_keyed_jagged(
    keys: Sequence[str],
    values: torch.Tensor,
    weights: torch.Tensor | None,
    lengths: torch.Tensor,
    stride: int,
    length_per_key: Sequence[int] | None,
) -> KeyedJaggedTensor:
    """A KeyedJaggedTensor of `stride` rows: `lengths` are `(keys · stride,)`, `length_per_key` their sums by key."""
    return _torchrec().KeyedJaggedTensor(
        keys=list(keys), values=values, weights=weights, lengths=lengths, stride=stride, length_per_key=length_per_key
    )


def new_jagged(values: torch.Tensor, weights: torch.Tensor | None, lengths: torch.Tensor) -> JaggedTensor:
    """A JaggedTensor of lengths `(rows,)`."""
    return _torchrec().JaggedTensor(values=values, weights=weights, lengths=lengths)


def new_keyed(keys: Sequence[str], widths: Sequence[int], values: torch.Tensor) -> KeyedTensor:
    """A KeyedTensor of values `(rows, sum of widths)`."""
    return _torchrec().KeyedTensor(keys=list(keys), length_per_key=list(widths), values=values)


def permute_segments(
    permute: torch.Tensor,
    segment_lengths: torch.Tensor,
    values: torch.Tensor,
    output_size: int | None = None,
) -> torch.Tensor:
    """Concatenate segments of a one-dimensional tensor in a new order; a segment may be left out or repeated.

    Args:
        permute: int32 `(num_output_segments,)`, the input segment of every output segment.
        segment_lengths: int32 or int64 `(num_input_segments,)`, elements per input segment.
        values: `(sum(segment_lengths),)`, any dtype.
        output_size: number of elements of the result; without it, it is read back from the device.
    """
    import fbgemm_gpu.sparse_ops  # noqa: F401  registers torch.ops.fbgemm

    if permute.numel() == 0 or values.numel() == 0 or output_size == 0:
        return values.new_empty(0)
    dtype = values.dtype
    if dtype.itemsize == 1:
        # No one-byte kernel: widen, permute, narrow. Exact, since every one-byte pattern fits an int32.
        wide = permute_segments(permute, segment_lengths, values.view(torch.uint8).to(torch.int32), output_size)
        return wide.to(torch.uint8).view(dtype)
    view = _VIEW_BY_ITEMSIZE.get(dtype.itemsize)
    if view is None:
        raise ValueError(f"values have dtype {dtype}; dtypes of 1, 2, 4 or 8 bytes can be permuted: convert them first")
    values = values.contiguous().view(view)
    _, permuted, _ = torch.ops.fbgemm.permute_1D_sparse_data(permute, segment_lengths, values, None, output_size)
    return permuted.view(dtype)


def select_kjt_rows(kjt: KeyedJaggedTensor, indices: torch.Tensor) -> KeyedJaggedTensor:
    """Rows `indices` of every key, weights included: int64 `(N,)` on the host, any order, repeats allowed.

    The host knows the lengths of the result if it knows those of `kjt`.
    """
    keys, num_rows = kjt.keys(), kjt.stride()
    on_device = indices.to(kjt.device())
    lengths = kjt.lengths().view(len(keys), num_rows)
    selected_lengths = lengths.index_select(1, on_device)  # (keys, N)
    starts = torch.arange(len(keys), device=on_device.device).unsqueeze(1) * num_rows
    permute = (starts + on_device.unsqueeze(0)).flatten().to(torch.int32)  # (keys · N,)
    known = host_copy(kjt.lengths())
    host_lengths = None if known is None else known.view(len(keys), num_rows).index_select(1, indices)
    # The total of all keys: where the host does not know the lengths, the one number that has to be read back.
    per_key = (selected_lengths if host_lengths is None else host_lengths).sum(dim=1).tolist()
    values, weights = (
        None if part is None else permute_segments(permute, lengths.flatten(), part, sum(per_key))
        for part in (kjt.values(), kjt.weights_or_none())
    )
    assert values is not None  # noqa: S101  every KeyedJaggedTensor has values
    selected = new_keyed_jagged(keys, values, weights, selected_lengths.flatten(), indices.numel(), per_key)
    if host_lengths is not None:
        attach_host_copy(selected.lengths(), host_lengths.flatten())
    return selected


def _torchrec() -> Any:
    return sys.modules.get(_MODULE) or importlib.import_module(_MODULE)
