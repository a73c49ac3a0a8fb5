"""Batches of lengths only, of all rows of a data set, from which a shuffler computes their workloads."""

from unittest import mock

import numpy as np
import pytest
import torch

from commons.datasets.loader.data_loader import get_data_loader
from commons.datasets.sequences import dataset as sequence_dataset
from commons.datasets.sequences import file as sequence_file
from commons.datasets.sids.map import random_sid_map
from commons.distributed.tokens_shuffler import TokensBalancedBatchShuffler
from commons.sequence_batch.schema import BatchSchema
from hstu.batch_shuffler import HSTUBalancedBatchShuffler
from hstu.negatives import sample_negatives
from sid_gr.batch_shuffler import SIDGRBalancedBatchShuffler


@pytest.fixture(autouse=True)
def small_length_only_batches(monkeypatch):
    monkeypatch.setattr(sequence_dataset, "_ROWS_PER_LENGTH_ONLY_BATCH", 25)


def lengths_of(batches):
    """Lengths of every key of features and labels in all real rows, and the numbers of candidates."""
    found = []
    for batch in batches:
        rows = batch.actual_batch_size
        jagged = [kjt for kjt in (batch.features, batch.labels) if kjt is not None]
        tables = [kjt.lengths().view(len(kjt.keys()), -1)[:, :rows] for kjt in jagged]
        candidates = getattr(batch, "num_candidates", None)
        found.append(torch.cat([*tables, *([] if candidates is None else [candidates[None, :rows]])]))
    return torch.cat(found, 1)


def require_length_only_batches(loader, shuffler):
    of_lengths, batches = list(loader.dataset.length_only_batches()), list(loader)
    assert len(of_lengths) > 1 and sum(batch.batch_size for batch in of_lengths) == loader.sampler.num_rows
    assert torch.equal(lengths_of(of_lengths), lengths_of(batches))
    for batch in of_lengths:
        assert not BatchSchema.of(batch).differences(BatchSchema.of(batches[0]))
        assert batch.features.values().untyped_storage().nbytes() == 8 and not batch.features.values().any()
    workloads = torch.cat([shuffler.get_workloads(batch) for batch in of_lengths])
    of_rows = torch.cat([shuffler.get_workloads(batch)[: batch.actual_batch_size] for batch in batches])
    assert torch.equal(workloads, of_rows)
    tokens, of_rows = ([shuffler.engine.costs.tokens_of(batch) for batch in each] for each in (of_lengths, batches))
    assert np.array_equal(np.concatenate(tokens), np.concatenate(of_rows))


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("candidates", [0, 3])
def test_length_only_batches_have_the_lengths_of_the_rows(generated, split, candidates):
    options = {"dataset_path": generated, "max_history_seqlen": 30, "max_num_candidates": candidates, "num_tasks": 2}
    loader = get_data_loader("ml-1m", split, batch_size=7, timestamps=True, **options)
    with mock.patch.object(sequence_file.SequenceFile, "_row_group") as read_all:  # nothing but the items' column
        list(loader.dataset.length_only_batches())
    assert not read_all.called
    require_length_only_batches(loader, HSTUBalancedBatchShuffler(16, 2, 8))


def test_length_only_batches_of_rows_with_negatives(generated):
    loader = get_data_loader("ml-1m", batch_size=7, dataset_path=generated, max_history_seqlen=30)
    with_negatives = sample_negatives(loader, "negatives", 5, 100, seed=1)
    require_length_only_batches(with_negatives, TokensBalancedBatchShuffler())


@pytest.mark.parametrize("candidates", [0, 2])
def test_length_only_batches_of_semantic_ids(generated, candidates):
    options = {"dataset_path": generated, "max_history_seqlen": 30, "max_num_candidates": candidates}
    loader = get_data_loader("sid-ml-1m", batch_size=7, sid_map=random_sid_map(4_000, (20, 20, 20)), **options)
    require_length_only_batches(loader, SIDGRBalancedBatchShuffler(16, 2, 8))


def test_random_data_know_no_lengths():
    sids = {"sid_map": random_sid_map(9, (3, 3))}
    for name, options in (("random", {}), ("sid-random", sids)):
        loader = get_data_loader(name, batch_size=4, max_history_seqlen=9, **options)
        with pytest.raises(ValueError, match="lengths of their rows are not known before: balance loaded batches"):
            loader.dataset.length_only_batches()
