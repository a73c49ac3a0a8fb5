"""TorchRec's jagged tensors in code that has to run without TorchRec too.

Whoever has such a tensor has imported TorchRec: its classes are looked up, and imported only to make a tensor of them.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

if TYPE_CHECKING:
    from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

_MODULE = "torchrec.sparse.jagged_tensor"


def is_keyed_jagged(value: Any) -> TypeGuard[KeyedJaggedTensor]:
    """Whether a value is a KeyedJaggedTensor."""
    return isinstance(value, _class_named("KeyedJaggedTensor"))


def is_jagged(value: Any) -> TypeGuard[JaggedTensor]:
    """Whether a value is a JaggedTensor."""
    return isinstance(value, _class_named("JaggedTensor"))


def is_any_jagged(value: Any) -> TypeGuard[KeyedJaggedTensor | JaggedTensor]:
    """Whether a value is a KeyedJaggedTensor or a JaggedTensor; one check for both, on the path of every batch."""
    torchrec = sys.modules.get(_MODULE)
    return torchrec is not None and isinstance(value, (torchrec.KeyedJaggedTensor, torchrec.JaggedTensor))


def is_keyed(value: Any) -> TypeGuard[KeyedTensor]:
    """Whether a value is a KeyedTensor."""
    return isinstance(value, _class_named("KeyedTensor"))


def new_keyed_jagged(**parts: Any) -> KeyedJaggedTensor:
    """A KeyedJaggedTensor of these arguments."""
    return _torchrec().KeyedJaggedTensor(**parts)


def empty_keyed_jagged(
    keys: Sequence[str],
    rows: int,
    values: torch.dtype,
    weights: torch.dtype | None,
    lengths: torch.dtype,
    device: torch.device | None = None,
) -> KeyedJaggedTensor:
    """A KeyedJaggedTensor of `rows` empty rows, of these dtypes."""
    return new_keyed_jagged(
        keys=list(keys),
        values=torch.empty(0, dtype=values, device=device),
        weights=None if weights is None else torch.empty(0, dtype=weights, device=device),
        lengths=torch.zeros(len(keys) * rows, dtype=lengths, device=device),
        stride=rows,
        length_per_key=[0] * len(keys),
    )


def new_jagged(**parts: Any) -> JaggedTensor:
    """A JaggedTensor of these arguments."""
    return _torchrec().JaggedTensor(**parts)


def new_keyed(keys: Sequence[str], widths: Sequence[int], values: torch.Tensor) -> KeyedTensor:
    """A KeyedTensor of values `(rows, sum of widths)`."""
    return _torchrec().KeyedTensor(keys=list(keys), length_per_key=list(widths), values=values)


def _torchrec() -> Any:
    return sys.modules.get(_MODULE) or importlib.import_module(_MODULE)


def _class_named(name: str) -> Any:
    """The class of that name for isinstance; no class at all where TorchRec has not been imported."""
    return getattr(sys.modules.get(_MODULE), name, ())
