"""HSTU trains the same weights with the shuffler on and off: exactly on plain tables, to rounding on sharded ones."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torchrec.distributed.train_pipeline.train_pipelines import TrainPipelineBase, TrainPipelineSparseDist

from commons.datasets.hstu_batch import FeatureConfig, RandomDistribution
from commons.datasets.random_dataset import RandomHSTUDataset
from commons.distributed.batch_shuffler import IdentityBalancedBatchShuffler
from commons.pipeline import balanced
from hstu import HSTUBalancedBatchShuffler
from hstu.model import HSTUConfig, HSTURankingModel, RankingConfig
from hstu.sharding import build_distributed_model, dense_parameters
from tests.models import AveragedSGD, weights_of

STEPS = 20
SIZES = {"hidden_size": 8, "num_layers": 2, "kv_channels": 4}
TABLES = {"user": 30, "item": 50, "action": 6}


def batches(candidates):
    """Heavy-tailed histories; the last batch is incomplete, by another number of rows on every rank."""
    rank = dist.get_rank()
    lengths = RandomDistribution("zipf", low=1, high=24, alpha=1.2)
    return RandomHSTUDataset(
        [FeatureConfig(["user"], [30], 1, False), FeatureConfig(["item", "action"], [50, 6], 24, True, lengths)],
        "item",
        ["user"],
        "action",
        batch_size=6,
        num_batches=STEPS,
        max_num_candidates=candidates,
        num_tasks=2,
        last_batch_size=1 + rank,
        seed=5,
        rank=rank,
        world_size=dist.get_world_size(),
    )


def _train(kind, candidates, sharding):
    device = torch.device("cpu")
    torch.manual_seed(0)
    hstu = HSTUConfig(num_attention_heads=2, max_sequence_length=2 * 24 + 1, **SIZES)
    config = RankingConfig(hstu, TABLES, (8, 2), 2)
    if sharding is None:
        model = HSTURankingModel(config, plain_embeddings=True).double()
        optimizer, pipeline_class = AveragedSGD(model.parameters(), lr=0.2), TrainPipelineBase
    else:
        model = build_distributed_model(
            HSTURankingModel(config),
            device=device,
            embedding_optimizer="sgd",
            embedding_lr=0.2,
            sharding=sharding,
            local_world_size=dist.get_world_size(),
        )
        optimizer = torch.optim.SGD(dense_parameters(model).values(), lr=0.2)
        pipeline_class = TrainPipelineSparseDist
    if kind == "hstu":
        shuffler = HSTUBalancedBatchShuffler(8, 2, 4, 2)
    else:
        shuffler = IdentityBalancedBatchShuffler()
    before = weights_of(model)
    pipeline = balanced(pipeline_class)(model, optimizer, device, batch_shuffler=shuffler)
    source = iter(batches(candidates))
    moved = losses = 0
    try:
        for _ in range(STEPS):
            output = pipeline.progress(source)
            losses += float(output.loss_sum)
            moved += pipeline.last_stats is not None and pipeline.last_stats.moved
    finally:
        shuffler.close()
    total = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(total)
    return before, weights_of(model), moved, float(total)


@pytest.mark.parametrize("candidates", [0, 3])
def test_plain_tables_in_float64(ranks, candidates):
    before, on, moved, loss_on = ranks.run(_train, "hstu", candidates, None)[0]
    _, off, _, loss_off = ranks.run(_train, "identity", candidates, None)[0]
    assert moved > 10
    for name in on:
        assert float((on[name] - off[name]).abs().max()) < 1e-10
    assert any(float((on[name] - before[name]).abs().max()) > 1e-2 for name in on)  # it did train
    assert loss_on == pytest.approx(loss_off, rel=1e-12)


@pytest.mark.parametrize("sharding", ["table_wise", "row_wise"])
def test_sharded_tables_in_float32(ranks, sharding):
    _, on, moved, loss_on = ranks.run(_train, "hstu", 0, sharding)[0]
    _, off, _, loss_off = ranks.run(_train, "identity", 0, sharding)[0]
    assert moved > 10
    for name in on:
        torch.testing.assert_close(on[name], off[name], rtol=1e-5, atol=1e-5 * float(off[name].abs().max()))
    assert loss_on == pytest.approx(loss_off, rel=1e-5)
