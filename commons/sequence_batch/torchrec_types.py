"""TorchRec's jagged tensors in code that has to run without TorchRec too.

Whoever has such a tensor has imported TorchRec: its classes are looked up, and imported only to make a tensor of them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

if TYPE_CHECKING:
    from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

_MODULE = "torchrec.sparse.jagged_tensor"


def is_keyed_jagged(value: Any) -> TypeGuard[KeyedJaggedTensor]:
    """Whether a value is a KeyedJaggedTensor."""
    return isinstance(value, _class_named("KeyedJaggedTensor"))


def is_jagged(value: Any) -> TypeGuard[JaggedTensor]:
    """Whether a value is a JaggedTensor."""
    return isinstance(value, _class_named("JaggedTensor"))


def is_keyed(value: Any) -> bool:
    """Whether a value is a KeyedTensor."""
    return isinstance(value, _class_named("KeyedTensor"))


def new_keyed_jagged(**parts: Any) -> KeyedJaggedTensor:
    """A KeyedJaggedTensor of these arguments."""
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    return KeyedJaggedTensor(**parts)


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
    from torchrec.sparse.jagged_tensor import JaggedTensor

    return JaggedTensor(**parts)


def _class_named(name: str) -> Any:
    """The class of that name for isinstance; no class at all where TorchRec has not been imported."""
    return getattr(sys.modules.get(_MODULE), name, ())
