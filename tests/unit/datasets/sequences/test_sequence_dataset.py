"""Batches from the columnar files: equal to a slow assembly, read lazily, sharded, through a DataLoader."""

import itertools
import shutil
from pathlib import Path
from unittest import mock

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from commons.datasets.hstu_batch import HSTUBatch
from commons.datasets.loader.data_loader import get_data_loader, list_datasets
from commons.datasets.public.movielens import SCHEMA, preprocess_movielens
from commons.datasets.sequences import metadata as sequence_metadata
from commons.datasets.sequences import writer as sequence_writer
from commons.datasets.sequences.dataset import SequenceDataset
from commons.datasets.sequences.file import SequenceFile
from tests.helpers.datasets.movielens import MOVIES, RATINGS, write_zip

_MOVIE_IDS = [9, 50, 1193]  # as in MOVIES, sorted: a movie's id in batches is its place here


def _dataset(path, split="train", **arguments) -> SequenceDataset:
    return SequenceDataset(path, SCHEMA, split=split, **{"batch_size": 4, "max_history_seqlen": 10, **arguments})


def _per_row(batch: HSTUBatch) -> list[dict]:
    """Rows of a batch."""
    candidates = [0] * batch.batch_size if batch.num_candidates is None else batch.num_candidates.tolist()
    rows = [{"num_candidates": count} for count in candidates]
    for kjt in (batch.features, batch.labels):
        for key in kjt.keys():
            for row, values in zip(rows, kjt[key].to_dense(), strict=True):
                row[key] = values.tolist()
    return rows


def _expected_row(user: int, users: list[tuple], ratings: list[tuple], history: int, candidates: int) -> dict:
    """One row, from the raw lines, by the definition."""
    gender, age, work, code = users[user]
    own = sorted((time, line, movie, rating) for line, (who, movie, rating, time) in enumerate(ratings) if who == user)
    own = [(_MOVIE_IDS.index(movie), rating, time) for time, _, movie, rating in own]
    num_candidates = min(candidates, max(len(own) - 1, 0))
    past, future = own[: len(own) - num_candidates], own[len(own) - num_candidates :]
    items = past[-history:] + future
    targets = future if candidates else items
    return {
        "user_id": [user],
        "gender": [sorted({u[0] for u in users}).index(gender)],
        "age": [sorted({u[1] for u in users}).index(age)],
        "occupation": [sorted({u[2] for u in users}).index(work)],
        "zip": [sorted({u[3] for u in users}).index(code)],
        "movie_id": [movie for movie, _, _ in items],
        "rating": [rating for _, rating, _ in items],
        "timestamp": [time for _, _, time in items],
        "task_0": [float(rating >= 4) for _, rating, _ in targets],
        "task_1": [float(rating == 5) for _, rating, _ in targets],
        "num_candidates": num_candidates,
    }


_USERS = st.lists(
    st.tuples(st.sampled_from("FM"), st.integers(1, 56), st.integers(0, 20), st.sampled_from(["1", "2-3", "99999"])),
    min_size=1,
    max_size=7,
)


