"""A model as one recipe: all that training, the demo, `evenrank calibrate` and `evenrank simulate` need of it.

    config ─► loaders ─► build_model ─► shuffler, metrics, flops ─► `run_training`, `compare`
      └─► task, row_tokens, host_batches ─► simulate;  with single_process_model, make_batch ─► calibrate

To add a model, derive from `Recipe` and name the class RECIPE in a module `recipe` of your package.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn
from torch.utils.data import DataLoader

from commons.distributed.batch_shuffler import BaseTaskBalancedBatchShuffler, IdentityBalancedBatchShuffler
from commons.distributed.batch_shuffler_factory import BatchShufflerFactory
from commons.perf_model.measurement import RowTokens
from commons.perf_model.task_estimator import AttentionTask, training_flops
from commons.trainer.config.load import load_config_file
from commons.trainer.data import open_loader, train_and_eval_loaders
from commons.trainer.evaluation import Metrics
from commons.trainer.optimize.optimizers import build_optimizer
from commons.trainer.ranks.launch import seed_all

R = TypeVar("R", bound="Recipe")


class Recipe(ABC):
    """A model, its data and its costs, built from a config; it is also a `commons.perf_model.measurement.CostTarget`.

    A subclass must define `config_class`, `task`, `row_tokens` and `build_model`; for `evenrank calibrate` also
    `single_process_model` and `make_batch`. Every other method may be overridden: for other data `open_loaders`, and
    `single_loader`, which `evenrank simulate` reads. `device` is the device of this rank, or of the only process.
    """

    # A dataclass with the fields `trainer` (TrainerArgs), `dataset` (DatasetArgs), `optimizer` (OptimizerArgs) and
    # `shuffler_type`, the name of a registered shuffler; the model may need further fields.
    config_class: ClassVar[type[Any]]
    compute_dtype: torch.dtype = torch.float32  # dtype of the matrix products, for MFU
    loss_scaler: torch.amp.GradScaler | None = None  # set by a model that scales its loss

    def __init__(self, config: Any, device: torch.device) -> None:
        self.config = config
        self.device = device
        self.batch_size: int = config.trainer.train_batch_size  # rows per rank in training
        self.max_length: int = config.dataset.max_history_seqlen  # maximum number of items in a history

    @classmethod
    def load(cls: type[R], path: Path, device: torch.device) -> R:
        """The recipe of a config file, for one process; raises as `load_config_file`."""
        return cls(load_config_file(cls.config_class, path), device)

    def share_batch(self, num_ranks: int) -> None:
        """Set the rows per rank in training to this rank's part of `global_batch_size`, if that is set.

        Raises:
            ValueError: the ranks have no equal parts.
        """
        rows = self.config.trainer.global_batch_size
        if rows is None:
            return
        if rows % num_ranks:
            raise ValueError(
                f"global_batch_size is {rows}, and {num_ranks} ranks share the data; each rank trains an equal part: "
                "give a multiple of every number of ranks that the run may have"
            )
        self.config.trainer.train_batch_size = self.batch_size = rows // num_ranks

    # The cost of a row.

    @property
    @abstractmethod
    def task(self) -> AttentionTask:
        """The task that computes the FLOPs of the layers."""

    @abstractmethod
    def row_tokens(self, batch: Any) -> RowTokens:
        """The number of tokens that the model computes for every real row of a batch."""

    def num_tokens(self, batch: Any) -> int:
        """The number of tokens of a host batch, for the log: all values of its features, contextual features too."""
        return int(batch.features.values().numel())

    def row_flops(self, batch: Any) -> torch.Tensor:
        """Forward FLOPs of every real row, int64 `(rows,)`, as the model's shuffler counts them: here of the layers."""
        return self.task.get_workloads(*self.row_tokens(batch))

    def flops(self, batch: Any) -> int:
        """Forward and backward FLOPs of a host batch: three times the sum of `row_flops`."""
        return training_flops(int(self.row_flops(batch).sum()))

    # Training; all ranks call these methods together.

    def prepare_ranks(self) -> None:
        """Create process groups; called before every other method."""
        return

    def release_ranks(self) -> None:
        """Destroy the process groups of `prepare_ranks`; called after a run, but not after a failure."""
        return

    def data_options(self) -> dict[str, Any]:
        """Further keyword arguments for `get_data_loader`."""
        return {}

    def open_loaders(self) -> tuple[DataLoader[Any], DataLoader[Any] | None]:
        """Create loaders of this rank's training and evaluation batches, on the host; None for no evaluation.

        With single_rank_load, training batches are those of all ranks, with `train_batch_size` rows for each of them.
        """
        return train_and_eval_loaders(self.config.dataset, self.config.trainer, self.device, **self.data_options())

    @cached_property
    def loaders(self) -> tuple[DataLoader[Any], DataLoader[Any] | None]:
        """The training and evaluation loaders of this run."""
        return self.open_loaders()

    def notes(self) -> list[str]:
        """Lines to print about the data before training."""
        return []

    @abstractmethod
    def build_model(self) -> nn.Module:
        """Build the model on all ranks; the model returns a loss to call `backward` on and a StepOutput.

        A second call returns an equal model, because it seeds the random states of weights and dropout.
        """

    def layers(self, model: nn.Module) -> nn.Module | None:
        """The submodule whose forward pass waits for no other rank, and whose FLOPs the workloads count.

        It is timed to measure the speed of each rank; None times nothing. Its inputs must be complete before it runs:
        embeddings come from other ranks, and TorchRec waits for an embedding at its first use.
        """
        return None

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer of all parameters that are not updated in the backward pass."""
        return build_optimizer(model, self.config.optimizer)

    def metrics(self, model: nn.Module) -> Metrics | None:
        """The metrics of evaluations; None for the loss only."""
        return None

    def fingerprint(self) -> dict[str, Any]:
        """Settings that a checkpoint and the run that loads it must share, JSON-ready."""
        return {"optimizer": self.config.optimizer.kinds()}

    def shuffler_arguments(self) -> Mapping[str, Mapping[str, Any]]:
        """Keyword arguments by name of the shuffler, for shufflers that take the model's dimensions."""
        return {}

    def build_shuffler(self, *, balances: bool) -> BaseTaskBalancedBatchShuffler:
        """Create the config's shuffler with the run's options; with `balances` False a shuffler that moves no row.

        Raises:
            KeyError: no shuffler of this name is registered.
        """
        trainer = self.config.trainer
        options = trainer.shuffler
        if trainer.balances_at_loading and options.mode == "balance":
            # Rank 0 or the sampler has balanced the rows already; the shuffler only reports the balance.
            options = replace(options, mode="observe")
        if not balances:
            return IdentityBalancedBatchShuffler(options=options)
        name = self.config.shuffler_type
        return BatchShufflerFactory.create(name, options=options, **self.shuffler_arguments().get(name, {}))

    # Measurement of costs, in one process.

    def single_process_model(self) -> nn.Module:
        """Build the whole model in this process, on its device; ValueError if the recipe does not define it."""
        raise ValueError(f"{type(self).__name__} has no single_process_model; measurements train this model: define it")

    def make_batch(self, lengths: Sequence[int]) -> Any:
        """Make a random batch on the device whose rows have these lengths (items of a history, each at least 1).

        Raises:
            ValueError: the recipe does not define it.
        """
        raise ValueError(f"{type(self).__name__} has no make_batch; measurements train its batches: define it")

    @cached_property
    def measured_model(self) -> nn.Module:
        """The seeded model that `train_step` trains."""
        seed_all(self.config.trainer.seed)
        return self.single_process_model().to(self.device).train()

    def train_step(self, batch: Any) -> None:
        """Run one forward and backward pass."""
        loss, _ = self.measured_model(batch)
        loss.backward()
        self.measured_model.zero_grad(set_to_none=True)

    @cached_property
    def single_loader(self) -> DataLoader[Any]:
        """Training batches as a single rank would read them."""
        dataset, trainer = self.config.dataset, self.config.trainer
        options = {"shuffle": dataset.shuffle, **self.data_options()}
        return open_loader("train", dataset, trainer, trainer.train_batch_size, **options)

    @property
    def draws_per_rank(self) -> bool:
        """Whether each rank generates its own batches (random data); else row i of the data goes to rank i mod W."""
        return hasattr(self.single_loader.dataset, "stream")

    def host_batches(self) -> Iterator[Any]:
        """Batches of the training data, as a single rank would read them, each row once; endless for random data."""
        dataset: Any = self.single_loader.dataset
        return dataset.stream() if self.draws_per_rank else iter(self.single_loader)
