"""AUC per task against the count of well-ordered pairs."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from hstu.metrics import RankingMetrics, auc_standard_error
from hstu.model import RankingOutput


def output(logits: torch.Tensor, labels: torch.Tensor, items: torch.Tensor | None = None) -> RankingOutput:
    return RankingOutput(logits, labels, torch.zeros(()), labels.numel(), items)


def share_of_ordered_pairs(logits: list[float], labels: list[int]) -> float:
    """The probability that a random positive scores above a random negative; ties count half."""
    pairs = [
        (p > n) + (p == n) / 2 for p, is_p in zip(logits, labels) if is_p for n, is_n in zip(logits, labels) if not is_n
    ]
    return sum(pairs) / len(pairs) if pairs else math.nan


def aucs(metrics: RankingMetrics) -> dict[str, float]:
    return {name: value for name, value in metrics.compute().items() if not name.endswith("_se")}


predictions = st.lists(st.tuples(st.integers(-30, 30), st.integers(0, 1), st.integers(0, 1)), max_size=25)


@given(st.lists(predictions, max_size=4))
def test_auc_is_the_share_of_ordered_pairs_over_all_steps(steps):
    metrics = RankingMetrics(2)
    for step in steps:
        # Some steps have all logits within [0, 1], others far outside: the same scale must hold for all of them.
        logits = torch.tensor([[p[0] / 10, 40 - p[0] * 4e-6] for p in step]).view(-1, 2)  # neighbours of 40
        metrics.update(output(logits, torch.tensor([[p[1], p[2]] for p in step], dtype=torch.float32).view(-1, 2)))
    everything = [p for step in steps for p in step]
    expected = [
        share_of_ordered_pairs([p[0] for p in everything], [p[1] for p in everything]),
        share_of_ordered_pairs([-p[0] for p in everything], [p[2] for p in everything]),
    ]
    found = metrics.compute()
    assert [found["auc_task_0"], found["auc_task_1"]] == pytest.approx(expected, abs=1e-6, nan_ok=True)


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e36])
def test_auc_is_that_of_scikit_learn(size):
    generator = torch.Generator().manual_seed(0)
    logits = size * torch.randn(4000, 1, generator=generator)
    logits[::5] = logits[::5].sign() * size  # many ties
    labels = (torch.rand(4000, 1, generator=generator) < torch.sigmoid(logits / size)).float()
    metrics = RankingMetrics(1)
    for part in zip(logits.split(900), labels.split(900)):
        metrics.update(output(*part))
    expected = roc_auc_score(labels.flatten().numpy(), logits.flatten().numpy())
    assert metrics.compute()["auc_task_0"] == pytest.approx(expected, abs=1e-6)


def test_a_prediction_that_is_no_number_is_not_ranked():
    metrics = RankingMetrics(2)
    logits = torch.tensor([[math.nan, 1.0], [0.0, -math.inf], [-0.0, math.inf]])
    metrics.update(output(logits, torch.tensor([[1.0, 1.0], [0.0, 0.0], [1.0, 0.0]])))
    found = metrics.compute()
    assert math.isnan(found["auc_task_0"]) and found["auc_task_1"] == 0.5
    metrics.reset()
    metrics.update(output(logits[1:], torch.tensor([[0.0, 0.0], [1.0, 1.0]])))
    assert aucs(metrics) == {"auc_task_0": 0.5, "auc_task_1": 1.0}


@pytest.mark.parametrize("labels", [[], [1.0, 1.0], [0.0]])
def test_auc_is_nan_without_both_labels(labels):
    metrics = RankingMetrics(1)
    metrics.update(output(torch.linspace(-1, 1, len(labels)).view(-1, 1), torch.tensor(labels).view(-1, 1)))
    assert math.isnan(metrics.compute()["auc_task_0"])


def test_reset_forgets_and_compute_may_be_repeated():
    metrics = RankingMetrics(1)
    right = output(torch.tensor([[2.0], [-1.0]]), torch.tensor([[1.0], [0.0]]))
    metrics.update(right)
    assert aucs(metrics) == aucs(metrics) == {"auc_task_0": 1.0}
    metrics.reset()
    metrics.update(output(-right.logits, right.labels))
    assert aucs(metrics) == {"auc_task_0": 0.0}


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 1)), min_size=1, max_size=20))
def test_popularity_is_judged_like_a_model(predictions):
    popularity = torch.tensor([900, 3, 0, 3, 70_000])
    metrics = RankingMetrics(1, popularity=popularity)
    items, labels = (torch.tensor(part) for part in zip(*predictions))
    metrics.update(output(torch.zeros(len(items), 1), labels.view(-1, 1).float(), items))
    expected = share_of_ordered_pairs(popularity[items].tolist(), labels.tolist())
    assert metrics.compute()["popularity_auc_task_0"] == pytest.approx(expected, abs=1e-6, nan_ok=True)


def test_popularity_needs_the_items():
    metrics = RankingMetrics(1, popularity=torch.ones(3))
    with pytest.raises(ValueError, match="the output has no items"):
        metrics.update(output(torch.zeros(1, 1), torch.ones(1, 1)))


scored = st.lists(st.tuples(st.integers(-4, 4), st.booleans()), min_size=4, max_size=25)


@given(scored)
def test_the_standard_error_is_that_of_delongs_placements_pair_by_pair(rows):
    positives, negatives = ([score for score, label in rows if label == wanted] for wanted in (True, False))
    assume(len(positives) > 1 and len(negatives) > 1)

    def share(score, others, sign):
        return statistics.fmean((sign * score > sign * other) + (score == other) / 2 for other in others)

    above = [share(score, negatives, 1) for score in positives]
    below = [share(score, positives, -1) for score in negatives]
    expected = math.sqrt(statistics.variance(above) / len(above) + statistics.variance(below) / len(below))
    scores, labels = (torch.tensor([row[index] for row in rows]) for index in (0, 1))
    assert float(auc_standard_error(scores.double(), labels)) == pytest.approx(expected, abs=1e-9)


def test_a_single_prediction_of_a_label_has_no_standard_error():
    metrics = RankingMetrics(1)
    metrics.update(output(torch.tensor([[1.0], [0.0], [2.0]]), torch.tensor([[1.0], [0.0], [0.0]])))
    found = metrics.compute()
    assert found["auc_task_0"] == 0.5 and math.isnan(found["auc_task_0_se"])
