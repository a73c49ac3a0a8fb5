"""Samplers of known workloads: arguments that they refuse, and places and data that are not theirs."""

from __future__ import annotations

import pytest

from commons.datasets import BalancedBatchSampler, BudgetBatchSampler
from commons.datasets.loader.resumable import ResumableLoader


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 0}, "batch_size is 0; it must be an integer of at least 1"),
        ({"window": 0}, "window is 0; it must be an integer of at least 1"),
        ({"window": 1.5}, "window is 1.5; it must be an integer of at least 1"),
        ({"num_ranks": 0}, "num_ranks is 0; it must be an integer of at least 1"),
        ({"rank": 2}, "rank is 2, num_ranks is 2; ranks are counted from 0"),
        ({"seed": -1}, "seed is -1; it must be an integer of at least 0"),
        ({"workloads": [1, -2]}, r"workloads\[1\] is -2; values must be non-negative"),
        ({"tokens": [1]}, "tokens has 1 entries, there are 3 rows"),
        ({"max_tokens": 4}, "max_tokens is 4, tokens is None; a cap needs the tokens of each row"),
        ({"max_tokens": 4, "padded": True}, "max_tokens is 4, padded is True; the tokens of a padded batch are its"),
        ({"speeds": [1]}, r"speeds has shape \(1,\), num_ranks is 2; each has one speed: pass 2 positive integers"),
        ({"speeds": [1, 0]}, r"speeds\[1\] is 0; a speed is a positive integer below 2\^31"),
        ({"speeds": [1, 2], "padded": True}, "speeds are given, padded is True; .*: leave out one of them"),
        ({"max_tokens": 4, "tokens": [1, 5, 2]}, "row 1 alone has 5 tokens, max_tokens is 4; no plan can keep that"),
    ],
)
def test_a_wrong_argument(changes, message):
    options = {"workloads": [1, 2, 3], "batch_size": 2, "num_ranks": 2, "rank": 0} | changes
    with pytest.raises(ValueError, match=message):
        BalancedBatchSampler(**options)
    for name in ("batch_size", "window"):
        options.pop(name, None)
    if not changes.keys() & {"batch_size", "window"}:
        with pytest.raises(ValueError, match=message):
            BudgetBatchSampler(**options, budget_per_rank=4)


def test_a_wrong_budget_or_place():
    for changes, message in (
        ({"budget_per_rank": 0}, "budget_per_rank is 0; it must be an integer of at least 1"),
        ({"budget_per_rank": 1}, "budget_per_rank is 1, the lightest row costs 2; a step has room for some rows"),
        ({"max_rows": 0}, "max_rows is 0; it must be an integer of at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            BudgetBatchSampler([2, 3], **{"budget_per_rank": 9, "num_ranks": 1, "rank": 0} | changes)
    with pytest.raises(TypeError, match="equal_size"):
        BudgetBatchSampler([2, 3], budget_per_rank=9, num_ranks=1, rank=0, equal_size=True)
    sampler = BalancedBatchSampler([1, 2], 1, num_ranks=1, rank=0, window=2)
    with pytest.raises(
        ValueError, match="steps is 2, the window of this BalancedBatchSampler is 2; a place is behind 0"
    ):
        sampler.start_at(0, 2)


def test_workloads_of_another_data_set():
    sampler = BalancedBatchSampler([1] * 39, 2, num_ranks=1, rank=0)
    with pytest.raises(ValueError, match="workloads has 39 entries, the data set has 40 rows"):
        ResumableLoader(range(40), sampler)
