"""Rows of jagged tensors: selecting them, and the dtype views that make fbgemm's kernels serve every dtype."""

from __future__ import annotations

import fbgemm_gpu.sparse_ops  # noqa: F401  registers torch.ops.fbgemm
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from commons.sequence_batch.host_copies import attach_host_copy, host_copy

# permute_1D_sparse_data has CPU kernels for these alone; other dtypes travel as bit-identical views of one of them.
_VIEW_BY_ITEMSIZE = {8: torch.int64, 4: torch.int32, 2: torch.float16}


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
        output_size: number of elements of the result. With it, nothing is read back from the device.

    Returns:
        `(output_size,)`, the dtype of `values`, in storage of its own.
    """
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
    """Rows of every key of a KeyedJaggedTensor, weights included.

    Args:
        kjt: `K` keys over `B` rows, one stride for all keys.
        indices: int64 `(N,)` on the host, rows in `[0, B)`; any order, repeats allowed.

    Returns:
        A KeyedJaggedTensor of the same keys over `N` rows. The host knows its lengths if it knows those of `kjt`.
    """
    keys = kjt.keys()
    num_rows = indices.numel()
    on_device = indices.to(kjt.device())
    lengths = kjt.lengths().view(len(keys), kjt.stride())  # (K, B)
    selected_lengths = lengths.index_select(1, on_device)  # (K, N)
    starts = torch.arange(len(keys), device=on_device.device).unsqueeze(1) * kjt.stride()
    permute = (starts + on_device.unsqueeze(0)).flatten().to(torch.int32)  # (K * N,)
    known = host_copy(kjt.lengths())
    host_lengths = None if known is None else known.view(len(keys), kjt.stride()).index_select(1, indices)
    # The total of all keys: where the host does not know the lengths, the one number that has to be read back.
    per_key = (selected_lengths if host_lengths is None else host_lengths).sum(dim=1).tolist()
    flat_lengths = lengths.flatten()
    weights = kjt.weights_or_none()
    selected = KeyedJaggedTensor(
        keys=list(keys),
        values=permute_segments(permute, flat_lengths, kjt.values(), sum(per_key)),
        weights=None if weights is None else permute_segments(permute, flat_lengths, weights, sum(per_key)),
        lengths=selected_lengths.flatten(),
        stride=num_rows,
        length_per_key=per_key,
    )
    if host_lengths is not None:
        attach_host_copy(selected.lengths(), host_lengths.flatten())
    return selected
