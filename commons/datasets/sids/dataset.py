"""Batches of semantic IDs from item-id histories and a map from items to SIDs.

Input: histories, a map, and rows chosen by a sampler. Output: GPTSIDBatch on the CPU. A user's last items are the
candidates, the items before them the history; the oldest items of a too long history are cut off.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from commons.datasets.gpt_sid_batch import LABEL_NAME, GPTSIDBatch, codebook_offsets
from commons.datasets.hstu_batch import length_only_kjt, padded_kjt
from commons.datasets.sequences.dataset import UserDataset, are_last
from commons.datasets.sids.histories import Histories, history_chunks
from commons.datasets.sids.map import ITEMS_DIGEST, SIDMap
from commons.sequence_batch.fields import make_batch

HISTORY, CANDIDATE = "history", "candidate"
_SHOWN = 3


class SIDDataset(UserDataset[GPTSIDBatch]):
    """Users of one split; `dataset[rows]` is the batch of these rows.

    All histories are read once at the start, to count items that are cut off and to find items without a SID.

    Args:
        histories: the users' histories.
        sid_map: SIDs of all their items.
        batch_size: rows of every batch; batches of fewer rows are padded.
        max_history_length: maximum items of a history; older items are cut off.
        max_candidate_length: maximum candidates, the last items of a user.

    Raises:
        ValueError: no users, a map that was made for other items, or items without a SID; the message has their number
            and the first of them.
    """

    def __init__(
        self,
        histories: Histories,
        sid_map: SIDMap,
        *,
        batch_size: int,
        max_history_length: int,
        max_candidate_length: int = 1,
    ) -> None:
        if not len(histories):
            raise ValueError(f"{histories.source} has no users; a data set has at least one: check the data")
        made_for, found = sid_map.options.get(ITEMS_DIGEST), histories.items_digest()
        if made_for and found not in ("", made_for):
            raise ValueError(
                f"the map was made for items with the digest {made_for}, those of {histories.source} have {found}; an "
                "item's id is its place among all items of a data set, so a map is valid only for the same items: make "
                "the map again with `evenrank make-sids`"
            )
        ids, most = sid_map.item_ids, histories.num_items
        if not sid_map.options and most is not None and not 0 <= ids[0] <= ids[-1] < most:
            raise ValueError(
                f"the map has items from {ids[0]} to {ids[-1]}, and an id of {histories.source} is the place of the "
                f"item among {most:,} items, counted from 0: replace the map's raw items by their rows in _vocabularies"
            )
        self.sid_map = sid_map
        self.vocabulary_digests = {"sids": sid_map.digest}  # equal ids of equal items
        if found and not made_for:  # a map of the user's does not state its items
            self.vocabulary_digests["items"] = found
        self.max_history_length, self.max_candidate_length = max_history_length, max_candidate_length
        self.max_items = max_history_length + max_candidate_length  # maximum items of a row, including candidates
        self._histories = histories
        self._batch_size = batch_size
        self._offsets = torch.tensor(codebook_offsets(sid_map.codebook_sizes), device="cpu")
        self._lengths = self._scan()  # (num_users,)
        excess = np.maximum(self._lengths - self.max_items, 0)
        # Number of users with more than `max_items` items, and number of items that are cut off, the oldest.
        self.num_cut_histories, self.num_cut_items = int(np.count_nonzero(excess)), int(excess.sum())

    def __len__(self) -> int:
        return len(self._histories)

    @property
    def row_order(self) -> dict[str, Any]:
        return self._histories.row_order()

    @property
    def row_contents(self) -> dict[str, Any]:
        return self._histories.row_contents()

    def _item_counts(self) -> np.ndarray:
        return self._lengths

    def _length_only_batch(self, lengths: np.ndarray) -> GPTSIDBatch:
        candidates, kept = self._cut(lengths)
        codes = self._code_lengths(candidates, kept)
        fields = self._fields(length_only_kjt(codes), length_only_kjt({LABEL_NAME: codes[CANDIDATE]}), len(kept))
        # Without the constructor, which checks the values: 0 is an id of the first hierarchy only.
        return make_batch(GPTSIDBatch, fields | {"batch_size": len(kept)})

    def _cut(self, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Numbers of candidates, and of kept items including candidates, for rows of given numbers of items."""
        candidates = np.minimum(lengths, self.max_candidate_length)
        return candidates, np.minimum(lengths, self.max_items)

    def _code_lengths(self, candidates: np.ndarray, kept: np.ndarray) -> dict[str, np.ndarray]:
        hierarchies = self.sid_map.num_hierarchies
        return {HISTORY: (kept - candidates) * hierarchies, CANDIDATE: candidates * hierarchies}

    def _fields(self, features: KeyedJaggedTensor, labels: KeyedJaggedTensor, num_rows: int) -> dict[str, Any]:
        hierarchies = self.sid_map.num_hierarchies
        return {
            "features": features,
            "batch_size": max(self._batch_size, num_rows),
            "feature_to_max_seqlen": {
                HISTORY: self.max_history_length * hierarchies,
                CANDIDATE: self.max_candidate_length * hierarchies,
            },
            "contextual_feature_names": [],
            "labels": labels,
            "actual_batch_size": num_rows,
            "history_feature_name": HISTORY,
            "candidate_feature_name": CANDIDATE,
            "num_hierarchies": hierarchies,
            "codebook_sizes": list(self.sid_map.codebook_sizes),
        }

    def _scan(self) -> np.ndarray:
        """Number of items of every user, int64 `(num_users,)`; ValueError for items without a SID."""
        num_unknown = 0
        found: list[np.ndarray] = []
        unknown: list[str] = []
        for users, lengths, items in history_chunks(self._histories):
            found.append(lengths)
            missing = np.flatnonzero(~np.isin(items, self.sid_map.item_ids))
            num_unknown += missing.size
            owners = np.repeat(users, lengths)[missing[:_SHOWN]]
            unknown += [f"item {items[index]} of user {user}" for index, user in zip(missing[:_SHOWN], owners)]
        if num_unknown:
            raise ValueError(
                f"{num_unknown} items in {self._histories.source} have no SID, the first ones "
                f"{', '.join(unknown[:_SHOWN])}; the map has {self.sid_map.num_items} items from "
                f"{self.sid_map.item_ids[0]} to {self.sid_map.item_ids[-1]}: make the map from these data"
            )
        return np.concatenate(found)

    def _assemble(self, rows: np.ndarray) -> GPTSIDBatch:
        candidates, kept = self._cut(self._lengths[rows])  # (num_rows,)
        items = self._histories.tails(rows, kept)  # (sum(kept),)
        is_candidate = are_last(kept, candidates)
        codes = torch.from_numpy(self.sid_map.codes[self.sid_map.rows_of(items)])  # (sum(kept), num_hierarchies)
        ids, lengths = codes + self._offsets, self._code_lengths(candidates, kept)
        values = {HISTORY: ids[~is_candidate].flatten(), CANDIDATE: ids[is_candidate].flatten()}
        labels = {LABEL_NAME: codes[is_candidate].flatten()}
        batch_size = max(self._batch_size, len(rows))
        return GPTSIDBatch(
            **self._fields(
                padded_kjt(values, lengths, batch_size),
                padded_kjt(labels, {LABEL_NAME: lengths[CANDIDATE]}, batch_size),
                len(rows),
            )
        )
