"""An HSTU model on many ranks: tables sharded by TorchRec, everything else copied to every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torchrec.distributed.model_parallel import DistributedModelParallel

from commons.trainer.sharding import EmbeddingOptimizer, Sharding, dense_parameters, shard_model
from hstu.model.config import SequenceModelConfig
from hstu.model.execution import choose_execution
from hstu.model.sequence_model import SequenceModel

__all__ = ["EmbeddingOptimizer", "Sharding", "build_distributed_model", "dense_parameters"]

_WIDTH_STEP = 4


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
        RuntimeError, ValueError: as `shard_model`; also for plain tables, widths without kernels, on CPU for tables
            that leave a rank without rows, and for a kernel backend that a rank cannot use.
    """
    if dist.is_initialized() and model.embedding.is_plain:
        raise ValueError(
            "the model has plain embeddings; only TorchRec's can be sharded: make it with plain_embeddings=False"
        )
    for name, width in model.config.table_widths.items():
        if width % _WIDTH_STEP:
            raise ValueError(
                f"the table of {name!r} is {width} wide; fbgemm's tables are a multiple of {_WIDTH_STEP} wide: correct "
                "hidden_size, or the table's own embedding dimension"
            )
    if dist.is_initialized() and device.type == "cpu":
        kinds = sharding if isinstance(sharding, Mapping) else dict.fromkeys(model.config.embedding_tables, sharding)
        row_wise = [table for table, kind in kinds.items() if kind == "row_wise"]
        require_rows_on_all_ranks(model.config, row_wise, dist.get_world_size())
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


def require_rows_on_all_ranks(config: SequenceModelConfig, row_wise: Sequence[str], world_size: int) -> None:
    """Raise ValueError if all `row_wise` tables of a width are too short for every rank to have a row.

    TorchRec looks up the tables of a width together. On CPU, fbgemm treats a rank without any of their rows as a GPU.
    """
    rows_by_width: dict[int, dict[str, int]] = {}
    for table in row_wise:
        if table in config.embedding_tables:
            rows_by_width.setdefault(config.table_widths[table], {})[table] = config.embedding_tables[table]
    for width, rows in rows_by_width.items():
        # All ranks except the last ones have ⌈rows ÷ ranks⌉ rows.
        if all(-(-num_rows // -(-num_rows // world_size)) < world_size for num_rows in rows.values()):
            raise ValueError(
                f"the row_wise tables of width {width} have rows {rows}, too few for {world_size} ranks; on CPU fbgemm "
                "needs a row on every rank: choose 'table_wise' for these tables"
            )
