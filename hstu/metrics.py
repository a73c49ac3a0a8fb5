"""Metrics of a ranking model: the area under the ROC curve (AUC) per task, and of the items' popularity as a baseline.

Each AUC has its standard error, after DeLong, DeLong and Clarke-Pearson 1988, "Comparing the Areas under Two or More
Correlated Receiver Operating Characteristic Curves", computed from midranks as in Sun and Xu 2014, "Fast Implementation
of DeLong's Algorithm". The error assumes independent predictions; the predictions of a user are correlated, so with
many predictions per user the true error is larger.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist

from commons.datasets.hstu_batch import HSTUBatch
from commons.distributed.process_group import resolve_process_group
from commons.run_log.standard_error import STANDARD_ERROR
from hstu.model.gathered_rows import gather_rows
from hstu.model.ranking import RankingOutput


class RankingMetrics:
    """Exact AUC per task over all predictions of all ranks since the last reset.

    A rank stores its own predictions, 16 bytes per prediction and task, and 8 per prediction for popularity; while
    `compute` runs, every rank stores the predictions of all ranks.
    """

    def __init__(
        self,
        num_tasks: int,
        *,
        popularity: torch.Tensor | None = None,
        device: torch.device | None = None,
    ) -> None:
        """Make empty metrics.

        Args:
            num_tasks: tasks of the model.
            popularity: popularity of each item, numbers `(num_items,)`, to compute also the AUC of this number as the
                score, a baseline for the model; None for no baseline.
            device: device on which predictions are stored and gathered, for NCCL the rank's own device; None for the
                CPU.
        """
        self._num_tasks = num_tasks
        self._popularity = None if popularity is None else popularity.to(device, torch.float64)
        self._device = device
        self.reset()

    def update(self, output: RankingOutput) -> None:
        """Add the predictions of a step; a step may have none."""
        columns = [output.logits, output.labels]
        if self._popularity is not None:
            if output.items is None:
                raise ValueError(
                    "the output has no items; the AUC of their popularity needs them: give RankingOutput.items"
                )
            columns.append(self._popularity[output.items.long()].unsqueeze(1))
        kept = [column.detach().to(self._device, torch.float64) for column in columns]  # without their graph
        self._predictions.append(torch.cat(kept, dim=1))

    def compute(self) -> dict[str, float]:
        """AUC by task, `{"auc_task_0": …, "auc_task_0_se": …, "popularity_auc_task_0": …}`: a collective call.

        A number between 0 and 1 per task, and its standard error, equal on every rank. NaN unless there are predictions
        with each label, and if a prediction is NaN; the error is also NaN if a label has a single prediction.
        """
        columns = gather_rows(torch.cat(self._predictions)).unbind(dim=1)
        tasks = self._num_tasks
        found: dict[str, float] = {}
        for kind, judged in (("auc", columns[:tasks]), ("popularity_auc", columns[2 * tasks :] * tasks)):
            for task, (scores, labels) in enumerate(zip(judged, columns[tasks : 2 * tasks])):
                name, (value, error) = f"{kind}_task_{task}", auc_with_error(scores, labels == 1)
                found |= {name: value, name + STANDARD_ERROR: error}
        return found

    def reset(self) -> None:
        """Remove all predictions."""
        # Per step the logits and the labels, `num_tasks` columns each, and a column of popularity if there is one. The
        # empty tensor lets a rank without predictions participate in the gather.
        width = 2 * self._num_tasks + (self._popularity is not None)
        self._predictions = [torch.empty(0, width, dtype=torch.float64, device=self._device)]


def auc_with_error(scores: torch.Tensor, is_positive: torch.Tensor) -> tuple[float, float]:
    """AUC of scores, float64 `(n,)`, and its standard error by DeLong, which assumes independent predictions.

    The placement of a positive is the fraction of negatives with lower scores, that of a negative the fraction of
    positives with higher scores; ties count half. The AUC is the mean placement of the positives. Its variance is the
    sample variance of the positives' placements ÷ the number of positives, plus the same for the negatives. Both
    results are NaN if a label is missing or a score is NaN, the error also if a label occurs once.
    """
    positives, negatives = scores[is_positive], scores[~is_positive]
    if bool(scores.isnan().any()):
        return math.nan, math.nan
    among_all = _midranks(scores)
    beaten = among_all[is_positive] - _midranks(positives)  # multiples of ½, so their sum is exact in any order
    above = beaten / len(negatives)
    below = 1 - (among_all[~is_positive] - _midranks(negatives)) / len(positives)
    variance = _variance(above) / len(positives) + _variance(below) / len(negatives)
    return float(beaten.sum() / (len(positives) * len(negatives))), float(variance.sqrt())


def _midranks(scores: torch.Tensor) -> torch.Tensor:
    """Rank of each score, 1 for the lowest; equal scores have the mean of their ranks: float64 `(n,)`."""
    _, place, counts = scores.unique(return_inverse=True, return_counts=True)
    return (counts.cumsum(0).double() - (counts - 1) / 2)[place]


def _variance(values: torch.Tensor) -> torch.Tensor:
    """Sample variance; NaN for a single value."""
    return ((values - values.mean()) ** 2).sum() / (len(values) - 1)


def count_items(batches: Iterable[HSTUBatch], num_items: int, *, device: torch.device) -> torch.Tensor:
    """Count every item in the histories of all ranks: a collective call.

    `batches` are this rank's host batches and are read to the end; ids are in `[0, num_items)`; the collective runs on
    `device`. Returns int64 `(num_items,)` on the host, equal on every rank.
    """
    counts = torch.zeros(num_items, dtype=torch.int64, device="cpu")
    for batch in batches:
        items = batch.features[batch.item_feature_name].values()
        counts += torch.bincount(items.long(), minlength=num_items)
    group = resolve_process_group()
    if group is not None:
        shared = counts.to(device)
        dist.all_reduce(shared, group=group)
        counts = shared.cpu()
    return counts
