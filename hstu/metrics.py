"""What a ranking model is judged by: the area under the ROC curve, per task, and that of the items' popularity."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torchmetrics.classification import BinaryAUROC
from torchmetrics.utilities.data import dim_zero_cat

from commons.distributed.process_group import resolve_process_group
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
            popularity: numbers `(num_items,)`; with them the AUC of each task is also told for scores that are these
                numbers, which a model has to beat. It takes as much memory again.
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
            popularity = self._popularity[_items_of(output).long()]
            for task, metric in enumerate(self._popularity_auc):
                metric.update(popularity, output.labels[:, task].long())

    def compute(self) -> dict[str, float]:
        """AUC by task, `{"auc_task_0": …, "popularity_auc_task_0": …}`: a collective call, the same on every rank.

        Returns:
            A number between 0 and 1 per task; NaN where all predictions, or none at all, have the same label: then
            no pair can be ranked right or wrong. NaN also where a prediction is no number.

        """
        kinds = {"auc": self._auc, "popularity_auc": self._popularity_auc}
        return {
            f"{kind}_task_{task}": float(metric.compute())
            for kind, metrics in kinds.items()
            for task, metric in enumerate(metrics)
        }

    def reset(self) -> None:
        """Forget all predictions."""
        for metric in [*self._auc, *self._popularity_auc]:
            metric.reset()
            # A rank without predictions takes part in gathering with the right dtypes.
            metric.update(
                torch.empty(0, dtype=torch.float64, device=self._device),
                torch.empty(0, dtype=torch.int64, device=self._device),
            )


def _items_of(output: RankingOutput) -> torch.Tensor:
    if output.items is None:
        raise ValueError("the output has no items; the AUC of their popularity needs them: give RankingOutput.items")
    return output.items


def _places_in_order(logits: torch.Tensor) -> torch.Tensor:
    """Where logits stand among all float32 numbers: float64 in [0, 1), which metrics take for probabilities.

    The order, ties included, is exactly that of the logits in float32; a sigmoid would make equal what is far from
    zero. The bits of a positive float32, read as an integer, rise with it, and those of a negative one fall.
    """
    bits = logits.float().contiguous().view(torch.int32).long()
    place = torch.where(bits < 0, -(2**31) - bits, bits)  # −0 and 0 are both at 0
    return ((place + 2**31).double() / 2**32).masked_fill(logits.isnan(), torch.nan)


class _AUC(BinaryAUROC):
    """BinaryAUROC that answers NaN where there are not both labels, or scores that are no numbers."""

    def compute(self) -> torch.Tensor:
        labels = dim_zero_cat(self.target)
        ranks_pairs = bool((labels == 1).any()) and bool((labels == 0).any())
        if ranks_pairs and not bool(dim_zero_cat(self.preds).isnan().any()):
            return super().compute()
        return labels.new_full((), torch.nan, dtype=torch.float64)
