"""An HSTU model on many ranks: tables sharded by TorchRec, everything else copied to every rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.model_parallel import DistributedModelParallel

from commons.trainer.sharding import shard_model
from hstu.model.execution import choose_execution
from hstu.model.sequence_model import SequenceModel


def build_distributed_model(model: SequenceModel, *, device: torch.device, **options: Any) -> DistributedModelParallel:
    """Shard the tables of a model and copy the rest to every rank; for `options` see `shard_model`.

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
    return shard_model(model, list(model.config.embedding_tables), device=device, **options)
