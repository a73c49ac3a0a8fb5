"""Metrics of generated items against slow definitions, and the names that are refused."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sid_gr.metrics import GenerationMetrics, parse_metric
from sid_gr.model.beam_search import GeneratedItems
from sid_gr.model.gpt import GenerationOutput
from tests.helpers.models.sid_models import metric_of_user

NAMES = ["HitRate@1", "HR@3", "Recall@1", "Recall@5", "NDCG@2", "NDCG@5"]


def output_of(users) -> GenerationOutput:
    """Users as pairs: the ranking, best first, and the true items."""
    return GenerationOutput(
        loss_sum=torch.tensor(0.0),
        num_loss_tokens=0,
        generated=GeneratedItems(
            torch.tensor([ranking for ranking, _ in users], dtype=torch.int64).view(len(users), 5),
            torch.zeros(len(users), 5),
        ),
        candidates=torch.tensor([item for _, true in users for item in true], dtype=torch.int64),
        num_candidates=torch.tensor([len(true) for _, true in users], dtype=torch.int64),
    )


USERS = st.lists(
    st.tuples(st.permutations(range(7)).map(lambda items: items[:5]), st.lists(st.integers(-1, 6), max_size=4)),
    max_size=8,
)


@given(steps=st.lists(USERS, max_size=3))
def test_metrics_are_means_over_users(steps):
    metrics = GenerationMetrics(NAMES, beam_width=5)
    for users in steps:
        metrics.update(output_of(users))
    # −1 is an item that cannot be generated; a user without true items is not judged; a repeated item counts once.
    judged = [(ranking, set(true)) for users in steps for ranking, true in users if true]
    found = metrics.compute()
    for name in NAMES:
        if not judged:
            assert math.isnan(found[name])
            continue
        values = [metric_of_user(name, *user) for user in judged]
        assert found[name] == pytest.approx(statistics.fmean(values))
        assert found[f"{name}_se"] == pytest.approx(statistics.pstdev(values) / math.sqrt(len(values)), abs=1e-7)
    metrics.reset()
    assert all(math.isnan(value) for value in metrics.compute().values())


@pytest.mark.parametrize("name", ["HitRate", "HitRate@0", "hitrate@2", "MRR@10", "NDCG@", "NDCG@-1", "Recall@2.5"])
def test_unknown_names(name):
    with pytest.raises(ValueError, match="metrics of generation are HR@K, Recall@K, NDCG@K"):
        parse_metric(name, beam_width=10)


def test_k_larger_than_the_beam():
    with pytest.raises(ValueError, match="'NDCG@11', the beam has 10 items; .* raise top_k_for_gen"):
        GenerationMetrics(["NDCG@11"], beam_width=10)
