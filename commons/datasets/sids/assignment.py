"""Semantic IDs from histories: items that users see together get the same leading codes.

    histories ─► co-occurrences ─► item vectors ─► codes, codebook after codebook ─► collisions resolved ─► SIDMap

1. Two items of a user co-occur if they are at most `window` positions apart.
2. An item's vector is its row of a truncated SVD of the positive pointwise mutual information of co-occurrences (Levy
   and Goldberg 2014, "Neural Word Embedding as Implicit Matrix Factorization"), scaled to length 1.
3. Codes come from residual k-means: the first codebook quantises the vectors, each further codebook the residuals of
   the one before it (Rajput et al. 2023, "Recommender Systems with Generative Retrieval", with k-means for an RQ-VAE).
4. A prefix of codes may have at most as many items as it has SIDs. Items beyond that, the farthest from their centroid,
   get the nearest code with room. Last codes have room for one item each; they are assigned to items such that the sum
   of squared distances is smallest.

Equal histories and seeds give equal maps.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse
from scipy.optimize import linear_sum_assignment
from sklearn.cluster import KMeans
from sklearn.decomposition import TruncatedSVD
from sklearn.preprocessing import normalize
from threadpoolctl import threadpool_limits

from commons.available_memory import require_memory
from commons.datasets.sids.histories import Histories, history_chunks
from commons.datasets.sids.map import ITEMS_DIGEST, SIDMap

# A hierarchy may have this number of codes, or the number of items if that is larger.
_MOST_CODES = 65_536
_LARGEST_VECTOR = 1_024
# Memory in bytes: per number of a vector, with the copies of SVD and k-means; per distance, with its temporaries.
_BYTES_PER_NUMBER, _BYTES_PER_DISTANCE = 6 * 8, 3 * 8


def assign_sids(
    histories: Histories,
    item_ids: np.ndarray,
    codebook_sizes: Sequence[int],
    *,
    vector_size: int = 64,
    window: int = 10,
    seed: int = 0,
    on_stage: Callable[[str], object] = lambda stage: None,
) -> SIDMap:
    """Assign a semantic ID to every item.

    Args:
        histories: histories of the users to learn from, without the users of the evaluation.
        item_ids: int64 `(num_items,)`, all items, without repetition; items outside the histories are grouped together.
        codebook_sizes: number of codes of each hierarchy.
        vector_size: width of an item's vector.
        window: maximum distance of two items that co-occur, in positions of a history.
        seed: seed of the SVD and of k-means.
        on_stage: called with the name of each stage at its beginning, `2 + len(codebook_sizes)` times.

    Returns:
        The map; its options have the settings, the number of items whose code was changed to resolve a collision, and
        the digest of the items.

    Raises:
        ValueError: a number out of range, fewer than two items, or codebooks with too few SIDs for the items.
    """
    _check(item_ids, codebook_sizes, vector_size, window, seed)
    item_ids = np.sort(np.asarray(item_ids, dtype=np.int64))
    on_stage("co-occurrences")
    counts = count_cooccurrences(histories, item_ids, window)
    # One thread: the order of sums over threads, and so their last bits, would differ between runs.
    with threadpool_limits(limits=1):
        on_stage("item vectors")
        residual = embed_items(counts, vector_size, seed)
        codes = np.zeros((len(item_ids), 0), np.int64)
        changed = np.zeros(len(item_ids), bool)
        for level, size in enumerate(codebook_sizes):
            on_stage(f"codebook {level + 1}")
            codebook = _Codebook.fit(residual, size, seed + level)
            chosen = codebook.assign(residual, codes, room=math.prod(codebook_sizes[level + 1 :]))
            changed |= chosen != codebook.nearest
            residual = residual - codebook.centroids[chosen]
            codes = np.column_stack([codes, chosen])
    options: dict[str, Any] = {"vector_size": vector_size, "window": window, "seed": seed}
    options |= {"items_told_apart": int(changed.sum()), ITEMS_DIGEST: histories.items_digest()}
    return SIDMap(item_ids, codes, tuple(codebook_sizes), options)


def count_cooccurrences(histories: Histories, item_ids: np.ndarray, window: int) -> scipy.sparse.csr_array:
    """Count how often two items are at most `window` positions apart in a history.

    `item_ids` is int64 `(num_items,)`, ascending; the result is float64 `(num_items, num_items)`, symmetric, indexed by
    the position in `item_ids`.
    """
    num_items = len(item_ids)
    total = scipy.sparse.csr_array((num_items, num_items), dtype=np.float64)
    for users, lengths, items in history_chunks(histories):
        position = np.searchsorted(item_ids, items)
        owner = np.repeat(users, lengths)
        for distance in range(1, min(window, int(lengths.max(initial=1)) - 1) + 1):
            together = np.flatnonzero(owner[distance:] == owner[:-distance])
            pairs = (position[together], position[together + distance])
            total += scipy.sparse.csr_array((np.ones(len(together)), pairs), shape=total.shape)
    return scipy.sparse.csr_array(total + total.T)


def embed_items(counts: scipy.sparse.csr_array, vector_size: int, seed: int) -> np.ndarray:
    """Vectors of length 1 whose products approximate the items' mutual information; 0 for items without co-occurrences.

    Returns:
        float64 `(num_items, vector_size)`; with fewer items than `vector_size`, one column per item.
    """
    pairs = counts.tocoo()
    per_item = np.asarray(counts.sum(axis=1)).ravel()
    with np.errstate(divide="ignore"):
        information = np.log(pairs.data) + math.log(max(per_item.sum(), 1.0)) - np.log(per_item)[pairs.row]
        information -= np.log(per_item)[pairs.col]
    positive = scipy.sparse.csr_array((np.maximum(information, 0.0), (pairs.row, pairs.col)), shape=counts.shape)
    if positive.nnz == 0 or positive.max() == 0:
        return np.zeros((counts.shape[0], 1))
    svd = TruncatedSVD(n_components=min(vector_size, counts.shape[0]), random_state=seed)
    scores = svd.fit_transform(positive)
    # U·S ÷ √S: the singular values are divided equally between both factors.
    return normalize(scores / np.sqrt(np.maximum(svd.singular_values_, np.finfo(np.float64).tiny)))


@dataclass(frozen=True)
class _Codebook:
    """The codebook of one hierarchy."""

    centroids: np.ndarray  # float64 `(num_codes, vector_size)`; zeros for codes that k-means does not use
    num_used: int  # number of codes that k-means uses: the first ones
    nearest: np.ndarray  # int64 `(num_items,)`, the code of every item's nearest centroid

    @classmethod
    def fit(cls, vectors: np.ndarray, num_codes: int, seed: int) -> _Codebook:
        """Fit k-means to vectors, float64 `(num_items, vector_size)`."""
        num_used = min(num_codes, len(np.unique(vectors.round(9), axis=0)))  # ignore differences from rounding errors
        clustering = KMeans(num_used, n_init=1, random_state=seed).fit(vectors)
        centroids = np.zeros((num_codes, vectors.shape[1]))
        centroids[:num_used] = clustering.cluster_centers_
        return cls(centroids, num_used, clustering.labels_.astype(np.int64))

    def assign(self, vectors: np.ndarray, parents: np.ndarray, room: int) -> np.ndarray:
        """Codes, int64 `(num_items,)`, such that at most `room` items have equal parents and equal codes.

        `parents` are the earlier codes, int64 `(num_items, level)`; at most `room` · num_codes items have equal ones.
        """
        codes = self.nearest.copy()
        num_codes = len(self.centroids)
        for items in _crowded_groups(parents, codes, room):
            require_memory(
                _BYTES_PER_DISTANCE * len(items) * num_codes,
                f"a codebook has {num_codes:,} codes for {len(items):,} items with equal earlier codes",
                "give smaller codebooks, or more of them",
            )
            distances = self._distances(vectors[items])
            if room == 1:
                codes[items] = linear_sum_assignment(distances)[1]
            else:
                codes[items] = _move_excess(codes[items], distances, room)
        return codes

    def _distances(self, vectors: np.ndarray) -> np.ndarray:
        """Squared distances to all codes, float64 `(n, num_codes)`; unused codes are farther than all used ones."""
        squared = (vectors**2).sum(axis=1, keepdims=True) - 2 * vectors @ self.centroids.T
        squared += (self.centroids**2).sum(axis=1)
        squared[:, self.num_used :] = squared.max(initial=0.0) + 1.0
        return squared


def _crowded_groups(parents: np.ndarray, codes: np.ndarray, room: int) -> list[np.ndarray]:
    """Groups of items with equal parents, if more than `room` of them have the same code; ascending within a group."""
    parent = np.unique(parents, axis=0, return_inverse=True)[1].reshape(-1) if parents.shape[1] else 0 * codes
    pairs, counts = np.unique(np.stack([parent, codes]), axis=1, return_counts=True)
    crowded = np.unique(pairs[0, counts > room])
    members = np.flatnonzero(np.isin(parent, crowded))
    members = members[np.argsort(parent[members], kind="stable")]
    return np.split(members, np.flatnonzero(np.diff(parent[members])) + 1) if members.size else []


def _move_excess(codes: np.ndarray, distances: np.ndarray, room: int) -> np.ndarray:
    """Keep the `room` nearest items of each code; every other item gets its nearest code that has room."""
    codes = codes.copy()
    taken = np.bincount(codes, minlength=distances.shape[1])
    excess = []
    for code in np.flatnonzero(taken > room):
        items = np.flatnonzero(codes == code)
        excess.append(items[np.argsort(distances[items, code], kind="stable")[room:]])
    taken = np.minimum(taken, room)
    for item in np.sort(np.concatenate(excess)):
        free = np.flatnonzero(taken < room)
        codes[item] = free[np.argmin(distances[item, free])]
        taken[codes[item]] += 1
    return codes


def _check(item_ids: np.ndarray, codebook_sizes: Sequence[int], vector_size: int, window: int, seed: int) -> None:
    most_codes = max(_MOST_CODES, len(item_ids))
    if not codebook_sizes or not 1 <= min(codebook_sizes) <= max(codebook_sizes) <= most_codes:
        raise ValueError(
            f"codebook_sizes is {list(codebook_sizes)}; every hierarchy has 1 to {most_codes:,} codes with "
            f"{len(item_ids):,} items: correct the sizes"
        )
    if len(item_ids) < 2 or len(np.unique(item_ids)) != len(item_ids):
        raise ValueError(
            f"item_ids has {len(item_ids)} entries, {len(np.unique(item_ids))} of them different; a map needs at least "
            "two different items: list every item once"
        )
    if math.prod(codebook_sizes) < len(item_ids):
        raise ValueError(
            f"codebook_sizes is {list(codebook_sizes)}, which makes {math.prod(codebook_sizes)} SIDs for "
            f"{len(item_ids)} items; items have different SIDs: enlarge the codebooks"
        )
    # k-means takes seeds of 32 bits, one for each codebook.
    most = {"vector_size": _LARGEST_VECTOR, "window": sys.maxsize, "seed": 2**32 - 1 - len(codebook_sizes)}
    for name, value, least in (("vector_size", vector_size, 1), ("window", window, 1), ("seed", seed, 0)):
        if not least <= value <= most[name]:
            raise ValueError(f"{name} is {value}; it is a number from {least} to {most[name]:,}: correct it")
    width = min(vector_size, len(item_ids))
    require_memory(
        _BYTES_PER_NUMBER * width * (len(item_ids) + max(codebook_sizes)),
        f"vector_size is {vector_size:,} for {len(item_ids):,} items, codebook_sizes is {list(codebook_sizes)}",
        "give a smaller vector_size or smaller codebooks",
    )
