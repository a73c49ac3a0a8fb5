"""The HSTU ranking model: embeddings ─► tokens ─► HSTU layers ─► multi-task head ─► loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from commons.datasets.hstu_batch import HSTUBatch
from commons.distributed import global_mean_loss
from hstu.model.config import LayerOptions, RankingConfig
from hstu.model.sequence_model import Embeddings, SequenceModel, SequenceTower


@dataclass(frozen=True)
class RankingOutput:
    """The results of a step besides the loss, detached from the graph."""

    logits: torch.Tensor  # `(num_predictions, num_tasks)`, row after row of the batch
    labels: torch.Tensor  # as `logits`, 0 or 1
    loss_sum: torch.Tensor  # 0-dimensional, the sum of the loss over all predictions and tasks of this rank
    num_loss_tokens: int  # number of terms of that sum
    # Integers `(num_predictions,)`, the item id of each prediction; only needed for the popularity baseline.
    items: torch.Tensor | None = None


class RankingTower(SequenceTower):
    """The dense part of the ranking model."""

    config: RankingConfig

    def __init__(self, config: RankingConfig, pg_group: dist.ProcessGroup | None = None) -> None:
        super().__init__(config, pg_group)
        self.head = prediction_head(config.hstu.hidden_size, config.prediction_head_arch)

    def _compute(self, embeddings: Embeddings, batch: HSTUBatch) -> tuple[torch.Tensor, RankingOutput]:
        logits, items = self._predict(embeddings, batch)
        labels = stack_labels(batch.labels, self.config.num_tasks, logits.shape[0]).to(logits.dtype)
        loss_sum = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="sum")
        num_loss_tokens = batch.num_loss_tokens()
        global_count = batch.global_loss_terms(self._pg_group)
        loss = global_mean_loss(loss_sum, num_loss_tokens, self._pg_group, global_count=global_count)
        return loss, RankingOutput(logits.detach(), labels, loss_sum.detach(), num_loss_tokens, items)

    def logits(self, embeddings: Embeddings, batch: HSTUBatch) -> torch.Tensor:
        """Scores of the candidates or, in a batch without candidates, of every item given the tokens before it.

        At least float32 `(num_predictions, num_tasks)`, row after row of the batch.
        """
        return self._predict(embeddings, batch)[0]

    def _predict(self, embeddings: Embeddings, batch: HSTUBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits, and the item id of each prediction."""
        items = batch.features[batch.item_feature_name].values()
        with self.autocast(items.device):
            tokens = self.encode(embeddings, batch)
            predicted = tokens.item_tokens
            if batch.num_candidates is not None and batch.max_num_candidates > 0:
                judged = tokens.last_items(batch.num_candidates.long(), int(batch.host_values("num_candidates").sum()))
                predicted, items = predicted.index_select(0, judged), items.index_select(0, judged)
            logits = self.head(tokens.values.index_select(0, predicted))
        return (logits if logits.dtype == torch.float64 else logits.float()), items

    def _check(self, batch: HSTUBatch) -> None:
        require_hidden_actions(self.config.hstu, batch, batch.max_num_candidates)


def require_hidden_actions(hstu: LayerOptions, names: Any, max_num_candidates: int) -> None:
    """Raise ValueError if the mask lets a prediction see the action to predict.

    `names` has the action_feature_name and the contextual_feature_names: a batch or its data set's schema.
    """
    if names.action_feature_name is None:
        return
    if not hstu.is_causal:
        raise ValueError(
            f"is_causal is False and batches have actions ({names.action_feature_name!r}); an item then sees its own "
            "action, which the model predicts: set is_causal, or leave the actions out"
        )
    if hstu.contextual_mask and max_num_candidates == 0 and names.contextual_feature_names:
        raise ValueError(
            "contextual_mask is True and batches have no candidates; contextual tokens see all actions and reveal "
            "them to the predictions: set max_num_candidates, or unset contextual_mask"
        )


def prediction_head(hidden_size: int, widths: tuple[int, ...]) -> nn.Sequential:
    """A multi-layer perceptron with ReLU between its layers."""
    layers: list[nn.Module] = []
    for width_in, width_out in zip((hidden_size, *widths[:-1]), widths):
        layers += [nn.Linear(width_in, width_out), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def stack_labels(labels: KeyedJaggedTensor | torch.Tensor | None, num_tasks: int, num_predictions: int) -> torch.Tensor:
    """Labels of all tasks side by side, `(num_predictions, num_tasks)`.

    `labels` have one key per task, in the order of the tasks, each with one value per prediction.

    Raises:
        TypeError: no KeyedJaggedTensor.
        ValueError: another number of keys or of values.
    """
    if not isinstance(labels, KeyedJaggedTensor):
        raise TypeError(
            f"labels are {type(labels).__name__}; the ranking loss needs a KeyedJaggedTensor with one key per task: "
            "give the batch such labels, or call the tower's logits()"
        )
    if len(labels.keys()) != num_tasks:
        raise ValueError(
            f"labels have keys {labels.keys()}, the model has {num_tasks} tasks; one key per task is needed: correct "
            "num_tasks or the labels"
        )
    values = labels.values()
    if labels.length_per_key() != [num_predictions] * num_tasks:
        raise ValueError(
            f"labels have {labels.length_per_key()} values for {num_tasks} tasks and {num_predictions} predictions; a "
            "task has one label per candidate or, without candidates, one per item: give the labels these lengths"
        )
    return values.view(num_tasks, num_predictions).t()


class HSTURankingModel(SequenceModel):
    """HSTU for ranking: the next action on every item, or on every candidate."""

    config: RankingConfig
    dense: RankingTower
    _tower_class = RankingTower