@settings(max_examples=15)
@given(users=_USERS, history=st.integers(1, 5), candidates=st.integers(0, 4), data=st.data())
def test_batches_equal_a_slow_assembly(tmp_path_factory, users, history, candidates, data):
    num_users = len(users)
    rating = st.tuples(st.integers(0, num_users - 1), st.sampled_from(_MOVIE_IDS), st.integers(1, 5), st.integers(0, 4))
    ratings = data.draw(st.lists(rating, min_size=1, max_size=40))
    folder = tmp_path_factory.mktemp("raw")
    source = write_zip(
        folder / "ml-1m.zip",
        ratings="".join(f"{user + 1}::{movie}::{stars}::{time}\n" for user, movie, stars, time in ratings),
        users="".join(f"{user + 1}::" + "::".join(map(str, fields)) + "\n" for user, fields in enumerate(users)),
        movies=MOVIES,
    )
    with (
        mock.patch.object(sequence_writer, "_INTERACTIONS_PER_GROUP", 6),
        mock.patch.object(sequence_writer, "_INTERACTIONS_PER_SHARD", 10),
    ):
        path = preprocess_movielens(source, folder, test_fraction=0.4)
    file = SequenceFile(path, "ml-1m", ["user_id"])
    for split in set(pq.read_table(path)["split"].to_pylist()):
        in_split = file.select(np.array(file.split_rows(split))).values("user_id").tolist()
        rows = data.draw(st.lists(st.integers(0, len(in_split) - 1), max_size=7))  # any order, repeats
        options = {"max_history_seqlen": history, "max_num_candidates": candidates, "num_tasks": 2, "timestamps": True}
        batch = _dataset(path, split, batch_size=5, **options)[rows]
        # A sampler's batch may have a row more than the batch size, so that no rank goes without.
        assert (batch.batch_size, batch.actual_batch_size) == (max(5, len(rows)), len(rows))
        expected = [_expected_row(in_split[row], users, ratings, history, candidates) for row in rows]
        empty = {key: 0 if key == "num_candidates" else [] for key in _per_row(batch)[0]}
        assert _per_row(batch) == expected + [empty] * (5 - len(rows))


class TestDataset:
    def test_lengths_and_names(self, generated):
        dataset = _dataset(generated, max_history_seqlen=30, max_num_candidates=5)
        assert dataset.max_sequence_length == 2 * 30 + 2 * 5 + 5
        batch = dataset[[3, 0, 7]]
        contextual = dict.fromkeys(("user_id", "gender", "age", "occupation", "zip"), 1)
        assert batch.feature_to_max_seqlen == contextual | {"movie_id": 35, "rating": 35}
        assert batch.num_candidates.tolist() == [5, 5, 5, 0]
        assert batch.labels.keys() == ["task_0"]
        assert batch.num_loss_tokens() == 15
        assert batch.sequence_lengths()[0].max() <= dataset.max_sequence_length
        assert dataset.vocabulary_sizes["movie_id"] == 3883
        assert dataset.metadata.generated
        for name, size in dataset.vocabulary_sizes.items():
            assert batch.features[name].values().max() < size

    def test_reads_only_the_row_groups_it_needs(self, generated):
        groups = []
        original = pq.ParquetFile.read_row_group

        def record(self, index, columns, **options):
            groups.append(index)
            assert "timestamp" not in columns
            return original(self, index, columns=columns, **options)

        opened = mock.patch.object(pq, "ParquetFile", wraps=pq.ParquetFile)
        with mock.patch.object(pq.ParquetFile, "read_row_group", record), opened as files:
            dataset = _dataset(generated)
            assert len(dataset) > 100
            first = dataset.metadata.shards[0].row_groups
            assert len(first) >= 2
            assert (groups, files.call_count) == ([], 0)
            dataset[[1, 2, first[0] + 1]]
            assert (groups, files.call_count) == ([0, 1], 1)
            dataset[[3, first[0]]]
            assert (groups, files.call_count) == ([0, 1], 1)
            dataset[[sum(first)]]
        assert (groups, files.call_count) == ([0, 1, 0], 2)

    def test_few_groups_are_kept(self, generated):
        file = SequenceFile(generated, "ml-1m", ["movie_id"], max_cached_bytes=30_000)
        everything = SequenceFile(generated, "ml-1m", ["movie_id"])
        rows = np.arange(150)[::-7]
        lengths = everything.select(rows).lengths("movie_id")
        assert file.select(rows).lengths("movie_id").tolist() == lengths.tolist()
        assert file.select(rows).tails("movie_id", lengths).tolist() == (
            everything.select(rows).tails("movie_id", lengths).tolist()
        )
        assert 1 <= len(file._cache) < len(everything._cache)
        assert file._cached_bytes == sum(group.num_bytes for group in file._cache.values())
        assert file._cached_bytes <= 30_000
        assert everything._cached_bytes > 90_000

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"num_tasks": 3}, "num_tasks is 3"),
            ({"split": "valid"}, "split is 'valid', .* has train, test"),
            ({"table_sizes": {"movie_id": 3882}}, "table of 'movie_id' has 3,882 rows, the vocabulary has 3,883 ids"),
        ],
    )
    def test_bad_arguments(self, generated, arguments, message):
        with pytest.raises(ValueError, match=message):
            _dataset(generated, **arguments)
        _dataset(generated, num_tasks=2, table_sizes={"movie_id": 3883})  # the limits

    @pytest.mark.parametrize("names", [["rating"], ["user_id", "timestamp"], ["split"], ["movie_id"]])
    def test_what_has_not_one_id_per_user_is_no_context(self, generated, names):
        with pytest.raises(ValueError, match=rf"contextual_feature_names has \['{names[-1]}'\]; .* choose from"):
            _loader(generated, contextual_feature_names=names)

    def test_a_context_given_twice_is_one_token(self, generated):
        loader = _loader(generated, contextual_feature_names=["age", "gender", "age"])
        (first, *_) = loader
        assert first.contextual_feature_names == ["age", "gender"]
        assert int(first.sequence_lengths()[0].max()) <= loader.dataset.max_sequence_length

    def test_bad_rows(self, generated):
        dataset = _dataset(generated)
        with pytest.raises(IndexError, match=f"row {len(dataset)}"):
            dataset[[0, len(dataset)]]
        with pytest.raises(IndexError, match="row -1"):
            dataset[-1]

    def test_empty_split(self, tmp_path):
        path = preprocess_movielens(write_zip(tmp_path / "a.zip"), tmp_path, test_fraction=0.0)
        with pytest.raises(ValueError, match="'test' .* has no users"):
            _dataset(path, "test")


