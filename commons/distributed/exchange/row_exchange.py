"""EXCHANGE and SELECT: one rank's part of a plan, as permutes, splits and lengths; packs, sends and unpacks the rows.

The worker thread makes a RowExchange from the plan. `pack` writes the rank's batch into one buffer, one collective
moves the rows, and `unpack` builds the batch that this rank trains. In a window, all batches of the rank are packed
into the buffer, and unpacked from it step by step. The buffer consists of segments of 4-byte words, in three regions:

    own       the rank's rows before the exchange, batch by batch: segment s of row r of a batch that begins at segment
              b is at b + s · rows + r; each batch ends in a segment that aligns the next
    received  the rows from other ranks, row by row: all segments of one row side by side
    zero      one row of padding: zero words for jagged segments, zeros for dense ones

One permute of the own region packs the rows to send; one permute of the whole buffer makes a result in ascending global
id, padding last. On the host no buffer is filled: rows are read from the batches, and each tensor of the result is
written in place. All sizes are computed from the gathered lengths, so that none is read back from a device. Everything
that the device needs is in one host array, which is copied to it once. Its int64 part has the lengths of the buffer's
segments, those of the own region first, and for each result the lengths `(num_keys, rows)` and the host values
`(num_kept, rows)` of its rows. Its int32 part has the segments of the own region that are sent and, for each result,
the segments of the buffer that make it up. The native core writes the array (perf_model/partitioner/native/routes.hpp).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from commons.distributed.channel.agree import ControlChannel
from commons.distributed.exchange.payload import WORD_BYTES, PayloadLayout
from commons.distributed.process_group import all_gather_single, serves
from commons.perf_model.partitioner import core
from commons.perf_model.shuffle_plan import ShufflePlanner
from commons.sequence_batch.fields import Path
from commons.sequence_batch.host_copies import attach_host_copy
from commons.sequence_batch.jagged import permute_segments
from commons.sequence_batch.open_batch import replace_rows


@dataclass(eq=False)
class RowExchange:
    """One rank's part of a plan; sizes are in words."""

    layout: PayloadLayout
    moves: bool  # whether rows of any rank move, so that all ranks run the collective
    block_words: int  # words of the largest sender, to which an all-gather pads; 0 for an all-to-all
    sent_words: int  # words of the rows that leave this rank
    segments: tuple[int, int, int]  # number of segments: of the own region, of the whole buffer, of the sent rows
    regions: list[int]  # words of the three regions of the buffer
    input_splits: list[int]  # words to every rank
    output_splits: list[int]  # words from every rank; in an all-gather, that each rank sends to all
    own_parts: list[list[int]]  # by batch before the exchange: words of every part, and of the aligning segment
    # By batch after the exchange: whether its rows differ from the rank's batch of that step before, its rows with and
    # without padding, the words of every part, and the entries of every key of all jagged fields.
    results: list[list[int]]
    rows_before: list[int]  # by result, the rows of the results before it; last, of all results
    indices: torch.Tensor  # the host array; pinned if the batches are trained on CUDA

    @classmethod
    def of(cls, planner: ShufflePlanner, layout: PayloadLayout) -> RowExchange:
        """This rank's part of the last plan of a planner; called on the worker thread."""
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
        """Whether any of this rank's batches gets other rows."""
        return any(result[0] for result in self.results)

    @property
    def bytes_sent(self) -> int:
        """Payload bytes that this rank sends: its moved rows; in an all-gather, its block to every other rank."""
        return WORD_BYTES * (self.block_words * (len(self.input_splits) - 1) or self.sent_words)

    @property
    def lookups(self) -> list[int]:
        """By batch after the exchange, values of its KeyedJaggedTensors except the labels."""
        return [sum(result[3 + part] // words for part, words in self.layout.lookups) for result in self.results]

    def pack(self, batches: Sequence[Any]) -> tuple[Sequence[torch.Tensor], torch.Tensor, torch.Tensor]:
        """Make the buffer of this rank's batches, and pack the rows to send; on CUDA, on the stream that copied them.

        Returns:
            On the device of the batches: the buffer, int32, `sum(regions)` words, in one piece or, on the host, in
            several, those of the own region being the batches' memory; the rows to send, int32 `(sum(input_splits),)`,
            by receiver; and the index array.

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
                "shuffle was started; a batch must not change until its shuffle is finished: change it before or after"
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

    def send_rows(
        self, buffer: Sequence[torch.Tensor], sent: torch.Tensor, group: dist.ProcessGroup, *, async_op: bool
    ) -> dist.Work | None:
        """Run the one payload collective, into the received region; returns it if it is asynchronous.

        ValueError for rows on the host in a group for GPUs only.
        """
        if sent.device.type == "cpu" and not serves(group, "cpu"):
            raise ValueError(
                "the batch is on the host, and the group's backend moves rows between GPUs only: copy the batch to the "
                "GPU before its shuffle ends, or let windowed_iter(iterator, shuffler, 1) exchange rows on the host"
            )
        received = buffer[0][self.regions[0] :][: self.regions[1]] if len(buffer) == 1 else buffer[-2]
        if not self.block_words:
            return dist.all_to_all_single(
                received, sent, self.output_splits, self.input_splits, group=group, async_op=async_op
            )
        block = sent.new_zeros(self.block_words)  # gloo gathers equal sizes only
        block[: sent.numel()] = sent
        return all_gather_single(received, block, group=group, async_op=async_op)

    def unpack(self, batch: Any, buffer: Sequence[torch.Tensor], indices: torch.Tensor, step: int = 0) -> Any:
        """Build a batch to train, in ascending global id with padding last.

        Every tensor has its own storage: TorchRec frees the memory of `features` early, and views of one buffer would
        lose the labels with it. Fields without rows are taken from `batch`, one of the packed batches.
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
        """Numbers of a result's row in the index array: its lengths and its host values."""
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
        """Segments of a buffer in a new order, as int32 tensors of the given sizes; on the host in own storage.

        `pieces` of the buffer have so many `segments`; the order of `count` segments begins at `first` in the int32
        part of the index array.
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


class ExchangeOrder:
    """The exchanges that are planned and not carried out, over one group; equal on all ranks that make the same calls.

    The payload has no step number: with the rows of another step, gloo ends the process or fills the batch with them.
    So ranks compare the steps of an exchange that is out of order: if an earlier one is left, because all ranks have
    dropped it or this rank alone has skipped it, and if a later one was carried out before.
    """

    def __init__(self, channel: ControlChannel) -> None:
        self._channel = channel
        self._planned: set[int] = set()
        self._latest = -1  # the latest step whose exchange was carried out

    def plan(self, step: int) -> None:
        """Expect an exchange; called on the worker thread, before the shuffle can be finished."""
        self._planned.add(step)

    def begin(self, step: int) -> None:
        """Take part in an exchange; called on the main thread.

        Raises:
            ValueError: ranks are at the exchanges of different steps.
            RankMissingError: another rank waits in an exchange that this rank has skipped.
        """
        self._planned.discard(step)
        skipped, latest = sorted(each for each in self._planned.copy() if each < step), self._latest
        if not skipped and step > latest:
            self._latest = step
            return
        reason = f"step {skipped[0]} was skipped" if skipped else f"step {latest} came before"
        steps = self._channel.gather(np.array([step]), step, f"exchange ({reason})", on_main=True)
        if (steps != step).any():
            raise ValueError(
                f"ranks finish the shuffles of steps {steps[:, 0].tolist()} ({self._channel.description}); every rank "
                "must finish the same shuffles in the same order: finish each shuffle that was started"
            )
        self._latest = max(latest, step)
        self._planned.difference_update(skipped)
