"""Integers of a device that the host knows too: the lengths of a batch, and what else a model plans by.

A tensor that was copied to a device remembers the host tensor that it is a copy of, so that whoever plans by its values
need not wait for the device. The memory belongs to this one tensor: another tensor in its place has none, and a tensor
that is written to, or whose source is, forgets. What writes past torch's count of versions is not seen: numpy, `.data`,
and inference mode.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

_ATTRIBUTE = "_evenrank_host_copy"


class _HostCopy:
    """A host tensor and the versions, of it and of the device's tensor, at which the two were equal."""

    __slots__ = ("host", "versions")

    def __init__(self, host: torch.Tensor, versions: tuple[int, int]) -> None:
        self.host = host
        self.versions = versions

    def __reduce__(self) -> tuple[type[dict[str, Any]], tuple[()]]:
        return OrderedDict, ()  # a tensor's pickle or deep copy is another tensor; torch.load takes this for harmless


def attach_host_copy(tensor: torch.Tensor, host: torch.Tensor) -> None:
    """Let a tensor remember its values; without effect for one on the host, which has them.

    Args:
        tensor: on any device.
        host: integers on the host of the same values, in the same order and perhaps of a wider dtype.
    """
    if tensor.device.type != "cpu":
        setattr(tensor, _ATTRIBUTE, _HostCopy(host, (_version(tensor), _version(host))))


def host_copy(tensor: torch.Tensor) -> torch.Tensor | None:
    """The values of a tensor on the host: itself where it lies there, else what is attached; None for neither."""
    if tensor.device.type == "cpu":
        return tensor
    known = getattr(tensor, _ATTRIBUTE, None)
    if not isinstance(known, _HostCopy) or known.versions != (_version(tensor), _version(known.host)):
        return None
    return known.host


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
    """One-dimensional arrays of one dtype on a device, in one copy that the host does not wait for.

    Args:
        arrays: at least one.
        device: where they go. To CUDA they go through pinned memory.

    Returns:
        For each array a tensor of its shape and dtype; they share one storage.
    """
    flat = torch.from_numpy(np.concatenate(arrays))
    if device.type == "cuda":
        flat = flat.pin_memory()
    return list(flat.to(device, non_blocking=True).split([array.size for array in arrays]))


def _as_array(host: torch.Tensor | None) -> np.ndarray:
    assert host is not None  # noqa: S101  attached by the caller
    return host.numpy().astype(np.int64, copy=False)


def _version(tensor: torch.Tensor) -> Any:
    return None if tensor.is_inference() else tensor._version
