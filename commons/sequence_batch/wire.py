"""A batch as bytes: its schema as JSON, its tensors as their bytes in memory, without pickle.

    message: length of the JSON (8 bytes), JSON, tensor after tensor

A receiver rebuilds the batch from the message and finds classes by name. Values that would arrive changed are refused:
the mask of a masked array, gradients, subclasses of tensors, attributes of a mapping in addition to its items.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from commons.checks import kind_of
from commons.sequence_batch.branches import UnsendableError
from commons.sequence_batch.fields import Path, path_name
from commons.sequence_batch.open_batch import Tree, open_tree
from commons.sequence_batch.plain_values import decode_plain, encode_plain
from commons.sequence_batch.row_leaves import share_offsets
from commons.sequence_batch.rows import Rows
from commons.sequence_batch.schema import BatchSchema

_LENGTH_BYTES = 8


@dataclass(frozen=True)
class Message:
    """A batch ready to be sent."""

    header: bytes  # the JSON, after its length
    tensors: list[torch.Tensor]  # the tensors that the header describes, in order; contiguous

    @property
    def nbytes(self) -> int:
        """Bytes of the message."""
        return len(self.header) + sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)

    @property
    def on_accelerator(self) -> bool:
        """Whether any tensor is on an accelerator."""
        return any(tensor.device.type != "cpu" for tensor in self.tensors)

    def write(self, target: torch.Tensor) -> None:
        """Copy the message into uint8 `(nbytes,)`, on the host or on a device."""
        start = 0
        header = torch.frombuffer(bytearray(self.header), dtype=torch.uint8)
        # Not reshape(-1): a tensor of a single element is contiguous with any stride.
        flat = (tensor.as_strided((tensor.numel(),), (1,)) for tensor in self.tensors)
        for part in (header, *(tensor.view(torch.uint8) for tensor in flat)):
            target[start : start + part.numel()].copy_(part)
            start += part.numel()


class MessageBuffer:
    """A growing tensor with messages end to end, so that only one copy of each message exists.

    Args:
        expected_bytes: expected size of all messages together.
        on_accelerator: whether the buffer is on the current CUDA device if the first message is; else on the host.
    """

    def __init__(self, expected_bytes: int, on_accelerator: bool) -> None:
        self._expected_bytes, self._on_accelerator = expected_bytes, on_accelerator
        self._storage = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.sizes: list[int] = []  # bytes of each message

    def append(self, message: Message | None) -> None:
        """Add a message; None for a receiver without a message."""
        start, size = sum(self.sizes), 0 if message is None else message.nbytes
        self.sizes.append(size)
        if message is None:
            return
        if start == 0 and self._on_accelerator and message.on_accelerator:
            self._storage = self._storage.to("cuda")
        if start + size > self._storage.numel():
            room = max(start + size, self._storage.numel() * 5 // 4, self._expected_bytes)
            grown = torch.empty(room, dtype=torch.uint8, device=self._storage.device)
            grown[:start].copy_(self._storage[:start])
            self._storage = grown
        message.write(self._storage[start : start + size])

    @property
    def bytes(self) -> torch.Tensor:
        """All messages, uint8 `(sum(sizes),)`."""
        return self._storage[: sum(self.sizes)]


def encode(*batches: Any, extra: Any = None) -> Message:
    """Turn batches, parsed or not, and a plain value into a message; numbers of rows may differ.

    Raises:
        TypeError: metadata, or a Python object per row, that JSON cannot hold; a class that a receiver could not find
            or rebuild; a tensor that requires gradients or is not a plain torch.Tensor; an array of a subclass such as
            a masked array.
        ValueError: a KeyedJaggedTensor whose keys have different numbers of rows.
    """
    tensors: list[torch.Tensor] = []
    described = [
        _describe(batch, batch.schema, tensors)
        if isinstance(batch, Rows)
        else _describe(tree := open_tree(batch), BatchSchema.of_tree(tree), tensors)
        for batch in batches
    ]
    header = json.dumps([described, encode_plain(extra, ())], separators=(",", ":")).encode()
    return Message(len(header).to_bytes(_LENGTH_BYTES, "little") + header, tensors)


def decode(message: torch.Tensor) -> tuple[list[Any], Any]:
    """The batches and the plain value of a message from `encode`; every tensor has its own storage.

    The message is uint8 `(nbytes,)`, on the host or on a device. Tensors that were on the sender's CUDA device go to
    the current CUDA device of this process, others to the host. KeyError for a class that no imported module has.
    """
    length = int.from_bytes(bytes(message[:_LENGTH_BYTES].tolist()), "little")
    header, rest = message[_LENGTH_BYTES : _LENGTH_BYTES + length], message[_LENGTH_BYTES + length :]
    described, extra = json.loads(header.cpu().numpy().tobytes())

    def next_tensor(name: str, shape: list[int], device_code: int) -> torch.Tensor:
        nonlocal rest
        dtype: torch.dtype = getattr(torch, name)
        raw, rest = rest.tensor_split([math.prod(shape) * dtype.itemsize])
        return raw.to(_device_of_code(device_code), copy=True).view(dtype).view(shape)

    return [_made_of(next_tensor, *each) for each in described], decode_plain(extra)


def _describe(tree: Tree[Any], schema: BatchSchema, tensors: list[torch.Tensor]) -> list[Any]:
    """The part of the header that describes a batch; appends the batch's tensors to `tensors`."""
    leaves = []
    for path, value in tree.leaves.items():
        field = tree.fields[path]
        field.check(value)
        content, parts = field.content(value)
        parts = [_require_sendable(path, part) for part in parts]
        tensors += parts
        specs = [
            [str(part.dtype).removeprefix("torch."), list(part.shape), _device_code(part.device)] for part in parts
        ]
        leaves.append([content, specs])
    counts = [[encode_plain(path, path), count] for path, count in tree.plain.items() if tree.counts_rows(path, count)]
    held = (branch.value for branch in tree.branches.values() if branch.kind == "tensordict")
    tensordicts = [[value.batch_size[0], _device_code(value.device)] for value in held]
    return [schema.text, leaves, counts, tensordicts]


