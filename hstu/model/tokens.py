"""From looked-up embeddings to one sequence of tokens per row.

    contextual features, in order │ item 1, action 1, item 2, action 2, …                      one row
                                  │ history ─────────────────────► │ candidates (targets) ──►

Every token's place follows from the lengths of the features by sums; no loop runs over rows and nothing is read
back from a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


class Jagged(Protocol):
    """What is needed of TorchRec's JaggedTensor."""

    def values(self) -> torch.Tensor: ...  # noqa: D102
    def lengths(self) -> torch.Tensor: ...  # noqa: D102


@dataclass(frozen=True)
class TokenSequence:
    """The rows of a batch as tokens, one row after the other.

    Attributes:
        values: `(num_tokens, hidden_size)`.
        lengths: int64 `(batch_size,)`, tokens per row.
        num_targets: int64 `(batch_size,)`, how many of a row's last tokens belong to candidates.
        item_tokens: int64 `(num_items,)`, the token of every item, in the order of the item feature.
        item_ends: int64 `(batch_size,)`, where a row's items end in `item_tokens`.

    """

    values: torch.Tensor
    lengths: torch.Tensor
    num_targets: torch.Tensor
    item_tokens: torch.Tensor
    item_ends: torch.Tensor

    def candidate_tokens(self, num_candidates: torch.Tensor, total: int) -> torch.Tensor:
        """The token of every candidate's item.

        Args:
            num_candidates: int64 `(batch_size,)`, candidates per row: its last items.
            total: their sum, known on the host.

        Returns:
            int64 `(total,)`, row after row.

        """
        starts = _exclusive_sum(num_candidates)
        shift = torch.repeat_interleave(self.item_ends - num_candidates - starts, num_candidates, output_size=total)
        return self.item_tokens.index_select(0, shift + torch.arange(total, device=shift.device))


def interleave_tokens(
    contextual: Sequence[Jagged],
    items: Jagged,
    actions: Jagged | None = None,
    num_candidates: torch.Tensor | None = None,
) -> TokenSequence:
    """Put the embeddings of a batch in the order in which the model reads them.

    Args:
        contextual: embeddings of the contextual features, in order; values `(n, hidden_size)`, lengths
            `(batch_size,)`.
        items: embeddings of the items.
        actions: embeddings of the actions, one per item: each follows its item.
        num_candidates: integers `(batch_size,)`, how many of a row's last items are candidates; none if not given.

    Raises:
        ValueError: another number of actions than of items.

    """
    num_items = items.values().shape[0]
    if actions is not None and actions.values().shape[0] != num_items:
        raise ValueError(
            f"there are {num_items} items and {actions.values().shape[0]} actions; every item has one action: give "
            "both features the same lengths"
        )
    step = 1 if actions is None else 2
    item_lengths = items.lengths().to(torch.int64)
    context_lengths = [feature.lengths().to(torch.int64) for feature in contextual]
    lengths = step * item_lengths
    for feature_lengths in context_lengths:
        lengths = lengths + feature_lengths

    first = _exclusive_sum(lengths)  # (batch_size,), where the next feature's tokens begin
    values, places = [], []
    for feature, feature_lengths in zip(contextual, context_lengths):
        values.append(feature.values())
        places.append(_places(first, feature_lengths, feature.values().shape[0]))
        first = first + feature_lengths
    item_tokens = _places(first, item_lengths, num_items, step)
    values.append(items.values())
    places.append(item_tokens)
    if actions is not None:
        values.append(actions.values())
        places.append(item_tokens + 1)
    source = torch.cat(values)
    if num_candidates is None:
        num_targets = torch.zeros_like(lengths)
    else:
        num_targets = step * num_candidates.to(lengths)
    return TokenSequence(
        # Every place is written once, so what was there before does not matter, and the gradient is a plain gather.
        values=torch.empty_like(source).index_copy(0, torch.cat(places), source),
        lengths=lengths,
        num_targets=num_targets,
        item_tokens=item_tokens,
        item_ends=item_lengths.cumsum(0),
    )


def _exclusive_sum(lengths: torch.Tensor) -> torch.Tensor:
    """Sum of the entries before each one; int64 `(n,)`."""
    return lengths.cumsum(0) - lengths


def _places(first: torch.Tensor, lengths: torch.Tensor, num_values: int, step: int = 1) -> torch.Tensor:
    """Token of every value of a feature: `first, first + step, …` in each row; int64 `(num_values,)`."""
    shift = torch.repeat_interleave(first - step * _exclusive_sum(lengths), lengths, output_size=num_values)
    return shift + step * torch.arange(num_values, device=shift.device)
