"""Batches of semantic IDs: equal to a slow assembly, cut at the old end and counted, mistakes reported."""

import weakref
from itertools import chain
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from commons.datasets.gpt_sid_batch import LABEL_NAME, codebook_offsets
from commons.datasets.loader.data_loader import get_data_loader
from commons.datasets.public.movielens import SCHEMA
from commons.datasets.sequences import file as sequence_file
from commons.datasets.sequences import writer as sequence_writer
from commons.datasets.sequences.event_columns import EventColumns
from commons.datasets.sequences.file import SequenceFile
from commons.datasets.sequences.own_parquet import preprocess_parquet, stored_schema
from commons.datasets.sids import histories as sid_histories
from commons.datasets.sids.dataset import SIDDataset
from commons.datasets.sids.histories import ParquetHistories, PreprocessedHistories
from commons.datasets.sids.map import SIDMap, random_sid_map
from tests.helpers.datasets.sid_users import Users

SIZES = (4, 3, 5)
ITEMS = [2, 3, 5, 7, 11, 13, 17]
SID_MAP = SIDMap(np.array(ITEMS), random_sid_map(len(ITEMS), SIZES).codes, SIZES)


def write(path, users, splits=None, column="item_id", list_type=pa.list_):
    columns = {column: pa.array(users, list_type(pa.int32()))}
    if splits is not None:
        columns["split"] = splits
    pq.write_table(pa.table(columns), path)
    return path


def items_of(batch, key) -> list[list[int]]:
    """Items of every row, found by their SID."""
    by_sid = {tuple(codes): item for item, codes in zip(ITEMS, SID_MAP.codes.tolist())}
    offsets = torch.tensor(codebook_offsets(SIZES) if key != LABEL_NAME else [0, 0, 0])
    jagged = (batch.labels if key == LABEL_NAME else batch.features)[key]
    rows = [(row.view(-1, 3) - offsets).tolist() for row in jagged.to_dense()]
    return [[by_sid[tuple(codes)] for codes in row] for row in rows]


@given(
    users=st.lists(st.lists(st.sampled_from(ITEMS), max_size=9), min_size=1, max_size=6),
    most_history=st.integers(0, 5),
    most_candidates=st.integers(1, 4),
    data=st.data(),
)
def test_rows_are_those_of_a_slow_assembly(users, most_history, most_candidates, data):
    dataset = SIDDataset(
        Users(users), SID_MAP, batch_size=4, max_history_length=most_history, max_candidate_length=most_candidates
    )
    rows = data.draw(st.lists(st.integers(0, len(users) - 1), min_size=1, max_size=4))
    batch = dataset[rows]
    for place, row in enumerate(rows):
        kept = users[row][-(most_history + most_candidates) :]
        count = min(len(kept), most_candidates)
        assert items_of(batch, "history")[place] == kept[: len(kept) - count]
        assert items_of(batch, "candidate")[place] == kept[len(kept) - count :]
    assert items_of(batch, LABEL_NAME) == items_of(batch, "candidate")
    assert (batch.batch_size, batch.actual_batch_size) == (4, len(rows))
    excess = [max(0, len(user) - most_history - most_candidates) for user in users]
    assert dataset.num_cut_histories == sum(cut > 0 for cut in excess)
    assert dataset.num_cut_items == sum(excess)
    assert int(batch.sequence_lengths().max()) <= max(1, dataset.max_items * 3)


class TestMistakes:
    def test_items_without_a_sid(self):
        users = Users([[2, 3], [4, 5, 6], [2], [8, 9, 9]])
        two_chunks = mock.patch.object(sid_histories, "_USERS_PER_CHUNK", 2)
        with two_chunks, pytest.raises(ValueError) as caught:
            SIDDataset(users, SID_MAP, batch_size=2, max_history_length=2)
        assert "5 items in a list have no SID" in str(caught.value)
        assert "item 4 of user 1, item 6 of user 1, item 8 of user 3; the map has 7 items" in str(caught.value)

    def test_rows(self):
        dataset = SIDDataset(Users([[2]] * 5), SID_MAP, batch_size=2, max_history_length=2)
        assert dataset[[0, 1, 2]].batch_size == dataset[[0, 1, 2]].actual_batch_size == 3
        with pytest.raises(ValueError, match="has no users"):
            SIDDataset(Users([]), SID_MAP, batch_size=2, max_history_length=2)


