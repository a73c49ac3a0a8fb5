"""A model as one recipe: all that training, the demo, `evenrank calibrate` and `evenrank simulate` ask about it.

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
from commons.trainer.data import single_process_loader, train_and_eval_loaders
from commons.trainer.evaluation import Metrics
from commons.trainer.optimize.optimizers import build_optimizer
from commons.trainer.ranks.launch import seed_all

R = TypeVar("R", bound="Recipe")


class Recipe(ABC):
    """A model, its data and its costs, by a config; it is a `commons.perf_model.measurement.CostTarget` too.

    A model's own recipe defines `config_class`, `task`, `row_tokens` and `build_model`; for `evenrank calibrate` also
    `single_process_model` and `make_batch`. What else it overrides is up to it. `device` is this rank's, or the one
    process's.
    """

    # A dataclass with the fields `trainer` (TrainerArgs), `dataset` (DatasetArgs), `optimizer` (OptimizerArgs) and
    # `shuffler_type`, the name of a registered shuffler; and whatever else the model needs.
    config_class: ClassVar[type[Any]]
    compute_dtype: torch.dtype = torch.float32  # of the matrix products, for MFU
    loss_scaler: torch.amp.GradScaler | None = None  # of a model that scales its loss

    def __init__(self, config: Any, device: torch.device) -> None:
        self.config = config
        self.device = device
        self.batch_size: int = config.trainer.train_batch_size  # rows per rank in training
        self.max_length: int = config.dataset.max_history_seqlen  # the most items of a history

    @classmethod
    def load(cls: type[R], path: Path, device: torch.device) -> R:
        """The recipe of a config file, for one process; raises as `load_config_file`."""
        return cls(load_config_file(cls.config_class, path), device)

    # What a row costs.

    @property
    @abstractmethod
    def task(self) -> AttentionTask:
        """The operations of the layers."""

    @abstractmethod
    def row_tokens(self, batch: Any) -> RowTokens:
        """Tokens that the model computes for every real row of a batch."""

    def num_tokens(self, batch: Any) -> int:
        """Tokens of a host batch, for the log: the values of its features, contextual ones too."""
        return int(batch.features.values().numel())

    def flops(self, batch: Any) -> int:
        """Forward and backward operations of the layers on a host batch; embeddings and heads are left out."""
        return training_flops(int(self.task.get_workloads(*self.row_tokens(batch)).sum()))

    # Training; called on all ranks together.

    def prepare_ranks(self) -> None:
        """Make process groups, before anything else is done."""
        return

    def release_ranks(self) -> None:
        """Destroy what `prepare_ranks` has made, after a run; not after a failure."""
        return

    def data_options(self) -> dict[str, Any]:
        """Further arguments of `get_data_loader`."""
        return {}

    def open_loaders(self) -> tuple[DataLoader[Any], DataLoader[Any] | None]:
        """New loaders of this rank's training and evaluation batches, on the host; None for no evaluation."""
        return train_and_eval_loaders(self.config.dataset, self.config.trainer, self.device, **self.data_options())

    @cached_property
    def loaders(self) -> tuple[DataLoader[Any], DataLoader[Any] | None]:
        """The loaders of this run."""
        return self.open_loaders()

    def notes(self) -> list[str]:
        """Lines to print about the data before training."""
        return []

    @abstractmethod
    def build_model(self) -> nn.Module:
        """The model on all ranks; it returns a loss to call `backward` on and a StepOutput.

        Called again, it gives an equal model: it sets the random states that weights and dropout are drawn from.
        """

    def layers(self, model: nn.Module) -> nn.Module | None:
        """The part of the model whose forward pass waits for no other rank, and whose operations loads count.

        It is timed, for the speeds of the ranks; None for nothing. What it is given has been waited for: embeddings
        come from other ranks, and TorchRec waits for them where they are first used.
        """
        return None

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer of what does not train itself."""
        return build_optimizer(model, self.config.optimizer)

    def metrics(self, model: nn.Module) -> Metrics | None:
        """What evaluations measure besides the loss."""
        return None

    def fingerprint(self) -> dict[str, Any]:
        """What must be equal to load a checkpoint, JSON-ready."""
        return {"optimizer": self.config.optimizer.kinds()}

    def shuffler_arguments(self) -> Mapping[str, Mapping[str, Any]]:
        """Arguments of the shufflers that take a model's dimensions, by name; others are made without."""
        return {}

    def build_shuffler(self, *, balances: bool) -> BaseTaskBalancedBatchShuffler:
        """The shuffler that the config names, with the run's options; with `balances` False one that moves nothing.

        Raises:
            KeyError: an unknown name.
        """
        trainer = self.config.trainer
        options = trainer.shuffler
        if trainer.balances_at_loading and options.mode == "balance":
            # Rows are dealt out, or read, evenly already; the shuffler only reports how even they are.
            options = replace(options, mode="observe")
        if not balances:
            return IdentityBalancedBatchShuffler(options=options)
        name = self.config.shuffler_type
        return BatchShufflerFactory.create(name, options=options, **self.shuffler_arguments().get(name, {}))

    # Costs, in one process.

    def single_process_model(self) -> nn.Module:
        """The whole model in this process, on its device; ValueError where the recipe does not define it."""
        raise ValueError(f"{type(self).__name__} has no single_process_model, which is what is measured: define it")

    def make_batch(self, lengths: Sequence[int]) -> Any:
        """A random batch on the device, of rows of these lengths (items of a history, each at least 1).

        Raises:
            ValueError: the recipe does not define it.
        """
        raise ValueError(f"{type(self).__name__} has no make_batch, of which measured batches are made: define it")

    @cached_property
    def measured_model(self) -> nn.Module:
        """The model that `train_step` trains."""
        seed_all(self.config.trainer.seed)
        return self.single_process_model().to(self.device).train()

    def train_step(self, batch: Any) -> None:
        """Forward and backward pass."""
        loss, _ = self.measured_model(batch)
        loss.backward()
        self.measured_model.zero_grad(set_to_none=True)

    @cached_property
    def single_loader(self) -> DataLoader[Any]:
        """Training batches as a single rank would read them."""
        return single_process_loader(self.config.dataset, self.config.trainer, **self.data_options())

    @property
    def draws_per_rank(self) -> bool:
        """Whether each rank draws batches of its own, as of random data; else the rows of all are dealt in turn."""
        return hasattr(self.single_loader.dataset, "stream")

    def host_batches(self) -> Iterator[Any]:
        """Batches of the training data, as a single rank would read them, each row once; random data have no end."""
        dataset: Any = self.single_loader.dataset
        return dataset.stream() if self.draws_per_rank else iter(self.single_loader)
