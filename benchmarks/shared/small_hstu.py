"""A small HSTU that ranks train on the CPU in seconds, and the users whose histories they train."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torchrec.distributed.train_pipeline.train_pipelines import TrainPipelineBase

from benchmarks.shared import lengths
from commons.distributed.batch_shuffler import BaseTaskBalancedBatchShuffler
from commons.perf_model.task_estimator import HSTUAttentionTask
from commons.pipeline import balanced
from commons.trainer.sharding import dense_parameters
from hstu.model import HSTUConfig, HSTURankingModel, RankingConfig
from hstu.sharding import build_distributed_model

CPU = torch.device("cpu")
DESCRIPTION = "HSTU, hidden 64, 2 layers, 4 heads × 16"
SIZES = (64, 4, 16, 2)  # hidden, heads, channels of a head, layers: arguments of shufflers and tasks
TASK = HSTUAttentionTask(*SIZES)
LONGEST = 2048
NUM_IDS = 4000


def draw_users(count: int, seed: int) -> np.ndarray:
    """int64 `(count,)`: items of users, 20 + lognormal of median 130 and sigma 1.4."""
    return np.minimum(lengths.draw("user-like", count, seed), LONGEST)


# Only items, with one label per item.
make_batch = partial(lengths.make_batch, contextual=[], num_ids=NUM_IDS, actions=False)


def make_model(
    device: torch.device = CPU, features: Sequence[str] = ("item",), longest: int = LONGEST
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A replica of the model with tables for these features, and its optimizer."""
    torch.manual_seed(0)
    hidden, heads, channels, layers = SIZES
    config = HSTUConfig(hidden, layers, heads, channels, max_sequence_length=longest)
    model = HSTURankingModel(RankingConfig(config, dict.fromkeys(features, NUM_IDS), (64, 1), 1))
    model = build_distributed_model(model, device=device)
    return model, torch.optim.SGD(dense_parameters(model).values(), lr=1e-3)


class Replica:
    """A replica of the model in a pipeline of TorchRec, balanced if there is a shuffler, and the batches it trains."""

    def __init__(
        self,
        batches: Iterator[Any],
        shuffler: BaseTaskBalancedBatchShuffler | None = None,
        *,
        pipeline: Any = TrainPipelineBase,
        device: torch.device = CPU,
        **of_model: Any,
    ) -> None:
        self.model, optimizer = make_model(device, **of_model)
        self.batches, self.shuffler = batches, shuffler
        if shuffler is None:
            self.pipeline = pipeline(self.model, optimizer, device)
        else:
            self.pipeline = balanced(pipeline)(self.model, optimizer, device, batch_shuffler=shuffler)

    def step(self) -> None:
        """Train a batch, and wait until the shuffler's worker is idle."""
        self.pipeline.progress(self.batches)
        self.settle()

    def settle(self) -> None:
        if self.shuffler is not None:
            self.shuffler.drain()

    def close(self) -> None:
        if self.shuffler is not None:
            self.pipeline.reset()
            self.shuffler.drain()
            self.shuffler.close()
