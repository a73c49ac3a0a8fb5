"""The times of items: seconds of the same items, last among the features, neither tokens nor ids."""

import pytest
import torch

from commons.datasets.loader.data_loader import get_data_loader


def by_row(batch, name) -> list[list[int]]:
    feature = batch.features[name]
    return [part.tolist() for part in feature.values().split(feature.lengths().tolist())]


@pytest.mark.parametrize("workers", [0, 1])
def test_all_else_is_as_it_is_without_them(generated, workers):
    options = {"batch_size": 40, "max_history_seqlen": 2, "max_num_candidates": 1, "shuffle": True}
    loaders = [
        get_data_loader("ml-1m", dataset_path=generated, timestamps=wanted, num_workers=workers, **options)
        for wanted in (False, True)
    ]
    for without, with_times in zip(*loaders):
        check_only_added(without, with_times)
    without, with_times = (loader.dataset for loader in loaders)
    assert with_times.vocabulary_sizes == without.vocabulary_sizes
    assert with_times.max_sequence_length == without.max_sequence_length


def check_only_added(without, with_times):
    assert with_times.features.keys() == [*without.features.keys(), "timestamp"]
    assert with_times.features.values().dtype == torch.int64
    for key in without.features.keys():
        assert by_row(with_times, key) == by_row(without, key)
    assert torch.equal(with_times.labels.values(), without.labels.values())
    assert with_times.contextual_feature_names == without.contextual_feature_names
    longest = with_times.feature_to_max_seqlen
    assert longest.pop("timestamp") == longest[without.item_feature_name]
    assert longest == without.feature_to_max_seqlen
    items = with_times.features[with_times.item_feature_name].lengths()
    assert torch.equal(with_times.features["timestamp"].lengths(), items)
    for counted, expected in zip(with_times.sequence_lengths(), without.sequence_lengths()):
        assert torch.equal(counted, expected) if expected is not None else counted is None


def test_random_data_rise_within_a_row():
    options = {"batch_size": 9, "max_history_seqlen": 30, "num_batches": 3, "max_num_candidates": 2}
    loaders = [get_data_loader("random", **options, timestamps=wanted) for wanted in (False, True)]
    for without, with_times in zip(*loaders):
        check_only_added(without, with_times)
        rows = by_row(with_times, "timestamp")
        assert all(sorted(set(row)) == row and min(row, default=946_684_801) > 946_684_800 for row in rows)
    assert "timestamp" not in loaders[1].dataset.vocabulary_sizes
