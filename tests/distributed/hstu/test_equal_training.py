"""HSTU trains the same weights with the shuffler on and off.

For both tasks; retrieval with negatives that rows bring, and with those of the whole global batch. On sharded tables:
test_a_command_given_twice in tests/distributed/trainer/test_run_folder.py.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torchrec.distributed.train_pipeline.train_pipelines import TrainPipelineBase

from commons.distributed.batch_shuffler import IdentityBalancedBatchShuffler
from commons.pipeline import balanced
from hstu import HSTUBalancedBatchShuffler
from hstu.model import HSTUConfig, RankingConfig, RetrievalConfig
from hstu.negatives import draw_negatives, with_negatives
from tests.helpers.models.hstu_models import TABLES, model_of, random_batch, with_timestamps
from tests.helpers.models.torchrec_model import AveragedSGD, weights_of
from tests.helpers.pipelines.shuffled_pipelines import before_a_commit, largest_difference, train_steps
from tests.helpers.ranks.on_ranks import on_ranks, on_two_ranks

STEPS = 7
HSTU = HSTUConfig(8, 2, 2, 4, max_sequence_length=2 * 24 + 4)
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
    """Histories of up to 24 items; the last batch is incomplete, by another number of rows on every rank."""
    rank = dist.get_rank()
    for number in range(STEPS):
        real, seed = 1 + rank if number == STEPS - 1 else 6, 100 * number + rank
        batch = random_batch(6, max_num_candidates=candidates, actual_batch_size=real, longest=24, seed=seed)
        if isinstance(config, RetrievalConfig) and config.negatives_feature_name:
            rows = 1000 * number + 100 * rank + np.arange(batch.actual_batch_size)
            drawn = draw_negatives(rows, config.num_negatives, TABLES["item"], seed=1, epoch=0)
            batch = with_negatives(batch, config.negatives_feature_name, torch.from_numpy(drawn))
        yield with_timestamps(batch) if config.hstu.time_bias else batch


def _train(kind, task, candidates):
    """Weights before and after, losses, and how often rows moved."""
    torch.manual_seed(0)
    model = model_of(MODELS[task], plain_embeddings=True).double()
    shuffler = HSTUBalancedBatchShuffler(8, 2, 4, 2) if kind == "hstu" else IdentityBalancedBatchShuffler()
    before, optimizer = weights_of(model), AveragedSGD(model.parameters(), lr=0.2)
    pipeline = balanced(TrainPipelineBase)(model, optimizer, torch.device("cpu"), batch_shuffler=shuffler)
    losses, moved = train_steps(pipeline, shuffler, batches(MODELS[task], candidates), STEPS)
    return before, weights_of(model), losses, moved


@pytest.mark.parametrize(
    ("task", "candidates"),
    before_a_commit([("ranking by time", 3), ("windows", 3), ("drawn", 0), ("global", 0)], [("ranking", 0)]),
)
@on_ranks
def test_weights_do_not_depend_on_the_shuffler(task, candidates):
    before, on, losses_on, moved = _train("hstu", task, candidates)
    _, off, losses_off, _ = _train("identity", task, candidates)
    assert moved > 5
    assert largest_difference(on, off) < 1e-10
    assert largest_difference(on, before) > 1e-2  # it did train
    assert losses_on == pytest.approx(losses_off, rel=1e-12)


@pytest.mark.slow
@on_two_ranks
def test_negatives_of_neighbours_change_with_the_neighbours():
    """What the docs say cannot be avoided; and that the tests above would notice."""
    (_, _, on, moved), (_, _, off, _) = (_train(kind, "neighbours", 0) for kind in ("hstu", "identity"))
    assert moved > 5
    assert abs(sum(on) - sum(off)) > 1e-4 * sum(off)
