"""Balanced chunks of a batch, with a way to restore the batch's order of their predictions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, overload

import torch

from commons.checks import as_count
from commons.dispatch.home import restore
from commons.dispatch.planning import split_rows
from commons.perf_model.loads import imbalance
from commons.sequence_batch.rows import Rows

B = TypeVar("B")
R = TypeVar("R")


@dataclass(frozen=True, eq=False)
class BalancedChunks(Sequence[B]):
    """A batch split into chunks of even work; a sequence of the chunks."""

    chunks: list[B]  # of the whole batch's type; in each, padding comes last
    # For each chunk int64 `(rows of the chunk,)`: the number of each row in the whole batch, ascending; -1 for padding.
    indices: list[torch.Tensor]
    # int64 `(rows of the whole batch without padding,)`: the position of each row in the concatenated chunks, so that
    # `torch.cat(predictions)[inverse]` is in the order of the batch, without padding.
    inverse: torch.Tensor
    loads: torch.Tensor  # int64 `(number of chunks,)`: the workload of each chunk

    def __len__(self) -> int:
        return len(self.chunks)

    @overload
    def __getitem__(self, index: int) -> B: ...
    @overload
    def __getitem__(self, index: slice) -> list[B]: ...
    def __getitem__(self, index: int | slice) -> B | list[B]:
        return self.chunks[index]

    def __repr__(self) -> str:
        rows = [len(indices) for indices in self.indices]
        largest = f"largest load {1 + self.imbalance:.4g} × the mean"
        return f"BalancedChunks({len(self)} of {min(rows)} to {max(rows)} rows, {largest})"

    @property
    def is_padding(self) -> list[torch.Tensor]:
        """For each chunk a bool tensor `(rows of the chunk,)`: which rows are padding."""
        return [rows < 0 for rows in self.indices]

    @property
    def imbalance(self) -> float:
        """Largest load divided by the mean, minus 1; 0.0 if there is no load."""
        return imbalance(self.loads.numpy())

    def restore(self, results: Iterable[R]) -> R:
        """Join the results of all chunks into one batch, in the order of the whole batch and without padding.

        Args:
            results: for each chunk a tensor or any other batch with one row per row of the chunk, such as predictions.

        Raises:
            ValueError: the number of results differs from the number of chunks, or a result's number of rows from its
                chunk's; results that cannot be joined.
        """
        return restore(results, self.indices, "chunk", "chunks")


def split_balanced(
    batch: B,
    num_chunks: int,
    workloads: Any,
    *,
    equal_size: bool = True,
    pad: bool = False,
    groups: Any = None,
) -> BalancedChunks[B]:
    """Split a batch into chunks of even work.

    Stated padding of the batch is dropped: chunks have only real rows, and new padding with `pad`.

    Args:
        batch: anything with rows (`commons.sequence_batch.rows`): a TensorDict, a dict of tensors, a BaseBatch, …
        num_chunks: number of chunks.
        workloads: non-negative integers `(rows,)`: list, array or CPU tensor; values of padding rows are ignored.
        equal_size: numbers of rows per chunk differ by at most one; with `groups`, which must then have equal sizes,
            numbers of groups per chunk differ by at most one.
        pad: pad all chunks to one number of rows. Padding rows have -1 in `indices`, and come after
            `actual_batch_size` if the batch has this field.
        groups: integers or strings `(rows,)`; rows with equal ids, such as the answers to one prompt, stay together.

    Returns:
        The chunks, with the indices that restore the order of the batch.

    Raises:
        ValueError: a batch without rows or with fields of different numbers of rows; workloads or ids of the wrong
            length; negative or fractional workloads; more chunks than rows (or groups), unless `pad` is set.

    Examples:
        >>> halves = split_balanced({"ids": torch.tensor([7, 1, 2, 6])}, 2, [7, 1, 2, 6])
        >>> [chunk["ids"].tolist() for chunk in halves.chunks], halves.loads.tolist()
        ([[7, 1], [2, 6]], [8, 8])
        >>> halves.restore([chunk["ids"] * 10 for chunk in halves.chunks]).tolist()
        [70, 10, 20, 60]
    """
    rows = Rows.of(batch)
    count = as_count(num_chunks, "num_chunks", 1)
    split = split_rows(rows, workloads, count, equal_size=equal_size, groups=groups, pad=pad)
    flat = torch.cat(split.indices)
    positions = torch.nonzero(flat >= 0)[:, 0]
    return BalancedChunks(
        chunks=[split.take(rows, part).batch for part in range(count)],
        indices=split.indices,
        inverse=torch.empty_like(positions).index_copy(0, flat[positions], positions),
        loads=torch.from_numpy(split.plan.loads),
    )
