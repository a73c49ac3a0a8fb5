"""Hugging Face's Accelerate on two ranks: a prepared loader of our samplers reads every row once, or is refused."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.extras.conftest import answers_of_ranks

pytestmark = [pytest.mark.extra("accelerate"), pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory):
    return answers_of_ranks("accelerated_rows", tmp_path_factory.mktemp("accelerate"))


@pytest.mark.parametrize("name", ["documented", "no window", "one row", "budget"])
def test_every_row_is_read_once_by_one_rank(of_ranks, name):
    epochs = [rank["read"][name] for rank in of_ranks]  # by rank, epoch and batch
    for first, second in zip(*epochs):
        assert len(first) == len(second) and all(first) and all(second)
        assert Counter(row for batch in first + second for row in batch) == Counter(range(257))
    assert epochs[0][0] != epochs[0][1]
    for rank in of_ranks:
        assert sorted(row for row in rank["gathered"][name] if row >= 0) == list(range(257))


def test_batches_of_different_numbers_of_rows_are_gathered_after_padding(of_ranks):
    assert all(-1 in rank["gathered"]["budget"] for rank in of_ranks)


def test_each_rank_reads_its_own_part_of_the_plan(of_ranks):
    for rank in of_ranks:
        assert rank["read"]["documented"] == rank["own"]
        assert rank["length"] == len(rank["own"][0]) == 33


def test_a_prepared_loader_sets_the_epoch(of_ranks):
    for rank in of_ranks:
        assert rank["epoch 3"] == rank["own epoch 3"] and rank["epoch 3"] not in rank["read"]["documented"]


def test_a_loop_resumes_within_an_epoch_as_documented(of_ranks):
    for rank in of_ranks:
        assert rank["epoch 4 from step 5"] == rank["own epoch 4"][5:] != rank["own"][0][5:]


def test_a_sampler_of_one_rank_is_refused(of_ranks):
    for rank, told in enumerate(of_ranks):
        for name, remedy, message in zip(
            ("BalancedBatchSampler", "BudgetBatchSampler", "ShardedBatchSampler"),
            ("make it with rank=None", "make it with rank=None", "use torch's BatchSampler"),
            told["refused"],
        ):
            assert message.startswith(f"ValueError: this {name} has only the batches of rank {rank} of 2")
            assert message.endswith(f"which leaves rows out: {remedy}, or do not prepare the loader")
