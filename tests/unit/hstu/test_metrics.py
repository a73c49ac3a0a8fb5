"""AUC per task against the count of well-ordered pairs; metrics of retrieval against a sorted list of all items."""

import math
import statistics

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch import nn

from hstu.metrics import RankingMetrics, auc_with_error
from hstu.model import RankingOutput, RetrievalOutput
from hstu.model.retrieval import unit
from hstu.retrieval_metrics import RetrievalMetrics


def output(logits: torch.Tensor, labels: torch.Tensor, items: torch.Tensor | None = None) -> RankingOutput:
    return RankingOutput(logits, labels, torch.zeros(()), labels.numel(), items)


def share_of_ordered_pairs(logits: list[float], labels: list[int]) -> float:
    """The probability that a random positive scores above a random negative; ties count half."""
    pairs = [
        (p > n) + (p == n) / 2 for p, is_p in zip(logits, labels) if is_p for n, is_n in zip(logits, labels) if not is_n
    ]
    return sum(pairs) / len(pairs) if pairs else math.nan


predictions = st.lists(st.tuples(st.integers(-30, 30), st.integers(0, 1), st.integers(0, 1)), max_size=25)


@given(st.lists(predictions, max_size=4))
@example([])
@example([[(3, 1, 0), (-3, 1, 0)]])  # of either label alone there is no AUC
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
    # To the last bit: on other ranks the same predictions come in another order.
    assert [found["auc_task_0"], found["auc_task_1"]] == pytest.approx(expected, rel=0, abs=0, nan_ok=True)


def test_a_prediction_that_is_no_number_is_not_ranked():
    metrics = RankingMetrics(2)
    logits = torch.tensor([[math.nan, 1.0], [0.0, -math.inf], [-0.0, math.inf]])
    metrics.update(output(logits, torch.tensor([[1.0, 1.0], [0.0, 0.0], [1.0, 0.0]])))
    found = metrics.compute()
    assert math.isnan(found["auc_task_0"]) and found["auc_task_1"] == 0.5
    metrics.reset()
    metrics.update(output(logits[1:], torch.tensor([[0.0, 0.0], [1.0, 1.0]])))
    found = metrics.compute()
    assert (found["auc_task_0"], found["auc_task_1"]) == (0.5, 1.0)


def test_predictions_are_kept_without_their_graph():
    metrics = RankingMetrics(1)
    metrics.update(output(torch.tensor([[2.0], [-1.0]], requires_grad=True), torch.tensor([[1.0], [0.0]])))
    assert not any(kept.requires_grad for kept in metrics._predictions)


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
@example([(1, True), (0, False), (2, False)])
def test_the_standard_error_is_that_of_delongs_placements_pair_by_pair(rows):
    positives, negatives = ([score for score, label in rows if label == wanted] for wanted in (True, False))
    assume(positives and negatives)

    def share(score, others, sign):
        return statistics.fmean((sign * score > sign * other) + (score == other) / 2 for other in others)

    above = [share(score, negatives, 1) for score in positives]
    below = [share(score, positives, -1) for score in negatives]
    # A single prediction of a label has no variance.
    variances = [statistics.variance(each) / len(each) if len(each) > 1 else math.nan for each in (above, below)]
    scores, labels = (torch.tensor([row[index] for row in rows]) for index in (0, 1))
    assert auc_with_error(scores.double(), labels)[1] == pytest.approx(math.sqrt(sum(variances)), abs=1e-9, nan_ok=True)


