"""Beam search over the hierarchies: the likeliest items, among those that there are.

A beam is the beginning of a SID. Of all codes that go on from a row's beams, those that lead to an item are scored by
the sum of the log-probabilities of their codes, and the best `beam_width` are kept. A head's probabilities are those
over its whole codebook: a code that no item has here loses its share, it is not given to the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from sid_gr.model.trie import SIDTrie

NextLogits = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class GeneratedItems:
    """The likeliest items of each row, the best one first."""

    leaves: torch.Tensor  # int64 `(num_rows, beam_width)`, numbers of SIDs in the trie, ascending with the SIDs
    log_probs: torch.Tensor  # at least float32 `(num_rows, beam_width)`, falling


def check_beam_width(beam_width: int, trie: SIDTrie) -> None:
    """Raise ValueError unless there are at least `beam_width` items, and it is at least 1."""
    if not 1 <= beam_width <= trie.num_sids:
        raise ValueError(
            f"beam width is {beam_width}, there are {trie.num_sids} valid SIDs; every beam ends in an SID of its own: "
            f"give a width between 1 and {trie.num_sids}"
        )


def beam_search(trie: SIDTrie, beam_width: int, first_logits: torch.Tensor, next_logits: NextLogits) -> GeneratedItems:
    """Find the likeliest items.

    With a beam as wide as there are items the result is exact; a narrower one may miss an item whose first codes are
    less likely than those of `beam_width` others.

    Args:
        trie: the items there are.
        beam_width: beams kept per row, and items found.
        first_logits: `(num_rows, codebook_sizes[0])`, scores of the first code.
        next_logits: called for every further hierarchy with the codes that were chosen last, int64
            `(num_rows, num_beams)`, and the beams they continue, of the same shape; returns the scores of the next
            code, `(num_rows, num_beams, codebook size)`. The number of beams is `beam_width`, or less where there are
            fewer beginnings.

    Raises:
        ValueError: a beam wider than there are items.
    """
    check_beam_width(beam_width, trie)
    num_rows = first_logits.shape[0]
    nodes = torch.zeros(num_rows, 1, dtype=torch.int64, device=first_logits.device)  # of every beam; here the root
    log_probs = first_logits.new_zeros(num_rows, 1)
    logits = first_logits.unsqueeze(1)  # (num_rows, num_beams, codebook size)
    for depth, size in enumerate(trie.codebook_sizes):
        # The node that every code of every beam leads to: (num_rows, num_beams · size).
        following = trie.next_nodes(depth, nodes.flatten()).view(num_rows, nodes.shape[1] * size)
        totals = (log_probs.unsqueeze(2) + logits.log_softmax(dim=2)).flatten(1).masked_fill(following < 0, -torch.inf)
        # Every beginning leads somewhere, so that there are always enough to choose from.
        log_probs, chosen = totals.topk(min(beam_width, trie.num_nodes[depth + 1]), dim=1)
        nodes = following.gather(1, chosen)
        if depth + 1 < len(trie.codebook_sizes):
            logits = next_logits(chosen % size, chosen // size)
    return GeneratedItems(nodes, log_probs)