def _made_of(
    next_tensor: Callable[..., torch.Tensor],
    schema_text: str,
    leaves: list[Any],
    counts: list[Any],
    tensordicts: list[Any],
) -> Any:
    """A batch from the result of `_describe`."""
    schema = BatchSchema.from_text(schema_text)
    values = {tuple(decode_plain(path)): count for path, count in counts}
    values |= share_offsets(
        {
            field.path: field.made_of(content, [next_tensor(*each) for each in specs])
            for field, (content, specs) in zip(schema.rows, leaves)
        }
    )
    paths = [branch.path for branch in schema.branches if branch.kind == "tensordict"]
    sizes = {path: (rows, _device_of_code(code)) for path, (rows, code) in zip(paths, tensordicts)}
    return schema.made_of(values, lambda path: sizes.get(path, (0, None)))


def _require_sendable(path: Path, tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor for a message; TypeError for a tensor that would arrive changed."""
    if type(tensor) is not torch.Tensor:
        raise TypeError(
            f"{path_name(path)!r} is {kind_of(tensor)}; it would arrive as a plain tensor: pass a plain "
            "tensor, and its other attributes as separate fields"
        )
    if tensor.requires_grad:
        error = TypeError if tensor.is_leaf else UnsendableError
        raise error(f"{path_name(path)!r} requires gradients; gradients do not cross processes: pass detach()")
    return tensor.resolve_conj().resolve_neg().contiguous()


def _device_code(device: torch.device | None) -> int | None:
    """0 for the host, 1 for an accelerator, without its index, which differs between ranks."""
    return None if device is None else int(device.type != "cpu")


def _device_of_code(code: int | None) -> torch.device | None:
    if code is None:
        return None
    return torch.device("cuda", torch.cuda.current_device()) if code else torch.device("cpu")
