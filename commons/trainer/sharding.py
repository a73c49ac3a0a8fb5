"""A model on many ranks: embedding tables sharded by TorchRec, everything else copied to every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, get_args

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec.distributed.comm import get_local_size
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.model_parallel import DefaultDataParallelWrapper, DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.types import ShardingEnv, ShardingType
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.optim.optimizers import in_backward_optimizer_filter

from commons.checks import require_names, require_one_of

EmbeddingOptimizer = Literal["sgd", "adam", "rowwise_adagrad"]
Sharding = Literal["table_wise", "row_wise", "data_parallel"]

_OPTIMIZERS = {
    "sgd": EmbOptimType.EXACT_SGD,
    "adam": EmbOptimType.ADAM,
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
}
_CPU_OPTIMIZERS = ("sgd", "rowwise_adagrad")  # fbgemm has no CPU kernel for the others
_WIDTH_STEP = 4  # of fbgemm's tables
# Without data_parallel: the caller's optimizer would have to train such a table, so only the user can choose it.
_PLANNED_TYPES = [ShardingType.TABLE_WISE.value, ShardingType.ROW_WISE.value]


def shard_model(
    model: nn.Module,
    tables: Sequence[str],
    *,
    device: torch.device,
    embedding_optimizer: EmbeddingOptimizer = "rowwise_adagrad",
    embedding_lr: float = 0.01,
    sharding: Mapping[str, Sharding | None] | Sharding | None = None,
    local_world_size: int | None = None,
    data_parallel_group: dist.ProcessGroup | None = None,
) -> DistributedModelParallel:
    """Shard the tables of a model and copy the rest to every rank.

    A collective call: every rank calls it with the same arguments. Tables on a real device keep their weights, which
    must be equal on all ranks. On "meta" every rank initialises its shards from its own random state: seed the ranks
    differently, or shards of different ranks have equal weights.

    Args:
        model: the model, with its tables in TorchRec's EmbeddingCollections.
        tables: names of all tables.
        device: this rank's device.
        embedding_optimizer: updates table-wise and row-wise tables during the backward pass. On CPU fbgemm offers "sgd"
            and "rowwise_adagrad".
        embedding_lr: learning rate of that optimizer.
        sharding: one kind for all tables, or a kind by table: "table_wise" (a table on one rank), "row_wise" (the rows
            of a table over all ranks), "data_parallel" (a copy on every rank, trained by the caller's optimizer, see
            `dense_parameters`; not on CPU), None (TorchRec's planner chooses between the first two). On
            CPU, a table with too few rows for all ranks is then table_wise.
        local_world_size: ranks per host; None for torchrun's number or, without torchrun, all ranks.
        data_parallel_group: ranks over which torch's DistributedDataParallel averages the gradients of the other
            parameters, which begin as those of its first rank; None for all ranks.

    Raises:
        RuntimeError: torch.distributed is not initialised.
        ValueError: a sharding for an unknown table, a kind or optimizer that is unknown or not available on this
            device, a learning rate that is not positive, a width without kernels, or on CPU row-wise tables that leave
            a rank without rows.
    """
    if not dist.is_initialized():
        raise RuntimeError(
            "torch.distributed is not initialised; sharding needs a process group: call init_process_group first, or "
            "train the model as it is in a single process"
        )
    _check_optimizer(embedding_optimizer, embedding_lr, device)
    kinds = _sharding_by_table(sharding, require_names("tables", tables), device)
    world_size = dist.get_world_size()
    for collection in model.modules():
        if isinstance(collection, EmbeddingCollection):
            _check_widths(collection)
            if device.type == "cpu":
                _give_rows_to_all_ranks(collection, kinds, world_size)
    sharder = EmbeddingCollectionSharder(
        fused_params={"optimizer": _OPTIMIZERS[embedding_optimizer], "learning_rate": embedding_lr}
    )
    planner = EmbeddingShardingPlanner(
        topology=Topology(
            world_size=world_size,
            local_world_size=get_local_size(world_size) if local_world_size is None else local_world_size,
            compute_device=device.type,
            # TorchRec assumes 32 GiB for every GPU; on a larger GPU tables would go to host memory or not fit.
            # None is TorchRec's own default for other devices.
            hbm_cap=torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None,
        ),
        constraints={
            table: ParameterConstraints(sharding_types=_PLANNED_TYPES if kind is None else [kind])
            for table, kind in kinds.items()
        },
    )
    return DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=device,
        plan=planner.collective_plan(model, [sharder], dist.group.WORLD),
        sharders=[sharder],
        data_parallel_wrapper=None if data_parallel_group is None else _WithinGroup(data_parallel_group),
    )


class _WithinGroup(DefaultDataParallelWrapper):
    """TorchRec's default wrapper, for the ranks of a group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self._group = group

    def wrap(self, dmp: DistributedModelParallel, env: ShardingEnv, device: torch.device) -> None:
        """Wrap everything that is not sharded."""
        super().wrap(dmp, ShardingEnv.from_process_group(self._group), device)


def dense_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that the caller's optimizer must train: all except tables updated in the backward pass."""
    return dict(in_backward_optimizer_filter(model.named_parameters()))


def _check_optimizer(optimizer: str, lr: float, device: torch.device) -> None:
    require_one_of("embedding_optimizer", optimizer, _OPTIMIZERS)
    if device.type == "cpu" and optimizer not in _CPU_OPTIMIZERS:
        raise ValueError(
            f"embedding_optimizer is {optimizer!r} on CPU; there fbgemm offers {list(_CPU_OPTIMIZERS)} only: "
            "choose one of them"
        )
    if not lr > 0:
        raise ValueError(f"embedding_lr is {lr}; a learning rate is positive: raise it")


def _sharding_by_table(
    sharding: Mapping[str, Sharding | None] | Sharding | None, tables: list[str], device: torch.device
) -> dict[str, str | None]:
    """The kind of every table; None where the planner chooses."""
    if not isinstance(sharding, Mapping):
        sharding = dict.fromkeys(tables, sharding)
    unknown = [table for table in sharding if table not in tables]
    if unknown:
        raise ValueError(f"sharding names tables {unknown}, the model has {tables}: correct the names")
    kinds: dict[str, str | None] = {table: sharding.get(table) for table in tables}
    for table, kind in kinds.items():
        if kind is not None and kind not in get_args(Sharding):
            raise ValueError(
                f"sharding of table {table!r} is {kind!r}; it is one of {list(get_args(Sharding))}, or None for the "
                "planner's choice: choose one"
            )
        if kind == "data_parallel" and device.type == "cpu":
            # On CPU, fbgemm's dense tables pool every sequence and return one row per sample.
            raise ValueError(
                f"sharding of table {table!r} is 'data_parallel' on CPU; there TorchRec cannot look up sequences in "
                "data-parallel tables: choose 'table_wise' or 'row_wise'"
            )
    return kinds


def _check_widths(collection: EmbeddingCollection) -> None:
    for table in collection.embedding_configs():
        if table.embedding_dim % _WIDTH_STEP:
            raise ValueError(
                f"the table of {table.name!r} is {table.embedding_dim} wide; fbgemm's tables are a multiple of "
                f"{_WIDTH_STEP} wide: correct hidden_size, or the table's own embedding dimension"
            )


def _give_rows_to_all_ranks(collection: EmbeddingCollection, kinds: dict[str, str | None], world_size: int) -> None:
    """Keep the planner from sharding short tables row-wise; ValueError if the user's row-wise tables are all short.

    A table is short if a rank would have none of its rows. TorchRec looks up the tables of a collection together. On
    CPU, fbgemm treats a rank without any of their rows as a GPU.
    """
    rows = {table.name: table.num_embeddings for table in collection.embedding_configs()}
    # All ranks except the last ones have ⌈rows ÷ ranks⌉ rows.
    short = [table for table, count in rows.items() if -(-count // -(-count // world_size)) < world_size]
    row_wise = {table: count for table, count in rows.items() if kinds.get(table) == "row_wise"}
    if row_wise and all(table in short for table in row_wise):
        raise ValueError(
            f"the row_wise tables of width {collection.embedding_dim()} have rows {row_wise}, too few for {world_size} "
            "ranks; on CPU fbgemm needs a row on every rank: choose 'table_wise' for these tables"
        )
    kinds.update({table: "table_wise" for table in short if kinds.get(table) is None})