class TestParquetHistories:
    USERS = [[2, 3, 5], [7], [], [11, 13]]

    def read(self, histories):
        users = np.arange(len(histories))
        lengths = histories.lengths(users)
        return [part.tolist() for part in np.split(histories.tails(users, lengths), np.cumsum(lengths)[:-1])]

    @pytest.mark.parametrize("list_type", [pa.list_, pa.large_list])
    def test_with_splits_every_user_is_in_one(self, tmp_path, list_type):
        splits = ["test", "train", "train", "test"]
        path = write(tmp_path / "h.parquet", self.USERS, splits, list_type=list_type)
        assert self.read(ParquetHistories(path, "item_id", "train")) == [[7], []]
        assert self.read(ParquetHistories(path, "item_id", "test")) == [[2, 3, 5], [11, 13]]

    @pytest.mark.parametrize(
        ("table", "message"),
        [
            ({"items": [[1]]}, "no 'item_id'"),
            ({"item_id": [1]}, "is of type int64"),
            ({"item_id": [["a"]]}, "a history is a list of integers"),
            ({"item_id": [[1], None]}, "has nulls"),
            ({"item_id": [[1, None]]}, "has nulls"),
            ({"item_id": [[1]], "split": ["valid"]}, r"has \['valid'\]; it must have 'train' and 'test'"),
            (
                {"item_id": [[1]], "split": [{"name": "train"}]},
                r"has \['values of type struct<name: string>'\]; it must",
            ),
            ({"item_id": [[1]], "split": [["train"]]}, r"has \['values of type list<element: string>'\]; it must have"),
            ("hello", "no parquet file"),
        ],
    )
    def test_files_with_mistakes(self, tmp_path, table, message):
        path = tmp_path / "h.parquet"
        path.write_text(table) if isinstance(table, str) else pq.write_table(pa.table(table), path)
        with pytest.raises(ValueError, match=message):
            ParquetHistories(path, "item_id", "train")

    def test_no_file(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="does not exist"):
            ParquetHistories(tmp_path / "h.parquet", "item_id", "train")
        with pytest.raises(IsADirectoryError, match="is a folder; .*: give the file"):  # as `preprocess` writes
            ParquetHistories(tmp_path, "item_id", "train")


class TestLoaders:
    def loader(self, name, split="train", **options):
        options = {"batch_size": 4, "max_history_seqlen": 6, "max_num_candidates": 2, **options}
        return get_data_loader(name, split, **options)

    def test_own_parquet(self, tmp_path):
        """Without splits the last item is left out in training; who has no other is not trained."""
        path = write(tmp_path / "h.parquet", [ITEMS, [7], [], ITEMS[:2]], column="seen")
        options = {"dataset_path": path, "sid_map": SID_MAP, "history_column": "seen"}
        (training,) = self.loader("sid", **options)
        assert items_of(training, "history") == [ITEMS[:4], [], [], []] and training.actual_batch_size == 2
        assert items_of(training, "candidate") == [ITEMS[4:6], ITEMS[:1], [], []]
        (evaluation,) = self.loader("sid", "test", **options)
        assert items_of(evaluation, "history") == [ITEMS[:6], [], [], ITEMS[:1]]
        assert items_of(evaluation, "candidate") == [ITEMS[6:], [7], [], ITEMS[1:2]]  # the last item alone

    def test_all_items_are_candidates_where_their_number_is_0(self, tmp_path):
        """As many as evaluation has in a row: a place that is not trained would predict at random."""
        path = write(tmp_path / "h.parquet", [ITEMS, ITEMS], ["train", "test"])
        options = {"dataset_path": path, "sid_map": SID_MAP, "max_num_candidates": 0, "max_history_seqlen": 5}
        (batch,) = self.loader("sid", **options)
        assert items_of(batch, "history")[0] == [] and items_of(batch, "candidate")[0] == ITEMS[1:]
        (evaluation,) = self.loader("sid", "test", **options)
        assert items_of(evaluation, "history")[0] + items_of(evaluation, "candidate")[0] == ITEMS[1:]

    @pytest.mark.parametrize("split", ["train", "test"])
    def test_preprocessed_data(self, generated, split):
        histories = PreprocessedHistories(generated, SCHEMA, split)
        sid_map = random_sid_map(3883, (16, 16, 16))
        loader = self.loader("sid-ml-1m", split, dataset_path=generated, sid_map=sid_map)
        users = np.arange(len(histories))
        lengths = histories.lengths(users)
        kept = np.minimum(lengths, 6 + (2 if split == "train" else 1))
        codes = sid_map.codes[histories.tails(users, kept)]
        batches = list(loader)
        assert sum(batch.actual_batch_size for batch in batches) == len(histories) > 4
        found = torch.cat([batch.labels.values() for batch in batches]).view(-1, 3)
        ends = np.cumsum(kept)
        last = [codes[end - count : end] for end, count in zip(ends, kept - 6)]
        assert found.tolist() == np.concatenate(last).tolist()
        digests = {"sids": sid_map.digest, "items": histories.items_digest()}  # the map does not state its items
        assert loader.dataset.vocabulary_digests == digests
        assert loader.dataset.row_order == SequenceFile(generated, "ml-1m", []).metadata.row_order("user_id") != {}

    def test_mistakes(self):
        with pytest.raises(ValueError, match="sid_map is not given"):
            self.loader("sid-random")
        with pytest.raises(ValueError, match="dataset_path is not set"):
            self.loader("sid", sid_map=SID_MAP)
        with pytest.raises(ValueError, match="num_tasks is 2"):
            self.loader("sid-random", sid_map=SID_MAP, num_tasks=2)
        with pytest.raises(ValueError, match="history_column is 'seen', dataset_name is 'sid-ml-1m', whose items are"):
            self.loader("sid-ml-1m", sid_map=SID_MAP, dataset_path="data", history_column="seen")


