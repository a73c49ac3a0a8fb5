"""Plain Python values as JSON that gives them back as they were: tuples stay tuples, keys keep their type."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import torch

from commons.sequence_batch.batch_tree import Path, path_name

# A JSON object has one entry: its key says what the value is. Lists and scalars stand for themselves.
_TUPLE, _DICT, _BYTES, _DTYPE, _DEVICE, _NUMPY = "tuple", "dict", "bytes", "dtype", "device", "numpy"


def encode_plain(value: Any, path: Path) -> Any:
    """A value that json.dumps takes.

    Args:
        value: None, bool, int, float, str, bytes, numpy scalar, torch.dtype, torch.device, or a list, tuple or dict of
            these.
        path: where in the batch it is, for the error.

    Raises:
        TypeError: anything else.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        return [encode_plain(item, path) for item in value]
    if type(value) is tuple:
        return {_TUPLE: [encode_plain(item, path) for item in value]}
    if type(value) is dict:
        return {_DICT: [[encode_plain(key, path), encode_plain(item, path)] for key, item in value.items()]}
    if type(value) is bytes:
        return {_BYTES: base64.b64encode(value).decode("ascii")}
    if isinstance(value, torch.dtype):
        return {_DTYPE: str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {_DEVICE: str(value)}
    if isinstance(value, np.generic) and value.dtype.kind in "biufSU":
        return {_NUMPY: [value.dtype.str, encode_plain(value.item(), path)]}
    raise TypeError(
        f"{path_name(path)!r} holds a {type(value).__name__}; what is no tensor or array travels as JSON: use None, "
        "numbers, strings, bytes, and lists, tuples and dicts of these"
    )


def decode_plain(data: Any) -> Any:
    """The value that `encode_plain` took."""
    if isinstance(data, list):
        return [decode_plain(item) for item in data]
    if not isinstance(data, dict):
        return data
    ((kind, content),) = data.items()
    if kind == _TUPLE:
        return tuple(decode_plain(item) for item in content)
    if kind == _DICT:
        return {decode_plain(key): decode_plain(item) for key, item in content}
    if kind == _BYTES:
        return base64.b64decode(content)
    if kind == _DTYPE:
        return getattr(torch, content)
    if kind == _DEVICE:
        return torch.device(content)
    dtype, item = content
    return np.dtype(dtype).type(decode_plain(item))
