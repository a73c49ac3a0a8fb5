"""TorchRec's classes for code that must also run without TorchRec, and the permutation of jagged values."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch

_MODULE = "torchrec.sparse.jagged_tensor"
# permute_1D_sparse_data has CPU kernels for these dtypes only; other dtypes are viewed as one of them, bit by bit.
_VIEW_BY_ITEMSIZE = {8: torch.int64, 4: torch.int32, 2: torch.float16}


def is_type_of(value_type: type, name: str) -> bool:
    """Whether a type is TorchRec's class of that name, or a subclass; False if TorchRec is not imported."""
    return issubclass(value_type, getattr(sys.modules.get(_MODULE), name, ()))


def torchrec_class(name: str) -> Any:
    """TorchRec's class of that name; imports TorchRec if necessary."""
    return getattr(sys.modules.get(_MODULE) or importlib.import_module(_MODULE), name)


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
        output_size: number of elements of the result; None to read it back from the device.
    """
    import fbgemm_gpu.sparse_ops  # noqa: F401  registers torch.ops.fbgemm

    if permute.numel() == 0 or values.numel() == 0 or output_size == 0:
        return values.new_empty(0)
    dtype = values.dtype
    if dtype.itemsize == 1:
        # There is no one-byte kernel: widen, permute, narrow. Exact, because every byte fits into an int32.
        wide = permute_segments(permute, segment_lengths, values.view(torch.uint8).to(torch.int32), output_size)
        return wide.to(torch.uint8).view(dtype)
    view = _VIEW_BY_ITEMSIZE.get(dtype.itemsize)
    if view is None:
        raise ValueError(f"values have dtype {dtype}; dtypes of 1, 2, 4 or 8 bytes can be permuted: convert them first")
    values = values.contiguous().view(view)
    _, permuted, _ = torch.ops.fbgemm.permute_1D_sparse_data(permute, segment_lengths, values, None, output_size)
    return permuted.view(dtype)
