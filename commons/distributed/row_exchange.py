"""EXCHANGE and SELECT: a plan as one rank's permutes, splits and lengths; the rows packed, sent and put in order.

The worker thread makes a RowExchange from the plan. `pack` writes the rank's batch into one buffer, one collective
moves the rows, and `unpack` builds the batch that this rank trains. Of a window, all batches of the rank are packed
into the buffer, and unpacked from it step by step. The buffer holds segments of 4-byte words in three regions:

    own       every row the rank brought, batch by batch and segment by segment: segment s of row r of a batch that
              begins at segment b is at b + s · rows + r; each batch ends in a segment that aligns the next
    received  what arrived, row by row: all segments of one row side by side
    zero      one row of padding: zero words for jagged segments, zeros for dense ones

One permute of the own region packs what is sent; one permute of the whole buffer gives a result in ascending global
id, padding last. Every size follows from the gathered lengths, so that none is read back from a device, and all that
the device needs to know lies in one host array, which is copied to it once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from commons.distributed.payload import WORD_BYTES, PayloadLayout
from commons.distributed.process_group import all_gather_single
from commons.perf_model.routes import Routes, route_rows
from commons.perf_model.shuffle_plan import ShufflePlan
from commons.sequence_batch.fields import batch_device, copy_batch, row_count_values
from commons.sequence_batch.host_copies import attach_host_copy
from commons.sequence_batch.jagged import permute_segments
from commons.sequence_batch.schema import BatchSchema


@dataclass(frozen=True)
class Section:
    """A part of the index array.

    Attributes:
        dtype: of its elements.
        start: elements of that size before it.
        stop: the same, at its end.
    """

    dtype: torch.dtype
    start: int
    stop: int

    def of(self, indices: torch.Tensor) -> torch.Tensor:
        """A view of the index array, or of a copy of it on a device; `(stop - start,)`."""
        return indices.view(self.dtype)[self.start : self.stop]


@dataclass(frozen=True)
class Permute:
    """Segments of a buffer in another order.

    Attributes:
        order: int32 `(output segments,)`, the input segment of each.
        lengths: int64 `(input segments,)`, words of each.
        words: words of the result.
    """

    order: Section
    lengths: Section
    words: int

    def __call__(self, buffer: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """int32 `(words,)`, in storage of its own; `indices` on the buffer's device."""
        return permute_segments(self.order.of(indices), self.lengths.of(indices), buffer, self.words)


@dataclass(frozen=True)
class ResultRows:
    """One batch that a rank trains, as it is taken from the buffer; sizes are in words.

    Attributes:
        changes: whether its rows differ from those that the rank brought there.
        select: buffer → result.
        parts: words of every part.
        rows: rows of the result, padding included.
        real_rows: those that are no padding.
        lengths: by field, int64 `(keys · rows,)`, the lengths of the result's KeyedJaggedTensors.
        length_per_key: by field, their sums.
        host_values: by field, int64 `(rows,)` on the host, those that it keeps, see `BaseBatch`.
    """

    changes: bool
    select: Permute
    parts: list[int]
    rows: int
    real_rows: int
    lengths: dict[str, Section]
    length_per_key: dict[str, list[int]]
    host_values: dict[str, torch.Tensor]

    @property
    def lookups(self) -> int:
        """Values of its KeyedJaggedTensors but the labels."""
        return sum(sum(lengths) for name, lengths in self.length_per_key.items() if name != "labels")


@dataclass(frozen=True)
class PackedRows:
    """A rank's rows on their way; all on the device of the batches.

    Attributes:
        buffer: int32 `(sum(regions),)`; what arrives is written into its second region.
        sent: int32 `(sum(input_splits),)`, what is sent, by receiver.
        indices: the index array.
    """

    buffer: torch.Tensor
    sent: torch.Tensor
    indices: torch.Tensor


