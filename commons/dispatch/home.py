"""HOME: puts results into the order of their rows, and moves gradients back to the ranks that the rows are from.

Rows move without autograd. If a tensor of the rows requires gradients on any rank, every rank wraps the received
tensors in a node of the graph whose backward is a collective of all ranks: it moves each row's gradient back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch.autograd.function import once_differentiable

from commons.checks import kind_of
from commons.sequence_batch.fields import Path, path_name
from commons.sequence_batch.row_fields import DenseField
from commons.sequence_batch.rows import Rows

R = TypeVar("R")
# Maps gradients of the received rows to gradients of this rank's own rows; None on a rank that had no rows.
MoveBack = Callable[[Rows[tuple[torch.Tensor, ...]]], Rows[tuple[torch.Tensor, ...]] | None]


def result_rows(results: R, numbers: torch.Tensor, of: str) -> Rows[R]:
    """The rows of results, without padding rows.

    Args:
        results: a tensor or any other batch.
        numbers: int64 `(rows,)`, the number of the row of each result; below 0 for padding, which comes last.
        of: name of the batch that has these results, for messages.

    Raises:
        ValueError: another number of rows, or results that state padding for real rows.
    """
    rows, real = Rows.of(results), int((numbers >= 0).sum())
    if rows.count != len(numbers):
        raise ValueError(
            f"results of {of} have {rows.count} rows, {of} has {len(numbers)}; results need one row per row, padding "
            "included: keep all rows"
        )
    if rows.real < real:
        raise ValueError(
            f"results of {of} are {kind_of(results)} with {rows.count - rows.real} rows of padding, which "
            "would be gathered out of order; results must not state padding: restore its fields"
        )
    return rows.select(range(real)) if real < rows.count else rows


def in_order(parts: Sequence[Rows[R]], numbers: Sequence[torch.Tensor]) -> R:
    """Join the rows of all parts into one batch, in the order of their numbers; numbers below 0 have no row."""
    order = torch.cat(list(numbers))
    return Rows.concat(parts).select(torch.argsort(order[order >= 0])).batch


def restore(results: Iterable[R], numbers: Sequence[torch.Tensor], part: str, parts: str) -> R:
    """Join the results of all parts of a batch, in the order of its rows; `part` and `parts` are words for messages."""
    made = list(results)  # a generator has no length
    if len(made) != len(numbers):
        raise ValueError(
            f"there are {len(made)} results for {len(numbers)} {parts}; each {part} has one result: pass them in order"
        )
    rows = [result_rows(each, of, f"{part} {index}") for index, (each, of) in enumerate(zip(made, numbers))]
    return in_order(rows, numbers)


def differentiable_leaves(rows: Rows[Any]) -> list[int]:
    """Numbers of the leaves that require gradients, in the order of `Rows.leaves`; empty if gradients are disabled.

    Raises:
        ValueError: a leaf that requires gradients and is not a dense tensor.
    """
    if not torch.is_grad_enabled():
        return []
    found = []
    for number, (path, value) in enumerate(rows.leaves.items()):
        leaf = rows.fields[path]
        if not any(tensor.requires_grad for tensor in leaf.tensors(value)):
            continue
        if not isinstance(leaf, DenseField):
            raise ValueError(
                f"field {path_name(path)!r} requires grad and is jagged; gradients follow only rows of dense tensors: "
                "pass detach(), or its rows as a tensor"
            )
        found.append(number)
    return found


def leaf_paths(rows: Rows[Any], numbers: Sequence[int]) -> list[Path]:
    """The paths of some leaves, by their numbers."""
    paths = list(rows.leaves)
    return [paths[number] for number in numbers]


def follow_gradients(arrived: Rows[R], sent: Rows[Any] | None, numbers: Sequence[int], move_back: MoveBack) -> Rows[R]:
    """Connect received rows to the graph, so that their gradients flow back to the sent rows.

    Args:
        arrived: the received rows, without gradients, with the structure of the sent rows.
        sent: the rows that this rank had before; None for no rows.
        numbers: numbers of the leaves with gradients, equal on all ranks.
        move_back: moves gradients; every rank's backward calls it, even if the rank's loss ignores these rows.
    """
    if not numbers:
        return arrived
    chosen = leaf_paths(arrived, numbers)
    outputs = [arrived.leaves[path] for path in chosen]
    inputs = [] if sent is None else [sent.leaves[path] for path in chosen]
    anchor = torch.empty(0, requires_grad=True)  # on a rank without rows, no input requires grad
    joined = dict(zip(chosen, _Followed.apply(move_back, outputs, anchor, *inputs)))
    return arrived.map(lambda path, value: joined.get(path, value))


class _Followed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, move_back: MoveBack, outputs: list[torch.Tensor], anchor: torch.Tensor, *inputs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.move_back, ctx.num_inputs = move_back, len(inputs)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        given = Rows.of(tuple(gradients))
        moved = ctx.move_back(given) or given.select([])  # a rank without rows passes on gradients of 0 rows
        return (None, None, None, *moved.batch[: ctx.num_inputs])
