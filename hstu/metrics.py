"""What a ranking model is judged by: the area under the ROC curve, per task, and that of the items' popularity.

Each with its standard error, after DeLong, DeLong and Clarke-Pearson 1988, "Comparing the Areas under Two or More
Correlated Receiver Operating Characteristic Curves", computed from midranks as in Sun and Xu 2014, "Fast Implementation
of DeLong's Algorithm". It takes predictions for independent; those of one user are alike, so with many predictions per
user the true error is larger.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torchmetrics.classification import BinaryAUROC
from torchmetrics.utilities.data import dim_zero_cat

from commons.datasets.hstu_batch import HSTUBatch
from commons.distributed.process_group import resolve_process_group
from commons.run_log.standard_error import STANDARD_ERROR
from hstu.model.ranking import RankingOutput


class RankingMetrics:
    """Exact AUC per task over all predictions since the last reset, of all ranks together.

    It keeps every prediction: 16 bytes per prediction and task on the rank that made it, and all of them on every rank
    while `compute` runs.
    """

    def __init__(
        self,
        num_tasks: int,
        *,
        popularity: torch.Tensor | None = None,
        device: torch.device | None = None,
        pg_group: dist.ProcessGroup | None = None,
    ) -> None:
        """Make empty metrics.

        Args:
            num_tasks: tasks of the model.
            popularity: numbers `(num_items,)`; with them the AUC of each task is also computed for scores that are
                these numbers, which a model has to beat. It takes as much memory again.
            device: where predictions are kept and gathered; for NCCL the rank's own device. The CPU if not given.
            pg_group: ranks whose predictions are judged together; the shuffler's default if not given.
        """
        group = resolve_process_group(pg_group)

        def make() -> list[BinaryAUROC]:
            return [_AUC(validate_args=False, process_group=group).to(device) for _ in range(num_tasks)]

        self._auc, self._popularity_auc = make(), [] if popularity is None else make()
        self._popularity: torch.Tensor | None = None
        if popularity is not None:  # metrics take probabilities
            self._popularity = (popularity.double() / popularity.max().clamp(min=1)).to(device)
        self._device = device
        self.reset()

    def update(self, output: RankingOutput) -> None:
        """Add the predictions of a step; a step may have none."""
        scores = _places_in_order(output.logits)
        for task, metric in enumerate(self._auc):
            metric.update(scores[:, task], output.labels[:, task].long())
        if self._popularity is not None:
            if output.items is None:
                raise ValueError(
                    "the output has no items; the AUC of their popularity needs them: give RankingOutput.items"
                )
            popularity = self._popularity[output.items.long()]
            for task, metric in enumerate(self._popularity_auc):
                metric.update(popularity, output.labels[:, task].long())

    def compute(self) -> dict[str, float]:
        """AUC by task, `{"auc_task_0": …, "auc_task_0_se": …, "popularity_auc_task_0": …}`: a collective call.

        A number between 0 and 1 per task, and its standard error, the same on every rank. NaN where all predictions, or
        none at all, have the same label, or a prediction is no number; the error also with a single prediction of a
        label.
        """
        found: dict[str, float] = {}
        for kind, metrics in (("auc", self._auc), ("popularity_auc", self._popularity_auc)):
            for task, metric in enumerate(metrics):
                name, (value, error) = f"{kind}_task_{task}", metric.compute().tolist()
                found |= {name: value, name + STANDARD_ERROR: error}
        return found

    def reset(self) -> None:
        """Forget all predictions."""
        for metric in [*self._auc, *self._popularity_auc]:
            metric.reset()
            # A rank without predictions takes part in gathering with the right dtypes.
            metric.update(
                torch.empty(0, dtype=torch.float64, device=self._device),
                torch.empty(0, dtype=torch.int64, device=self._device),
            )


def _places_in_order(logits: torch.Tensor) -> torch.Tensor:
    """Where logits stand among all float32 numbers: float64 in [0, 1), which metrics take for probabilities.

    The order, ties included, is exactly that of the logits; a sigmoid would make equal what is far from zero. The bits
    of a positive float32, read as an integer, rise with it, and those of a negative one fall.
    """
    bits = logits.float().contiguous().view(torch.int32).long()
    place = torch.where(bits < 0, -(2**31) - bits, bits)  # −0 and 0 are both at 0
    return ((place + 2**31).double() / 2**32).masked_fill(logits.isnan(), torch.nan)


class _AUC(BinaryAUROC):
    """AUC and its standard error, NaN where there are not both labels, or scores that are no numbers."""

    def compute(self) -> torch.Tensor:
        """float64 `(2,)`."""
        labels, scores = dim_zero_cat(self.target) == 1, dim_zero_cat(self.preds)
        if bool(labels.any()) and not bool(labels.all()) and not bool(scores.isnan().any()):
            return torch.stack([super().compute().double(), auc_standard_error(scores, labels)])
        return torch.full((2,), torch.nan, dtype=torch.float64, device=scores.device)


def auc_standard_error(scores: torch.Tensor, is_positive: torch.Tensor) -> torch.Tensor:
    """DeLong's standard error of the AUC of independent predictions: float64, 0-dimensional.

    A positive's placement is the share of negatives that it scores above, a negative's the share of positives that
    score above it, ties counted half. The variance of the AUC is the sample variance of the positives' placements ÷
    their number, plus the same of the negatives. NaN with a single positive, or a single negative.
    """
    positives, negatives = scores[is_positive], scores[~is_positive]
    among_all = _midranks(scores)
    above = (among_all[is_positive] - _midranks(positives)) / len(negatives)
    below = 1 - (among_all[~is_positive] - _midranks(negatives)) / len(positives)
    variance = _variance(above) / len(positives) + _variance(below) / len(negatives)
    return variance.sqrt()


def _midranks(scores: torch.Tensor) -> torch.Tensor:
    """Rank of each score from the lowest, 1, equal ones sharing the mean of theirs: float64 `(n,)`."""
    _, place, counts = scores.unique(return_inverse=True, return_counts=True)
    return (counts.cumsum(0).double() - (counts - 1) / 2)[place]


def _variance(values: torch.Tensor) -> torch.Tensor:
    """Sample variance; NaN of a single value."""
    return ((values - values.mean()) ** 2).sum() / (len(values) - 1)


def count_items(
    batches: Iterable[HSTUBatch],
    num_items: int,
    *,
    device: torch.device,
    pg_group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Occurrences of every item in the histories of all ranks: a collective call.

    `batches` are this rank's, on the host, and read to the end; ids lie in `[0, num_items)`; ranks exchange tensors on
    `device`. Returns int64 `(num_items,)` on the host, the same on every rank.
    """
    counts = torch.zeros(num_items, dtype=torch.int64)
    for batch in batches:
        items = batch.features[batch.item_feature_name].values()
        counts += torch.bincount(items.long(), minlength=num_items)
    group = resolve_process_group(pg_group)
    if group is not None:
        shared = counts.to(device)
        dist.all_reduce(shared, group=group)
        counts = shared.cpu()
    return counts
