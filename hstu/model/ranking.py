"""The HSTU ranking model: embeddings ─► tokens ─► HSTU layers ─► multi-task head ─► loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from commons.datasets.hstu_batch import HSTUBatch
from commons.distributed import global_mean_loss
from hstu.embedding import HSTUEmbedding
from hstu.model.config import RankingConfig
from hstu.model.layer import HSTUEncoder
from hstu.model.tokens import interleave_tokens


@dataclass(frozen=True)
class RankingOutput:
    """What a step says besides the loss; without a graph.

    Attributes:
        logits: `(num_predictions, num_tasks)`, rows of the batch one after the other.
        labels: as `logits`, 0 or 1.
        loss_sum: 0-dimensional, the sum of the loss over all predictions and tasks of this rank.
        num_loss_tokens: how many terms that sum has.

    """

    logits: torch.Tensor
    labels: torch.Tensor
    loss_sum: torch.Tensor
    num_loss_tokens: int


class RankingTower(nn.Module):
    """The dense part: everything behind the embeddings."""

    def __init__(self, config: RankingConfig, pg_group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.config = config
        self.encoder = HSTUEncoder(config.hstu)
        self.head = prediction_head(config.hstu.hidden_size, config.prediction_head_arch)
        self._pg_group = pg_group

    def forward(self, embeddings: Mapping[str, JaggedTensor], batch: HSTUBatch) -> tuple[torch.Tensor, RankingOutput]:
        """Loss of a batch.

        Args:
            embeddings: by feature name, values `(num_ids, hidden_size)`.
            batch: the batch they belong to, with labels.

        Returns:
            The loss to call `backward` on, W × local sum ÷ global count, and what the step says besides.

        Raises:
            ValueError: labels that do not fit the predictions or the number of tasks, or a row that is too long.
            TypeError: labels that are no KeyedJaggedTensor.
            KeyError: a feature without a table.

        """
        logits = self.logits(embeddings, batch)
        labels = stack_labels(batch.labels, self.config.num_tasks, logits.shape[0]).to(logits.dtype)
        loss_sum = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="sum")
        num_loss_tokens = batch.num_loss_tokens()
        loss = global_mean_loss(loss_sum, num_loss_tokens, self._pg_group)
        return loss, RankingOutput(logits.detach(), labels, loss_sum.detach(), num_loss_tokens)

    def logits(self, embeddings: Mapping[str, JaggedTensor], batch: HSTUBatch) -> torch.Tensor:
        """Scores of the candidates or, in a batch without candidates, of every item given what precedes it.

        Reads the sequence lengths back from the device, once; the rest of the forward pass does not wait for it.

        Returns:
            At least float32 `(num_predictions, num_tasks)`, rows of the batch one after the other.

        """
        action = batch.action_feature_name
        self._check_tables([*batch.contextual_feature_names, batch.item_feature_name, *([action] if action else [])])
        num_candidates = batch.num_candidates if batch.max_num_candidates > 0 else None
        sequence = interleave_tokens(
            [embeddings[name] for name in batch.contextual_feature_names],
            embeddings[batch.item_feature_name],
            None if action is None else embeddings[action],
            num_candidates,
        )
        lengths, num_targets = torch.stack([sequence.lengths, sequence.num_targets]).cpu().unbind(0)
        # Embeddings may come in float32 whatever the dtype of the layers.
        hidden = self.encoder(sequence.values.to(self.encoder.norm.weight.dtype), lengths, num_targets)
        if num_candidates is None:
            predicted = sequence.item_tokens
        else:
            tokens_per_item = 1 if action is None else 2
            predicted = sequence.candidate_tokens(num_candidates.long(), int(num_targets.sum()) // tokens_per_item)
        logits = self.head(hidden.index_select(0, predicted))
        return logits if logits.dtype == torch.float64 else logits.float()

    def _check_tables(self, features: list[str]) -> None:
        tables = self.config.embedding_tables
        missing = [name for name in features if name not in tables]
        if missing:
            raise KeyError(
                f"features {missing} have no table, the model has {list(tables)}; each feature of the sequence needs "
                "one: add them to embedding_tables"
            )


def prediction_head(hidden_size: int, widths: tuple[int, ...]) -> nn.Sequential:
    """A multi-layer perceptron with ReLU between its layers."""
    layers: list[nn.Module] = []
    for width_in, width_out in zip((hidden_size, *widths[:-1]), widths):
        layers += [nn.Linear(width_in, width_out), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def stack_labels(labels: KeyedJaggedTensor | torch.Tensor | None, num_tasks: int, num_predictions: int) -> torch.Tensor:
    """Labels of all tasks side by side.

    Args:
        labels: one key per task, in the order of the tasks, each with one value per prediction.
        num_tasks: tasks of the model.
        num_predictions: predictions of the model.

    Returns:
        `(num_predictions, num_tasks)`.

    Raises:
        TypeError: no KeyedJaggedTensor.
        ValueError: another number of keys or of values.

    """
    if not isinstance(labels, KeyedJaggedTensor):
        raise TypeError(
            f"labels are {type(labels).__name__}; the ranking loss needs a KeyedJaggedTensor with one key per task: "
            "give the batch such labels, or ask the tower for logits alone"
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


class HSTURankingModel(nn.Module):
    """HSTU for ranking: the next action on every item, or on every candidate.

    The tables are in `embedding`, everything else in `dense`; DistributedModelParallel shards the one and copies the
    other to every rank.
    """

    def __init__(
        self,
        config: RankingConfig,
        *,
        pg_group: dist.ProcessGroup | None = None,
        embedding_device: torch.device | None = None,
        plain_embeddings: bool = False,
    ) -> None:
        """Make the model.

        Args:
            config: its dimensions.
            pg_group: ranks that share the global batch; the shuffler's default if not given.
            embedding_device: where the tables are made; "meta" where they are too large for one process.
            plain_embeddings: tables without TorchRec, for one process or for training in float64
                (`model.double()`); DistributedModelParallel does not shard them.

        """
        super().__init__()
        self.config = config
        self.embedding = HSTUEmbedding(
            config.embedding_tables, config.hstu.hidden_size, device=embedding_device, plain=plain_embeddings
        )
        self.dense = RankingTower(config, pg_group)

    def forward(self, batch: HSTUBatch) -> tuple[torch.Tensor, RankingOutput]:
        """Loss of a batch, and what the step says besides; see `RankingTower.forward`."""
        return self.dense(self.embedding(batch.features), batch)
