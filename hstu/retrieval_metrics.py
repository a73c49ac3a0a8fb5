"""Metrics of a retrieval model: the rank of the true item among all items.

The score of an item is the cosine of its embedding and the query. With r the rank of the true item, 1 for the highest
score and the lower id first among equal scores:

    HR@K = 1 if r ≤ K        NDCG@K = 1 ÷ log₂(1 + r) if r ≤ K

(Järvelin and Kekäläinen 2002, "Cumulated Gain-Based Evaluation of IR Techniques", with one true item), averaged over
all users of all ranks. The loss is the cross-entropy of the softmax over all items. Each metric has a standard error,
of a mean over independent users: for HR@K √(p(1 − p) ÷ n).

All rows of the table are ranked, also items in the user's history and ids that never occur; published numbers may leave
these out.

Every rank scores its own rows of the table for the users of all ranks, a chunk of items at a time, and the counts are
summed over the ranks, so no rank needs the whole table. Scores are computed in float64 and rounded to multiples of
2⁻²⁴, about the precision of float32 weights, so that scores and ties do not depend on the sharding of the table.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor

from commons.distributed.process_group import resolve_process_group
from commons.run_log.standard_error import STANDARD_ERROR, error_of_mean
from commons.trainer.evaluation import TopKMetric, parse_top_k_metric
from hstu.model.gathered_rows import gather_rows
from hstu.model.retrieval import RetrievalOutput, unit

# Most scores in memory at a time, in float64.
_MAX_SCORES = 2**22
# Rounding to float32 would not do: near 0 float32 is finer than the rounding errors of the float64 scores.
_SCORE_STEP = 2.0**-24
# Consecutive rows of a table: the id of the first row, and the weights.
TableRows = tuple[int, torch.Tensor]


class RetrievalMetrics:
    """Means over all users of all ranks since the last reset.

    `update` and `compute` are collective calls; ranks without users call them too.

    Args:
        model: the model with the table, sharded by TorchRec or whole on every rank.
        item_feature_name: name of the items' table.
        names: metrics to compute.
        temperature: divisor of the cosines in the loss.
        popularity: popularity of each item, numbers `(num_items,)`, to compute every metric also with this number as
            the score; None for no baseline.
        device: device of this rank; None for the CPU.

    Raises:
        ValueError: an unknown metric, a K above the number of items, or no such table.
    """

    def __init__(
        self,
        model: nn.Module,
        item_feature_name: str,
        names: Sequence[str],
        *,
        temperature: float,
        popularity: torch.Tensor | None = None,
        device: torch.device | None = None,
    ) -> None:
        self._model = model
        self._item_feature_name = item_feature_name
        self._temperature = temperature
        self._device = device or torch.device("cpu")
        self._group = resolve_process_group()
        table = self._table()
        # The ranks that score its rows: all that share it, also tensor-parallel peers, which have the same users.
        self._owners = table._process_group if isinstance(table, ShardedTensor) else self._group
        self._num_items = int(table.shape[0])
        self._metrics = {name: parse_top_k_metric(name, ("HR", "NDCG"), "retrieval", self._num_items) for name in names}
        self._rank_by_popularity = None if popularity is None else ranks_by(popularity).to(self._device)
        self.reset()

    def update(self, output: RetrievalOutput) -> None:
        """Add the users of a step; a step may have none."""
        # Every rank counts all users, so the sums are equal on all ranks.
        queries = gather_rows(output.queries.double(), self._group)
        targets = gather_rows(output.targets, self._group)
        if not targets.numel():
            return
        ranks, loss = self._find(queries, targets)
        sums = [loss.sum(), torch.ones_like(loss).sum()]
        by_source = [ranks] if self._rank_by_popularity is None else [ranks, self._rank_by_popularity[targets]]
        gains = [_gain(metric, found) for found in by_source for metric in self._metrics.values()]
        sums += [total for gain in gains for total in (gain.sum(), gain.square().sum())]
        self._sums += torch.stack(sums)

    def compute(self) -> dict[str, float]:
        """The loss, the metrics, and the metrics of popularity as `popularity_…`; NaN without users.

        The standard error of metric X is X_se.
        """
        loss, users, *sums = self._sums.tolist()
        prefixes = [""] if self._rank_by_popularity is None else ["", "popularity_"]
        names = [prefix + name for prefix in prefixes for name in self._metrics]
        found = {"loss": loss / users if users else math.nan}
        for name, total, squares in zip(names, sums[::2], sums[1::2]):
            found[name] = total / users if users else math.nan
            found[name + STANDARD_ERROR] = error_of_mean(total, squares, users)
        return found

    def reset(self) -> None:
        """Remove all users; the table is read again, because the model may have been trained since."""
        sources = 1 if self._rank_by_popularity is None else 2
        self._sums = torch.zeros(2 + 2 * sources * len(self._metrics), dtype=torch.float64, device=self._device)
        self._rows: list[TableRows] | None = None

    def _find(self, queries: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rank of the true item and loss of each user, both float64 `(num_users,)`."""
        rows = self._own_rows()
        true = self._over_ranks(self._true_scores(rows, queries, targets))
        worse, log_total = torch.zeros_like(true), torch.full_like(true, -torch.inf)
        size = max(1, _MAX_SCORES // targets.numel())
        for first, weight in rows:
            for start in range(0, weight.shape[0], size):
                scores = self._scores(queries, weight[start : start + size])  # (num_users, size)
                ids = torch.arange(first + start, first + start + scores.shape[1], device=scores.device)
                is_behind = (scores == true[:, None]) & (ids > targets[:, None])
                # Exclude the true item, whose score here and in `true` may be rounded differently.
                is_other = ids != targets[:, None]
                worse += (((scores < true[:, None]) | is_behind) & is_other).sum(1)
                log_total = torch.logaddexp(log_total, (scores / self._temperature).logsumexp(1))
        largest = self._over_ranks(log_total.clone(), dist.ReduceOp.MAX)
        worse, total = self._over_ranks(torch.stack([worse, (log_total - largest).exp()]))
        # Counts the items that are not worse, so that a true item with score NaN is ranked last and is never a hit.
        ranks = self._num_items - worse + true.isnan()
        return ranks, total.log() + largest - true / self._temperature

    def _true_scores(self, rows: list[TableRows], queries: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Scores of the true items in these rows, 0 for true items elsewhere: float64 `(num_users,)`."""
        scores = torch.zeros(targets.shape, dtype=torch.float64, device=targets.device)
        for first, weight in rows:
            mine = ((targets >= first) & (targets < first + weight.shape[0])).nonzero().flatten()
            found = unit(weight.index_select(0, targets[mine] - first).double())
            scores[mine] = _rounded((queries[mine] * found).sum(1))
        return scores

    def _scores(self, queries: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return _rounded(queries @ unit(weight.double()).t())

    def _over_ranks(self, values: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> torch.Tensor:
        if self._owners is not None:
            dist.all_reduce(values, op, group=self._owners)
        return values

    def _own_rows(self) -> list[TableRows]:
        """The rows of the table that this rank scores; every row is on one rank."""
        if self._rows is None:
            table = self._table()
            if isinstance(table, ShardedTensor):
                shards = table.local_shards()
                self._rows = [(shard.metadata.shard_offsets[0], shard.tensor.detach()) for shard in shards]
            else:  # the table is whole on every rank; each rank scores a part
                rank, world_size = 0, 1
                if self._group is not None:
                    rank, world_size = dist.get_rank(self._group), dist.get_world_size(self._group)
                first, end = (part * table.shape[0] // world_size for part in (rank, rank + 1))
                self._rows = [(first, table[first:end].detach())]
        return self._rows

    def _table(self) -> Any:
        state: Mapping[str, Any] = self._model.state_dict()
        found = [
            value for name, value in state.items() if name.endswith(f"embeddings.{self._item_feature_name}.weight")
        ]
        if len(found) != 1:
            raise ValueError(
                f"the model has {len(found)} tables {self._item_feature_name!r}; it must have one: correct "
                "item_feature_name"
            )
        return found[0]


def _rounded(scores: torch.Tensor) -> torch.Tensor:
    return (scores / _SCORE_STEP).round() * _SCORE_STEP


def ranks_by(popularity: torch.Tensor) -> torch.Tensor:
    """Rank of every item by popularity, 1 for the most popular, ties by lower id: int64 `(num_items,)`.

    >>> ranks_by(torch.tensor([3, 9, 3])).tolist()
    [2, 1, 3]
    """
    order = torch.argsort(popularity, descending=True, stable=True)
    ranks = torch.empty_like(order)
    ranks[order] = torch.arange(1, order.numel() + 1, device=order.device)
    return ranks


def _gain(metric: TopKMetric, ranks: torch.Tensor) -> torch.Tensor:
    """The metric of each user for the rank of the user's true item: float64 `(num_users,)`."""
    gains = torch.ones_like(ranks, dtype=torch.float64)
    if metric.kind == "NDCG":
        gains = 1 / (1 + ranks.double()).log2()
    return gains * (ranks <= metric.top_k)
