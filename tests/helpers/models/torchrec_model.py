"""A small TorchRec model for pipeline tests, its plain float64 twin, and the data they train on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torch.distributed.tensor import DTensor
from torchrec.distributed.comm import get_local_size
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from commons.distributed import global_mean_loss
from commons.sequence_batch.batch import BaseBatch

KEYS = ["item", "action"]
NUM_IDS = 40
WIDTH = 8
LEARNING_RATE = 0.1


@dataclass
class SampleBatch(BaseBatch):
    """Weighted sequences with one target per row; `sample_id` names each real row."""

    sample_id: torch.Tensor = field(kw_only=True)
    target: torch.Tensor = field(kw_only=True)


def make_batch(ids: list[int], rows: int, longest: int = 12) -> SampleBatch:
    """A batch whose rows depend on their ids alone; padded to `rows`."""
    lengths = torch.zeros(len(KEYS), rows, dtype=torch.int64)
    values: list[list[torch.Tensor]] = [[] for _ in KEYS]
    weights: list[list[torch.Tensor]] = [[] for _ in KEYS]
    target = torch.zeros(rows)
    for row, sample in enumerate(ids):
        generator = torch.Generator().manual_seed(sample)
        target[row] = torch.rand((), generator=generator)
        # heavy-tailed, and now and then a real user with an empty history
        scale = torch.rand((), generator=generator) ** 4
        for key in range(len(KEYS)):
            count = 0 if sample % 7 == 0 else int(longest * scale) + 1
            lengths[key, row] = count
            values[key].append(torch.randint(0, NUM_IDS, (count,), generator=generator))
            weights[key].append(torch.rand(count, generator=generator))
    return SampleBatch(
        features=KeyedJaggedTensor(
            keys=KEYS,
            values=torch.cat([torch.empty(0, dtype=torch.int64), *values[0], *values[1]]),
            weights=torch.cat([torch.empty(0), *weights[0], *weights[1]]),
            lengths=lengths.flatten().to(torch.int32),
            stride=rows,
        ),
        batch_size=rows,
        feature_to_max_seqlen=dict.fromkeys(KEYS, 64),
        actual_batch_size=len(ids),
        sample_id=torch.tensor(ids + [0] * (rows - len(ids)), dtype=torch.int64),
        target=target,
    )


def rank_batches(rank: int, num_batches: int, sizes: list[int]) -> Iterator[SampleBatch]:
    """Batches of one rank: real rows cycle through `sizes`, padded to six where they are fewer but not single."""
    for step in range(num_batches):
        count = sizes[(step + rank) % len(sizes)]
        first = 1 + rank * 100_000 + step * 100
        yield make_batch(list(range(first, first + count)), 6 if 1 < count <= 6 else count)


class Head(nn.Module):
    """Weighted sum of a row's embeddings, one linear layer, squared error; a leaf for TorchRec's tracer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH * len(KEYS), 1)
        self.trained: list[torch.Tensor] = []  # kept as tensors, so that a step reads nothing back

    @property
    def seen(self) -> list[list[int]]:
        """Ids of the real rows of every batch so far."""
        return [ids.tolist() for ids in self.trained]

    def forward(self, embeddings: dict[str, JaggedTensor], batch: SampleBatch) -> tuple[torch.Tensor, torch.Tensor]:
        pooled = []
        for key in KEYS:
            jagged, weights = embeddings[key], batch.features[key].weights()
            row = torch.repeat_interleave(
                torch.arange(batch.batch_size, device=weights.device),
                batch.features[key].lengths().long(),
                output_size=weights.numel(),  # so that the device is not asked
            )
            summed = jagged.values().new_zeros(batch.batch_size, WIDTH)
            pooled.append(summed.index_add(0, row, jagged.values() * weights[:, None].to(jagged.values().dtype)))
        prediction = self.linear(torch.cat(pooled, dim=1)).squeeze(1)
        real = torch.arange(batch.batch_size, device=prediction.device) < batch.actual_batch_size
        error = (prediction - batch.target.to(prediction.dtype)) ** 2 * real
        self.trained.append(batch.sample_id[: batch.actual_batch_size])
        return global_mean_loss(error.sum(), batch.actual_batch_size), error.detach().sum()