class TestBadFiles:
    def test_missing(self, tmp_path):
        (tmp_path / "empty").mkdir()
        for path in (tmp_path, tmp_path / "data.parquet", tmp_path / "empty"):
            with pytest.raises(FileNotFoundError, match="run `evenrank preprocess ml-1m"):
                _dataset(path)

    def test_another_data_set_and_a_missing_column(self, generated):
        with pytest.raises(ValueError, match="contains 'ml-1m', dataset_name is 'ml-20m'"):
            SequenceFile(generated / "ml-1m.parquet", "ml-20m", [])
        with pytest.raises(ValueError, match=r"but no \['price'\]"):
            SequenceFile(generated, "ml-1m", ["movie_id", "price"])

    def test_ids_beyond_the_vocabulary(self, tmp_path):
        path = preprocess_movielens(write_zip(tmp_path / "a.zip"), tmp_path, test_fraction=0)
        manifest = path / sequence_metadata.MANIFEST
        manifest.write_text(manifest.read_text().replace('"movie_id": 3', '"movie_id": 2'))
        with pytest.raises(ValueError, match="has id 2 of 'movie_id', whose vocabulary has 2; .* preprocess"):
            _dataset(path)[[0, 1, 2]]

    def test_a_shard_of_another_run(self, tmp_path):
        path = preprocess_movielens(write_zip(tmp_path / "a.zip"), tmp_path, test_fraction=0)
        shard = path / "train-00000.parquet"
        pq.write_table(pq.read_table(shard).slice(1), shard)
        with pytest.raises(ValueError, match="has 2 rows in row group 0, _manifest.json has 3"):
            _dataset(path)[[0]]

    def test_data_that_are_replaced_while_they_are_read(self, tmp_path):
        """The new shards were read with the old manifest, so that ids stood for other values."""
        archive = write_zip(tmp_path / "a.zip")
        path = preprocess_movielens(archive, tmp_path, test_fraction=0)
        before, opened, unopened = _dataset(path)[[0, 1, 2]], _dataset(path), _dataset(path)
        assert opened[[0]].batch_size == 4
        preprocess_movielens(archive, tmp_path, test_fraction=0)  # the same data again
        assert _per_row(_dataset(path)[[0, 1, 2]]) == _per_row(unopened[[0, 1, 2]]) == _per_row(before)
        unopened = _dataset(path)
        renamed = {
            "movies": MOVIES.replace("1193", "7"),
            "ratings": RATINGS.replace("1193", "7"),
        }  # sorted, it is first
        preprocess_movielens(write_zip(archive, **renamed), tmp_path, test_fraction=0)
        for _ in range(2):
            with pytest.raises(ValueError, match="was replaced while it was read; .* to a folder that no run reads"):
                unopened[[0, 1, 2]]
        assert _per_row(opened[[0, 1, 2]]) == _per_row(before)  # its files are still open
        shutil.rmtree(path)
        with pytest.raises(ValueError, match="was replaced while it was read"):
            unopened[[0]]

    def test_damaged_data(self, generated, tmp_path):
        path = Path(shutil.copytree(generated / "ml-1m.parquet", tmp_path / "ml-1m.parquet"))
        shard = path / "train-00000.parquet"
        data = bytearray(shard.read_bytes())
        data[2000:12_000] = bytes(10_000)
        shard.write_bytes(bytes(data))
        with pytest.raises(ValueError, match="is damaged") as caught:
            _dataset(tmp_path)[[0, 1, 2, 3]]
        for workers in (0, 1):  # a worker process says no more and no less
            with pytest.raises(ValueError) as again:
                list(_loader(tmp_path, num_workers=workers))
            assert str(again.value) == str(caught.value)


