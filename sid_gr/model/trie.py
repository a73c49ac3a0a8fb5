"""A trie of the valid semantic IDs, stored in arrays: which codes may follow a prefix.

The nodes of depth d are the different prefixes of d codes, in ascending order, so the children of a node are adjacent,
and the number of a leaf is the index of its SID among the sorted SIDs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn


class SIDTrie(nn.Module):
    """All semantic IDs of items.

    A module without parameters, so that it moves to a device with its model; it is not part of a checkpoint.

    Args:
        codes: integers `(num_sids, num_hierarchies)`, in any order; SIDs may be repeated.
        codebook_sizes: number of codes of each hierarchy.

    Attributes:
        num_nodes: number of nodes (different prefixes) of every depth, from the root.

    Raises:
        ValueError: no SIDs, the numbers of codes and codebooks differ, or a code is outside its codebook.

    >>> trie = SIDTrie(np.array([[0, 1], [2, 0], [0, 0]]), [3, 2])
    >>> trie.num_nodes
    [1, 2, 3]
    >>> trie.lookup(torch.tensor([[2, 0], [1, 1]])).tolist()
    [2, -1]
    """

    def __init__(self, codes: np.ndarray, codebook_sizes: Sequence[int]) -> None:
        super().__init__()
        codes = np.asarray(codes, dtype=np.int64)
        if codes.ndim != 2 or codes.shape[0] == 0 or codes.shape[1] != len(codebook_sizes):
            raise ValueError(
                f"codes have shape {codes.shape}, codebook_sizes is {list(codebook_sizes)}; there is at least one SID, "
                "with one code per codebook: correct the codes"
            )
        if codes.min() < 0 or bool((codes >= np.asarray(codebook_sizes)).any()):
            raise ValueError(
                f"codes reach from {codes.min(axis=0).tolist()} to {codes.max(axis=0).tolist()}, codebook_sizes is "
                f"{list(codebook_sizes)}; codes must be in [0, size): correct the codes or codebook_sizes"
            )
        self.codebook_sizes = tuple(codebook_sizes)
        sids = np.unique(codes, axis=0)  # sorted, the first code first
        self.num_nodes = [1]
        parent = np.zeros(len(sids), np.int64)  # for every SID, its node of the previous depth
        for depth, size in enumerate(codebook_sizes):
            keys, node = np.unique(parent * size + sids[:, depth], return_inverse=True)
            first_child = np.searchsorted(keys, np.arange(self.num_nodes[-1] + 1) * size)
            for name, array in (("keys", keys), ("first_child", first_child)):
                self.register_buffer(f"_{name}_{depth}", torch.from_numpy(array), persistent=False)
            self.num_nodes.append(len(keys))
            parent = node.reshape(-1)
        self.register_buffer("_sids", torch.from_numpy(sids), persistent=False)

    @property
    def num_sids(self) -> int:
        """Number of different SIDs, which are the leaves."""
        return self.num_nodes[-1]

    @property
    def sids(self) -> torch.Tensor:
        """int64 `(num_sids, num_hierarchies)`, ascending: the SID of every leaf."""
        return self.get_buffer("_sids")

    def next_nodes(self, depth: int, nodes: torch.Tensor) -> torch.Tensor:
        """The children of nodes.

        Args:
            depth: depth of the nodes; 0 for the root.
            nodes: numbers of the nodes, int64 `(n,)`.

        Returns:
            int64 `(n, codebook_sizes[depth])`: the child for each code; −1 if no SID has this prefix.
        """
        keys, first_child = self.get_buffer(f"_keys_{depth}"), self.get_buffer(f"_first_child_{depth}")
        size = self.codebook_sizes[depth]
        first = first_child[nodes]
        counts = first_child[nodes + 1] - first
        row = torch.repeat_interleave(torch.arange(nodes.numel(), device=nodes.device), counts)
        within = torch.arange(row.numel(), device=nodes.device) - (counts.cumsum(0) - counts)[row]
        child = first[row] + within
        table = nodes.new_full((nodes.numel(), size), -1)
        table[row, keys[child] % size] = child
        return table

    def lookup(self, codes: torch.Tensor) -> torch.Tensor:
        """The leaves of SIDs.

        Args:
            codes: int64 `(n, num_hierarchies)`, codes in their codebooks.

        Returns:
            int64 `(n,)`; −1 for an SID of no item.
        """
        node = codes.new_zeros(codes.shape[0])
        for depth, size in enumerate(self.codebook_sizes):
            keys = self.get_buffer(f"_keys_{depth}")
            wanted = node * size + codes[:, depth]
            place = torch.searchsorted(keys, wanted).clamp(max=keys.numel() - 1)
            node = torch.where((node >= 0) & (keys[place] == wanted), place, -1)
        return node