class Table(nn.Module):
    """A table under the name that a model gives it."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.embeddings = nn.ModuleDict({"item": nn.Embedding.from_pretrained(weight, freeze=False)})


def output_of(queries: torch.Tensor, targets: list[int]) -> RetrievalOutput:
    return RetrievalOutput(torch.zeros(()), 0, queries, torch.tensor(targets, dtype=torch.int64))


@st.composite
def scored_users(draw):
    num_items, width = draw(st.integers(3, 12)), 3
    # Few different directions, so that many scores are equal; zeros have no direction at all.
    coordinate = st.integers(-1, 1)
    table = draw(st.lists(st.tuples(*[coordinate] * width), min_size=num_items, max_size=num_items))
    steps = draw(
        st.lists(st.lists(st.tuples(st.tuples(*[coordinate] * width), st.integers(0, num_items - 1)), max_size=4))
    )
    popularity = draw(st.lists(st.integers(0, 3), min_size=num_items, max_size=num_items))
    return table, steps, popularity


@settings(max_examples=25)
@given(scored_users(), st.integers(1, 3))
def test_metrics_equal_a_sorted_list_for_every_user(case, top_k):
    table, steps, popularity = case
    weight = torch.tensor(table, dtype=torch.float32)
    names = ["HR@1", f"HR@{top_k}", f"NDCG@{top_k}"]
    metrics = RetrievalMetrics(Table(weight), "item", names, temperature=0.5, popularity=torch.tensor(popularity))
    users = []
    for step in steps:
        queries = unit(torch.tensor([query for query, _ in step], dtype=torch.float32).view(-1, 3))
        metrics.update(output_of(queries, [target for _, target in step]))
        users += zip(queries.double(), [target for _, target in step])
    result = metrics.compute()
    if not users:
        assert all(math.isnan(value) for value in result.values())
        return
    expected = dict.fromkeys(["loss", *names, *(f"popularity_{name}" for name in names)], 0.0)
    squares = dict.fromkeys(expected, 0.0)
    for query, target in users:
        scores = ((unit(weight.double()) @ query) * 2**24).round() / 2**24
        expected["loss"] += float(torch.logsumexp(scores / 0.5, 0) - scores[target] / 0.5)
        for prefix, values in (("", scores.tolist()), ("popularity_", popularity)):
            order = sorted(range(len(table)), key=lambda item: (-values[item], item))
            rank = 1 + order.index(target)
            gains = {"HR@1": rank == 1, f"HR@{top_k}": rank <= top_k}
            gains[f"NDCG@{top_k}"] = (rank <= top_k) / math.log2(1 + rank)
            for name, gain in gains.items():
                expected[prefix + name] += gain
                squares[prefix + name] += gain**2
    means = {name: total / len(users) for name, total in expected.items()}
    errors = {
        f"{name}_se": math.sqrt(max(0, squares[name] / len(users) - means[name] ** 2) / len(users))
        for name in means
        if name != "loss"
    }
    assert result == pytest.approx(means | errors, abs=1e-6)


def test_metrics_in_chunks_and_after_a_reset(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(40, 6, generator=generator)
    queries, targets = unit(torch.randn(15, 6, generator=generator)), list(range(15))
    table = Table(weight)
    whole = RetrievalMetrics(table, "item", ["HR@5"], temperature=0.1)
    whole.update(output_of(queries, targets))
    monkeypatch.setattr("hstu.retrieval_metrics._MAX_SCORES", 100)
    chunked = RetrievalMetrics(table, "item", ["HR@5"], temperature=0.1)
    for part in (slice(0, 4), slice(4, 15)):
        chunked.update(output_of(queries[part], targets[part]))
    first = chunked.compute()
    assert first == pytest.approx(whole.compute()) and 0 < first["HR@5"] < 1
    chunked.reset()
    with torch.no_grad():
        table.embeddings["item"].weight[:15] = queries  # as training would
    chunked.update(output_of(queries, targets))
    assert chunked.compute()["HR@5"] == 1.0


def test_a_score_that_is_no_number_is_no_hit():
    metrics = RetrievalMetrics(Table(torch.eye(4)), "item", ["HR@1", "HR@4", "NDCG@4"], temperature=0.1)
    metrics.update(output_of(torch.full((1, 4), torch.nan), [0]))
    found = metrics.compute()
    assert math.isnan(found.pop("loss")) and not any(found.values())


@pytest.mark.parametrize("temperature", [1e-5, 1e3])
def test_the_loss_is_finite_at_any_temperature(temperature):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(9, 4, generator=generator)
    query = unit(torch.randn(1, 4, generator=generator))
    for target in range(9):
        metrics = RetrievalMetrics(Table(weight), "item", [], temperature=temperature)
        metrics.update(output_of(query, [target]))
        scores = (unit(weight.double()) @ query[0].double()) / temperature
        expected = float(torch.logsumexp(scores, 0) - scores[target])
        assert metrics.compute()["loss"] == pytest.approx(expected, rel=1e-5, abs=1e-7 / temperature)


@pytest.mark.parametrize("num_items", [3, 40])
def test_items_at_right_angles_are_equal_whatever_their_rounding_errors(num_items):
    """All scores are 0 but for errors that depend on how many items are scored together."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(num_items, 2, generator=generator).repeat_interleave(2, dim=1) * torch.tensor([1, -1, 1, -1])
    queries = torch.randn(9, 2, generator=generator).repeat_interleave(2, dim=1)
    metrics = RetrievalMetrics(Table(weight), "item", ["HR@1", "HR@2"], temperature=0.1)
    metrics.update(output_of(unit(queries), [0, 1, 2] * 3))
    assert metrics.compute()["HR@1"] == pytest.approx(1 / 3) and metrics.compute()["HR@2"] == pytest.approx(2 / 3)


@pytest.mark.parametrize("direction", [-torch.inf, torch.inf])
def test_an_item_is_never_better_than_itself(direction, monkeypatch):
    """The true item's score is computed on its own and among all items; the two may round apart."""
    score_all = RetrievalMetrics._scores

    def round_apart(self, queries, weight):
        scores = score_all(self, queries, weight).float()
        return torch.nextafter(scores, torch.full_like(scores, direction)).double()

    monkeypatch.setattr(RetrievalMetrics, "_scores", round_apart)
    metrics = RetrievalMetrics(Table(torch.eye(4)), "item", ["HR@1", "NDCG@4"], temperature=0.1)
    metrics.update(output_of(torch.eye(4)[:3], [0, 1, 2]))
    found = metrics.compute()
    assert found["HR@1"] == found["NDCG@4"] == 1.0


@pytest.mark.parametrize("name", ["HR", "HR@0", "AUC@3", "hr@10", "NDCG@-1", "HR@10 "])
def test_unknown_metrics_are_named(name):
    with pytest.raises(ValueError, match="eval_metrics has .*; metrics of retrieval are HR@K, NDCG@K"):
        RetrievalMetrics(Table(torch.eye(4)), "item", [name], temperature=0.1)


def test_metrics_that_cannot_be_are_named():
    with pytest.raises(ValueError, match="eval_metrics has 'HR@10', retrieval ranks 4 items"):
        RetrievalMetrics(Table(torch.eye(4)), "item", ["HR@10"], temperature=0.1)
    with pytest.raises(ValueError, match="the model has 0 tables 'movie'"):
        RetrievalMetrics(Table(torch.eye(4)), "movie", ["HR@1"], temperature=0.1)