@given(users=st.lists(st.lists(st.integers(0, 9), max_size=9), max_size=9), items=st.integers(1, 20))
def test_chunks_are_all_users_in_order(users, items):
    with mock.patch.multiple(sid_histories, _USERS_PER_CHUNK=4, _ITEMS_PER_CHUNK=items):
        chunks = list(sid_histories.history_chunks(Users(users)))
    assert [user for found, _, _ in chunks for user in found.tolist()] == list(range(len(users)))
    for found, lengths, chunk in chunks:
        assert found.size and chunk.tolist() == [item for user in found for item in users[user]]
        assert lengths.tolist() == [len(users[user]) for user in found]
        assert len(chunk) <= items + 9


def test_reading_all_lengths_has_few_row_groups_in_memory(tmp_path):
    """Of the users of a chunk, who had all their items in memory at once."""
    events = {"user": range(256), "item": range(256), "time": range(256)}
    pq.write_table(pa.table(events), tmp_path / "events.parquet")
    with mock.patch.object(sequence_writer, "_INTERACTIONS_PER_GROUP", 1):  # a row group for every user
        path = preprocess_parquet(
            EventColumns("user", "item", "time"), tmp_path / "events.parquet", tmp_path / "out", test_fraction=0.0
        )
    histories = PreprocessedHistories(path, stored_schema(path), "train")
    histories._file._max_cached_bytes = 0
    made, most = weakref.WeakSet(), 0

    class Counted(sequence_file._RowGroup):
        def __init__(self, table):
            nonlocal most
            super().__init__(table)
            made.add(self)
            most = max(most, len(made))

    with (
        mock.patch.object(sequence_file, "_RowGroup", Counted),
        mock.patch.object(sid_histories, "_ITEMS_PER_CHUNK", 4),
    ):
        read = [items.tolist() for _, _, items in sid_histories.history_chunks(histories)]
    assert list(chain.from_iterable(read)) == list(range(256)) and len(read) > 60
    assert 0 < most < 16


def test_histories_of_as_many_users_and_items_have_other_contents(tmp_path):
    files = ([[2, 3], [5]], [[2, 3], [7]], [[2], [3, 5]], [[2, 3], [5]])
    found = [
        ParquetHistories(write(tmp_path / f"{i}.parquet", users), "item_id", "test") for i, users in enumerate(files)
    ]
    first, other_item, other_lengths, same = (each.row_contents() for each in found)
    assert first == same and first not in (other_item, other_lengths)
    assert {first["num_users"], other_item["num_users"]} == {2} and first["num_interactions"] == 3
