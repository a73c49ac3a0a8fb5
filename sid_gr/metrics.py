"""Metrics of generated items: HitRate@K, Recall@K and NDCG@K over all users of all ranks.

A user's true items are the candidates of the row, one item in the usual leave-one-out evaluation. With the generated
items in order of likelihood, hit_k = 1 if the k-th item is true, and T true items:

    HitRate@K = 1 if any hit_k, k ≤ K           Recall@K = Σ hit_k ÷ T
    NDCG@K    = Σ hit_k ÷ log₂(k + 1)  ÷  Σ_{k ≤ min(K, T)} 1 ÷ log₂(k + 1)

after Järvelin and Kekäläinen 2002, "Cumulated Gain-Based Evaluation of IR Techniques". With one true item HitRate and
Recall are equal. Each metric has a standard error, of a mean over independent users: for HitRate@K √(p(1 − p) ÷ n).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from commons.distributed.process_group import resolve_process_group
from commons.run_log.standard_error import STANDARD_ERROR, error_of_mean
from commons.trainer.evaluation import TopKMetric, parse_top_k_metric
from sid_gr.model.gpt import GenerationOutput


def parse_metric(name: str, beam_width: int) -> TopKMetric:
    """Parse a name such as "NDCG@10"; ValueError for an unknown metric, or a K above `beam_width`."""
    return parse_top_k_metric(name, tuple(_SCORES), "generation", beam_width, "raise top_k_for_generation or lower K")


class GenerationMetrics:
    """Means over all users of all data-parallel ranks since the last reset.

    Every real row with at least one candidate counts once, on whichever rank it was evaluated; padding does not count.

    Args:
        names: metrics to compute.
        beam_width: number of generated items.
        device: device of the sums, for NCCL the rank's own device; None for the CPU.

    Raises:
        ValueError: an unknown metric, or a K above `beam_width`.
    """

    def __init__(
        self,
        names: Sequence[str],
        beam_width: int,
        *,
        device: torch.device | None = None,
    ) -> None:
        self._names = list(names)
        self._metrics = [parse_metric(name, beam_width) for name in names]
        self._device = device
        self._group = resolve_process_group()
        self.reset()

    def update(self, output: GenerationOutput) -> None:
        """Add the users of a step; a step may have none."""
        leaves, lengths = output.generated.leaves, output.num_candidates
        row = torch.repeat_interleave(torch.arange(lengths.numel(), device=lengths.device), lengths)
        # An item that is twice among a user's candidates is one true item.
        row, item = torch.stack([row, output.candidates]).unique(dim=1)
        num_true = torch.bincount(row, minlength=lengths.numel())  # (num_rows,)
        found = leaves.new_zeros(leaves.shape).index_add_(0, row, (leaves[row] == item[:, None]).to(leaves.dtype))
        hits, num_true = found[num_true > 0].to(torch.float64), num_true[num_true > 0]
        for index, (kind, top_k) in enumerate(self._metrics):
            scores = _SCORES[kind](hits[:, :top_k], num_true)
            self._sums[index] += torch.stack([scores.sum(), scores.square().sum()])
        self._sums[-1] += num_true.numel()

    def compute(self) -> dict[str, float]:
        """Metrics by name, and the standard error of metric X as X_se: a collective call, equal results on all ranks.

        NaN without users.
        """
        sums = self._sums.clone()
        if self._group is not None:
            dist.all_reduce(sums, group=self._group)
        *of_metrics, (users, _) = sums.tolist()
        found = {}
        for name, (total, squares) in zip(self._names, of_metrics):
            found[name] = total / users if users else math.nan
            found[name + STANDARD_ERROR] = error_of_mean(total, squares, users)
        return found

    def reset(self) -> None:
        """Remove all users."""
        # For each metric its sum and its sum of squares; in the last row the number of users, twice.
        self._sums = torch.zeros(len(self._metrics) + 1, 2, dtype=torch.float64, device=self._device)


def _hit_rate(hits: torch.Tensor, num_true: torch.Tensor) -> torch.Tensor:
    """HitRate of each user, float64 `(num_users,)`, from hits (0 or 1) `(num_users, K)`; other metrics use num_true."""
    return hits.amax(dim=1)


def _recall(hits: torch.Tensor, num_true: torch.Tensor) -> torch.Tensor:
    return hits.sum(dim=1) / num_true


def _ndcg(hits: torch.Tensor, num_true: torch.Tensor) -> torch.Tensor:
    top_k = hits.shape[1]
    discounts = 1.0 / torch.arange(2, top_k + 2, dtype=torch.float64, device=hits.device).log2()
    ideal = discounts.cumsum(0)[num_true.clamp(max=top_k) - 1]
    return (hits @ discounts) / ideal


_SCORES = {"HR": _hit_rate, "Recall": _recall, "NDCG": _ndcg}
