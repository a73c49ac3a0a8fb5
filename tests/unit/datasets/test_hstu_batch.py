"""HSTUBatch: what random batches look like, what is refused, and the tokens that a model computes."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from commons.datasets.hstu_batch import FeatureConfig, HSTUBatch, RandomDistribution, padded_kjt
from tests.helpers.batches.any_batches import as_values


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _random_batch(
    seed=0, batch_size=6, num_real=None, max_num_candidates=3, num_tasks=2, with_actions=True
) -> HSTUBatch:
    features = [
        FeatureConfig(["user", "country"], [50, 7], 1, is_jagged=False),
        FeatureConfig(["item", "action"], [100, 5], 9, True)
        if with_actions
        else FeatureConfig(["item"], [100], 9, True),
        FeatureConfig(["hobbies"], [11], 3, is_jagged=True),  # contextual keys need not be adjacent
    ]
    names = "item", ["user", "country", "hobbies"], "action" if with_actions else None
    sizes = max_num_candidates, num_tasks, num_real
    return HSTUBatch.random(batch_size, features, *names, *sizes, device="cpu", generator=_generator(seed))


def _lengths(kjt: KeyedJaggedTensor, key: str) -> list[int]:
    return kjt[key].lengths().tolist()


class TestRandom:
    @given(
        seed=st.integers(0, 2**32),
        batch_size=st.integers(1, 9),
        padding=st.integers(0, 9),
        max_num_candidates=st.integers(0, 4),
        num_tasks=st.none() | st.integers(1, 3),
        with_actions=st.booleans(),
    )
    def test_rows_keep_the_rules(self, seed, batch_size, padding, max_num_candidates, num_tasks, with_actions):
        num_real = max(0, batch_size - padding)
        batch = _random_batch(seed, batch_size, num_real, max_num_candidates, num_tasks, with_actions)
        assert (batch.batch_size, batch.actual_batch_size) == (batch_size, num_real)
        items = _lengths(batch.features, "item")
        assert all(length <= 9 for length in items)
        assert items[num_real:] == [0] * (batch_size - num_real)
        assert _lengths(batch.features, "user") == [1] * num_real + [0] * (batch_size - num_real)
        if with_actions:
            assert _lengths(batch.features, "action") == items
            assert set(batch.features["action"].values().tolist()) <= set(range(5))
        if max_num_candidates:
            candidates = batch.num_candidates.tolist()
            assert batch.num_candidates.dtype == torch.int64
            assert all(0 <= c <= min(max_num_candidates, max(0, n - 1)) for c, n in zip(candidates, items))
            assert all(c >= 1 for c, n in zip(candidates, items) if n > 1)
        else:
            assert batch.num_candidates is None
            candidates = items
        if num_tasks is None:
            assert batch.labels is None
        else:
            assert batch.labels.keys() == [f"task_{task}" for task in range(num_tasks)]
            assert batch.labels.values().dtype == torch.float32
            assert set(batch.labels.values().tolist()) <= {0.0, 1.0}
            for key in batch.labels.keys():
                assert _lengths(batch.labels, key) == candidates
        assert batch.num_loss_tokens() == (num_tasks or 0) * sum(candidates)
        longest = {"user": 1, "country": 1, "hobbies": 3, "item": 9} | ({"action": 9} if with_actions else {})
        assert batch.feature_to_max_seqlen == longest

    def test_length_distribution_is_clipped_to_the_longest(self):
        dist = RandomDistribution("uniform", low=4, high=90)
        config = FeatureConfig(["item"], [10], 20, is_jagged=True, seqlen_dist=dist)
        lengths = config.draw_lengths(500, _generator(0))
        assert lengths.min() >= 4
        assert lengths.max() == 20


class TestSequenceLengths:
    @given(seed=st.integers(0, 2**32), max_num_candidates=st.integers(0, 4), with_actions=st.booleans())
    def test_counts_what_the_model_computes(self, seed, max_num_candidates, with_actions):
        batch = _random_batch(seed, 7, 5, max_num_candidates, with_actions=with_actions)
        lengths = {key: _lengths(batch.features, key) for key in batch.features.keys()}
        for interleaved in (True, False):
            factor = 2 if interleaved and with_actions else 1
            tokens, targets = batch.sequence_lengths(action_interleaved=interleaved)
            assert tokens.dtype == targets.dtype == torch.int64
            for row in range(7):
                context = sum(lengths[key][row] for key in ("user", "country", "hobbies"))
                assert tokens[row] == context + factor * lengths["item"][row]
                candidates = 0 if batch.num_candidates is None else batch.num_candidates[row]
                assert targets[row] == factor * candidates

    @pytest.mark.parametrize("contextual", [[], ["age"]])
    def test_int32_lengths_make_int64_tokens(self, contextual):
        features = KeyedJaggedTensor(["item", "age"], torch.arange(4), lengths=torch.tensor([3, 1]).int())
        candidates = {"max_num_candidates": 1, "num_candidates": torch.tensor([1]).int()}
        batch = HSTUBatch(features, 1, {"item": 3, "age": 1}, contextual, item_feature_name="item", **candidates)
        assert [each.dtype for each in batch.sequence_lengths()] == [torch.int64] * 2

    def test_nothing_is_read_back_from_the_device(self):
        batch = _random_batch().to(torch.device("meta"))  # a meta tensor has no values: reading one raises
        tokens, targets = batch.sequence_lengths()
        assert tokens.device.type == targets.device.type == "meta"
        assert dataclasses.replace(batch).num_candidates is batch.num_candidates
        with pytest.raises(RuntimeError, match="meta"):
            tokens.sum().item()


ITEMS = FeatureConfig(["item"], [10], 5, is_jagged=True)


def drawn(**changes):
    arguments = {"batch_size": 4, "feature_configs": [ITEMS], "item_feature_name": "item"} | changes
    return HSTUBatch.random(**arguments, device="cpu")


def config(**changes):
    return dataclasses.replace(ITEMS, **changes)


def test_names_may_come_from_a_generator():
    features = [ITEMS, FeatureConfig(["user", "country"], [9, 9], 1, is_jagged=False)]
    names = (name for name in ("user", "country"))
    batch = drawn(feature_configs=features, contextual_feature_names=names)
    assert batch.contextual_feature_names == ["user", "country"]


def test_numbers_are_drawn_on_the_host_whatever_the_default_device_is():
    """Without a generator, in a script that has called torch.set_default_device; no data is on this one."""
    features = [ITEMS, FeatureConfig(["user"], [9], 1, is_jagged=False)]

    def draw():
        torch.manual_seed(3)
        return drawn(feature_configs=features, max_num_candidates=2, num_tasks=1, timestamps=True)

    expected = draw()
    with torch.device("meta"):
        batch = draw()
    assert as_values(batch) == as_values(expected)


def built(actions=(3, 0, 2), **changes):
    lengths = {"item": torch.tensor([3, 0, 2]), "action": torch.tensor(actions)}
    fields = {
        "features": padded_kjt(dict.fromkeys(lengths, torch.arange(5)), lengths, 4),
        "batch_size": 4,
        "feature_to_max_seqlen": {"item": 3, "action": 3},
        "actual_batch_size": 3,
        "item_feature_name": "item",
        "action_feature_name": "action",
        "max_num_candidates": 2,
        "num_candidates": torch.tensor([2, 0, 1, 0]),
    }
    return HSTUBatch(**fields | changes)


@pytest.mark.parametrize(
    ("make", "changes", "message"),
    [
        (drawn, {"batch_size": 0}, "batch_size is 0"),
        (drawn, {"actual_batch_size": 5}, "actual_batch_size is 5"),
        (drawn, {"actual_batch_size": -1}, "actual_batch_size is -1"),
        (drawn, {"batch_size": "4"}, "batch_size is '4'"),
        (drawn, {"num_tasks": 0}, "num_tasks is 0"),
        (drawn, {"num_tasks": 1.5}, "num_tasks is 1.5"),
        (drawn, {"item_feature_name": "movie"}, "item_feature_name is 'movie'"),
        (drawn, {"action_feature_name": "click"}, "action_feature_name is 'click'"),
        (drawn, {"contextual_feature_names": ["age"]}, "age"),
        (drawn, {"contextual_feature_names": ["item"]}, "contextual or part of the sequence"),
        (drawn, {"feature_configs": [ITEMS, ITEMS]}, "feature_configs have 'item' twice"),
        (config, {"feature_names": []}, "feature_names"),
        (config, {"feature_names": ["a", "b"]}, "feature_names"),
        (config, {"max_item_ids": [0]}, r"max_item_ids\[0\] is 0"),
        (config, {"max_item_ids": ["9"]}, r"max_item_ids\[0\] is '9'"),
        (config, {"max_sequence_length": -1}, "max_sequence_length"),
        (config, {"max_sequence_length": 2.5}, "max_sequence_length is 2.5"),
        (built, {"num_candidates": None}, "max_num_candidates is 2 and num_candidates is None"),
        (built, {"max_num_candidates": -1}, "max_num_candidates is -1"),
        (built, {"max_num_candidates": 2.5}, "max_num_candidates is 2.5"),
        (built, {"max_num_candidates": None}, "max_num_candidates is None"),
        (built, {"num_candidates": torch.tensor([2, 0, 1])}, "disagree on the number of rows"),
        (built, {"num_candidates": torch.zeros(4)}, "dtype torch.float32"),
        (built, {"num_candidates": torch.zeros(4, 2, dtype=torch.int64)}, r"shape \(4, 2\)"),
        (built, {"num_candidates": torch.tensor([2, 1, 1, 0])}, r"num_candidates\[1\] is 1, row 1 has 0 items"),
        (built, {"num_candidates": torch.tensor([3, 0, 1, 0])}, r"num_candidates\[0\] is 3.*max_num_candidates is 2"),
        (built, {"num_candidates": torch.tensor([2, 0, -1, 0])}, r"num_candidates\[2\] is -1"),
        (built, {"num_candidates": torch.tensor([2, 0, 1, 1])}, r"num_candidates\[3\] is 1"),  # a padding row
        (built, {"max_num_candidates": 0}, r"num_candidates\[0\] is 2"),
        (built, {"actions": (3, 1, 1)}, "row 1 has 0 items .* and 1 actions"),
    ],
)
def test_what_is_no_batch_is_refused(make, changes, message):
    with pytest.raises(ValueError, match=message):
        make(**changes)


@pytest.mark.parametrize(
    ("make", "changes", "message"),
    [
        (config, {"max_item_ids": 10}, r"max_item_ids is the number 10; .* write \[10\]"),
        (config, {"seqlen_dist": "zipf"}, "seqlen_dist is 'zipf'; lengths are drawn from a RandomDistribution"),
        (built, {"num_candidates": [2, 0, 1, 0]}, r"num_candidates is a list; .* int64 tensor of shape \(4,\)"),
        (built, {"num_candidates": np.array([2, 0, 1, 0])}, "num_candidates is an ndarray"),
    ],
)
def test_the_wrong_type_is_refused(make, changes, message):
    with pytest.raises(TypeError, match=message):
        make(**changes)
