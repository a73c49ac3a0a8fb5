"""TorchEasyRec's Batch, written down: dicts of KeyedTensors, KeyedJaggedTensors, JaggedTensors and tensors.

What a row holds depends on its id alone. `batch_size` is -1, which states nothing.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from torchrec.streamable import Pipelineable

from commons.distributed.batch_shuffler import BaseTaskBalancedBatchShuffler
from commons.sequence_batch.schema import register_batch_type

B = TypeVar("B", bound="EasyRecBatch")


class Reserves:
    """Stands for its record batch, an object that JSON cannot hold."""


@register_batch_type(per_rank=("data_timestamp", "checkpoint_info", "reserves", "dummy"))
@dataclass
class EasyRecBatch(Pipelineable):
    """The fields of TorchEasyRec's Batch that hold data; it cannot state padding."""

    dense_features: dict[str, KeyedTensor] = field(default_factory=dict)
    sparse_features: dict[str, KeyedJaggedTensor] = field(default_factory=dict)
    sequence_mulval_lengths: dict[str, KeyedJaggedTensor] = field(default_factory=dict)
    sequence_dense_features: dict[str, JaggedTensor] = field(default_factory=dict)
    labels: dict[str, torch.Tensor] = field(default_factory=dict)
    jagged_labels: dict[str, JaggedTensor] = field(default_factory=dict)
    sample_weights: dict[str, torch.Tensor] = field(default_factory=dict)
    batch_size: int = -1
    reserves: Reserves | None = None
    tile_size: int = -1
    data_timestamp: float = -1.0
    checkpoint_info: dict[str, int] = field(default_factory=dict)
    dummy: bool = False

    def to(self: B, device: torch.device, non_blocking: bool = False) -> B:
        moved = self.map(lambda value: value.to(device=device, non_blocking=non_blocking))
        return copy.deepcopy(moved)  # its own memory on the host too, as on a device

    def pin_memory(self: B) -> B:
        return self.map(lambda value: value.pin_memory() if hasattr(value, "pin_memory") else value)

    def record_stream(self, stream: torch.Stream) -> None:
        self.map(lambda value: value.record_stream(stream))

    def map(self: B, function: Callable[[Any], Any]) -> B:
        held = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        dicts = {name: value for name, value in held.items() if isinstance(value, dict) and name != "checkpoint_info"}
        mapped = {name: {key: function(each) for key, each in value.items()} for name, value in dicts.items()}
        return type(self)(**{**held, **mapped})


@dataclass
class PaddedEasyRecBatch(EasyRecBatch):
    """The same with a field that states padding."""

    actual_batch_size: int | None = None


def clicks(sample: int) -> int:
    """Clicks of a row, which its cost follows."""
    return sample * sample % 11


def easyrec_batch(
    ids: Sequence[int], rows: int | None = None, timestamp: float = 0.0, *, backwards: bool = False
) -> EasyRecBatch:
    """A batch of these rows; with `rows` of one that states padding, and its dicts filled the other way round."""
    padding = (len(ids) if rows is None else rows) - len(ids)
    per_row = torch.tensor([*ids, *[0] * padding], dtype=torch.int64)
    is_real = torch.arange(len(per_row)) < len(ids)
    each = [torch.tensor([clicks(sample) for sample in ids] + [0] * padding, dtype=torch.int64)]
    each.append(torch.tensor([sample % 3 for sample in ids] + [0] * padding, dtype=torch.int64))

    def dense(width: int, dtype: torch.dtype) -> torch.Tensor:
        values = torch.sin(per_row[:, None] * 3.0 + torch.arange(width)) * 50
        return (values * is_real[:, None]).to(dtype)

    def elements(lengths: torch.Tensor, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        row = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        within = torch.arange(len(row)) - (torch.cumsum(lengths, 0) - lengths)[row]
        first = (per_row[row] * 100 + within).view(-1, *[1] * len(shape))
        return (first + torch.arange(torch.Size(shape).numel()).view(1, *shape) * 7 if shape else first).to(dtype)

    def sparse(keys: Sequence[str], lengths: Sequence[torch.Tensor], weights: bool = False) -> KeyedJaggedTensor:
        values = torch.cat([elements(length, dtype=torch.int64) for length in lengths])
        given = values.to(torch.float32) / 7 if weights else None
        return KeyedJaggedTensor(list(keys), values, given, torch.cat(list(lengths)).int(), stride=len(per_row))

    def jagged(lengths: torch.Tensor, *shape: int, dtype: torch.dtype) -> JaggedTensor:
        return JaggedTensor(elements(lengths, *shape, dtype=dtype), lengths=lengths)

    def filled(items: dict[str, Any]) -> dict[str, Any]:
        return dict(reversed(items.items())) if backwards else items

    held: dict[str, Any] = {
        "dense_features": {
            "user": KeyedTensor(["age", "geo"], [1, 2], dense(3, torch.float32)),
            "item": KeyedTensor(["price"], [1], dense(1, torch.float64)),
        },
        "sparse_features": {"user": sparse(["id", "tags"], each, True), "item": sparse(["clicks"], each[:1])},
        "sequence_mulval_lengths": {"item": sparse(["clicks"], each[1:])},
        "sequence_dense_features": {
            "price": jagged(each[0], 3, dtype=torch.float32),
            "shown": jagged(each[1], 2, 3, dtype=torch.int8),
            "score": jagged(each[1], dtype=torch.bfloat16),
        },
        "labels": {"row": per_row, "ctr": dense(2, torch.float16)},
        "jagged_labels": {"dwell": jagged(each[1], dtype=torch.float64)},
        "sample_weights": {"ctr": dense(1, torch.float32)[:, 0].abs()},
    }
    held = {name: filled(value) for name, value in held.items()}
    if rows is None:
        return EasyRecBatch(**held, data_timestamp=timestamp)
    return PaddedEasyRecBatch(**held, data_timestamp=timestamp, actual_batch_size=len(ids))


class ClicksShuffler(BaseTaskBalancedBatchShuffler):
    """A row costs 10 and the square of its clicks."""

    def get_workloads(self, batch: Any) -> torch.Tensor:
        return batch.sparse_features["item"].lengths().to(torch.int64) ** 2 + 10
