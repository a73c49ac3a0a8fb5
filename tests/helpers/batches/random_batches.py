"""Batches for tests: every dtype, weights, trailing dimensions; and rows as plain values, for comparison."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from commons.sequence_batch.batch import BaseBatch
from commons.sequence_batch.fields import path_name
from commons.sequence_batch.open_batch import batch_rows, real_rows, row_fields

JAGGED_DTYPES = [
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
]


@dataclass
class RichBatch(BaseBatch):
    """A subclass with added fields of several kinds; `sample_id` names each real row."""

    sample_id: torch.Tensor = field(kw_only=True)
    image: torch.Tensor = field(kw_only=True)
    flag: torch.Tensor = field(kw_only=True)
    tiny: KeyedJaggedTensor = field(kw_only=True)
    note: dict[str, Any] = field(default_factory=lambda: {"unit": "s"})


def random_values(count: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    raw = torch.randint(0, 100, (count,), generator=generator)
    return (raw % 2 == 0) if dtype == torch.bool else (raw.to(torch.float64) / 7).to(dtype)


def random_kjt(
    keys: list[str],
    rows: int,
    real: int,
    generator: torch.Generator,
    *,
    dtype: torch.dtype = torch.int64,
    lengths_dtype: torch.dtype = torch.int32,
    weights_dtype: torch.dtype | None = None,
    max_length: int = 6,
) -> KeyedJaggedTensor:
    lengths = torch.randint(0, max_length + 1, (len(keys), rows), generator=generator)
    lengths[:, real:] = 0
    total = int(lengths.sum())
    return KeyedJaggedTensor(
        keys=keys,
        values=random_values(total, dtype, generator),
        weights=None if weights_dtype is None else random_values(total, weights_dtype, generator),
        lengths=lengths.flatten().to(lengths_dtype),
        stride=rows,
    )


def random_batch(
    seed: int,
    rows: int,
    real: int | None = None,
    *,
    first_id: int = 0,
    values_dtype: torch.dtype = torch.int64,
    tiny_dtype: torch.dtype = torch.int8,
    weights_dtype: torch.dtype | None = torch.float32,
    max_length: int = 6,
) -> RichBatch:
    real = rows if real is None else real
    generator = torch.Generator().manual_seed(seed)
    sample_id = torch.zeros(rows, dtype=torch.int64)
    sample_id[:real] = first_id + 1 + torch.arange(real)
    image = torch.rand(rows, 2, 3, generator=generator).to(torch.bfloat16)
    image[real:] = 0
    flag = torch.randint(0, 2, (rows,), generator=generator).to(torch.bool)
    flag[real:] = False
    return RichBatch(
        features=random_kjt(
            ["user", "item", "action"],
            rows,
            real,
            generator,
            dtype=values_dtype,
            weights_dtype=weights_dtype,
            max_length=max_length,
        ),
        batch_size=rows,
        feature_to_max_seqlen={"user": 6, "item": 6, "action": 6},
        contextual_feature_names=["user"],
        labels=random_kjt(["label"], rows, real, generator, dtype=torch.float32, lengths_dtype=torch.int64),
        actual_batch_size=real,
        sample_id=sample_id,
        image=image,
        flag=flag,
        tiny=random_kjt(["a", "b"], rows, real, generator, dtype=tiny_dtype),
    )


def _plain(tensor: torch.Tensor) -> Any:
    return (tensor.double() if tensor.is_floating_point() else tensor).tolist()


def _hashable(element: Any) -> Any:
    return tuple(map(_hashable, element)) if isinstance(element, list) else element


def rows_as_values(batch: Any, *, padding: bool = False) -> list[tuple[Any, ...]]:
    """Every real row (or every row) as nested tuples of names and Python values; the slow, obvious way."""
    rows = []
    for row in range(batch_rows(batch) if padding else real_rows(batch)):
        values: list[Any] = []
        for path, value in row_fields(batch):
            name = path_name(path)
            if isinstance(value, torch.Tensor):
                values.append((name, str(value.dtype), repr(_plain(value[row]))))
                continue
            lengths = value.lengths().tolist()
            keys = value.keys() if isinstance(value, KeyedJaggedTensor) else [None]
            for index, key in enumerate(keys):
                segment = index * (len(lengths) // len(keys)) + row
                start = sum(lengths[:segment])
                stop = start + lengths[segment]
                weights = value.weights_or_none()
                values.append(
                    (
                        name,
                        key,
                        str(value.values().dtype),
                        str(value.lengths().dtype),
                        tuple(map(_hashable, _plain(value.values()[start:stop]))),
                        None if weights is None else tuple(_plain(weights[start:stop])),
                    )
                )
        rows.append(tuple(values))
    return rows
