"""An HSTU model as a CostTarget: what `evenrank calibrate` measures and `evenrank simulate` reads lengths from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from commons.datasets.data_loader import get_data_loader
from commons.datasets.hstu_batch import HSTUBatch, padded_kjt
from commons.datasets.random_dataset import RandomHSTUDataset
from commons.datasets.random_times import random_times
from commons.datasets.sequence_metadata import TIMESTAMP
from commons.perf_model.measurement import RowTokens
from commons.sequence_batch.fields import real_rows
from commons.trainer.config import load_config_file
from commons.trainer.launch import seed_all
from hstu.flops import hstu_task
from hstu.lengths import workload_lengths
from hstu.model import RetrievalConfig
from hstu.negatives import with_negatives
from hstu.tasks import TASKS, Task, data_options
from hstu.train_config import TrainConfig

# A lookup costs the same in any table; a small one leaves the memory to the layers.
_MOST_TABLE_ROWS = 10_000


class HSTUCostTarget:
    """The model of a training config, in one process, with tables of at most 10,000 rows.

    Attributes:
        task: operations of the model.
        device: where it runs.
        batch_size: rows per rank in training.
        max_length: the most items of a history.
    """

    def __init__(self, config: TrainConfig, device: torch.device) -> None:
        self.device = device
        self.batch_size = config.trainer.train_batch_size
        self.max_length = config.dataset.max_history_seqlen
        self._config = replace(config, model=config.model.on(device))
        seed_all(config.trainer.seed)
        # The first batch shows what batches of this data set look like.
        self._example = self._first_batch()
        task = self._make_task()
        self._model_config = task.config
        self.task = hstu_task(task.config.hstu)
        self._model = task.make_model(plain_embeddings=True)
        for module in self._model.modules():
            if isinstance(module, nn.Embedding):
                module.sparse = True  # the gradient of the rows looked up alone, as TorchRec's tables have it
        self._model.to(device).train()

    def make_batch(self, lengths: Sequence[int]) -> HSTUBatch:
        """A random batch on the device; with candidates at their most, but at least one item before."""
        example, ids = self._example, self._model_config.embedding_tables
        items = torch.as_tensor(lengths, dtype=torch.int64)
        candidates = None
        if example.max_num_candidates:
            candidates = (items - 1).clamp(0, example.max_num_candidates)
        row_lengths = {
            name: torch.ones_like(items) if name in example.contextual_feature_names else items
            for name in example.features.keys()
        }
        values = {
            name: random_times(count) if name == TIMESTAMP else torch.randint(ids[name], (int(count.sum()),))
            for name, count in row_lengths.items()
        }
        predicted = items if candidates is None else candidates
        tasks = [f"task_{task}" for task in range(self._config.dataset.num_tasks)]
        labels = padded_kjt(
            {task: torch.randint(2, (int(predicted.sum()),)).float() for task in tasks},
            dict.fromkeys(tasks, predicted),
            len(items),
        )
        batch = HSTUBatch(
            features=padded_kjt(values, row_lengths, len(items)),
            batch_size=len(items),
            feature_to_max_seqlen=example.feature_to_max_seqlen,
            contextual_feature_names=example.contextual_feature_names,
            labels=labels,
            item_feature_name=example.item_feature_name,
            action_feature_name=example.action_feature_name,
            max_num_candidates=example.max_num_candidates,
            num_candidates=candidates,
        )
        return self._add_negatives(batch).to(self.device)

    def train_step(self, batch: HSTUBatch) -> None:
        """Forward and backward pass."""
        loss, _ = self._model(batch)
        loss.backward()
        self._model.zero_grad(set_to_none=True)

    def row_tokens(self, batch: HSTUBatch) -> RowTokens:
        """Tokens of every real row and, among them, candidates and what sees all of the history."""
        rows = real_rows(batch)
        seqlen, targets, contextual = workload_lengths(batch, contextual_mask=self._config.model.contextual_mask)
        return RowTokens(seqlen[:rows], targets[:rows], None if contextual is None else contextual[:rows])

    def host_batches(self) -> Iterator[HSTUBatch]:
        """Batches of the training data, as a single rank reads them; random data have no end."""
        loader = self._loader()
        return loader.dataset.stream() if isinstance(loader.dataset, RandomHSTUDataset) else iter(loader)

    def _first_batch(self) -> HSTUBatch:
        for batch in self.host_batches():
            return batch
        raise ValueError("the data set has no batch for training: check its path and split")

    def _loader(self) -> Any:
        dataset, trainer = self._config.dataset, self._config.trainer
        return get_data_loader(
            dataset.dataset_name,
            "train",
            batch_size=trainer.train_batch_size,
            max_history_seqlen=dataset.max_history_seqlen,
            dataset_path=dataset.dataset_path,
            max_num_candidates=dataset.max_num_candidates,
            num_tasks=dataset.num_tasks,
            shuffle=dataset.shuffle,
            seed=trainer.seed,
            **dataset.loader_options(),
            **data_options(self._config.model),
        )

    def _add_negatives(self, batch: HSTUBatch) -> HSTUBatch:
        config = self._model_config
        if not isinstance(config, RetrievalConfig) or config.negatives_feature_name is None:
            return batch
        shape = (batch.batch_size, config.num_negatives)
        drawn = torch.randint(config.embedding_tables[config.item_feature_name], shape)
        return with_negatives(batch, config.negatives_feature_name, drawn)

    def _make_task(self) -> Task:
        data = self._loader().dataset
        tables = {name: min(rows, _MOST_TABLE_ROWS) for name, rows in data.vocabulary_sizes.items()}
        return TASKS[self._config.task](self._config.model, self._config.dataset, data, tables)


def cost_target(config: Path, device: torch.device) -> HSTUCostTarget:
    """The model of a training config; see `commons.perf_model.measurement.CostTarget`."""
    return HSTUCostTarget(load_config_file(TrainConfig, config), device)