def _init(weight: torch.Tensor) -> None:
    with torch.no_grad():
        weight.copy_(torch.sin(torch.arange(weight.numel(), dtype=torch.float64)).view_as(weight))


class ShardableModel(nn.Module):
    """TorchRec embeddings and the head."""

    def __init__(self) -> None:
        super().__init__()
        self.head = Head()
        self.embedding = EmbeddingCollection(
            device=torch.device("meta"),
            tables=[
                EmbeddingConfig(
                    name=f"t_{key}", embedding_dim=WIDTH, num_embeddings=NUM_IDS, feature_names=[key], init_fn=_init
                )
                for key in KEYS
            ],
        )

    def forward(self, batch: SampleBatch) -> tuple[torch.Tensor, torch.Tensor]:
        return self.head(self.embedding(batch.features), batch)


class PlainModel(nn.Module):
    """The same in float64 on plain embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.head = Head()
        self.tables = nn.ModuleDict({key: nn.Embedding(NUM_IDS, WIDTH) for key in KEYS})
        for table in self.tables.values():
            _init(table.weight)
        self.double()

    def forward(self, batch: SampleBatch) -> tuple[torch.Tensor, torch.Tensor]:
        embeddings = {
            key: JaggedTensor(
                values=self.tables[key](batch.features[key].values()), lengths=batch.features[key].lengths()
            )
            for key in KEYS
        }
        return self.head(embeddings, batch)


class AnyBatch(nn.Module):
    """Trains batches of any type, and hands each of them to a function; what it computes does not matter."""

    def __init__(self, note: Callable[[Any], object]) -> None:
        super().__init__()
        self.weight, self.note = nn.Parameter(torch.zeros(())), note

    def forward(self, batch: Any) -> tuple[torch.Tensor, Any]:
        self.note(batch)
        return self.weight * 1.0, batch


class AveragedSGD(torch.optim.SGD):
    """SGD on gradients averaged over the ranks: data parallelism by hand."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                if dist.is_initialized():
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= dist.get_world_size()
        return super().step(closure)


def build_plain() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = PlainModel()
    return model, AveragedSGD(model.parameters(), lr=LEARNING_RATE)


def build_sharded(sharding: str = "table_wise", device: str = "cpu") -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = ShardableModel()
    model.head.to(rank_device(device))
    fused = {"learning_rate": LEARNING_RATE, "optimizer": EmbOptimType.EXACT_SGD}
    sharder, world_size = EmbeddingCollectionSharder(fused_params=fused), dist.get_world_size()
    constraint = ParameterConstraints(sharding_types=[sharding], compute_kernels=["fused"])
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=world_size, compute_device=device, local_world_size=get_local_size(world_size)),
        constraints={f"t_{key}": constraint for key in KEYS},
        batch_size=32,
    )
    plan = planner.collective_plan(model, [sharder], dist.group.WORLD)
    parallel = DistributedModelParallel(model, device=rank_device(device), plan=plan, sharders=[sharder])
    dense = [parameter for name, parameter in parallel.named_parameters() if "head" in name]
    return parallel, torch.optim.SGD(dense, lr=LEARNING_RATE)


def rank_device(kind: str) -> torch.device:
    """The device of this rank, one GPU per rank."""
    return torch.device("cpu") if kind == "cpu" else torch.device(kind, torch.cuda.current_device())


def head_of(model: nn.Module) -> Head:
    return next(module for module in model.modules() if isinstance(module, Head))


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every weight, whole, by a name that does not depend on how the model is wrapped."""
    result = {}
    for name, value in sorted(model.state_dict().items()):
        if hasattr(value, "local_shards"):
            whole = torch.zeros(value.size(), device=next(model.parameters()).device)
            for shard in value.local_shards():
                rows, columns = shard.metadata.shard_offsets
                whole[rows : rows + shard.tensor.shape[0], columns : columns + shard.tensor.shape[1]] = shard.tensor
            dist.all_reduce(whole)
            value = whole
        value = value.full_tensor() if isinstance(value, DTensor) else value
        result[name] = value.detach().cpu().clone()
    return result
