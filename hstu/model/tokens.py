"""From looked-up embeddings to one sequence of tokens per row.

    contextual features, in order │ item 1, action 1, item 2, action 2, …                      one row
                                  │ history ─────────────────────► │ candidates (targets) ──►

The place of every token is computed from cumulative sums of the features' lengths, without a loop over rows and without
reading from a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torchrec.sparse.jagged_tensor import JaggedTensor


@dataclass(frozen=True)
class TokenSequence:
    """The rows of a batch as tokens, one row after the other."""

    values: torch.Tensor  # `(num_tokens, hidden_size)`, the input or the output of the layers
    lengths: torch.Tensor  # int64 `(batch_size,)`, tokens per row
    num_contextual: torch.Tensor  # int64 `(batch_size,)`, number of contextual tokens, which begin a row
    item_tokens: torch.Tensor  # int64 `(num_items,)`, the token of every item, in the order of the item feature
    item_lengths: torch.Tensor  # int64 `(batch_size,)`, items per row
    tokens_per_item: int  # 2 if an action follows every item, else 1

    def last_items(self, counts: torch.Tensor, total: int) -> torch.Tensor:
        """The last `counts` items of every row: int64 `(total,)`, indices into the item feature, row after row.

        `counts` is int64 `(batch_size,)`; `total` is its sum, an int on the host.
        """
        return _places(self.item_lengths.cumsum(0) - counts, counts, total)

    def last_tokens_of(self, items: torch.Tensor) -> torch.Tensor:
        """The last token of each item: the token of its action if there are actions; int64, the shape of `items`."""
        return self.item_tokens.index_select(0, items) + (self.tokens_per_item - 1)

    def token_times(self, item_times: torch.Tensor) -> torch.Tensor:
        """The timestamp of each token, int64 `(num_tokens,)`, from the items' timestamps, integers `(num_items,)`.

        An item and its action have the item's timestamp, contextual tokens that of the first item; all tokens of a row
        without items have the same timestamp.
        """
        num_tokens = self.values.shape[0]
        behind_context = -self.num_contextual  # (batch_size,), place of the first token relative to the first item
        place = _places(behind_context, self.lengths, num_tokens)
        first_item = torch.repeat_interleave(_exclusive_sum(self.item_lengths), self.lengths, output_size=num_tokens)
        item = first_item + place.clamp(min=0) // self.tokens_per_item
        # One more timestamp, after the last item, for rows without items.
        times = torch.nn.functional.pad(item_times.to(torch.int64), (0, 1))
        return times.index_select(0, item)


def interleave_tokens(
    contextual: Sequence[JaggedTensor],
    items: JaggedTensor,
    actions: JaggedTensor | None = None,
) -> TokenSequence:
    """Put the embeddings of a batch in the order in which the model reads them.

    Args:
        contextual: embeddings of the contextual features, in order; values `(n, hidden_size)`, lengths `(batch_size,)`.
        items: embeddings of the items.
        actions: embeddings of the actions, one per item; each action follows its item. None for no actions.
    """
    num_items = items.values().shape[0]
    step = 1 if actions is None else 2
    item_lengths = items.lengths().to(torch.int64)
    context_lengths = [feature.lengths().to(torch.int64) for feature in contextual]
    num_contextual = torch.zeros_like(item_lengths)
    for feature_lengths in context_lengths:
        num_contextual = num_contextual + feature_lengths
    lengths = num_contextual + step * item_lengths

    first = _exclusive_sum(lengths)  # (batch_size,), first token of the next feature
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
    return TokenSequence(
        # Every place is written once, so the buffer need not be initialised, and the gradient is a plain gather.
        values=torch.empty_like(source).index_copy(0, torch.cat(places), source),
        lengths=lengths,
        num_contextual=num_contextual,
        item_tokens=item_tokens,
        item_lengths=item_lengths,
        tokens_per_item=step,
    )


def _exclusive_sum(lengths: torch.Tensor) -> torch.Tensor:
    """Sum of the entries before each entry; int64 `(n,)`."""
    return lengths.cumsum(0) - lengths


def _places(first: torch.Tensor, lengths: torch.Tensor, num_values: int, step: int = 1) -> torch.Tensor:
    """Token of every value of a feature: `first, first + step, …` in each row; int64 `(num_values,)`."""
    shift = torch.repeat_interleave(first - step * _exclusive_sum(lengths), lengths, output_size=num_values)
    return shift + step * torch.arange(num_values, device=shift.device)
