"""The HSTU retrieval model: embeddings ─► tokens ─► HSTU layers ─► query ─► sampled softmax over items.

In training every item of a row except the first is predicted from the tokens before it. With q the query after the
previous item, e the embedding of an item, both of length 1, c = q · e ÷ temperature and N the negatives of the
prediction:

    loss = −log( exp c(true) ÷ (exp c(true) + Σ_{n ∈ N, n ≠ true} exp c(n)) )

(Jean et al. 2015, "On Using Very Large Target Vocabulary for Neural Machine Translation", without its correction for
the probability of drawing a negative.) The true item is masked among the negatives.

In evaluation the last item of every row with at least two items is predicted; `hstu.retrieval_metrics` compares the
query with all items.

Kinds of negatives:
- drawn: in a feature of the batch, so they move with the row (see `hstu.negatives`). They are the same with the
  shuffler on or off, and on any number of ranks.
- in-batch, of this rank: the items of the rank's other predictions. They change if the shuffler moves rows.
- in-batch, of all ranks: the items of all other predictions of the global batch. They do not depend on where rows are.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from commons.datasets.hstu_batch import HSTUBatch
from commons.distributed import global_mean_loss
from hstu.model.config import RetrievalConfig
from hstu.model.gathered_rows import gather_rows
from hstu.model.sequence_model import Embeddings, SequenceModel, SequenceTower, by_feature

# Most in-batch scores in memory at a time.
_MAX_SCORES = 2**24


@dataclass(frozen=True)
class RetrievalOutput:
    """The results of a step besides the loss, detached from the graph."""

    # 0-dimensional, the sum of the loss over all predictions of this rank; 0 in evaluation, where the metrics compute
    # the loss over all items.
    loss_sum: torch.Tensor
    num_loss_tokens: int  # number of terms of that sum
    queries: torch.Tensor  # at least float32 `(num_users, item_dim)`, of length 1; num_users is 0 in training
    targets: torch.Tensor  # int64 `(num_users,)`, the ids of the true items


class RetrievalTower(SequenceTower):
    """The dense part of the retrieval model; in evaluation it computes queries and no loss.

    Batches have no candidates; in training they have the drawn negatives, if the config uses them.
    """

    config: RetrievalConfig

    def __init__(self, config: RetrievalConfig, pg_group: dist.ProcessGroup | None = None) -> None:
        super().__init__(config, pg_group)
        self.query = nn.Linear(config.hstu.hidden_size, config.item_dim)

    def _compute(self, embeddings: Embeddings, batch: HSTUBatch) -> tuple[torch.Tensor, RetrievalOutput]:
        # In training all items of a row except the first are predicted, in evaluation the last one of these.
        most = None if self.training else 1
        counts = np.clip(batch.host_lengths(batch.item_feature_name)[0] - 1, 0, most)
        looked_up = by_feature(embeddings)
        with self.autocast(batch.features.device()):
            tokens = self.encode(embeddings, batch)
            true = tokens.last_items((tokens.item_lengths - 1).clamp(0, most), int(counts.sum()))
            queries = self.query(tokens.values.index_select(0, tokens.last_tokens_of(true - 1)))
            queries = unit(queries if queries.dtype == torch.float64 else queries.float())
        ids = batch.features[batch.item_feature_name].values().index_select(0, true)
        if not self.training:
            zero = queries.new_zeros(())
            return zero, RetrievalOutput(zero, 0, queries.detach(), ids.long())
        items = unit(looked_up[batch.item_feature_name].values().index_select(0, true).to(queries.dtype))
        items_of_ranks = batch.global_lengths(batch.item_feature_name, self._pg_group)
        predictions = None
        if items_of_ranks is not None:
            predictions = [int(np.maximum(lengths - 1, 0).sum()) for lengths in items_of_ranks]
        negatives = self.config.negatives_feature_name
        if negatives is None:
            terms = self._in_batch_terms(queries, items, ids, predictions)
        else:
            drawn = unit(looked_up[negatives].values().to(queries.dtype))
            terms = self._drawn_terms(queries, items, ids, counts, drawn, batch)
        loss_sum = terms.sum()
        global_count = None if predictions is None else sum(predictions)
        loss = global_mean_loss(loss_sum, terms.numel(), self._pg_group, global_count=global_count)
        return loss, RetrievalOutput(loss_sum.detach(), terms.numel(), queries.detach()[:0], ids[:0].long())

    def _drawn_terms(
        self,
        queries: torch.Tensor,
        items: torch.Tensor,
        ids: torch.Tensor,
        counts: np.ndarray,
        drawn: torch.Tensor,
        batch: HSTUBatch,
    ) -> torch.Tensor:
        """Loss terms `(num_predictions,)` with drawn negatives `(num_rows · num_negatives, item_dim)`, row by row."""
        drawn_ids = batch.features[self.config.negatives_feature_name].values()
        real = counts[: batch.actual_batch_size].tolist()  # padding rows have neither predictions nor negatives
        num_negatives = self.config.num_negatives
        if drawn_ids.numel() != len(real) * num_negatives:
            raise ValueError(
                f"{self.config.negatives_feature_name!r} has {drawn_ids.numel()} ids for {len(real)} rows; every row "
                f"has num_negatives = {num_negatives} ids: draw them with hstu.negatives"
            )
        rows = zip(
            *(part.split(real) for part in (queries, items, ids)),
            *(part.split(num_negatives) for part in (drawn, drawn_ids)),
        )
        terms = [self._terms(*row) for row in rows]
        # Without any term, the empty sum keeps all inputs in the graph.
        return torch.cat([*terms, (queries[:0] * drawn.sum()).sum(1)])

    def _in_batch_terms(
        self, queries: torch.Tensor, items: torch.Tensor, ids: torch.Tensor, predictions: list[int] | None
    ) -> torch.Tensor:
        """Loss terms `(num_predictions,)` with the true items of all predictions as negatives, in bounded memory.

        `predictions` is the number of predictions of every rank; None if unknown.
        """
        pool, pool_ids = items, ids
        if self.config.in_batch_pool == "global":
            pool, pool_ids = (gather_rows(part, self._pg_group, predictions) for part in (items, ids))
        size = max(1, _MAX_SCORES // max(1, pool.shape[0]))
        chunks = zip(queries.split(size), items.split(size), ids.split(size))
        terms = [checkpoint(self._terms, *chunk, pool, pool_ids, use_reentrant=False) for chunk in chunks]
        return torch.cat([*terms, (queries[:0] * pool.sum()).sum(1)])

    def _terms(
        self,
        queries: torch.Tensor,
        items: torch.Tensor,
        ids: torch.Tensor,
        negatives: torch.Tensor,
        negative_ids: torch.Tensor,
    ) -> torch.Tensor:
        """Loss terms `(n,)` of predictions that share the negatives `(k, item_dim)`."""
        true = (queries * items).sum(1, keepdim=True)
        false = (queries @ negatives.t()).masked_fill(ids[:, None] == negative_ids, -torch.inf)
        scores = torch.cat([true, false], dim=1) / self.config.temperature
        return scores.logsumexp(1) - scores[:, 0]

    def _check(self, batch: HSTUBatch) -> None:
        if batch.item_feature_name != self.config.item_feature_name:
            raise ValueError(
                f"the batch's item feature is {batch.item_feature_name!r}, the model's "
                f"{self.config.item_feature_name!r}; both must be equal: correct item_feature_name"
            )
        if batch.max_num_candidates > 0:
            raise ValueError(
                f"max_num_candidates is {batch.max_num_candidates}; retrieval predicts every next item, with all items "
                "as candidates: set it to 0"
            )


def unit(vectors: torch.Tensor) -> torch.Tensor:
    """Vectors divided by their length; a zero vector remains zero."""
    return torch.nn.functional.normalize(vectors, dim=1)


class HSTURetrievalModel(SequenceModel):
    """HSTU for retrieval: the next item, found among all items by the similarity of its embedding to the query."""

    config: RetrievalConfig
    dense: RetrievalTower
    _tower_class = RetrievalTower
