"""Pretend CUDA on a CPU build of torch, and look at every operation: what is launched, what is copied, who waits.

    with pretended_cuda(), Watch() as watch:
        ...                                  # tensors on CUDA have shapes, dtypes and devices, but no values
    assert watch.waits == [] and watch.mixed == []

FakeTensorMode runs the rules of shapes and devices alone, and refuses whatever needs a value of the device, as a real
device would have to be waited for. What a CPU build of torch lacks to do so for CUDA is in `pretended_process`.
"""

from __future__ import annotations

import contextlib
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
_PROJECT = Path(__file__).parents[3]
# Operations that make no kernel: they look at memory in another way, or only take it.
_NO_KERNEL = {
    *("view", "_unsafe_view", "_reshape_alias", "reshape", "flatten", "unflatten", "view_as", "as_strided", "expand"),
    *("slice", "select", "narrow", "split", "split_with_sizes", "unbind", "chunk", "unfold", "permute", "transpose"),
    *("t", "unsqueeze", "squeeze", "detach", "alias", "lift_fresh", "device", "sym_size", "is_same_size"),
    *("record_stream", "empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "resize_", "set_"),
}
# Operations whose result, or its size, is known to the device alone.
_READ_BACK = {
    *("_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2"),
    *("unique_consecutive", "unique_dim"),
}
# aten's indices may lie on the host; they are then copied.
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}


class Wait(NamedTuple):
    """The host waits for the device: for what, and the line of ours or of TorchRec that asks for it."""

    what: str
    where: str


class Copy(NamedTuple):
    """A copy from the host to the device."""

    shape: tuple[int, ...]  # of the tensor
    non_blocking: bool  # as asked for
    pinned: bool  # whether the source is in pinned memory; a copy from elsewhere may wait
    where: str  # the line of ours or of TorchRec


@dataclass(frozen=True)
class PinnedMemory:
    """Memory that has been pinned, in pretence, while this is active."""

    tensors: list[torch.Tensor]

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a host tensor lies in pinned memory."""
        storage = tensor.untyped_storage()._cdata
        return any(pinned.untyped_storage()._cdata == storage for pinned in self.tensors)


@contextlib.contextmanager
def pretended_pinning() -> Iterator[PinnedMemory]:
    """Let `pin_memory()` and `torch.empty(..., pin_memory=True)` succeed, on any thread and for any device."""
    pinned, empty = PinnedMemory([]), torch.empty

    def pin(tensor: torch.Tensor, *_: Any) -> torch.Tensor:
        copy = tensor if pinned.holds(tensor) else tensor.clone()
        pinned.tensors.append(copy)
        return copy

    def take(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        tensor = empty(*args, **kwargs)
        if pin_memory:
            pinned.tensors.append(tensor)
        return tensor

    with (
        mock.patch.object(torch.Tensor, "pin_memory", pin),
        mock.patch.object(torch.Tensor, "is_pinned", lambda tensor, *_: pinned.holds(tensor)),
        mock.patch.object(torch, "empty", take),
        mock.patch.object(torch.cuda, "set_device", lambda device: None),
    ):
        yield pinned


class _FakeDevice(FakeTensorMode):
    """Where what touches the device is fake; operations on the host alone run, and their results have values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = tree_leaves((args, kwargs))
        if any(isinstance(leaf, FakeTensor) or (isinstance(leaf, torch.device) and leaf != CPU) for leaf in leaves):
            return super().__torch_dispatch__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))


def fake_mode() -> FakeTensorMode:
    """Where tensors on CUDA can be made, and those of the host are what they are."""
    return _FakeDevice(allow_non_fake_inputs=True)


class Watch(TorchDispatchMode):
    """Records what operations on CUDA would do; entered within `fake_mode`. Memory is `pinned`, or none is."""

    def __init__(self, pinned: PinnedMemory | None = None) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()  # kernels and copies within the device, by operator
        self.copies: list[Copy] = []  # from the host to the device
        self.waits: list[Wait] = []  # of the host for the device
        self.mixed: list[tuple[str, str]] = []  # operations with tensors of both, which a device refuses; and where
        self.collectives: list[str] = []  # names of c10d's operations
        self._pinned = pinned or PinnedMemory([])

    @property
    def num_launches(self) -> int:
        """Kernels and copies within the device."""
        return sum(self.launches.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Take note of an operation and run it."""
        kwargs = kwargs or {}
        namespace, _, name = func._schema.name.partition("::")
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        # A host scalar is a kernel's argument.
        kinds = {tensor.device.type for tensor in tensors if tensor.dim() or tensor.device.type == "cuda"}
        if name == "_to_copy":
            self._note_copy(args[0], torch.device(kwargs.get("device") or args[0].device), kwargs, name)
        elif name in ("copy_", "_copy_from"):
            self._note_copy(
                args[1], args[0].device, {"non_blocking": args[2] if len(args) > 2 else False} | kwargs, name
            )
        elif namespace == "c10d":
            self.collectives.append(name)
            self._note_mixed(f"{namespace}::{name}", kinds)
        elif "cuda" in kinds or torch.device(kwargs.get("device") or "cpu").type == "cuda":
            self._note_launch(namespace, name, kinds, kwargs)
        try:
            return func(*args, **kwargs)
        except (
            torch._subclasses.fake_tensor.DynamicOutputShapeException,
            torch._subclasses.fake_tensor.DataDependentOutputException,
        ):
            if not self.waits or self.waits[-1].what != name:
                self.waits.append(Wait(name, _where()))
            raise

    def _note_copy(self, source: torch.Tensor, target: torch.device, options: dict[str, Any], name: str) -> None:
        kinds, non_blocking = (source.device.type, target.type), bool(options.get("non_blocking"))
        if kinds == ("cuda", "cuda"):
            self.launches[name] += 1
        elif kinds == ("cuda", "cpu"):
            self.waits.append(Wait(f"copy of {tuple(source.shape)} to the host", _where()))
        elif kinds == ("cpu", "cuda"):
            where, shape = _where(), tuple(source.shape)
            self.copies.append(Copy(shape, non_blocking, self._pinned.holds(source), where))
            if not non_blocking:
                self.waits.append(Wait(f"blocking copy of {shape} from the host", where))

    def _note_launch(self, namespace: str, name: str, kinds: set[str], options: dict[str, Any]) -> None:
        if len(kinds) > 1 and name not in _INDEXING:
            self._note_mixed(f"{namespace}::{name}", kinds)
        sized = name == "repeat_interleave" and options.get("output_size") is None
        if name in _READ_BACK or sized or (name in _INDEXING and len(kinds) > 1):
            self.waits.append(Wait(name, _where()))
        if name not in _NO_KERNEL:
            self.launches[f"{namespace}::{name}"] += 1

    def _note_mixed(self, name: str, kinds: set[str]) -> None:
        if kinds - {"cuda"}:
            self.mixed.append((name, _where()))


def _where() -> str:
    """The innermost line of this project's or of TorchRec's."""
    for frame in reversed(traceback.extract_stack()[:-2]):
        path = Path(frame.filename)
        if "torchrec" in path.parts:
            return f"{'/'.join(path.parts[path.parts.index('torchrec') :])}:{frame.lineno} {frame.line}"
        if path.is_relative_to(_PROJECT) and "site-packages" not in path.parts and path != Path(__file__):
            return f"{path.relative_to(_PROJECT)}:{frame.lineno} {frame.line}"
    return "?"
