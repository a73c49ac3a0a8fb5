"""Beam search over the hierarchies for the likeliest valid items.

A beam is a prefix of an SID. In each step the beams of a row are extended by all codes that lead to an item, scored by
the sum of the log-probabilities of their codes, and the best `beam_width` are kept. A head's softmax is over its whole
codebook: the probability of invalid codes is not redistributed to valid codes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from sid_gr.model.trie import SIDTrie

NextLogits = Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class GeneratedItems:
    """The likeliest items of each row, the best first."""

    leaves: torch.Tensor  # int64 `(num_rows, beam_width)`, leaves of the trie: indices of the sorted SIDs
    log_probs: torch.Tensor  # at least float32 `(num_rows, beam_width)`, descending


def require_beam_width(beam_width: int, trie: SIDTrie) -> None:
    """Raise ValueError unless `beam_width` is between 1 and the number of SIDs."""
    if not 1 <= beam_width <= trie.num_sids:
        raise ValueError(
            f"beam_width (trainer.top_k_for_generation) is {beam_width}, there are {trie.num_sids} valid SIDs; every "
            f"beam ends in a different SID: give 1 to {trie.num_sids}"
        )


def beam_search(trie: SIDTrie, beam_width: int, first_logits: torch.Tensor, next_logits: NextLogits) -> GeneratedItems:
    """Find the likeliest items.

    If `beam_width` is the number of items, the result is exact; a narrower beam may miss an item whose prefix is less
    likely than `beam_width` other prefixes.

    Args:
        trie: the valid items.
        beam_width: number of beams kept per row, and of items found.
        first_logits: `(num_rows, codebook_sizes[0])`, scores of the first code.
        next_logits: function called for every further hierarchy with its number, the last chosen codes, int64
            `(num_rows, num_beams)`, and the numbers of the beams that they extend, of the same shape; returns the
            scores of the next code, `(num_rows, num_beams, codebook size)`. num_beams is `beam_width`, or the number
            of prefixes if that is smaller.

    Raises:
        ValueError: `beam_width` is not between 1 and the number of valid items.
    """
    require_beam_width(beam_width, trie)
    num_rows = first_logits.shape[0]
    nodes = torch.zeros(num_rows, 1, dtype=torch.int64, device=first_logits.device)  # node of every beam: the root
    log_probs = first_logits.new_zeros(num_rows, 1)
    logits = first_logits.unsqueeze(1)  # (num_rows, num_beams, codebook size)
    for depth, size in enumerate(trie.codebook_sizes):
        # The child of every beam for every code: (num_rows, num_beams · size).
        following = trie.next_nodes(depth, nodes.flatten()).view(num_rows, nodes.shape[1] * size)
        totals = (log_probs.unsqueeze(2) + logits.log_softmax(dim=2)).flatten(1).masked_fill(following < 0, -torch.inf)
        # Every prefix has a child, so there are always enough children to choose from.
        log_probs, chosen = totals.topk(min(beam_width, trie.num_nodes[depth + 1]), dim=1)
        nodes = following.gather(1, chosen)
        if depth + 1 < len(trie.codebook_sizes):
            logits = next_logits(depth + 1, chosen % size, chosen // size)
    return GeneratedItems(nodes, log_probs)
