"""Integers of a device that the host knows too: the lengths of a batch, and what else a model plans by.

A tensor that was copied to a device remembers the host tensor that it is a copy of, so that whoever plans by its values
need not wait for the device. What is remembered belongs to this one tensor: another tensor in its place, a copy of it
included, has none, and a tensor that is written to or given other memory, or whose source is, forgets.

What writes past torch's count of versions is not noticed: collectives that write into the tensor (`broadcast`,
`all_reduce`, `all_to_all_single`, `scatter`), numpy, DLPack, `.data.add_`, `untyped_storage().copy_`, inference mode.
Call `torch.autograd.graph.increment_version(tensor)` after such a write. Nothing in this project writes so into a field
of a batch: tensor-parallel peers load and shuffle alike, and the exchange makes new tensors.
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
    """A host tensor, and the states of it and of the device's tensor at which the two were equal."""

    __slots__ = ("host", "owner", "states")

    def __init__(self, host: torch.Tensor, tensor: torch.Tensor) -> None:
        self.host = host
        self.owner = id(tensor)  # copy.copy takes attributes along, but not the version
        self.states = _state(tensor), _state(host)

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor has the values of the host tensor, as far as torch tells."""
        return self.owner == id(tensor) and self.states == (_state(tensor), _state(self.host))

    def __reduce__(self) -> tuple[type[dict[str, Any]], tuple[()]]:
        return OrderedDict, ()  # a tensor's pickle or deep copy is another tensor; torch.load takes this for harmless


def _state(tensor: torch.Tensor) -> tuple[Any, ...]:
    """A tensor's version, memory and shape at this moment."""
    version = None if tensor.is_inference() else tensor._version
    # Weak: an address that is kept by nobody may be taken again by other memory.
    return version, StorageWeakRef(tensor.untyped_storage()), tensor.storage_offset(), tensor.shape


def attach_host_copy(tensor: torch.Tensor, host: torch.Tensor) -> None:
    """Let a tensor remember its values, integers of the same order on the host, perhaps of a wider dtype.

    Without effect for a tensor on the host, which has them.
    """
    if tensor.device.type != "cpu":
        setattr(tensor, _ATTRIBUTE, _HostCopy(host, tensor))


def host_copy(tensor: torch.Tensor) -> torch.Tensor | None:
    """The values of a tensor on the host: itself where it lies there, else what is attached; None for neither."""
    if tensor.device.type == "cpu":
        return tensor
    known = getattr(tensor, _ATTRIBUTE, None)
    return known.host if isinstance(known, _HostCopy) and known.is_of(tensor) else None


def carry_host_copy(source: torch.Tensor, copied: torch.Tensor) -> None:
    """Let a copy of a tensor know what the tensor knows."""
    host = host_copy(source)
    if host is not None:
        attach_host_copy(copied, host)


def host_arrays(tensors: Sequence[torch.Tensor]) -> list[np.ndarray]:
    """The values of integer tensors, int64 of the same shapes, not to be written to.

    Waits for the device only if a tensor's values are not known: those are read back in one copy, and attached.
    """
    unknown = [tensor for tensor in tensors if host_copy(tensor) is None]
    if unknown:
        values = torch.cat([tensor.flatten().to(torch.int64) for tensor in unknown]).cpu()
        for tensor, part in zip(unknown, values.split([tensor.numel() for tensor in unknown])):
            attach_host_copy(tensor, part.view(tensor.shape))
    return [_as_array(host_copy(tensor)) for tensor in tensors]


def to_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """One-dimensional arrays of one dtype, at least one, on a device, in one copy that the host does not wait for.

    To CUDA they go through pinned memory. The tensors share one storage.
    """
    flat = torch.from_numpy(np.concatenate(arrays))
    if device.type == "cuda":
        flat = flat.pin_memory()
    return list(flat.to(device, non_blocking=True).split([array.size for array in arrays]))


def _as_array(host: torch.Tensor | None) -> np.ndarray:
    assert host is not None  # noqa: S101  attached by the caller
    return host.numpy().astype(np.int64, copy=False)
