"""A batch as bytes: its structure as JSON, its tensors as they lie in memory. Nothing is pickled.

    message: length of the JSON (8 bytes), JSON, tensor after tensor

A receiver makes the batch again out of the message alone; classes travel by name. What would arrive as something else
is refused: the mask of a masked array, gradients, subclasses of tensors, attributes of a mapping beside its items.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from commons.sequence_batch.branches import BranchKind, Constant, UnsendableError, build, describe
from commons.sequence_batch.fields import Path, path_name
from commons.sequence_batch.jagged import new_jagged, new_keyed_jagged
from commons.sequence_batch.open_batch import Node, parse
from commons.sequence_batch.plain_values import decode_plain, encode_plain
from commons.sequence_batch.row_leaves import (
    ARRAY,
    COLUMN,
    DENSE_TENSOR,
    JAGGED,
    KEYED_JAGGED,
    LeafType,
    nested_from_lengths,
    nested_lengths,
    ragged_axis,
    require_plain_array,
)
from commons.sequence_batch.rows import Rows

_LENGTH_BYTES = 8


@dataclass(frozen=True)
class Message:
    """A batch ready to be sent."""

    header: bytes  # the JSON, with its length in front
    tensors: list[torch.Tensor]  # what the header refers to, in order; contiguous

    @property
    def nbytes(self) -> int:
        """Bytes of the message."""
        return len(self.header) + sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)

    @property
    def on_accelerator(self) -> bool:
        """Whether any tensor lies on a device."""
        return any(tensor.device.type != "cpu" for tensor in self.tensors)

    def write(self, target: torch.Tensor) -> None:
        """Copy the message into uint8 `(nbytes,)`, on the host or on a device."""
        start = 0
        header = torch.frombuffer(bytearray(self.header), dtype=torch.uint8)
        for part in (header, *(tensor.reshape(-1).view(torch.uint8) for tensor in self.tensors)):
            target[start : start + part.numel()].copy_(part)
            start += part.numel()


class MessageBuffer:
    """Messages end to end in one tensor that grows as they come, so that no other copy of them is kept.

    Args:
        expected_bytes: of all messages together, as far as known.
        on_accelerator: whether the buffer lies on the current CUDA device.
    """

    def __init__(self, expected_bytes: int, on_accelerator: bool) -> None:
        device = torch.device("cuda" if on_accelerator else "cpu")
        self._storage = torch.empty(expected_bytes, dtype=torch.uint8, device=device)
        self.sizes: list[int] = []  # bytes of each message

    def append(self, message: Message | None) -> None:
        """Add a message; None for a receiver that gets none."""
        start, size = sum(self.sizes), 0 if message is None else message.nbytes
        if start + size > self._storage.numel():
            grown = self._storage.new_empty(max(start + size, self._storage.numel() * 5 // 4))
            grown[:start].copy_(self._storage[:start])
            self._storage = grown
        if message is not None:
            message.write(self._storage[start : start + size])
        self.sizes.append(size)

    @property
    def bytes(self) -> torch.Tensor:
        """uint8 `(sum(sizes),)`."""
        return self._storage[: sum(self.sizes)]


def encode(*batches: Any, extra: Any = None) -> Message:
    """Turn batches, parsed or not, and a plain value into a message; numbers of rows may differ.

    Raises:
        TypeError: metadata, or a Python object per row, that JSON cannot hold; a class that no receiver could find, or
        make as it was; a tensor that requires gradients or is no plain one; an array of a subclass such as a masked
        one.
        ValueError: a KeyedJaggedTensor whose keys differ in their number of rows.
    """
    encoder = _Encoder()
    nodes = [encoder.node(batch.tree if isinstance(batch, Rows) else parse(batch), ()) for batch in batches]
    header = json.dumps([nodes, encode_plain(extra, ())], separators=(",", ":")).encode()
    return Message(len(header).to_bytes(_LENGTH_BYTES, "little") + header, encoder.tensors)


def decode(message: torch.Tensor) -> tuple[list[Any], Any]:
    """The batches and the plain value that `encode` took, every tensor in storage of its own.

    The message is uint8 `(nbytes,)`, on the host or on a device. Tensors that lay on the sender's CUDA device go to the
    current one of this process, the others to the host. KeyError for a class that no imported module has.
    """
    length = int.from_bytes(bytes(message[:_LENGTH_BYTES].tolist()), "little")
    header = message[_LENGTH_BYTES : _LENGTH_BYTES + length]
    nodes, extra = json.loads(header.cpu().numpy().tobytes())
    decoder = _Decoder(message, _LENGTH_BYTES + length)
    return [decoder.value(node) for node in nodes], decode_plain(extra)


@dataclass
class _Encoder:
    """Describes a batch and collects its tensors."""

    tensors: list[torch.Tensor] = field(default_factory=list)

    def node(self, node: Node, path: Path) -> list[Any]:
        if node.leaf_type is not None:
            return self.leaf(node.leaf_type, node.value, path)
        if node.kind is not None:
            return self.branch(node.kind, node, path)
        if isinstance(node.value, Constant):
            return ["constant", encode_plain(node.value.value, path)]
        return ["plain", encode_plain(node.value, path)]

    def branch(self, kind: BranchKind, node: Node, path: Path) -> list[Any]:
        value, children = node.value, node.children
        nodes = [[encode_plain(key, path), self.node(child, (*path, key))] for key, child in children.items()]
        rows, place = (value.batch_size[0], _place(value.device)) if kind == "tensordict" else (0, None)
        return ["branch", describe(kind, value, path), rows, place, nodes]

    def leaf(self, leaf_type: LeafType[Any], value: Any, path: Path) -> list[Any]:
        if leaf_type is COLUMN:
            return ["column", encode_plain(value, path)]
        if leaf_type is ARRAY:
            return self.array(value, path)
        if leaf_type is DENSE_TENSOR:
            return ["tensor", self.tensor(value, path)]
        if leaf_type is KEYED_JAGGED:
            leaf_type.count(value, path_name(path))  # of one number of rows, or an error
            parts = [self.tensor(part, path) for part in leaf_type.tensors(value)]
            return ["keyed_jagged", value.keys(), value.stride(), value.length_per_key(), parts]
        if leaf_type is JAGGED:
            return ["jagged", [self.tensor(part, path) for part in leaf_type.tensors(value)]]
        compact = leaf_type.select(value, torch.arange(value.size(0)))  # without gaps between the rows
        values, lengths = compact.values(), nested_lengths(compact)
        return ["nested", ragged_axis(value), self.tensor(values, path), self.tensor(lengths, path)]

    def array(self, value: np.ndarray, path: Path) -> list[Any]:
        require_plain_array(value, path_name(path))
        if value.dtype == object:
            return ["objects", list(value.shape), [encode_plain(item, path) for item in value.ravel().tolist()]]
        if value.dtype.fields is not None or not _is_dtype_of_numpy(value.dtype):
            raise TypeError(
                f"{path_name(path)!r} is an array of dtype {value.dtype}; arrays of one simple dtype of numpy can be "
                "sent: pass its fields as arrays of their own, or convert it"
            )
        raw = np.frombuffer(bytearray(value.tobytes()), dtype=np.uint8)
        return ["array", value.dtype.str, list(value.shape), self.tensor(torch.from_numpy(raw), path)]

    def tensor(self, tensor: torch.Tensor, path: Path) -> list[Any]:
        if type(tensor) is not torch.Tensor:
            raise TypeError(
                f"{path_name(path)!r} is a {type(tensor).__name__}; it would arrive as a plain tensor: pass one, and "
                "what it has beside its values as a field of its own"
            )
        if tensor.requires_grad:
            error = TypeError if tensor.is_leaf else UnsendableError
            raise error(
                f"{path_name(path)!r} requires gradients, which end where a tensor leaves its process: pass detach()"
            )
        tensor = tensor.resolve_conj().resolve_neg().contiguous()
        self.tensors.append(tensor)
        return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), _place(tensor.device)]


class _Decoder:
    """Makes a batch out of a message; every method `make_<kind>` takes what the encoder wrote after the kind."""

    def __init__(self, message: torch.Tensor, position: int) -> None:
        self._message = message
        self._position = position

    def value(self, node: list[Any]) -> Any:
        kind, *content = node
        return getattr(self, f"make_{kind}")(*content)

    def make_plain(self, value: Any) -> Any:
        return decode_plain(value)

    def make_constant(self, value: Any) -> Constant:
        return Constant(decode_plain(value))

    def make_column(self, items: list[Any]) -> list[Any]:
        return decode_plain(items)

    def make_objects(self, shape: list[int], items: list[Any]) -> np.ndarray:
        array = np.empty(len(items), dtype=object)
        for index, item in enumerate(items):
            array[index] = decode_plain(item)
        return array.reshape(shape)

    def make_array(self, dtype: str, shape: list[int], raw: list[Any]) -> np.ndarray:
        return self.make_tensor(raw).numpy().view(dtype).reshape(shape)

    def make_tensor(self, described: list[Any]) -> torch.Tensor:
        name, shape, place = described
        dtype: torch.dtype = getattr(torch, name)
        size = math.prod(shape) * dtype.itemsize
        raw = self._message[self._position : self._position + size]
        self._position += size
        return raw.to(_device_at(place), copy=True).view(dtype).view(shape)

    def make_keyed_jagged(self, keys: list[str], stride: int, per_key: list[int], parts: list[list[Any]]) -> Any:
        values, lengths, *weights = map(self.make_tensor, parts)
        return new_keyed_jagged(keys, values, weights[0] if weights else None, lengths, stride, per_key)

    def make_jagged(self, parts: list[list[Any]]) -> Any:
        values, lengths, *weights = map(self.make_tensor, parts)
        return new_jagged(values, weights[0] if weights else None, lengths)

    def make_nested(self, ragged: int, values: list[Any], lengths: list[Any]) -> torch.Tensor:
        return nested_from_lengths(self.make_tensor(values), self.make_tensor(lengths), ragged)

    def make_branch(self, described: list[Any], rows: int, place: int | None, nodes: list[Any]) -> Any:
        children = {decode_plain(key): self.value(node) for key, node in nodes}
        return build(described, children, rows, None if place is None else _device_at(place))


def _is_dtype_of_numpy(dtype: np.dtype[Any]) -> bool:
    """Whether the text that a message holds of a dtype gives it back; other packages' dtypes read as bytes."""
    try:
        return np.dtype(dtype.str) == dtype
    except TypeError:
        return False


def _place(device: torch.device | None) -> int | None:
    """0 for the host, 1 for an accelerator: its number differs between ranks."""
    return None if device is None else int(device.type != "cpu")


def _device_at(place: int) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if place else torch.device("cpu")
