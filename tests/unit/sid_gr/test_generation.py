"""The trie of valid SIDs, beam search over it and metrics of generated items, against enumeration."""

import math
import statistics

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sid_gr.metrics import GenerationMetrics, parse_metric
from sid_gr.model.beam_search import GeneratedItems, beam_search
from sid_gr.model.gpt import GenerationOutput
from sid_gr.model.trie import SIDTrie
from tests.helpers.models.sid_models import metric_of_user


@st.composite
def sid_sets(draw):
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    codes = draw(st.lists(st.tuples(*(st.integers(0, size - 1) for size in sizes)), min_size=1, max_size=20))
    return sizes, codes


@given(sid_sets())
def test_lookup(given_sids):
    sizes, codes = given_sids
    trie = SIDTrie(np.array(codes), sizes)
    everything = torch.cartesian_prod(*(torch.arange(size) for size in sizes)).view(-1, len(sizes))
    valid = sorted(set(codes))
    expected = [valid.index(tuple(sid)) if tuple(sid) in set(codes) else -1 for sid in everything.tolist()]
    assert trie.lookup(everything).tolist() == expected
    assert trie.lookup(everything[:0]).tolist() == []


def scores_of_all(trie, tables, row):
    """Log-probability of every valid SID: a code's logits depend on the row, and on all codes before it."""
    scores = []
    for sid in trie.sids.tolist():
        prefix, total = (), 0.0
        for code in sid:
            total += float(logits_of(tables, row, prefix, trie.codebook_sizes[len(prefix)]).log_softmax(0)[code])
            prefix = (*prefix, code)
        scores.append(total)
    return torch.tensor(scores)


def logits_of(seed, row, prefix, size) -> torch.Tensor:
    generator = torch.Generator().manual_seed(hash((seed, row, *prefix)) % 2**63)
    return 3 * torch.randn(size, generator=generator, dtype=torch.float64)


class Prefixes:
    """Follows the beams as a decoder does."""

    def __init__(self, seed, sizes, num_rows):
        self.seed, self.sizes = seed, sizes
        self.beams = [[()] for _ in range(num_rows)]

    def first(self):
        rows = [logits_of(self.seed, row, (), self.sizes[0]) for row in range(len(self.beams))]
        return torch.stack(rows) if rows else torch.zeros(0, self.sizes[0], dtype=torch.float64)

    def __call__(self, hierarchy, codes, parents):
        self.beams = [
            [(*beams[parent], code) for code, parent in zip(row_codes, row_parents)]
            for beams, row_codes, row_parents in zip(self.beams, codes.tolist(), parents.tolist())
        ]
        size = self.sizes[hierarchy]
        rows = [
            torch.stack([logits_of(self.seed, row, beam, size) for beam in beams])
            for row, beams in enumerate(self.beams)
        ]
        return torch.stack(rows) if rows else torch.zeros(*codes.shape, size, dtype=torch.float64)


@given(sid_sets(), st.integers(0, 3), st.integers(1, 4) | st.just(10**6), st.integers(0, 99))
def test_a_beam_finds_different_valid_items_with_their_scores_the_best_first(given_sids, num_rows, width, seed):
    """One that is as wide as the items finds all of them."""
    sizes, codes = given_sids
    trie = SIDTrie(np.array(codes), sizes)
    width = min(width, trie.num_sids)
    steps = Prefixes(seed, sizes, num_rows)
    found = beam_search(trie, width, steps.first(), steps)
    assert found.leaves.shape == found.log_probs.shape == (num_rows, width)
    for row in range(num_rows):
        leaves = found.leaves[row].tolist()
        assert len(set(leaves)) == width and min(leaves) >= 0 and max(leaves) < trie.num_sids
        scores = scores_of_all(trie, seed, row)
        torch.testing.assert_close(found.log_probs[row], scores[leaves].double(), rtol=1e-6, atol=1e-6)
        assert found.log_probs[row].tolist() == sorted(found.log_probs[row].tolist(), reverse=True)


def test_a_narrow_beam_can_miss_what_a_wide_one_finds():
    trie = SIDTrie(np.array([[0, 0], [0, 1], [1, 0]]), [2, 2])
    first = torch.tensor([[0.6, 0.4]]).log()

    def steps(hierarchy, codes, parents):
        # Code 0 is likelier, but what follows it is shared by two; code 1 leads to one item alone.
        following = torch.tensor([[0.5, 0.5], [1.0, 0.0]])
        return following[codes].log().clamp(min=-1e9)

    assert beam_search(trie, 1, first, steps).leaves.tolist() == [[0]]
    wide = beam_search(trie, 3, first, steps)
    assert wide.leaves[0, 0] == 2
    assert wide.log_probs.exp().tolist()[0] == pytest.approx([0.4, 0.3, 0.3])


@pytest.mark.parametrize(
    ("codes", "sizes", "message"),
    [
        ([[0, 1, 2]], [3, 3], "codes have shape (1, 3)"),
        (np.zeros((0, 2)), [3, 3], "at least one"),
        ([[0, 3]], [3, 3], "codes reach from [0, 3] to [0, 3], codebook_sizes is [3, 3]"),
        ([[-1, 0]], [3, 3], "codes must be in [0, size)"),
    ],
)
def test_codes_that_do_not_fit(codes, sizes, message):
    with pytest.raises(ValueError) as caught:
        SIDTrie(np.array(codes), sizes)
    assert message in str(caught.value)


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
    st.tuples(st.permutations(range(7)).map(lambda items: items[:5]), st.lists(st.integers(-2, 6), max_size=4)),
    max_size=8,
)


@given(steps=st.lists(USERS, max_size=3))
def test_metrics_are_means_over_users(steps):
    metrics = GenerationMetrics(NAMES, beam_width=5)
    for users in steps:
        metrics.update(output_of(users))
    # Negative items cannot be generated; a user without true items is not judged; a repeated item counts once.
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
    with pytest.raises(ValueError, match="'NDCG@11', generation ranks 10 items; .* raise top_k_for_gen"):
        GenerationMetrics(["NDCG@11"], beam_width=10)
