"""EXCHANGE and SELECT: a plan as one rank's permutes, splits and lengths; the rows packed, sent and put in order.

The worker thread makes a RowExchange from the plan. `pack` writes the rank's batch into one buffer, one collective
moves the rows, and `unpack` builds the batch that this rank trains. Of a window, all batches of the rank are packed
into the buffer, and unpacked from it step by step. The buffer holds segments of 4-byte words in three regions:

    own       every row the rank brought, batch by batch and segment by segment: segment s of row r of a batch that
              begins at segment b is at b + s · rows + r; each batch ends in a segment that aligns the next
    received  what arrived, row by row: all segments of one row side by side
    zero      one row of padding: zero words for jagged segments, zeros for dense ones

One permute of the own region packs what is sent; one permute of the whole buffer gives a result in ascending global
id, padding last. On the host no buffer is filled: own rows are read from the batch, and each tensor of the result is
written where it stays. Every size follows from the gathered lengths, so that none is read back from a device, and all
that the device needs to know lies in one host array, which is copied to it once. It holds int64 numbers: the lengths of
the buffer's segments, those of the own region first, and by result the lengths `(num_keys, rows)` and the host values
`(num_kept, rows)` of its rows; then int32 ones: the segments of the own region that are sent and, by result, the
segments of the buffer that it is made of. The native core writes it (perf_model/partitioner/native/routes.hpp).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist

from commons.distributed.exchange.payload import WORD_BYTES, PayloadLayout
from commons.distributed.process_group import all_gather_single
from commons.perf_model.partitioner import core
from commons.perf_model.shuffle_plan import ShufflePlanner
from commons.sequence_batch.fields import Path
from commons.sequence_batch.host_copies import attach_host_copy
from commons.sequence_batch.jagged import permute_segments
from commons.sequence_batch.open_batch import replace_rows


@dataclass(eq=False)
class RowExchange:
    """What one rank does to carry out a plan; sizes are in words."""

    layout: PayloadLayout
    moves: bool  # whether rows of any rank move, so that all of them run the collective
    block_words: int  # words of the largest sender, to which an all-gather pads; 0 for an all-to-all
    sent_words: int  # words that this rank sends to one receiver each
    segments: tuple[int, int, int]  # of the own region, of the whole buffer, and of what is sent
    regions: list[int]  # words of the three regions of the buffer
    input_splits: list[int]  # words to every rank
    output_splits: list[int]  # words from every rank; of an all-gather, from every rank to all of them
    own_parts: list[list[int]]  # by batch that the rank brought, words of every part, and of what aligns the next
    # By batch that the rank trains: whether its rows differ from those that the rank brought there, its rows with and
    # without padding, the words of every part, and the entries of every key of all jagged fields.
    results: list[list[int]]
    rows_before: list[int]  # by result, rows of those before it; last, of all
    indices: torch.Tensor  # the host array, pinned where the batches are trained on CUDA

    @classmethod
    def of(cls, planner: ShufflePlanner, layout: PayloadLayout) -> RowExchange:
        """This rank's part of the plan that a planner has just made; called on the worker thread."""
        head, numbers, steps, num_ranks = planner.head, planner.exchange, planner.head["steps"], planner.num_ranks
        own, own_size = 3 + 2 * num_ranks, len(layout.parts) + 1
        first, size = own + steps * own_size, 2 + own_size + layout.schema.num_keys
        results = [numbers[at : at + size] for at in range(first, first + steps * size, size)]
        return cls(
            layout,
            bool(head["moves"]),
            head["block_words"],
            head["sent_words"],
            (head["own_segments"], head["buffer_segments"], head["sent_segments"]),
            regions=numbers[:3],
            input_splits=numbers[3 : 3 + num_ranks],
            output_splits=numbers[3 + num_ranks : own],
            own_parts=[numbers[at : at + own_size] for at in range(own, first, own_size)],
            results=results,
            rows_before=[0, *accumulate(result[1] for result in results)],
            indices=planner.indices[: head["index_room"]],
        )

    @property
    def changes(self) -> bool:
        """Whether this rank's rows differ from those it brought."""
        return any(result[0] for result in self.results)

    @property
    def bytes_sent(self) -> int:
        """Payload bytes that this rank sends: its moved rows, or its block once to every other rank."""
        if not self.moves:
            return 0
        return WORD_BYTES * (self.block_words * (len(self.input_splits) - 1) or self.sent_words)

    @property
    def lookups(self) -> list[int]:
        """By batch that the rank trains, values of its KeyedJaggedTensors but the labels."""
        return [sum(result[3 + part] // words for part, words in self.layout.lookups) for result in self.results]

    def pack(self, batches: Sequence[Any]) -> tuple[Sequence[torch.Tensor], torch.Tensor, torch.Tensor]:
        """Make the buffer of batches, and pack the rows that leave them.

        Args:
            batches: this rank's, at least one; on CUDA the current stream must be the one that copied them.

        Returns:
            On the device of the batches: the buffer, int32, `sum(regions)` words in one piece or, on the host, in
            several, of which the own region's lie in the memory of the batches; what is sent, int32
            `(sum(input_splits),)`, by receiver; and the index array.

        Raises:
            ValueError: the batches have other sizes than those that were planned.
        """
        buffer: list[torch.Tensor] = []
        for batch, (*_, aligns) in zip(batches, self.own_parts):
            buffer += [part.words_of(part.tensor_of(batch)) for part in self.layout.parts]
            if aligns:
                buffer.append(buffer[0].new_empty(aligns))
        own_words, received_words, zero_words = self.regions
        if (given := sum(piece.numel() for piece in buffer)) != own_words:
            raise ValueError(
                f"the rows to exchange have {WORD_BYTES * given} bytes, and had {WORD_BYTES * own_words} when the "
                "shuffle was started; a batch stays as it is until its shuffle is finished: change it before or after"
            )
        beside = [buffer[0].new_empty(received_words), buffer[0].new_zeros(zero_words)]
        if buffer[0].device.type == "cpu":
            own, buffer = buffer, buffer + beside
        else:
            buffer = [torch.cat(buffer + beside)]
            own = [buffer[0][:own_words]]
        indices = self.indices.to(buffer[0].device, non_blocking=True)
        (sent,) = self._select(indices, own, self.segments[0], 0, self.segments[2], [self.sent_words])
        return buffer, sent, indices

    def received(self, buffer: Sequence[torch.Tensor]) -> torch.Tensor:
        """The region of a buffer that what arrives is written into."""
        return buffer[0][self.regions[0] :][: self.regions[1]] if len(buffer) == 1 else buffer[-2]

    def send_rows(
        self, buffer: Sequence[torch.Tensor], sent: torch.Tensor, group: dist.ProcessGroup, *, async_op: bool
    ) -> dist.Work | None:
        """Run the one payload collective, into the received region; returns it if it is asynchronous."""
        received = self.received(buffer)
        if not self.block_words:
            return dist.all_to_all_single(
                received, sent, self.output_splits, self.input_splits, group=group, async_op=async_op
            )
        block = sent.new_zeros(self.block_words)  # gloo gathers equal sizes only
        block[: sent.numel()] = sent
        return all_gather_single(received, block, group=group, async_op=async_op)

    def unpack(self, batch: Any, buffer: Sequence[torch.Tensor], indices: torch.Tensor, step: int = 0) -> Any:
        """A batch to train, in ascending global id with padding last.

        Every tensor is in storage of its own: TorchRec frees `features` early, and views of one buffer would take the
        labels with them.

        Args:
            batch: one that was packed; it gives what holds no rows.
            buffer: as `pack` made it, after the collective.
            indices: as `pack` made it.
            step: which of the results.
        """
        schema, num_parts = self.layout.schema, len(self.layout.parts)
        _, rows, real_rows, *sizes = self.results[step]
        parts, num_entries = sizes[:num_parts], sizes[num_parts:]
        on_host, rows_before = buffer[0].device.type == "cpu", self.rows_before[step]
        first = self.segments[2] + self.layout.num_segments * rows_before
        sections = self._select(indices, buffer, self.segments[1], first, self.layout.num_segments * rows, parts)
        tensors = {}
        for part, words in zip(self.layout.parts, sections):
            keys = slice(part.first_key, part.first_key + part.num_segments)
            own = words if on_host or part.is_narrow else words.clone()
            tensors[part.path, part.weights] = part.read(own, rows if part.is_dense else sum(num_entries[keys]))
        values: dict[Path, Any] = {}
        at, key = self.segments[1] + self._columns * rows_before, 0
        for field in schema.jagged:
            stop, last = at + len(field.keys) * rows, key + len(field.keys)
            lengths = indices[at:stop].to(field.lengths_dtype, copy=True)
            values[field.path] = field.jagged(
                tensors[field.path, False], tensors.get((field.path, True)), lengths, rows, num_entries[key:last]
            )
            if not on_host:
                attach_host_copy(lengths, self.indices[at:stop])
            at, key = stop, last
        for dense in schema.dense:
            values[dense.path] = tensors[dense.path, False]
        for field_kept in schema.host_fields:
            attach_host_copy(values[field_kept.path], self.indices[at : at + rows])
            at += rows
        return replace_rows(batch, values, rows, real_rows)

    @property
    def _columns(self) -> int:
        """Numbers of a row of a result in the index array: its lengths, and what else the host keeps of it."""
        return self.layout.schema.num_keys + len(self.layout.schema.host_fields)

    def _select(
        self,
        indices: torch.Tensor,
        pieces: Sequence[torch.Tensor],
        segments: int,
        first: int,
        count: int,
        sizes: list[int],
    ) -> Sequence[torch.Tensor]:
        """Segments of a buffer in a new order, int32 in sections of these sizes; on the host, each in its own storage.

        Args:
            indices: on the device of the buffer.
            pieces: of the buffer, or of its own region.
            segments: how many segments lie in them.
            first: of the int32 part of the index array, where the order begins.
            count: segments of the result.
            sizes: words of the sections, which follow one another.
        """
        orders = self.segments[1] + self._columns * self.rows_before[-1]  # where the int32 part begins
        if pieces[0].device.type != "cpu":
            order = indices[orders:].view(torch.int32)[first : first + count]
            return torch.split(permute_segments(order, indices[:segments], pieces[0], sum(sizes)), sizes)
        sections, where = [pieces[0].new_empty(size) for size in sizes], indices.data_ptr()
        read, written = ([(each.data_ptr(), each.numel()) for each in tensors] for tensors in (pieces, sections))
        core.permute_words(
            where, segments, where + indices.itemsize * orders + WORD_BYTES * first, count, read, written
        )
        return sections
