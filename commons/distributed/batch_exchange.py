"""EXCHANGE and SELECT: the rows of one batch, packed, sent, and put in order.

Input: this rank's batch on its device and the routes that the worker built. Output: the batch this rank trains, in
ascending global id with padding last, every tensor in storage of its own (TorchRec frees `features` early, and views of
one buffer would take the labels with them).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from commons.distributed.collective_ops import all_gather_words, all_to_all_words
from commons.distributed.payload import (
    PayloadLayout,
    element_positions,
    read_part,
    segment_shifts,
    write_part,
)
from commons.distributed.row_routes import RowRoutes
from commons.sequence_batch.fields import batch_device, copy_batch, row_count_values
from commons.sequence_batch.jagged import permute_segments

# What runs a collective: given a function of the group and of whether to return at once, and the payload's device, it
# returns the bytes sent when the payload may be read.
Collective = Callable[[dist.ProcessGroup, bool], tuple[dist.Work | None, int]]
Transfer = Callable[[Collective, torch.device], int]


@dataclass(frozen=True)
class _NarrowPart:
    """Where the elements of a padded part are: shifts and lengths per segment, and their total."""

    shifts: torch.Tensor
    lengths: torch.Tensor
    total: int


@dataclass(frozen=True)
class ExchangeArrays:
    """The arrays of a RowRoutes as host tensors, ready to be copied to the device without waiting."""

    pack_permute: torch.Tensor
    own_lengths: torch.Tensor
    unpack_permute: torch.Tensor
    buffer_lengths: torch.Tensor
    result_lengths: dict[str, torch.Tensor]
    length_per_key: dict[str, list[int]]
    own_narrow: dict[int, _NarrowPart]
    result_narrow: dict[int, _NarrowPart]


def prepare_arrays(routes: RowRoutes, layout: PayloadLayout, pin_memory: bool) -> ExchangeArrays:
    """Host tensors for `exchange_rows`; called on the worker thread.

    Args:
        routes: the index arrays.
        layout: the parts of a row.
        pin_memory: whether the batch is on CUDA, so that the copies need not wait.
    """

    def tensor(array: np.ndarray, dtype: torch.dtype | None = None) -> torch.Tensor:
        host = torch.from_numpy(np.ascontiguousarray(array)).to(dtype)
        return host.pin_memory() if pin_memory else host

    def narrow(row_lengths: np.ndarray) -> dict[int, _NarrowPart]:
        parts = {}
        for index, part in enumerate(layout.parts):
            shifts = segment_shifts(part, row_lengths)
            if shifts is not None:
                elements = part.elements(row_lengths).T.ravel()
                parts[index] = _NarrowPart(tensor(shifts), tensor(elements), int(elements.sum()))
        return parts

    result_lengths, length_per_key, first_key = {}, {}, 0
    for field in layout.schema.jagged:
        lengths = routes.result_row_lengths[:, first_key : first_key + len(field.keys)].T  # (keys, rows)
        first_key += len(field.keys)
        result_lengths[field.name] = tensor(lengths.ravel(), field.lengths_dtype)
        length_per_key[field.name] = lengths.sum(axis=1).tolist()
    return ExchangeArrays(
        pack_permute=tensor(routes.pack_permute),
        own_lengths=tensor(routes.own_lengths),
        unpack_permute=tensor(routes.unpack_permute),
        buffer_lengths=tensor(routes.buffer_lengths),
        result_lengths=result_lengths,
        length_per_key=length_per_key,
        own_narrow=narrow(routes.own_row_lengths),
        result_narrow=narrow(routes.result_row_lengths),
    )


def exchange_rows(
    batch: Any,
    layout: PayloadLayout,
    routes: RowRoutes,
    arrays: ExchangeArrays,
    transfer: Transfer,
) -> tuple[Any, int]:
    """Carry out a plan for one rank's batch.

    Args:
        batch: the rank's batch; on CUDA the current stream must be the one that copied it.
        layout: the parts of a row.
        routes: sizes of the exchange.
        arrays: its index arrays.
        transfer: runs the collective that it is given.

    Returns:
        The batch to train and the bytes that this rank sent.
    """
    if not routes.moved_words and not routes.changed:
        return batch, 0
    device = batch_device(batch)
    buffer = torch.empty(routes.own_words + routes.received_words + routes.zero_words, dtype=torch.int32, device=device)
    own, received, zero = torch.split(buffer, [routes.own_words, routes.received_words, routes.zero_words])
    zero.zero_()
    _write_own_rows(batch, layout, routes, arrays, own)
    bytes_sent = 0
    if routes.moved_words:
        packed = permute_segments(
            _on(arrays.pack_permute, device), _on(arrays.own_lengths, device), own, routes.sent_words
        )
        send = all_gather_words if routes.gather_words else all_to_all_words
        bytes_sent = transfer(functools.partial(send, packed, received, routes), device)
    if not routes.changed:
        return batch, bytes_sent
    result = permute_segments(
        _on(arrays.unpack_permute, device), _on(arrays.buffer_lengths, device), buffer, sum(routes.section_words)
    )
    return _build_batch(batch, layout, routes, arrays, result, device), bytes_sent


def _on(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    return host.to(device, non_blocking=True)


def _positions(narrow: _NarrowPart | None, device: torch.device) -> torch.Tensor | None:
    if narrow is None:
        return None
    return element_positions(_on(narrow.shifts, device), _on(narrow.lengths, device), narrow.total)


def _write_own_rows(
    batch: Any, layout: PayloadLayout, routes: RowRoutes, arrays: ExchangeArrays, own: torch.Tensor
) -> None:
    for index, (part, words) in enumerate(zip(layout.parts, torch.split(own, routes.own_section_words))):
        write_part(part, part.tensor_of(batch), words, _positions(arrays.own_narrow.get(index), own.device))


def _build_batch(
    batch: Any,
    layout: PayloadLayout,
    routes: RowRoutes,
    arrays: ExchangeArrays,
    words: torch.Tensor,
    device: torch.device,
) -> Any:
    rows = len(routes.result_row_lengths)
    tensors: dict[tuple[str, bool], torch.Tensor] = {}
    for index, (part, section) in enumerate(zip(layout.parts, torch.split(words, routes.section_words))):
        positions = _positions(arrays.result_narrow.get(index), device)
        tensors[part.field, part.weights] = read_part(part, section, rows, positions)
    fields: dict[str, Any] = {}
    for jagged in layout.schema.jagged:
        fields[jagged.name] = KeyedJaggedTensor(
            keys=list(jagged.keys),
            values=tensors[jagged.name, False],
            weights=tensors.get((jagged.name, True)),
            lengths=_on(arrays.result_lengths[jagged.name], device),
            stride=rows,
            length_per_key=arrays.length_per_key[jagged.name],
        )
    for dense in layout.schema.dense:
        fields[dense.name] = tensors[dense.name, False].view(rows, *dense.trailing)
    return copy_batch(batch, fields | row_count_values(type(batch), rows, routes.result_real_rows))
