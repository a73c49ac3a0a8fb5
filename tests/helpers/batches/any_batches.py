"""Batches of every kind and nesting, made from sample ids: a row depends on its id alone."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from commons.sequence_batch.batch import BaseBatch
from commons.sequence_batch.rows import Rows
from commons.sequence_batch.wire import MessageBuffer, decode, encode

Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class PlainBatch:
    """A user's own dataclass: cannot state padding."""

    dense: torch.Tensor
    sparse: KeyedJaggedTensor
    nested: dict[str, Any]
    names: list[str] = field(default_factory=lambda: ["kept", "whole"])


@dataclass
class PaddedBatch(BaseBatch):
    sample_id: torch.Tensor = field(kw_only=True)


def length_of(sample: int) -> int:
    return sample * 7 % 5


def elements(sample: int, width: int = 0) -> torch.Tensor:
    """The jagged part of a row: `(length,)`, or `(length, width)`."""
    flat = sample * 100 + torch.arange(length_of(sample) * max(width, 1))
    return flat.view(-1, width) if width else flat


def dense(ids, dtype=torch.int64):
    values = torch.tensor(ids, dtype=torch.int64).view(-1, 1) * 10 + torch.arange(3)
    return (values % 2 == 0) if dtype == torch.bool else values.to(dtype)


def nested(ids, width=0):
    if not ids:
        empty = elements(0, width)[:0]
        return torch.nested.nested_tensor_from_jagged(empty, torch.zeros(1, dtype=torch.int64))
    return torch.nested.nested_tensor([elements(sample, width) for sample in ids], layout=torch.jagged)