def _loader(path, **arguments):
    return get_data_loader("ml-1m", dataset_path=path, **{"batch_size": 8, "max_history_seqlen": 20, **arguments})


class TestDataLoader:
    def test_unknown_data_sets_and_files(self):
        assert {"ml-1m", "random"} <= set(list_datasets())
        with pytest.raises(KeyError, match="'ml-2m'; known data sets are kuairand-1k, "):
            get_data_loader("ml-2m", batch_size=1, max_history_seqlen=1)

        with pytest.raises(ValueError, match="dataset_path is not set"):
            get_data_loader("ml-1m", batch_size=2, max_history_seqlen=4)


# Times of items: seconds of the same items, last among the features, neither tokens nor ids.


def times_of(with_times, without):
    """The times of each row; all else is as it is in the batch without them."""
    rows = _per_row(with_times)
    times = [row.pop("timestamp") for row in rows]
    assert rows == _per_row(without) and with_times.features.keys() == [*without.features.keys(), "timestamp"]
    assert [len(each) for each in times] == [len(row[without.item_feature_name]) for row in rows]
    assert with_times.features.values().dtype == torch.int64
    assert with_times.contextual_feature_names == without.contextual_feature_names
    longest = without.feature_to_max_seqlen
    assert with_times.feature_to_max_seqlen == longest | {"timestamp": longest[without.item_feature_name]}
    for counted, expected in zip(with_times.sequence_lengths(), without.sequence_lengths()):
        assert torch.equal(counted, expected) if expected is not None else counted is None
    return times


@pytest.mark.parametrize("workers", [0, 1])
def test_all_else_is_as_it_is_without_times(generated, workers):
    options = {"max_history_seqlen": 2, "max_num_candidates": 1, "shuffle": True, "num_workers": workers}
    with_times, without = (_loader(generated, timestamps=wanted, **options) for wanted in (True, False))
    for batches in zip(with_times, without):
        times_of(*batches)
    assert with_times.dataset.vocabulary_sizes == without.dataset.vocabulary_sizes
    assert with_times.dataset.max_sequence_length == without.dataset.max_sequence_length


def test_times_of_random_data_rise_within_a_row():
    options = {"batch_size": 9, "max_history_seqlen": 30, "num_batches": 3, "max_num_candidates": 2}
    loaders = [get_data_loader("random", **options, timestamps=wanted) for wanted in (True, False)]
    for times in itertools.chain(*(times_of(*batches) for batches in zip(*loaders))):
        assert sorted(set(times)) == times and min(times, default=946_684_801) > 946_684_800
    assert "timestamp" not in loaders[0].dataset.vocabulary_sizes
