"""A decoder as a CostTarget: what `evenrank calibrate` measures and `evenrank simulate` reads lengths from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from commons.datasets.data_loader import get_data_loader
from commons.datasets.gpt_sid_batch import GPTSIDBatch
from commons.datasets.sid_dataset import CANDIDATE, HISTORY
from commons.datasets.sid_random_dataset import RandomSIDDataset
from commons.perf_model.measurement import RowTokens
from commons.sequence_batch.fields import real_rows
from commons.trainer.config import load_config_file
from commons.trainer.launch import seed_all
from sid_gr.flops import sid_task
from sid_gr.megatron_core import parallel_state
from sid_gr.model import SIDGRModel
from sid_gr.parallel import initialize_model_parallel
from sid_gr.train_config import TrainConfig


class SIDGRCostTarget:
    """The model of a training config, in one process.

    Attributes:
        task: operations of the layers.
        device: where it runs.
        batch_size: rows per rank in training.
        max_length: the most items of a history.

    Raises:
        ValueError: a config with tensor parallelism: its decoder is shared by several processes.

    """

    def __init__(self, config: TrainConfig, device: torch.device) -> None:
        if config.model.tensor_model_parallel_size > 1:
            raise ValueError(
                f"tensor_model_parallel_size is {config.model.tensor_model_parallel_size}; costs are measured in one "
                "process: measure a config with 1"
            )
        self.device = device
        self.batch_size = config.trainer.train_batch_size
        self.max_length = config.dataset.max_history_seqlen
        self._config = config
        _form_group_of_one()
        seed_all(config.trainer.seed)
        self._sid_map = config.sid.load_map(config.dataset.dataset_name, config.trainer.seed)
        dataset: Any = self._loader().dataset
        model_config = config.model.decoder_config(
            codebook_sizes=self._sid_map.codebook_sizes, max_items=dataset.max_items
        )
        self.task = sid_task(model_config)
        self._model = SIDGRModel(model_config, feature_names=(HISTORY, CANDIDATE)).to(device).train()

    def make_batch(self, lengths: Sequence[int]) -> GPTSIDBatch:
        """A random batch on the device; as many of a row's items are candidates as training takes."""
        items = torch.as_tensor(lengths, dtype=torch.int64)
        candidates = items.clamp(max=self._config.dataset.max_num_candidates or int(items.max()))
        batch = GPTSIDBatch.random_of_lengths(
            items - candidates,
            candidates,
            self._sid_map.codebook_sizes,
            HISTORY,
            CANDIDATE,
            sids=torch.from_numpy(self._sid_map.codes),
        )
        return batch.to(self.device)

    def train_step(self, batch: GPTSIDBatch) -> None:
        """Forward and backward pass."""
        loss, _ = self._model(batch)
        loss.backward()
        self._model.zero_grad(set_to_none=True)

    def row_tokens(self, batch: GPTSIDBatch) -> RowTokens:
        """Tokens of every real row, none of them a target that others do not see."""
        return RowTokens(batch.sequence_lengths()[: real_rows(batch)])

    def host_batches(self) -> Iterator[GPTSIDBatch]:
        """Batches of the training data, as a single rank reads them; random data have no end."""
        loader = self._loader()
        return loader.dataset.stream() if isinstance(loader.dataset, RandomSIDDataset) else iter(loader)

    def _loader(self) -> Any:
        dataset, trainer = self._config.dataset, self._config.trainer
        options: dict[str, Any] = {"sid_map": self._sid_map}
        if dataset.dataset_name == "sid":
            options["history_column"] = self._config.sid.history_column
        return get_data_loader(
            dataset.dataset_name,
            "train",
            batch_size=trainer.train_batch_size,
            max_history_seqlen=dataset.max_history_seqlen,
            dataset_path=dataset.dataset_path,
            max_num_candidates=dataset.max_num_candidates,
            shuffle=dataset.shuffle,
            seed=trainer.seed,
            **dataset.loader_options(),
            **options,
        )


def _form_group_of_one() -> None:
    """megatron-core's layers ask for their group, even where it is this process alone."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if not parallel_state.model_parallel_is_initialized():
        initialize_model_parallel()


def cost_target(config: Path, device: torch.device) -> SIDGRCostTarget:
    """The model of a training config; see `commons.perf_model.measurement.CostTarget`."""
    return SIDGRCostTarget(load_config_file(TrainConfig, config), device)