def kjt(ids, rows=None, weights=True):
    padding = [0] * ((rows or len(ids)) - len(ids))
    lengths = [length_of(sample) for sample in ids] + padding
    shorter = [length // 2 for length in lengths]
    values = [elements(sample) for sample in ids] + [elements(sample)[: length_of(sample) // 2] for sample in ids]
    flat = torch.cat([torch.empty(0, dtype=torch.int64), *values])
    return KeyedJaggedTensor(
        keys=["long", "short"],
        values=flat,
        weights=flat.to(torch.float32) / 7 if weights else None,
        lengths=torch.tensor(lengths + shorter, dtype=torch.int32),
        stride=len(lengths),
    )


def kjt_without_keys(ids):
    none = torch.empty(0, dtype=torch.int64)
    return KeyedJaggedTensor([], none, none.float(), none.to(torch.int32), stride=len(ids))


def jagged(ids):
    values = torch.cat([torch.empty(0, 2, dtype=torch.int64), *(elements(sample, 2) for sample in ids)])
    lengths = torch.tensor([length_of(sample) for sample in ids], dtype=torch.int64)
    return JaggedTensor(values, lengths=lengths, weights=values[:, 0].double() / 3)


def keyed(ids):
    return KeyedTensor(["wide", "thin"], [2, 1], dense(ids, torch.float16))


def padded_batch(ids, rows=None):
    rows = len(ids) if rows is None else rows
    return PaddedBatch(
        features=kjt(ids, rows),
        batch_size=rows,
        feature_to_max_seqlen={"long": 5, "short": 2},
        contextual_feature_names=["short"],
        labels=torch.nn.functional.pad(dense(ids, torch.float32), (0, 0, 0, rows - len(ids))),
        actual_batch_size=len(ids),
        sample_id=torch.tensor(ids + [0] * (rows - len(ids)), dtype=torch.int64),
    )


def plain_batch(ids):
    return PlainBatch(dense(ids, torch.float64), kjt(ids, weights=False), {"inner": dense(ids, torch.int16)})


def tensordict_batch(ids):
    batch = TensorDict(
        {"ids": dense(ids), "deep": {"mask": dense(ids, torch.bool)}, "tokens": nested(ids)}, batch_size=[len(ids)]
    )
    batch.set("prompt", NonTensorStack(*(NonTensorData(f"p{sample}") for sample in ids)))
    batch.set_non_tensor("objects", object_array(ids))
    batch.set_non_tensor("settings", ["kept", 1])
    return batch


def object_array(ids):
    array = np.empty(len(ids), dtype=object)
    for row, sample in enumerate(ids):
        array[row] = {"sample": sample, "turns": [sample, (1, "x")]}
    return array


def everything(ids):
    """One batch with every kind of leaf, branch and metadata."""
    factory = defaultdict(list)
    factory["x"] = dense(ids, torch.uint8)
    return {
        "tensors": [dense(ids, torch.bfloat16), (nested(ids), nested(ids, 2))],
        "pair": Pair(left=jagged(ids), right="kept"),
        "arrays": OrderedDict(
            half=np.array(ids, dtype=np.float16),
            names=np.array([f"n{sample}" * (sample + 1) for sample in ids], dtype=str),
            objects=object_array(ids),
        ),
        "factory": factory,
        "td": tensordict_batch(ids),
        "plain": plain_batch(ids),
        "padded": padded_batch(ids),
        "groups": {"deep": keyed(ids)},
        "texts": [f"t{sample}" for sample in ids],
        "token lists": [[sample] * length_of(sample) for sample in ids],
        7: ("kept", ["whole"], float("inf")),
        "nothing": None,
    }


KINDS = {
    "tensor": dense,
    "nested": nested,
    "kjt": kjt,
    "kjt without keys": kjt_without_keys,
    "jagged": jagged,
    "keyed": keyed,
    "texts": lambda ids: [f"t{sample}" for sample in ids],
    "objects": object_array,
    "plain dataclass": plain_batch,
    "BaseBatch": padded_batch,
    "TensorDict": tensordict_batch,
    "everything": everything,
}


def count_rows(batch: Any) -> int:
    return Rows.of(batch).count


def concat_rows(batches: Sequence[Any]) -> Any:
    return Rows.concat([Rows.of(batch) for batch in batches]).batch


def as_values(value: Any) -> Any:
    """A batch as nested Python values that `==` compares, types and dtypes included; the slow, obvious way."""
    if isinstance(value, torch.Tensor):
        if value.is_nested:
            return ("nested", [as_values(row) for row in value.unbind()])
        return (str(value.dtype), tuple(value.shape), value.double().tolist())
    if isinstance(value, np.ndarray):
        kind = value.dtype.kind if value.dtype.kind == "U" else str(value.dtype)
        return ("array", kind, value.shape, value.tolist())
    if isinstance(value, KeyedJaggedTensor):
        return ("kjt", {key: as_values(value[key]) for key in value.keys()}, str(value.lengths().dtype), value.stride())
    if isinstance(value, KeyedTensor):
        return ("keyed", value.keys(), [as_values(part) for part in value.to_dict().values()], value.key_dim())
    if isinstance(value, JaggedTensor):
        weights = value.weights_or_none()
        parts = (value.values(), value.lengths(), *([] if weights is None else [weights]))
        return ("jagged", [as_values(part) for part in parts])
    if isinstance(value, TensorDict):
        items = {key: as_values(value.get(key)) for key in sorted(value.keys())}
        return ("TensorDict", tuple(value.batch_size), items)
    if isinstance(value, NonTensorStack):
        return ("stack", value.tolist())
    if isinstance(value, NonTensorData):
        return ("constant", as_values(value.data))
    if hasattr(value, "__dataclass_fields__"):
        return (type(value).__name__, {name: as_values(getattr(value, name)) for name in value.__dataclass_fields__})
    if isinstance(value, dict):
        factory = getattr(value, "default_factory", None)
        return (type(value).__name__, factory, {key: as_values(child) for key, child in value.items()})
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, [as_values(child) for child in value])
    return value


def there_and_back(batch: Any) -> Any:
    """The batch that another rank makes of its message."""
    buffer = MessageBuffer(0, on_accelerator=False)
    buffer.append(encode(batch))
    return decode(buffer.bytes)[0][0]