@dataclass(frozen=True)
class RowExchange:
    """What one rank does to carry out a plan; sizes are in words.

    Attributes:
        layout: the parts of a row.
        moves: whether rows of any rank move, so that all of them run the collective.
        input_splits: words to every rank.
        output_splits: words from every rank; of an all-gather, from every rank to all of them.
        block_words: words of the largest sender, to which an all-gather pads; 0 for an all-to-all.
        regions: words of the three regions of the buffer.
        own_parts: by batch that the rank brought, words of every part in the own region, and of what aligns the next.
        indices: int64, all index arrays on the host, pinned where the batches are trained on CUDA.
        send: own region → what is sent.
        results: the batches that the rank trains, one for each step.
    """

    layout: PayloadLayout
    moves: bool
    input_splits: list[int]
    output_splits: list[int]
    block_words: int
    regions: list[int]
    own_parts: list[list[int]]
    indices: torch.Tensor
    send: Permute
    results: list[ResultRows]

    @property
    def changes(self) -> bool:
        """Whether this rank's rows differ from those it brought."""
        return any(result.changes for result in self.results)

    @classmethod
    def of(
        cls, plan: ShufflePlan, layout: PayloadLayout, rank: int, *, all_gather: bool, pin_memory: bool
    ) -> RowExchange:
        """Turn a plan into one rank's part of it; called on the worker thread.

        Args:
            plan: the plan, the same on every rank.
            layout: the parts of a row.
            rank: this rank.
            all_gather: whether every rank receives what any rank sends, padded to the largest sender; else each rank
                receives its own rows only.
            pin_memory: whether the batch is trained on CUDA, so that the copy to it need not wait.
        """
        routes = route_rows(plan, layout.table, rank, all_gather=all_gather)
        indices = torch.from_numpy(routes.indices)
        own, buffer, sent = routes.segments
        first_order = 2 * (buffer + sum(len(each.length_per_key) * each.rows for each in routes.results))
        return cls(
            layout=layout,
            moves=routes.moves,
            input_splits=routes.input_splits,
            output_splits=routes.output_splits,
            block_words=routes.block_words,
            regions=routes.regions,
            own_parts=routes.own_parts,
            indices=indices.pin_memory() if pin_memory else indices,
            send=Permute(
                Section(torch.int32, first_order, first_order + sent), Section(torch.int64, 0, own), routes.sent_words
            ),
            results=_results(routes, layout, first_order + sent, _host_values(plan, layout.schema, rank)),
        )

    def pack(self, batches: Sequence[Any]) -> PackedRows:
        """Write batches into a new buffer, and pack the rows that leave them.

        Args:
            batches: this rank's, at least one; on CUDA the current stream must be the one that copied them.
        """
        device = batch_device(batches[0])
        indices = self.indices.to(device, non_blocking=True)
        buffer = torch.empty(sum(self.regions), dtype=torch.int32, device=device)
        own, _, zero = torch.split(buffer, self.regions)
        zero.zero_()
        sections = iter(torch.split(own, [words for parts in self.own_parts for words in parts]))
        for batch in batches:
            for part, words in zip(self.layout.parts, sections):
                part.write(part.tensor_of(batch), words)
            next(sections)
        return PackedRows(buffer, self.send(own, indices), indices)

    def send_rows(self, packed: PackedRows, group: dist.ProcessGroup, *, async_op: bool) -> dist.Work | None:
        """Run the one payload collective, into the received region; returns it if it is asynchronous."""
        received = torch.split(packed.buffer, self.regions)[1]
        if not self.block_words:
            return dist.all_to_all_single(
                received, packed.sent, self.output_splits, self.input_splits, group=group, async_op=async_op
            )
        block = packed.sent.new_zeros(self.block_words)  # gloo gathers equal sizes only
        block[: packed.sent.numel()] = packed.sent
        return all_gather_single(received, block, group=group, async_op=async_op)

    @property
    def bytes_sent(self) -> int:
        """Payload bytes that this rank sends: its moved rows, or its block once to every other rank."""
        if not self.moves:
            return 0
        return WORD_BYTES * (self.block_words * (len(self.input_splits) - 1) or self.send.words)

    def unpack(self, batch: Any, packed: PackedRows, step: int = 0) -> Any:
        """A batch to train, in ascending global id with padding last.

        Every tensor is in storage of its own: TorchRec frees `features` early, and views of one buffer would take the
        labels with them.

        Args:
            batch: any that was packed; it gives the fields that hold no rows.
            packed: as `pack` made it, after the collective.
            step: which of the results.
        """
        result = self.results[step]
        schema = self.layout.schema
        sections = torch.split(result.select(packed.buffer, packed.indices), result.parts)
        tensors = {
            (part.field, part.weights): part.read(words, result.rows)
            for part, words in zip(self.layout.parts, sections)
        }
        fields: dict[str, Any] = {
            field.name: KeyedJaggedTensor(
                keys=list(field.keys),
                values=tensors[field.name, False],
                weights=tensors.get((field.name, True)),
                lengths=result.lengths[field.name].of(packed.indices).to(field.lengths_dtype, copy=True),
                stride=result.rows,
                length_per_key=result.length_per_key[field.name],
            )
            for field in schema.jagged
        }
        for dense in schema.dense:
            fields[dense.name] = tensors[dense.name, False].view(result.rows, *dense.trailing)
        for name, lengths in result.lengths.items():
            attach_host_copy(fields[name].lengths(), lengths.of(self.indices))
        for name, values in result.host_values.items():
            attach_host_copy(fields[name], values)
        return copy_batch(batch, fields | row_count_values(type(batch), result.rows, result.real_rows))


def _results(
    routes: Routes, layout: PayloadLayout, first_order: int, host_values: list[dict[str, torch.Tensor]]
) -> list[ResultRows]:
    """Where in the index array every result finds its lengths and, from element `first_order` on, its segments."""
    results, at, order_at = [], routes.segments[1], first_order
    for sizes, values in zip(routes.results, host_values):
        lengths, length_per_key, key = {}, {}, 0
        for field in layout.schema.jagged:
            stop = at + len(field.keys) * sizes.rows
            lengths[field.name] = Section(torch.int64, at, stop)
            length_per_key[field.name] = sizes.length_per_key[key : key + len(field.keys)]
            at, key = stop, key + len(field.keys)
        order = Section(torch.int32, order_at, order_at + layout.num_segments * sizes.rows)
        results.append(
            ResultRows(
                changes=sizes.changes,
                select=Permute(order, Section(torch.int64, 0, routes.segments[1]), sum(sizes.parts)),
                parts=sizes.parts,
                rows=sizes.rows,
                real_rows=sizes.real_rows,
                lengths=lengths,
                length_per_key=length_per_key,
                host_values=values,
            )
        )
        order_at = order.stop
    return results


def _host_values(plan: ShufflePlan, schema: BatchSchema, rank: int) -> list[dict[str, torch.Tensor]]:
    """By step and field that the host keeps, its values `(rows,)` in the batch that the rank trains."""
    steps = []
    for place in range(rank * plan.gathered.steps, (rank + 1) * plan.gathered.steps):
        chosen = plan.rows_for(place) if schema.host_fields else np.zeros(0, dtype=np.int64)
        kept, values = plan.gathered.table.kept(chosen), {}
        for column, field in enumerate(schema.host_fields):
            # In an array: torch lets go of the interpreter lock wherever it is asked.
            of_rows = np.zeros(plan.result_batch_size(place), dtype=np.int64)
            of_rows[: len(chosen)] = kept[:, column]
            values[field.name] = torch.from_numpy(of_rows)
        steps.append(values)
    return steps
