"""What a ranking model is judged by: the area under the ROC curve, per task."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torchmetrics.classification import BinaryAUROC
from torchmetrics.utilities import dim_zero_cat

from commons.distributed.process_group import resolve_process_group
from hstu.model.ranking import RankingOutput


class RankingMetrics:
    """Exact AUC per task over all predictions since the last reset, of all ranks together.

    It keeps every prediction: 16 bytes per prediction and task on the rank that made it, and all of them on every rank
    while `compute` runs.
    """

    def __init__(
        self, num_tasks: int, *, device: torch.device | None = None, pg_group: dist.ProcessGroup | None = None
    ) -> None:
        """Make empty metrics.

        Args:
            num_tasks: tasks of the model.
            device: where predictions are kept and gathered; for NCCL the rank's own device. The CPU if not given.
            pg_group: ranks whose predictions are judged together; the shuffler's default if not given.

        """
        group = resolve_process_group(pg_group)
        self._auc = [_AUC(validate_args=False, process_group=group).to(device) for _ in range(num_tasks)]
        self._device = device
        self.reset()

    def update(self, output: RankingOutput) -> None:
        """Add the predictions of a step; a step may have none."""
        # In float64 a sigmoid keeps the order of the logits, up to ±36; metrics take probabilities.
        scores = output.logits.double().sigmoid()
        for task, metric in enumerate(self._auc):
            metric.update(scores[:, task], output.labels[:, task].long())

    def compute(self) -> dict[str, float]:
        """AUC by task, `{"auc_task_0": …}`: a collective call, the same numbers on every rank.

        Returns:
            A number between 0 and 1 per task; NaN where all predictions, or none at all, have the same label: then
            no pair can be ranked right or wrong.

        """
        return {f"auc_task_{task}": float(metric.compute()) for task, metric in enumerate(self._auc)}

    def reset(self) -> None:
        """Forget all predictions."""
        for metric in self._auc:
            metric.reset()
            # A rank without predictions takes part in gathering with the right dtypes.
            metric.update(
                torch.empty(0, dtype=torch.float64, device=self._device),
                torch.empty(0, dtype=torch.int64, device=self._device),
            )


class _AUC(BinaryAUROC):
    """BinaryAUROC that answers NaN where there are not both labels."""

    def compute(self) -> torch.Tensor:
        labels = dim_zero_cat(self.target)
        if bool((labels == 1).any()) and bool((labels == 0).any()):
            return super().compute()
        return labels.new_full((), torch.nan, dtype=torch.float64)
