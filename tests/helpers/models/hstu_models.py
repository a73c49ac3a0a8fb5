"""Small HSTU models and batches for them."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from commons.datasets.hstu_batch import FeatureConfig, HSTUBatch, RandomDistribution, padded_kjt
from hstu.model import ExecutionConfig, HSTUConfig, HSTURankingModel, HSTURetrievalModel, RankingConfig, RetrievalConfig

TABLES = {"user": 20, "tags": 9, "item": 50, "action": 4}
HSTU = HSTUConfig(hidden_size=8, num_layers=2, num_attention_heads=2, kv_channels=3, max_sequence_length=40)
CONFIG = RankingConfig(hstu=HSTU, embedding_tables=TABLES, prediction_head_arch=(6, 2), num_tasks=2)


def random_batch(
    batch_size=6, *, with_actions=True, max_num_candidates=0, actual_batch_size=None, longest=9, most=None, seed=0
) -> HSTUBatch:
    """Histories of up to `longest` items; `most` is what batches state, if others have longer ones."""
    lengths = RandomDistribution("uniform", high=longest)
    return HSTUBatch.random(
        batch_size,
        [
            FeatureConfig(["user"], [20], 1, is_jagged=False),
            FeatureConfig(["tags"], [9], 3, is_jagged=True),
            FeatureConfig(["item", "action"], [50, 4], most or longest, True, lengths),
        ],
        "item",
        ["user", "tags"],
        "action" if with_actions else None,
        max_num_candidates,
        2,
        actual_batch_size,
        device="cpu",
        generator=torch.Generator().manual_seed(seed),
    )


def with_execution(config: Any, **options: Any) -> Any:
    """A config of layers or of a model, executed in another way."""
    if isinstance(config, HSTUConfig):
        return dataclasses.replace(config, execution=ExecutionConfig(**options))
    return dataclasses.replace(config, hstu=with_execution(config.hstu, **options))


def with_timestamps(batch: HSTUBatch) -> HSTUBatch:
    """The batch with one rising time per item, seconds to years apart."""
    items = batch.features["item"]
    gaps = torch.rand(items.values().numel(), generator=torch.Generator().manual_seed(1)) * 18
    times = 10**9 + gaps.exp().long().cumsum(0)
    added = padded_kjt({"timestamp": times}, {"timestamp": items.lengths()}, batch.batch_size)
    return dataclasses.replace(batch, features=KeyedJaggedTensor.concat([batch.features, added]))


def model_of(config: RankingConfig | RetrievalConfig, **options) -> HSTURankingModel | HSTURetrievalModel:
    """The model of a config."""
    return (HSTURankingModel if isinstance(config, RankingConfig) else HSTURetrievalModel)(config, **options)


def plain_model(config=CONFIG) -> HSTURankingModel | HSTURetrievalModel:
    torch.manual_seed(0)
    model = model_of(config, plain_embeddings=True).double()
    with torch.no_grad():  # biases and norms away from their special initial values
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return model
