"""EXCHANGE and SELECT: a plan as one rank's permutes, splits and lengths; the rows packed, sent and put in order.

The worker thread makes a RowExchange from the plan. On the main thread `pack` writes the batch into one buffer, one
collective moves the rows, and `unpack` builds the batch that this rank trains. The buffer holds segments of 4-byte
words in three regions:

    own       every row the rank brought, segment by segment: segment s of row r is at s · rows + r
    received  what arrived, row by row: all segments of one row side by side
    zero      one row of padding: zero words for jagged segments, zeros for dense ones

One permute of the own region packs what is sent; one permute of the whole buffer gives the result in ascending global
id, padding last. Every size follows from the gathered lengths, so that none is read back from a device.
"""

from __future__ import annotations

from collections.abc import Callable
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
class RowExchange:
    """What one rank does to carry out a plan; sizes are in words.

    Attributes:
        layout: the parts of a row.
        moves: whether rows of any rank move, so that all of them run the collective.
        changes: whether this rank's rows differ from those it brought.
        input_splits: words to every rank.
        output_splits: words from every rank; of an all-gather, from every rank to all of them.
        block_words: words of the largest sender, to which an all-gather pads; 0 for an all-to-all.
        regions: words of the three regions of the buffer.
        own_parts: words of every part in the own region.
        result_parts: words of every part in the result.
        send: own region → what is sent.
        select: buffer → result.
        rows: rows of the result, padding included.
        real_rows: those that are no padding.
        lengths: by field, the lengths of the result's KeyedJaggedTensors, on the host.
        length_per_key: by field, their sums.
    """

    layout: PayloadLayout
    moves: bool
    changes: bool
    input_splits: list[int]
    output_splits: list[int]
    block_words: int
    regions: list[int]
    own_parts: list[int]
    result_parts: list[int]
    send: Permute
    select: Permute
    rows: int
    real_rows: int
    lengths: dict[str, torch.Tensor]
    length_per_key: dict[str, list[int]]

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
        home, local_row, lengths = gathered.home, gathered.local_row, gathered.lengths
        row_words = layout.words(lengths)  # (N, segments)
        words_of_row = row_words.sum(axis=1)
        segments = np.arange(layout.num_segments)

        own_rows = int(gathered.rows[rank])
        own_row_lengths = np.zeros((own_rows, lengths.shape[1]), dtype=np.int64)
        own_row_lengths[local_row[home == rank]] = lengths[home == rank]
        own_lengths = layout.words(own_row_lengths).T.ravel()  # segment by segment

        moved = np.flatnonzero(plan.moves)
        moved = moved[np.lexsort((local_row[moved], plan.destination[moved], home[moved]))]  # sender, receiver, row
        sent, arriving = moved[home[moved] == rank], moved[plan.destination[moved] == rank]
        if all_gather:
            arriving, block_words, received_lengths, first_segment = _blocks(moved, home, row_words, gathered.num_ranks)
        else:
            block_words, received_lengths = 0, row_words[arriving].ravel()
            first_segment = np.arange(len(arriving)) * len(segments)

        result, rows = plan.rows_for(rank), plan.result_batch_size(rank)
        stays = home[result] == rank
        position = np.empty(len(home), dtype=np.int64)
        position[arriving] = first_segment
        first_received, first_zero = len(own_lengths), len(own_lengths) + len(received_lengths)
        source = np.empty((len(segments), rows), dtype=np.int64)  # in the buffer, of every segment of the result
        kept, came = np.flatnonzero(stays), np.flatnonzero(~stays)
        source[:, kept] = segments[:, None] * own_rows + local_row[result[kept]]
        source[:, came] = first_received + position[result[came]] + segments[:, None]
        source[:, len(result) :] = (first_zero + segments)[:, None]
        result_lengths = np.zeros((rows, lengths.shape[1]), dtype=np.int64)
        result_lengths[: len(result)] = lengths[result]
        zero_lengths = layout.words(np.zeros((1, lengths.shape[1]), dtype=np.int64))[0]

        host = _host_tensors(pin_memory)
        result_parts = layout.words_of_parts(result_lengths)
        of_fields = layout.split_keys(result_lengths)
        return cls(
            layout=layout,
            moves=bool(words_of_row[moved].sum()),
            changes=bool(len(sent) or len(came) or rows != own_rows),
            input_splits=sum_by_rank(plan.destination[sent], words_of_row[sent], gathered.num_ranks).tolist(),
            output_splits=sum_by_rank(home[arriving], words_of_row[arriving], gathered.num_ranks).tolist(),
            block_words=block_words,
            regions=[int(region.sum()) for region in (own_lengths, received_lengths, zero_lengths)],
            own_parts=layout.words_of_parts(own_row_lengths),
            result_parts=result_parts,
            send=Permute(
                host((segments * own_rows + local_row[sent][:, None]).ravel(), torch.int32),
                host(own_lengths),
                int(words_of_row[sent].sum()),
            ),
            select=Permute(
                host(source.ravel(), torch.int32),
                host(np.concatenate([own_lengths, received_lengths, zero_lengths])),
                sum(result_parts),
            ),
            rows=rows,
            real_rows=len(result),
            lengths={field.name: host(table.ravel(), field.lengths_dtype) for field, table in of_fields},
            length_per_key={field.name: table.sum(axis=1).tolist() for field, table in of_fields},
        )

    def pack(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a batch into a new buffer, and pack the rows that leave it.

        Args:
            batch: this rank's; on CUDA the current stream must be the one that copied it.

        Returns:
            The buffer, int32 `(sum(regions),)`, and what is sent, int32 `(sum(input_splits),)`, by receiver.
        """
        buffer = torch.empty(sum(self.regions), dtype=torch.int32, device=batch_device(batch))
        own, _, zero = torch.split(buffer, self.regions)
        zero.zero_()
        for part, words in zip(self.layout.parts, torch.split(own, self.own_parts)):
            part.write(part.tensor_of(batch), words)
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

    def unpack(self, batch: Any, buffer: torch.Tensor) -> Any:
        """The batch to train, in ascending global id with padding last.

        Every tensor is in storage of its own: TorchRec frees `features` early, and views of one buffer would take the
        labels with them.

        Args:
            batch: what was packed; it gives the fields that hold no rows.
            buffer: as `pack` made it, after the collective.
        """
        schema, sections = self.layout.schema, torch.split(self.select(buffer), self.result_parts)
        tensors = {
            (part.field, part.weights): part.read(words, self.rows) for part, words in zip(self.layout.parts, sections)
        }
        fields: dict[str, Any] = {
            field.name: KeyedJaggedTensor(
                keys=list(field.keys),
                values=tensors[field.name, False],
                weights=tensors.get((field.name, True)),
                lengths=self.lengths[field.name].to(buffer.device, non_blocking=True),
                stride=self.rows,
                length_per_key=self.length_per_key[field.name],
            )
            for field in schema.jagged
        }
        for dense in schema.dense:
            fields[dense.name] = tensors[dense.name, False].view(self.rows, *dense.trailing)
        return copy_batch(batch, fields | row_count_values(type(batch), self.rows, self.real_rows))


def _host_tensors(pin_memory: bool) -> Callable[..., torch.Tensor]:
    def host(array: np.ndarray, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array)).to(dtype)
        return tensor.pin_memory() if pin_memory else tensor

    return host


def _blocks(
    moved: np.ndarray, home: np.ndarray, row_words: np.ndarray, num_ranks: int
) -> tuple[np.ndarray, int, np.ndarray, np.ndarray]:
    """The received region of an all-gather: one block per sender, each ending in a segment that pads it.

    Returns:
        The moved rows in order of arrival, the words of a block, the words of every segment, and each row's first
        segment within the region.
    """
    num_segments = row_words.shape[1]
    sent = sum_by_rank(home[moved], row_words[moved].sum(axis=1), num_ranks)
    block_words = int(sent.max(initial=0))
    # Sender k's rows come after the k pads of the blocks before it.
    first_segment = np.arange(len(moved)) * num_segments + home[moved]
    pad_segment = np.cumsum(np.bincount(home[moved], minlength=num_ranks)) * num_segments + np.arange(num_ranks)
    lengths = np.empty(len(moved) * num_segments + num_ranks, dtype=np.int64)
    lengths[pad_segment] = block_words - sent
    lengths[(first_segment[:, None] + np.arange(num_segments)).ravel()] = row_words[moved].ravel()
    return moved, block_words, lengths, first_segment
