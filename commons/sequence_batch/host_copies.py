"""Host copies of integer tensors on a device: the lengths of a batch and its `host_fields`.

A tensor that was copied to a device keeps a reference to its source on the host, so that planning need not synchronise
with the device. The host copy belongs to this one tensor object: other tensors, its copies included, have none. It
becomes invalid when the tensor or its source is written to or gets other memory.

Writes that do not change torch's version counter are not detected: collectives that write into the tensor (`broadcast`,
`all_reduce`, `all_to_all_single`, `scatter`), numpy, DLPack, `.data.add_`, `untyped_storage().copy_`, inference mode.
Call `torch.autograd.graph.increment_version(tensor)` after such a write. This project never writes to fields of a batch
in these ways: tensor-parallel peers load and shuffle alike, and the exchange makes new tensors.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef

_ATTRIBUTE = "_evenrank_host_copy"


class _HostCopy:
    """A host tensor, with the states of both tensors when their values were equal."""

    __slots__ = ("host", "owner", "states")

    def __init__(self, host: torch.Tensor, tensor: torch.Tensor) -> None:
        self.host = host
        self.owner = id(tensor)  # copy.copy copies attributes, but not the version
        self.states = _state(tensor), _state(host)

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Whether this is a valid host copy of the tensor: neither has changed by torch's version counters."""
        return self.owner == id(tensor) and self.states == (_state(tensor), _state(self.host))

    def __reduce__(self) -> tuple[type[dict[str, Any]], tuple[()]]:
        return OrderedDict, ()  # a pickled or deep-copied tensor has no host copy; torch.load allows an OrderedDict


def _state(tensor: torch.Tensor) -> tuple[Any, ...]:
    """A tensor's current version, memory and shape."""
    version = None if tensor.is_inference() else tensor._version
    # A weak reference and not the address, which may be reused after the storage is freed.
    return version, StorageWeakRef(tensor.untyped_storage()), tensor.storage_offset(), tensor.shape


def attach_host_copy(tensor: torch.Tensor, host: torch.Tensor) -> None:
    """Attach a host copy to a tensor: the same integers in the same order, in the same or a wider dtype.

    Has no effect on a tensor that is on the host.
    """
    if tensor.device.type != "cpu":
        setattr(tensor, _ATTRIBUTE, _HostCopy(host, tensor))


def host_copy(tensor: torch.Tensor) -> torch.Tensor | None:
    """The values of a tensor on the host: the tensor itself if it is there, else its host copy; None if it has none."""
    if tensor.device.type == "cpu":
        return tensor
    known = getattr(tensor, _ATTRIBUTE, None)
    return known.host if isinstance(known, _HostCopy) and known.is_of(tensor) else None


def carry_host_copy(source: torch.Tensor, copied: torch.Tensor) -> None:
    """Attach the host copy of a tensor, if any, to a copy of the tensor."""
    host = host_copy(source)
    if host is not None:
        attach_host_copy(copied, host)


def host_arrays(tensors: Sequence[torch.Tensor]) -> list[np.ndarray]:
    """The values of integer tensors, int64 of the same shapes; writing to them may change the tensors.

    Tensors without a host copy are read back in one copy, which synchronises with the device, and then have one.
    """
    unknown = [tensor for tensor in tensors if host_copy(tensor) is None]
    if unknown:
        values = torch.cat([tensor.flatten().to(torch.int64) for tensor in unknown]).cpu()
        for tensor, part in zip(unknown, values.split([tensor.numel() for tensor in unknown])):
            attach_host_copy(tensor, part.view(tensor.shape))
    return [_as_array(host_copy(tensor)) for tensor in tensors]


def to_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Copy arrays of one dtype, at least one, to a device, in one non-blocking copy.

    Copies to CUDA use pinned memory. The tensors share one storage.
    """
    flat = torch.from_numpy(np.concatenate([array.ravel() for array in arrays]))
    if device.type == "cuda":
        flat = flat.pin_memory()
    parts = flat.to(device, non_blocking=True).split([array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays)]


def _as_array(host: torch.Tensor | None) -> np.ndarray:
    assert host is not None  # noqa: S101  attached by the caller
    return host.numpy().astype(np.int64, copy=False)
