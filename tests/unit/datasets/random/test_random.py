"""Random lengths, random data sets and samplers."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from commons.datasets.hstu_batch import FeatureConfig
from commons.datasets.loader.data_loader import get_data_loader
from commons.datasets.random.dataset import RandomHSTUDataset, user_like_dataset
from commons.datasets.random.distribution import LengthDistribution, RandomDistribution
from commons.datasets.sids.dataset import HISTORY
from commons.datasets.sids.map import random_sid_map
from tests.helpers.batches.any_batches import as_values


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@st.composite
def distributions(draw) -> RandomDistribution:
    kind, low = draw(st.sampled_from(["uniform", "normal", "zipf", "lognormal"])), draw(st.integers(0, 50))
    shape = {"mean": draw(st.floats(0.1, 300)), "std": draw(st.floats(0, 300)), "alpha": draw(st.floats(1.01, 4))}
    return RandomDistribution(kind, low=low, high=low + draw(st.integers(0, 200)), **shape)


class TestRandomDistribution:
    @given(dist=distributions(), size=st.integers(0, 200), seed=st.integers(0, 2**32))
    def test_stays_within_bounds_and_repeats(self, dist, size, seed):
        drawn = dist.sample(size, generator=_generator(seed))
        assert drawn.dtype == torch.int64
        assert drawn.shape == (size,)
        assert bool(((drawn >= dist.low) & (drawn <= dist.high)).all())
        assert torch.equal(drawn, dist.sample(size, generator=_generator(seed)))

    def test_uses_the_global_generator_if_none_is_given(self):
        dist = RandomDistribution("uniform", high=10**6)
        torch.manual_seed(5)
        first = dist.sample(10)
        assert not torch.equal(first, dist.sample(10))
        torch.manual_seed(5)
        assert torch.equal(first, dist.sample(10))

    @pytest.mark.parametrize("dist_type", ["normal", "lognormal"])
    def test_mean_and_std_are_those_of_the_lengths(self, dist_type):
        drawn = RandomDistribution(dist_type, mean=400, std=80).sample(20_000, generator=_generator(1)).double()
        assert drawn.mean().item() == pytest.approx(400, abs=3)
        assert drawn.std().item() == pytest.approx(80, abs=3)

    @pytest.mark.parametrize("alpha", [1.2, 1.5, 3.0])
    def test_zipf_follows_its_law(self, alpha):
        num_draws, high = 40_000, 50
        drawn = RandomDistribution("zipf", low=1, high=high, alpha=alpha).sample(num_draws, generator=_generator(2))
        # zeta(alpha) by Euler-Maclaurin behind the first 1,000 terms.
        terms = [k**-alpha for k in range(1, 1000)]
        zeta = sum(terms) + 1000 ** (1 - alpha) / (alpha - 1) + 0.5 * 1000**-alpha
        counts = torch.bincount(drawn, minlength=high + 1).double()
        for k in (1, 2, 3, 10):
            share = terms[k - 1] / zeta
            error = 5 * math.sqrt(share * (1 - share) / num_draws)
            assert counts[k].item() / num_draws == pytest.approx(share, abs=error)
        # Clipping puts the whole tail on `high`.
        tail = 1 - sum(terms[: high - 1]) / zeta
        assert counts[high].item() / num_draws == pytest.approx(tail, abs=5 * math.sqrt(tail / num_draws))


class TestLengthDistribution:
    def test_what_is_left_out_follows_from_the_longest_row(self):
        assert LengthDistribution().within(100) == RandomDistribution("lognormal", 1, 100, 25.0, 25.0)
        assert LengthDistribution(mean=8).within(100) == RandomDistribution("lognormal", 1, 100, 8, 8)
        assert LengthDistribution("normal", mean=8, std=2, high=9).within(100).high == 9
        assert LengthDistribution("uniform", low=0).within(7) == RandomDistribution("uniform", 0, 7, 1.75, 1.75)

    @pytest.mark.parametrize(
        ("kind", "arguments", "message"),
        [
            (RandomDistribution, {"dist_type": "poisson"}, "'poisson'; known distributions are uniform, normal, zipf,"),
            (RandomDistribution, {"dist_type": "uniform"}, "high is None"),
            (RandomDistribution, {"dist_type": "uniform", "low": -1, "high": 3}, "low is -1"),
            (RandomDistribution, {"dist_type": "uniform", "low": 5, "high": 3}, "high is 3, low is 5"),
            (RandomDistribution, {"dist_type": "normal", "std": 1.0}, "mean is None"),
            (RandomDistribution, {"dist_type": "normal", "mean": 1.0}, "std is None"),
            (RandomDistribution, {"dist_type": "normal", "mean": math.nan, "std": 1.0}, "mean is nan"),
            (RandomDistribution, {"dist_type": "normal", "mean": 1.0, "std": -1.0}, "std is -1.0"),
            (RandomDistribution, {"dist_type": "lognormal", "mean": 0.0, "std": 1.0}, "mean is 0.0"),
            (RandomDistribution, {"dist_type": "zipf"}, "alpha is None"),
            (RandomDistribution, {"dist_type": "zipf", "alpha": 1.0}, "alpha is 1.0"),
            (RandomDistribution, {"dist_type": "zipf", "alpha": 1100.0}, "alpha is 1100.0"),  # 2^1100 is no float
            (LengthDistribution, {"alpha": 1.2}, "alpha is 1.2 and dist_type is 'lognormal', .*: remove it"),
            (LengthDistribution, {"dist_type": "zipf", "alpha": 1.2, "mean": 3.0}, "mean is 3.0 and dist_type is"),
            (LengthDistribution, {"low": 5, "high": 3}, "high is 3, low is 5"),
            (LengthDistribution, {"low": True}, "low is True; it must be an integer of at least 0"),
            (LengthDistribution, {"low": 1.5}, "low is 1.5; it must be an integer of at least 0"),
            (RandomDistribution, {"dist_type": "uniform", "high": 2.5}, "high is 2.5; it must be an integer"),
            (LengthDistribution, {"mean": -0.5}, "^mean is -0.5"),
        ],
    )
    def test_is_checked_when_made(self, kind, arguments, message):
        with pytest.raises(ValueError, match=message):
            kind(**arguments)

    def test_whole_floats_are_bounds(self):
        made = RandomDistribution("uniform", low=2.0, high=1e3)
        assert (made.low, made.high) == (2, 1000) and all(isinstance(each, int) for each in (made.low, made.high))

    @pytest.mark.parametrize("name", ["low", "high"])
    def test_no_row_is_longer_than_the_data_set_allows(self, name):
        options = {"batch_size": 4, "max_history_seqlen": 20, "max_num_candidates": 3}
        with pytest.raises(ValueError, match=f"length_distribution.{name} is 24; rows have at most 23 items: lower it"):
            get_data_loader("random", length_distribution=LengthDistribution(**{"high": 30, name: 24}), **options)

    def test_loaders_of_both_models_draw_from_it(self):
        arguments = {"batch_size": 500, "max_history_seqlen": 50, "num_batches": 1}
        arguments["length_distribution"] = LengthDistribution("zipf", alpha=1.2, high=40)
        (hstu,) = get_data_loader("random", **arguments)
        (sids,) = get_data_loader("sid-random", sid_map=random_sid_map(9, [3, 3]), max_num_candidates=1, **arguments)
        for name, lengths in (("item_id", hstu.features["item_id"].lengths()), (HISTORY, sids.features[HISTORY])):
            lengths = lengths if name == "item_id" else lengths.lengths() // 2
            assert lengths.min() == 1 and lengths.max() == 40
            # 1 ÷ ζ(1.2) of the rows have one item.
            assert (lengths == 1).double().mean().item() == pytest.approx(0.179, abs=0.06)
            assert (lengths == 40).double().mean().item() > 0.3


def _dataset(**arguments) -> RandomHSTUDataset:
    configs = [FeatureConfig(["item", "action"], [1000, 5], 30, is_jagged=True)]
    options = {"batch_size": 4, "num_batches": 5, "max_num_candidates": 3, "num_tasks": 2, **arguments}
    return RandomHSTUDataset(configs, "item", action_feature_name="action", **options)


class TestRandomDataset:
    def test_batches_differ_by_rank_index_and_seed_and_repeat(self):
        seen = [
            str(as_values(batch))
            for seed in (0, 1)
            for rank in range(3)
            for batch in _dataset(rank=rank, world_size=3, seed=seed)
        ]
        assert len(seen) == len(set(seen)) == 2 * 3 * 5
        again = [str(as_values(_dataset(rank=1, world_size=3)[index])) for index in (4, 0)]
        assert again == [seen[5 + 4], seen[5 + 0]]

    def test_last_batch_may_be_incomplete(self):
        assert [batch.actual_batch_size for batch in _dataset(last_batch_size=3)] == [4, 4, 4, 4, 3]

    def test_user_like_lengths_are_heavy_tailed_within_bounds(self):
        dataset = user_like_dataset(max_history_seqlen=90, max_num_candidates=10, batch_size=500, num_batches=1)
        tokens, targets = dataset[0].sequence_lengths()
        assert dataset.max_sequence_length == 202
        assert tokens.max() <= 202
        assert tokens.max() > 3 * tokens.double().median()
        assert targets.max() <= 20
