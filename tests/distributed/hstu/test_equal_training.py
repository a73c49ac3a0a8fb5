"""HSTU trains the same weights with the shuffler on and off: exactly on plain tables, to rounding on sharded ones.

For both tasks; retrieval with negatives that rows bring, and with those of the whole global batch.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torchrec.distributed.train_pipeline.train_pipelines import TrainPipelineBase, TrainPipelineSparseDist

from commons.datasets.hstu_batch import FeatureConfig, RandomDistribution
from commons.datasets.random.dataset import RandomHSTUDataset
from commons.distributed.batch_shuffler import IdentityBalancedBatchShuffler
from commons.pipeline import balanced
from hstu import HSTUBalancedBatchShuffler
from hstu.model import HSTUConfig, RankingConfig, RetrievalConfig
from hstu.negatives import draw_negatives, with_negatives
from hstu.sharding import build_distributed_model, dense_parameters
from tests.helpers.models.hstu_models import model_of, with_timestamps
from tests.helpers.models.torchrec_model import AveragedSGD, weights_of
from tests.helpers.pipelines.shuffled_pipelines import before_a_commit, train_steps
from tests.helpers.ranks.on_ranks import on_ranks, on_two_ranks

STEPS = 7
TABLES = {"user": 30, "item": 50, "action": 6}
HSTU = HSTUConfig(8, 2, 2, 4, max_sequence_length=2 * 24 + 1)
RETRIEVAL = RetrievalConfig(HSTU, TABLES, "item", temperature=1.0, embedding_dims={"item": 4})
MODELS = {
    "ranking": RankingConfig(HSTU, TABLES, (8, 2), 2),
    "ranking by time": RankingConfig(dataclasses.replace(HSTU, time_bias=True), TABLES, (8, 2), 2),
    "windows": RankingConfig(
        dataclasses.replace(HSTU, max_attn_len=5, contextual_mask=True, target_group_size=2), TABLES, (8, 2), 2
    ),
    "drawn": dataclasses.replace(RETRIEVAL, num_negatives=12),
    "global": dataclasses.replace(RETRIEVAL, in_batch_pool="global"),
    "neighbours": RETRIEVAL,
}


def batches(config, candidates):
    """Heavy-tailed histories; the last batch is incomplete, by another number of rows on every rank."""
    for number, batch in enumerate(random_batches(candidates)):
        if isinstance(config, RetrievalConfig) and config.negatives_feature_name:
            rows = 1000 * number + 100 * dist.get_rank() + np.arange(batch.actual_batch_size)
            drawn = draw_negatives(rows, config.num_negatives, TABLES["item"], seed=1, epoch=0)
            batch = with_negatives(batch, config.negatives_feature_name, torch.from_numpy(drawn))
        yield with_timestamps(batch) if config.hstu.time_bias else batch


def random_batches(candidates):
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


def _train(kind, task, candidates, sharding):
    """Weights before and after, losses, and how often rows moved."""
    device = torch.device("cpu")
    torch.manual_seed(0)
    config = MODELS[task]
    if sharding is None:
        model = model_of(config, plain_embeddings=True).double()
        optimizer, pipeline_class = AveragedSGD(model.parameters(), lr=0.2), TrainPipelineBase
    else:
        model = build_distributed_model(
            model_of(config),
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
    losses, moved = train_steps(pipeline, shuffler, batches(config, candidates), STEPS)
    return before, weights_of(model), losses, moved


@pytest.mark.parametrize(
    ("task", "candidates"),
    before_a_commit([("ranking by time", 3), ("windows", 3), ("drawn", 0), ("global", 0)], [("ranking", 0)]),
)
@on_ranks
def test_plain_tables_in_float64(task, candidates):
    before, on, losses_on, moved = _train("hstu", task, candidates, None)
    _, off, losses_off, _ = _train("identity", task, candidates, None)
    assert moved > 5
    for name in on:
        assert float((on[name] - off[name]).abs().max()) < 1e-10
    assert any(float((on[name] - before[name]).abs().max()) > 1e-2 for name in on)  # it did train
    assert losses_on == pytest.approx(losses_off, rel=1e-12)


@pytest.mark.parametrize(
    ("task", "sharding"),
    before_a_commit(
        [("ranking", "table_wise"), ("drawn", "row_wise")], [("ranking by time", "row_wise"), ("global", "table_wise")]
    ),
)
@on_ranks
def test_sharded_tables_in_float32(task, sharding):
    (_, on, losses_on, moved), (_, off, losses_off, _) = (
        _train(kind, task, 0, sharding) for kind in ("hstu", "identity")
    )
    assert moved > 5
    for name in on:
        # A small weight, such as a bias, is the sum of terms of order 1, which float32 rounds.
        atol = max(1e-6, 1e-5 * float(off[name].abs().max()))
        torch.testing.assert_close(on[name], off[name], rtol=1e-5, atol=atol)
    assert losses_on == pytest.approx(losses_off, rel=1e-5)


@pytest.mark.slow
@on_two_ranks
def test_negatives_of_neighbours_change_with_the_neighbours():
    """What the docs say cannot be avoided; and that the tests above would notice."""
    (_, _, on, moved), (_, _, off, _) = (_train(kind, "neighbours", 0, None) for kind in ("hstu", "identity"))
    assert moved > 5
    assert abs(sum(on) - sum(off)) > 1e-4 * sum(off)
