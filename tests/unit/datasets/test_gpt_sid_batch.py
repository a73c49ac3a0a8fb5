"""GPTSIDBatch: what random batches look like, what is refused, what a row costs in tokens, and how rows travel."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from commons.datasets.gpt_sid_batch import LABEL_NAME, GPTSIDBatch, RandomDistribution, codebook_offsets
from commons.datasets.hstu_batch import padded_kjt
from tests.helpers.batches.any_batches import as_values

SIZES = [5, 3, 7]


def random_batch(seed=0, batch_size=6, num_real=None, longest=9, most_candidates=3, **options) -> GPTSIDBatch:
    options |= {"actual_batch_size": num_real, "generator": torch.Generator().manual_seed(seed)}
    return GPTSIDBatch.random(batch_size, SIZES, longest, most_candidates, device="cpu", **options)


def rows_of(kjt, key) -> list[list[int]]:
    return [row.tolist() for row in kjt[key].to_dense()]


def build(history, candidate, **changes) -> GPTSIDBatch:
    """A batch of one row from lists of ids."""
    values = {"history": torch.tensor(history), "candidate": torch.tensor(candidate)}
    fields = {
        "features": padded_kjt(values, {name: torch.tensor([len(value)]) for name, value in values.items()}, 1),
        "batch_size": 1,
        "feature_to_max_seqlen": {"history": 30, "candidate": 30},
        "history_feature_name": "history",
        "candidate_feature_name": "candidate",
        "num_hierarchies": 3,
        "codebook_sizes": SIZES,
    }
    return GPTSIDBatch(**(fields | changes))


class TestRandom:
    @given(
        seed=st.integers(0, 2**32),
        batch_size=st.integers(1, 9),
        padding=st.integers(0, 9),
        longest=st.integers(0, 9),
        most_candidates=st.integers(0, 3),
        with_labels=st.booleans(),
    )
    def test_rows_keep_the_rules(self, seed, batch_size, padding, longest, most_candidates, with_labels):
        num_real = max(0, batch_size - padding)
        batch = random_batch(seed, batch_size, num_real, longest, most_candidates, with_labels=with_labels)
        assert (batch.batch_size, batch.actual_batch_size) == (batch_size, num_real)
        assert (batch.max_history_length, batch.max_candidate_length) == (longest, most_candidates)
        histories, candidates = (rows_of(batch.features, key) for key in ("history", "candidate"))
        for row, (history, candidate) in enumerate(zip(histories, candidates)):
            assert len(history) % 3 == 0 and len(history) <= 3 * longest
            assert len(candidate) % 3 == 0 and len(candidate) <= 3 * most_candidates
            if row >= num_real:
                assert history == candidate == []
            elif most_candidates:
                assert candidate
            for place, code in enumerate(history + candidate):
                first = codebook_offsets(SIZES)[place % 3]
                assert first <= code < first + SIZES[place % 3]
        if with_labels:
            assert batch.labels.values().dtype == torch.int64
            offsets = codebook_offsets(SIZES)
            labels = rows_of(batch.labels, LABEL_NAME)
            assert [[code + offsets[i % 3] for i, code in enumerate(row)] for row in labels] == candidates
        assert batch.num_loss_tokens() == (sum(map(len, candidates)) if with_labels else 0)

    def test_histories_follow_a_distribution_and_are_clipped(self):
        dist = RandomDistribution("zipf", low=1, alpha=1.2)
        items = random_batch(batch_size=400, longest=30, history_dist=dist).code_lengths("history") // 3
        drawn = dist.sample(400, generator=torch.Generator().manual_seed(0)).clamp(max=30)
        assert items.tolist() == drawn.tolist() and items.max() == 30

    def test_items_are_drawn_from_a_table(self):
        sids = torch.tensor([[0, 1, 2], [4, 2, 6]])
        batch = random_batch(batch_size=50, sids=sids)
        codes = batch.features.values().view(-1, 3) - torch.tensor(codebook_offsets(SIZES))
        assert {tuple(row) for row in codes.tolist()} == {(0, 1, 2), (4, 2, 6)}

    @pytest.mark.parametrize("sids", [None, torch.tensor([[0, 1, 2], [4, 2, 6]])], ids=["codes", "items"])
    def test_numbers_are_drawn_on_the_host_whatever_the_default_device_is(self, sids):
        """Without a generator, in a script that has called torch.set_default_device; no data is on this one."""

        def draw():
            torch.manual_seed(3)
            return GPTSIDBatch.random(4, SIZES, 5, 2, sids=sids, device="cpu")

        expected = draw()
        with torch.device("meta"):
            batch = draw()
        assert as_values(batch) == as_values(expected)


ITEM = [0, 5, 8]


class TestChecks:
    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (lambda: random_batch(num_real=7), "actual_batch_size is 7"),
            (lambda: random_batch(longest=-1), "max_history_length is -1"),
            (lambda: random_batch(longest="9"), "max_history_length is '9'"),
            (lambda: random_batch(most_candidates=-2), "max_candidate_length is -2"),
            (lambda: random_batch(sids=torch.zeros(4, 2).long()), r"sids have shape \(4, 2\), there are 3 codebooks"),
            (lambda: random_batch(sids=torch.zeros(0, 3).long()), r"sids have shape \(0, 3\), there are 3 codebooks"),
            (lambda: GPTSIDBatch.random(2, [], 5, device="cpu"), "num_hierarchies is 0"),
            (lambda: GPTSIDBatch.random(2, [4, 0], 5, device="cpu"), "at least one code"),
            (lambda: build(ITEM, ITEM, history_feature_name="past"), "history_feature_name is 'past', the keys are"),
            (lambda: build(ITEM, ITEM, candidate_feature_name="history"), "are both 'history'"),
            (lambda: build(ITEM, ITEM, feature_to_max_seqlen={"history": 9}), "not the candidate_feature_name 'cand"),
            (lambda: build(ITEM, ITEM, num_hierarchies=0, codebook_sizes=None), "num_hierarchies is 0"),
            (lambda: build(ITEM, ITEM, num_hierarchies=3.0), "num_hierarchies is 3.0"),
            (lambda: build(ITEM, ITEM, num_hierarchies=2), r"codebook_sizes is \[5, 3, 7\], num_hierarchies is 2"),
            (lambda: build(ITEM, ITEM, codebook_sizes=[5, 3, 0]), "at least one code"),
            (lambda: build(ITEM[:2], ITEM), "row 0 of 'history' has 2 ids, num_hierarchies is 3"),
        ],
    )
    def test_what_is_no_batch_is_refused(self, make, message):
        with pytest.raises(ValueError, match=message):
            make()

    @pytest.mark.parametrize(
        ("ids", "code", "hierarchy"), [([0, 5, 15], 7, 2), ([5, 5, 8], 5, 0), ([0, 5, 8, 1, 3, 8], -2, 1)]
    )
    def test_an_id_outside_its_codebook(self, ids, code, hierarchy):
        with pytest.raises(ValueError, match=f"has code {code} in hierarchy {hierarchy}"):
            build(ITEM, ids)
        assert build(ITEM, ids, codebook_sizes=None).codebook_sizes is None  # unchecked

    def test_codebook_sizes_are_a_list_on_every_rank(self):
        assert build(ITEM, ITEM, codebook_sizes=tuple(SIZES)).codebook_sizes == SIZES


class TestTokens:
    def test_bos_and_all_codes_but_the_last(self):
        assert build(ITEM * 4, ITEM * 2).sequence_lengths().tolist() == [1 + 12 + 5]
        assert build(ITEM * 4, []).sequence_lengths().tolist() == [1 + 12]
        assert build([], ITEM).sequence_lengths().tolist() == [3]

    def test_padding_has_no_tokens_and_a_user_without_items_has_one(self):
        batch = random_batch(batch_size=3, num_real=2, longest=0, most_candidates=0)
        assert batch.sequence_lengths().tolist() == [1, 1, 0]
