"""An HSTU model on many ranks: tables sharded by TorchRec, everything else copied to every rank."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torchrec.distributed.model_parallel import DistributedModelParallel

from commons.trainer.sharding import EmbeddingOptimizer, Sharding, dense_parameters, shard_model
from hstu.model.execution import choose_execution
from hstu.model.sequence_model import SequenceModel

__all__ = ["EmbeddingOptimizer", "Sharding", "build_distributed_model", "dense_parameters"]


def build_distributed_model(
    model: SequenceModel,
    *,
    device: torch.device,
    embedding_optimizer: EmbeddingOptimizer = "rowwise_adagrad",
    embedding_lr: float = 0.01,
    sharding: Mapping[str, Sharding | None] | Sharding | None = None,
    local_world_size: int | None = None,
) -> DistributedModelParallel:
    """Shard the tables of a model and copy the rest to every rank; see `commons.trainer.sharding.shard_model`.

    Also chooses how all ranks compute the layers, see `hstu.model.execution.choose_execution`.

    Raises:
        RuntimeError, ValueError: as `shard_model`; also for plain tables, and for a kernel backend that a rank cannot
            use.
    """
    if dist.is_initialized() and model.embedding.is_plain:
        raise ValueError(
            "the model has plain embeddings; only TorchRec's can be sharded: make it with plain_embeddings=False"
        )
    choose_execution(model.config.hstu, device)
    return shard_model(
        model,
        list(model.config.embedding_tables),
        device=device,
        embedding_optimizer=embedding_optimizer,
        embedding_lr=embedding_lr,
        sharding=sharding,
        local_world_size=local_world_size,
    )
