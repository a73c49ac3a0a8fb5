"""EXCHANGE and SELECT: a plan as one rank's permutes, splits and lengths; the rows packed, sent and put in order.

The worker thread makes a RowExchange from the plan. `pack` writes the rank's batch into one buffer, one collective
moves the rows, and `unpack` builds the batch that this rank trains. Of a window, all batches of the rank are packed
into the buffer, and unpacked from it step by step. The buffer holds segments of 4-byte words in three regions:

    own       every row the rank brought, batch by batch and segment by segment: segment s of row r of a batch that
              begins at segment b is at b + s · rows + r; each batch ends in a segment that aligns the next
    received  what arrived, row by row: all segments of one row side by side
    zero      one row of padding: zero words for jagged segments, zeros for dense ones

One permute of the own region packs what is sent; one permute of the whole buffer gives a result in ascending global
id, padding last. Every size follows from the gathered lengths, so that none is read back from a device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from commons.distributed.payload import WORD_BYTES, PayloadLayout
from commons.distributed.process_group import all_gather_single
from commons.perf_model.loads import sum_by_rank
from commons.perf_model.shuffle_plan import ShufflePlan
from commons.sequence_batch.fields import batch_device, copy_batch, row_count_values
from commons.sequence_batch.jagged import permute_segments

# Every batch in the buffer begins at a multiple of the largest element, a complex number of two doubles.
_ALIGNED_WORDS = 4


@dataclass(frozen=True)
class Permute:
    """Segments of a buffer in another order; host tensors, copied to the buffer's device without waiting.

    Attributes:
        order: int32 `(output segments,)`, the input segment of each.
        lengths: int64 `(input segments,)`, words of each.
        words: words of the result.
    """

    order: torch.Tensor
    lengths: torch.Tensor
    words: int

    def __call__(self, buffer: torch.Tensor) -> torch.Tensor:
        """int32 `(words,)`, in storage of its own."""
        order, lengths = (host.to(buffer.device, non_blocking=True) for host in (self.order, self.lengths))
        return permute_segments(order, lengths, buffer, self.words)


@dataclass(frozen=True)
class ResultRows:
    """One batch that a rank trains, as it is taken from the buffer; sizes are in words.

    Attributes:
        changes: whether its rows differ from those that the rank brought there.
        select: buffer → result.
        parts: words of every part.
        rows: rows of the result, padding included.
        real_rows: those that are no padding.
        lengths: by field, the lengths of the result's KeyedJaggedTensors, on the host.
        length_per_key: by field, their sums.
    """

    changes: bool
    select: Permute
    parts: list[int]
    rows: int
    real_rows: int
    lengths: dict[str, torch.Tensor]
    length_per_key: dict[str, list[int]]


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
            pin_memory: whether the batch is trained on CUDA, so that copies to it need not wait.
        """
        gathered = plan.gathered
        home, num_ranks = gathered.home, gathered.num_ranks
        sender, receiver = home // gathered.steps, plan.destination // gathered.steps
        row_words = layout.words(gathered.lengths)  # (N, segments)
        words_of_row = row_words.sum(axis=1)
        segments = np.arange(layout.num_segments)
        places = range(rank * gathered.steps, (rank + 1) * gathered.steps)

        own_tables = [_own_lengths(plan, place) for place in places]
        own_parts = [layout.words_of_parts(table) for table in own_tables]
        for parts in own_parts:
            parts.append(-sum(parts) % _ALIGNED_WORDS)
        own_lengths = np.concatenate(
            [np.append(layout.words(table).T, parts[-1]) for table, parts in zip(own_tables, own_parts)]
        )
        own_rows = np.array([len(table) for table in own_tables])
        first_of_batch = np.cumsum(own_rows * len(segments) + 1) - (own_rows * len(segments) + 1)
        own = np.flatnonzero(sender == rank)
        step = home[own] - places.start
        # Of every real row that this rank has or gets: its first segment in the buffer, and from one to the next.
        first, stride = np.empty(len(home), dtype=np.int64), np.ones(len(home), dtype=np.int64)
        first[own] = first_of_batch[step] + gathered.local_row[own]
        stride[own] = own_rows[step]

        moved = np.flatnonzero(plan.moves)
        moved = moved[np.lexsort((moved, receiver[moved], sender[moved]))]
        sent, arriving = moved[sender[moved] == rank], moved[receiver[moved] == rank]
        if all_gather:
            arriving, block_words, received_lengths, first_segment = _blocks(moved, sender, row_words, num_ranks)
        else:
            block_words, received_lengths = 0, row_words[arriving].ravel()
            first_segment = np.arange(len(arriving)) * len(segments)
        came = receiver[arriving] == rank
        first[arriving[came]] = len(own_lengths) + first_segment[came]

        zero_lengths = layout.words(np.zeros((1, gathered.lengths.shape[1]), dtype=np.int64))[0]
        host = _host_tensors(pin_memory)
        buffer_lengths = host(np.concatenate([own_lengths, received_lengths, zero_lengths]))
        first_zero = len(own_lengths) + len(received_lengths)

        def result(place: int) -> ResultRows:
            chosen, rows = plan.rows_for(place), plan.result_batch_size(place)
            source = np.empty((len(segments), rows), dtype=np.int64)  # in the buffer, of every segment of the result
            source[:, : len(chosen)] = first[chosen] + segments[:, None] * stride[chosen]
            source[:, len(chosen) :] = (first_zero + segments)[:, None]
            lengths = np.zeros((rows, gathered.lengths.shape[1]), dtype=np.int64)
            lengths[: len(chosen)] = gathered.lengths[chosen]
            parts, of_fields = layout.words_of_parts(lengths), layout.split_keys(lengths)
            return ResultRows(
                changes=rows != gathered.rows[place] or not np.array_equal(chosen, np.flatnonzero(home == place)),
                select=Permute(host(source.ravel(), torch.int32), buffer_lengths, sum(parts)),
                parts=parts,
                rows=rows,
                real_rows=len(chosen),
                lengths={field.name: host(table.ravel(), field.lengths_dtype) for field, table in of_fields},
                length_per_key={field.name: table.sum(axis=1).tolist() for field, table in of_fields},
            )

        return cls(
            layout=layout,
            moves=bool(words_of_row[moved].sum()),
            input_splits=sum_by_rank(receiver[sent], words_of_row[sent], num_ranks).tolist(),
            output_splits=sum_by_rank(sender[arriving], words_of_row[arriving], num_ranks).tolist(),
            block_words=block_words,
            regions=[int(region.sum()) for region in (own_lengths, received_lengths, zero_lengths)],
            own_parts=own_parts,
            send=Permute(
                host((first[sent][:, None] + segments * stride[sent][:, None]).ravel(), torch.int32),
                host(own_lengths),
                int(words_of_row[sent].sum()),
            ),
            results=[result(place) for place in places],
        )

    def pack(self, batches: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Write batches into a new buffer, and pack the rows that leave them.

        Args:
            batches: this rank's, at least one; on CUDA the current stream must be the one that copied them.

        Returns:
            The buffer, int32 `(sum(regions),)`, and what is sent, int32 `(sum(input_splits),)`, by receiver.
        """
        buffer = torch.empty(sum(self.regions), dtype=torch.int32, device=batch_device(batches[0]))
        own, _, zero = torch.split(buffer, self.regions)
        zero.zero_()
        sections = iter(torch.split(own, [words for parts in self.own_parts for words in parts]))
        for batch in batches:
            for part, words in zip(self.layout.parts, sections):
                part.write(part.tensor_of(batch), words)
            next(sections)
        return buffer, self.send(own)

    def send_rows(
        self, packed: torch.Tensor, buffer: torch.Tensor, group: dist.ProcessGroup, *, async_op: bool
    ) -> dist.Work | None:
        """Run the one payload collective, into the received region; returns it if it is asynchronous."""
        received = torch.split(buffer, self.regions)[1]
        if not self.block_words:
            return dist.all_to_all_single(
                received, packed, self.output_splits, self.input_splits, group=group, async_op=async_op
            )
        block = packed.new_zeros(self.block_words)  # gloo gathers equal sizes only
        block[: packed.numel()] = packed
        return all_gather_single(received, block, group=group, async_op=async_op)

    @property
    def bytes_sent(self) -> int:
        """Payload bytes that this rank sends: its moved rows, or its block once to every other rank."""
        if not self.moves:
            return 0
        return WORD_BYTES * (self.block_words * (len(self.input_splits) - 1) or self.send.words)

    def unpack(self, batch: Any, buffer: torch.Tensor, step: int = 0) -> Any:
        """A batch to train, in ascending global id with padding last.

        Every tensor is in storage of its own: TorchRec frees `features` early, and views of one buffer would take the
        labels with them.

        Args:
            batch: any that was packed; it gives the fields that hold no rows.
            buffer: as `pack` made it, after the collective.
            step: which of the results.
        """
        result = self.results[step]
        schema, sections = self.layout.schema, torch.split(result.select(buffer), result.parts)
        tensors = {
            (part.field, part.weights): part.read(words, result.rows)
            for part, words in zip(self.layout.parts, sections)
        }
        fields: dict[str, Any] = {
            field.name: KeyedJaggedTensor(
                keys=list(field.keys),
                values=tensors[field.name, False],
                weights=tensors.get((field.name, True)),
                lengths=result.lengths[field.name].to(buffer.device, non_blocking=True),
                stride=result.rows,
                length_per_key=result.length_per_key[field.name],
            )
            for field in schema.jagged
        }
        for dense in schema.dense:
            fields[dense.name] = tensors[dense.name, False].view(result.rows, *dense.trailing)
        return copy_batch(batch, fields | row_count_values(type(batch), result.rows, result.real_rows))


def _own_lengths(plan: ShufflePlan, place: int) -> np.ndarray:
    """int64 `(rows, num_keys)`, the lengths of all rows of a batch as it was brought, padding included."""
    gathered = plan.gathered
    table = np.zeros((int(gathered.rows[place]), gathered.lengths.shape[1]), dtype=np.int64)
    here = gathered.home == place
    table[gathered.local_row[here]] = gathered.lengths[here]
    return table


def _host_tensors(pin_memory: bool) -> Callable[..., torch.Tensor]:
    def host(array: np.ndarray, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array)).to(dtype)
        return tensor.pin_memory() if pin_memory else tensor

    return host


def _blocks(
    moved: np.ndarray, sender: np.ndarray, row_words: np.ndarray, num_ranks: int
) -> tuple[np.ndarray, int, np.ndarray, np.ndarray]:
    """The received region of an all-gather: one block per sender, each ending in a segment that pads it.

    Returns:
        The moved rows in order of arrival, the words of a block, the words of every segment, and each row's first
        segment within the region.
    """
    num_segments = row_words.shape[1]
    sent = sum_by_rank(sender[moved], row_words[moved].sum(axis=1), num_ranks)
    block_words = int(sent.max(initial=0))
    # Sender k's rows come after the k pads of the blocks before it.
    first_segment = np.arange(len(moved)) * num_segments + sender[moved]
    pad_segment = np.cumsum(np.bincount(sender[moved], minlength=num_ranks)) * num_segments + np.arange(num_ranks)
    lengths = np.empty(len(moved) * num_segments + num_ranks, dtype=np.int64)
    lengths[pad_segment] = block_words - sent
    lengths[(first_segment[:, None] + np.arange(num_segments)).ravel()] = row_words[moved].ravel()
    return moved, block_words, lengths, first_segment
