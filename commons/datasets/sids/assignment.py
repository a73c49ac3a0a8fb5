"""Semantic IDs from histories: items that users see together get the same leading codes.

    histories ─► co-occurrences ─► item vectors ─► codes, codebook after codebook ─► collisions resolved ─► SIDMap

1. Two items of a user co-occur if they stand at most `window` places apart.
2. An item's vector is its row of a truncated SVD of the positive pointwise mutual information of co-occurrences (Levy
   and Goldberg 2014, "Neural Word Embedding as Implicit Matrix Factorization"), scaled to length 1.
3. Codes are those of residual k-means: the first codebook quantises the vectors, each further one what its predecessor
   left (Rajput et al. 2023, "Recommender Systems with Generative Retrieval", with k-means in place of an RQ-VAE).
4. Every beginning of a SID is given to at most as many items as there are SIDs that begin so: items too many, those
   farthest from their centroid, take the nearest code with room. For the last code, where one item has room, codes are
   dealt out so that the squared distances have the least sum.

The same histories and seed give the same map.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import scipy.sparse
from scipy.optimize import linear_sum_assignment
from sklearn.cluster import KMeans
from sklearn.decomposition import TruncatedSVD
from sklearn.preprocessing import normalize
from threadpoolctl import threadpool_limits

from commons.available_memory import require_memory
from commons.datasets.sids.histories import Histories, history_chunks
from commons.datasets.sids.map import SIDMap

# A hierarchy may have more codes only where there are more items.
_MOST_CODES = 65_536
_LARGEST_VECTOR = 1_024
# Memory, in float64: vectors with what the SVD and k-means make of them; distances with what they are computed from.
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
    """Give every item a semantic ID.

    Args:
        histories: users to learn from; leave out those that a model is evaluated on.
        item_ids: int64 `(num_items,)`, all items, without repetition; those that no history has are grouped together.
        codebook_sizes: codes of each hierarchy.
        vector_size: width of an item's vector.
        window: how far apart two items that co-occur may stand.
        seed: of the SVD and of k-means.
        on_stage: told what is done next, `2 + len(codebook_sizes)` times.

    Returns:
        The map; its options say how it was made, and how many items had to change a code.

    Raises:
        ValueError: a number out of range, fewer than two items, or codebooks with too few SIDs for the items.

    """
    _check(item_ids, codebook_sizes, vector_size, window, seed)
    item_ids = np.sort(np.asarray(item_ids, dtype=np.int64))
    on_stage("co-occurrences")
    counts = count_cooccurrences(histories, item_ids, window)
    # One thread: sums over threads come in any order, and so would the last bits.
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
    options = {"vector_size": vector_size, "window": window, "seed": seed, "items_told_apart": int(changed.sum())}
    return SIDMap(item_ids, codes, tuple(codebook_sizes), options)


def count_cooccurrences(histories: Histories, item_ids: np.ndarray, window: int) -> scipy.sparse.csr_array:
    """How often two items stand at most `window` places apart in a history.

    `item_ids` are int64 `(num_items,)`, ascending; the result is float64 `(num_items, num_items)`, symmetric, by
    position there.
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
    """Vectors of length 1 whose products follow the items' mutual information; 0 for items without co-occurrences.

    Returns:
        float64 `(num_items, vector_size)`; fewer columns where there are not as many items.

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
    # U·S ÷ √S: both sides of the product share the singular values.
    return normalize(scores / np.sqrt(np.maximum(svd.singular_values_, np.finfo(np.float64).tiny)))


@dataclass(frozen=True)
class _Codebook:
    """What one hierarchy quantises with."""

    centroids: np.ndarray  # float64 `(num_codes, vector_size)`; zeros for codes that k-means does not use
    num_used: int  # codes that it uses, the first ones
    nearest: np.ndarray  # int64 `(num_items,)`, the code of every item's nearest centroid

    @classmethod
    def fit(cls, vectors: np.ndarray, num_codes: int, seed: int) -> _Codebook:
        """k-means of vectors, float64 `(num_items, vector_size)`."""
        num_used = min(num_codes, len(np.unique(vectors.round(9), axis=0)))  # what rounding left is no difference
        clustering = KMeans(num_used, n_init=1, random_state=seed).fit(vectors)
        centroids = np.zeros((num_codes, vectors.shape[1]))
        centroids[:num_used] = clustering.cluster_centers_
        return cls(centroids, num_used, clustering.labels_.astype(np.int64))

    def assign(self, vectors: np.ndarray, parents: np.ndarray, room: int) -> np.ndarray:
        """int64 `(num_items,)`, codes such that no more than `room` items have the same one behind the same codes.

        `parents` are the codes before, int64 `(num_items, level)`; at most `room` · num_codes items have the same.
        """
        codes = self.nearest.copy()
        num_codes = len(self.centroids)
        for items in _crowded_groups(parents, codes, room):
            require_memory(
                _BYTES_PER_DISTANCE * len(items) * num_codes,
                f"a codebook has {num_codes:,} codes, and {len(items):,} items that begin alike are to share them",
                "give smaller codebooks, or more of them",
            )
            distances = self._distances(vectors[items])
            if room == 1:
                codes[items] = linear_sum_assignment(distances)[1]
            else:
                codes[items] = _move_excess(codes[items], distances, room)
        return codes

    def _distances(self, vectors: np.ndarray) -> np.ndarray:
        """Squared distances to all codes, float64 `(n, num_codes)`; unused codes are farther away than all others."""
        squared = (vectors**2).sum(axis=1, keepdims=True) - 2 * vectors @ self.centroids.T
        squared += (self.centroids**2).sum(axis=1)
        squared[:, self.num_used :] = squared.max(initial=0.0) + 1.0
        return squared


def _crowded_groups(parents: np.ndarray, codes: np.ndarray, room: int) -> list[np.ndarray]:
    """Items of equal parents among whom more than `room` have the same code; rows ascend within a group."""
    parent = np.unique(parents, axis=0, return_inverse=True)[1].reshape(-1) if parents.shape[1] else 0 * codes
    pairs, counts = np.unique(np.stack([parent, codes]), axis=1, return_counts=True)
    crowded = np.unique(pairs[0, counts > room])
    members = np.flatnonzero(np.isin(parent, crowded))
    members = members[np.argsort(parent[members], kind="stable")]
    return np.split(members, np.flatnonzero(np.diff(parent[members])) + 1) if members.size else []


def _move_excess(codes: np.ndarray, distances: np.ndarray, room: int) -> np.ndarray:
    """Leave `room` items with each code, those nearest to it; the others take the nearest code that has room."""
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
            f"codebook_sizes is {list(codebook_sizes)}; every hierarchy has a code, and none has use for more than "
            f"{most_codes:,} with {len(item_ids):,} items: give 1 to {most_codes:,} each"
        )
    if len(item_ids) < 2 or len(np.unique(item_ids)) != len(item_ids):
        raise ValueError(
            f"item_ids has {len(item_ids)} entries, {len(np.unique(item_ids))} of them different; a map tells at least "
            "two items apart: list every item once"
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
