"""Semantic IDs: maps and their files, how mistakes are reported, and maps that are made from histories."""

import itertools
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commons import available_memory
from commons.datasets.loader.data_loader import get_data_loader
from commons.datasets.sequences.event_columns import EventColumns
from commons.datasets.sequences.own_parquet import preprocess_parquet
from commons.datasets.sids import map as sid_map
from commons.datasets.sids.assignment import _Codebook, assign_sids, count_cooccurrences, embed_items
from commons.datasets.sids.map import SIDMap, is_sid_map, random_sid_map
from tests.helpers.datasets.sid_users import Users
from tests.helpers.datasets.stored_users import vocabularies_of

CODES = np.array([[0, 1], [2, 0], [1, 1], [0, 0]])


class TestFiles:
    def test_parquet_of_our_own_keeps_sizes_and_options(self, tmp_path):
        SIDMap(np.arange(4) * 3, CODES, (3, 2), {"seed": 5}).save(tmp_path / "sids.parquet")
        loaded = SIDMap.load(tmp_path / "sids.parquet", [3, 2])
        assert loaded.codes.tolist() == CODES.tolist() and loaded.item_ids.tolist() == [0, 3, 6, 9]
        assert loaded.options == {"seed": 5} and is_sid_map(tmp_path / "sids.parquet")
        with pytest.raises(ValueError, match=r"codebook_sizes is \[4, 2\], the map was made with \[3, 2\]"):
            SIDMap.load(tmp_path / "sids.parquet", [4, 2])

    @pytest.mark.parametrize("kind", [pa.list_(pa.int16()), pa.large_list(pa.int64()), pa.list_(pa.int32(), 2)])
    def test_parquet_of_others(self, tmp_path, kind):
        table = pa.table({"sid": pa.array(CODES.tolist(), kind), "item_id": pa.array([4, 3, 2, 1], pa.uint32())})
        pq.write_table(table, tmp_path / "sids.parquet", store_schema=False)  # without any metadata
        loaded = SIDMap.load(tmp_path / "sids.parquet", [3, 2])
        assert loaded.codes.tolist() == CODES[::-1].tolist() and not is_sid_map(tmp_path / "sids.parquet")

    def test_npy(self, tmp_path):
        np.save(tmp_path / "sids.npy", CODES.astype(np.int32))
        loaded = SIDMap.load(tmp_path / "sids.npy", [3, 2])
        assert loaded.item_ids.tolist() == [0, 1, 2, 3] and loaded.codes.dtype == np.int64
        assert loaded.rows_of(np.array([3, 0, 3])).tolist() == [3, 0, 3]
        with pytest.raises(KeyError, match="2 items have no SID, the first ones 4, -1"):  # not the last item's row
            loaded.rows_of(np.array([4, 1, -1]))

    def test_a_failed_save_leaves_what_was_there(self, tmp_path):
        path = tmp_path / "sids.parquet"
        path.write_text("before")
        with pytest.raises(TypeError):
            SIDMap(np.arange(4), CODES, (3, 2), {"not json": object()}).save(path)
        assert path.read_text() == "before" and len(list(tmp_path.iterdir())) == 1
        with pytest.raises(ValueError, match="maps are written as .parquet"):
            SIDMap(np.arange(4), CODES, (3, 2)).save(tmp_path / "sids.npy")

    @pytest.mark.parametrize(
        ("name", "content", "message"),
        [
            *((f"a.{end}", b"", r"a pickle, .* run code .* numpy.save\('sids") for end in ("pt", "pth", "pkl")),
            ("sids.csv", b"", "ends in '.csv'; SID maps are .parquet or .npy"),
            *((f"sids.{kind}", b"no such thing", "the file is no ") for kind in ("npy", "parquet")),
            ("sids.npy", np.array([object()]), "no array of numbers"),
            ("sids.npy", np.ones((3, 2)), "float64"),
            ("sids.parquet", {"item": [1], "sid": [[0, 1]]}, "a map has item_id and sid"),
            ("sids.parquet", {"item_id": [1], "sid": [3]}, "sid of type int64"),
            ("sids.parquet", {"item_id": ["a"], "sid": [[0, 1]]}, "item_id is of type string"),
            ("sids.parquet", {"item_id": [1, 2], "sid": [[0, 1], None]}, "the file has nulls"),
            ("sids.parquet", {"item_id": [1, 2], "sid": [[0, 1], [0, None]]}, "the file has nulls"),
            ("sids.parquet", {"item_id": [1, 2], "sid": [[0, 1], [0]]}, r"lists of \[1, 2\] codes"),
            ("sids.parquet", {"item_id": [1], "sid": [[0, 1, 1]]}, r"codes have shape \(1, 3\)"),
        ],
    )
    def test_what_is_no_map(self, tmp_path, name, content, message):
        path = tmp_path / name
        if isinstance(content, bytes):
            path.write_bytes(content)
        elif isinstance(content, dict):
            pq.write_table(pa.table(content), path)
        else:
            np.save(path, content, allow_pickle=True)
        with pytest.raises(ValueError, match=f"{name}.*{message}|{message}.*{name}"):
            SIDMap.load(path, [3, 2])

    def test_a_map_of_another_format_is_refused(self, tmp_path, monkeypatch):
        monkeypatch.setattr(sid_map, "_FORMAT_VERSION", 7)
        SIDMap(np.arange(4), CODES, (3, 2)).save(tmp_path / "sids.parquet")
        monkeypatch.undo()
        with pytest.raises(ValueError, match="format version 7, this version reads 1: make it again"):
            SIDMap.load(tmp_path / "sids.parquet", [3, 2])

    def test_files_that_are_none_and_a_damaged_header(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="evenrank make-sids"):
            SIDMap.load(tmp_path / "sids.npy", [3, 2])
        (tmp_path / "folder.parquet").mkdir()
        with pytest.raises(IsADirectoryError, match="is a folder; .*: give the file"):
            SIDMap.load(tmp_path / "folder.parquet", [2])
        # numpy takes the header apart with Python's own tokenizer, whose errors are none of numpy's.
        np.save(tmp_path / "sids.npy", CODES)
        (tmp_path / "sids.npy").write_bytes((tmp_path / "sids.npy").read_bytes().replace(b"}", b"(", 1))
        with pytest.raises(ValueError, match="no array of numbers"):
            SIDMap.load(tmp_path / "sids.npy", [3, 2])


@pytest.mark.parametrize(
    ("item_ids", "codes", "sizes", "message"),
    [
        (
            [10, 20, 30, 40, 50],
            [[0, 1], [3, 0], [1, 2], [0, -1], [9, 9]],
            (3, 2),
            "4 of 5 items have a code outside its codebook.*item 20: [3, 0], item 30: [1, 2], item 40: [0, -1];",
        ),
        (
            range(7),
            [[1, 1], [0, 1], [1, 1], [2, 0], [0, 1], [0, 1], [0, 1]],
            (3, 2),
            "6 of 7 items share their SID with another.*the first ones 0, 2 have [1, 1];",
        ),
        ([8, 1, 2, 8], CODES, (3, 2), "1 items are listed more than once, the first ones 8"),
        (range(4), CODES, (3, 2, 2), "codes have shape (4, 2) for 4 items, codebook_sizes is [3, 2, 2]"),
        ([], CODES[:0], (3, 2), "at least one item"),
    ],
)
def test_what_is_no_map_is_named(item_ids, codes, sizes, message):
    with pytest.raises(ValueError, match=re.escape(message).replace(r"\.\*", ".*")):
        SIDMap(np.array(item_ids, np.int64), np.array(codes), sizes)


@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4), seed=st.integers(0, 9), data=st.data())
def test_random_maps_have_different_sids(sizes, seed, data):
    capacity = int(np.prod(sizes))
    num_items = data.draw(st.integers(1, capacity))
    sid_map = random_sid_map(num_items, sizes, seed)  # its constructor looks for shared SIDs
    assert sid_map.num_items == num_items
    assert np.array_equal(sid_map.codes, random_sid_map(num_items, sizes, seed).codes)
    with pytest.raises(ValueError, match=rf"\(sid.num_random_items\) is {capacity + 1}"):
        random_sid_map(capacity + 1, sizes, seed)


def grouped_users(num_groups=4, items_per_group=12, num_users=80, seed=0):
    """Users who like the items of one group: items group · items_per_group + 0 … 11."""
    rng = np.random.default_rng(seed)
    groups = rng.integers(0, num_groups, num_users)
    return Users([(group * items_per_group + rng.permutation(items_per_group)[:8]).tolist() for group in groups])


@given(users=st.lists(st.lists(st.integers(0, 6), max_size=8), min_size=1, max_size=5), window=st.integers(1, 4))
def test_cooccurrences_are_those_of_all_pairs(users, window):
    expected = np.zeros((7, 7))
    for user in users:
        for i, first in enumerate(user):
            for second in user[i + 1 : i + 1 + window]:
                expected[first, second] += 1
                expected[second, first] += 1
    found = count_cooccurrences(Users(users), np.arange(7), window)
    assert np.array_equal(found.toarray(), expected)


def test_vectors_are_those_of_the_mutual_information():
    """Up to a rotation, which the products of vectors do not show."""
    users = np.random.default_rng(0).integers(0, 6, (8, 9)).tolist()
    counts = count_cooccurrences(Users(users), np.arange(6), 3)
    pairs, of_items = counts.toarray(), counts.toarray().sum(axis=1)
    with np.errstate(divide="ignore"):
        information = np.log(pairs * pairs.sum() / np.outer(of_items, of_items))
    left, scales, _ = np.linalg.svd(np.maximum(information, 0))
    expected = left * np.sqrt(scales)
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    found = embed_items(counts, 64, seed=0)
    assert np.allclose(found @ found.T, expected @ expected.T)


def test_leading_codes_are_shared_within_a_group():
    sid_map = assign_sids(grouped_users(), np.arange(50), [5, 4, 16], vector_size=4, seed=3)
    first = sid_map.codes[:48, 0].reshape(4, 12)
    assert (first == first[:, :1]).all() and len(set(first[:, 0])) == 4


def test_the_same_seed_gives_the_same_map():
    maps = [assign_sids(grouped_users(), np.arange(50), [6, 6, 6], seed=seed) for seed in (1, 1, 2)]
    assert np.array_equal(maps[0].codes, maps[1].codes)
    assert not np.array_equal(maps[0].codes, maps[2].codes)


@settings(max_examples=15)
@given(sizes=st.lists(st.integers(1, 8), min_size=1, max_size=3), num_items=st.integers(2, 60), seed=st.integers(0, 5))
def test_all_sids_differ_or_there_is_no_room(sizes, num_items, seed):
    users = grouped_users(num_groups=1, items_per_group=min(num_items, 8), num_users=10, seed=seed)
    if int(np.prod(sizes)) < num_items:
        with pytest.raises(ValueError, match=f"SIDs for {num_items} items"):
            assign_sids(users, np.arange(num_items), sizes, seed=seed)
        return
    sid_map = assign_sids(users, np.arange(num_items), sizes, seed=seed)  # SIDMap looks for shared SIDs
    assert sid_map.num_items == num_items


def test_collisions_change_the_last_code_alone_where_that_is_enough():
    # Items 0 to 5 are never seen: equal vectors, so equal codes.
    users = Users([[6, 7, 8, 9] * 3] * 4)
    sid_map = assign_sids(users, np.arange(10), [3, 3, 6], seed=0)
    assert len({tuple(codes) for codes in sid_map.codes[:6, :2].tolist()}) == 1
    assert sorted(sid_map.codes[:6, 2].tolist()) == [0, 1, 2, 3, 4, 5]
    crowded = assign_sids(users, np.arange(10), [3, 3, 4], seed=0)
    assert len(set(crowded.codes[:6, 0].tolist())) == 1 and len(set(crowded.codes[:6, 1].tolist())) == 2
    assert crowded.options["items_told_apart"] >= 2


@given(seed=st.integers(0, 10_000), num_items=st.integers(2, 4))
def test_last_codes_have_the_least_sum_of_squared_distances(seed, num_items):
    rng = np.random.default_rng(seed)
    vectors, centroids = rng.standard_normal((num_items, 2)), rng.standard_normal((4, 2))
    distances = ((vectors[:, None] - centroids) ** 2).sum(2)
    codebook = _Codebook(centroids, 4, distances.argmin(1))
    codes = codebook.assign(vectors, np.zeros((num_items, 1), np.int64), room=1)
    sums = [distances[range(num_items), chosen].sum() for chosen in itertools.permutations(range(4), num_items)]
    assert len(set(codes)) == num_items
    assert distances[range(num_items), codes].sum() == pytest.approx(min(sums))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"codebook_sizes": []}, "codebook_sizes is []"),
        ({"codebook_sizes": [8, 10**12]}, "every hierarchy has 1 to 65,536 codes with 48 items"),
        ({"item_ids": np.array([1, 1, 2])}, "item_ids has 3 entries, 2 of them different"),
        ({"item_ids": np.array([1])}, "at least two different items"),
        ({"window": 0}, "window is 0"),
        ({"vector_size": 10**9}, "vector_size is 1000000000; it is a number from 1 to 1,024"),
        ({"seed": 2**32}, "seed is 4294967296; it is a number from 0 to 4,294,967,293"),
    ],
)
def test_mistakes(changes, message):
    arguments = {"item_ids": np.arange(48), "codebook_sizes": [8, 8], "histories": grouped_users()} | changes
    with pytest.raises(ValueError) as caught:
        assign_sids(**arguments)
    assert message in str(caught.value)


def test_memory_is_asked_for_before_it_is_taken(monkeypatch):
    arguments = {"item_ids": np.arange(50), "codebook_sizes": [8, 4, 16], "histories": grouped_users()}
    monkeypatch.setattr(available_memory, "available_memory", lambda: 30_000)
    with pytest.raises(ValueError, match=r"vector_size is 64 for 50 items, codebook_sizes is \[8, 4, 16\]; that"):
        assign_sids(**arguments)
    monkeypatch.setattr(available_memory, "available_memory", lambda: 4_000_000)
    with pytest.raises(ValueError, match=r"65,536 codes for 50 items with equal earlier codes; that takes"):
        assign_sids(**arguments | {"codebook_sizes": [1, 65_536], "vector_size": 1, "item_ids": np.arange(50)})


class TestCommand:
    def test_movielens_from_end_to_end(self, generated, tmp_path, told):
        made = ["--output", str(tmp_path / "sids.parquet"), "--codebook-sizes", "32", "32", "32"]
        shown = told("make-sids", "ml-1m", "--source", str(generated), *made)
        assert "32 × 32 × 32" in shown and "3,883" in shown
        sid_map = SIDMap.load(tmp_path / "sids.parquet", [32, 32, 32])
        assert sid_map.item_ids.tolist() == list(range(3883))

    def test_parquet(self, tmp_path, told):
        table = pa.table({"seen": [[10, 20, 30], [20, 30, 99]], "split": ["train", "test"]})
        pq.write_table(table, tmp_path / "h.parquet")
        command = ["make-sids", "parquet", "--source", str(tmp_path / "h.parquet"), "--history-column", "seen"]
        told(*command, "--output", str(tmp_path / "s.parquet"), "--codebook-sizes", "2", "2", "2")
        assert SIDMap.load(tmp_path / "s.parquet", [2, 2, 2]).item_ids.tolist() == [10, 20, 30, 99]

    def test_a_preprocessed_log_of_ones_own(self, tmp_path, told, mistake):
        users = [[3, 5, 7, 11], [5, 7, 13], [3, 13, 5, 11]]
        log = [(f"u{user}", f"i{item}", time) for user, items in enumerate(users) for time, item in enumerate(items)]
        events = pa.table(dict(zip(("uid", "iid", "ts"), map(list, zip(*log)))))
        pq.write_table(events, tmp_path / "log.parquet")
        columns = EventColumns("uid", "iid", "ts")
        path = preprocess_parquet(columns, tmp_path / "log.parquet", tmp_path / "data", test_fraction=0)
        command = ["make-sids", "parquet", "--output", str(tmp_path / "s.parquet"), "--codebook-sizes", "2", "2", "2"]
        told(*command, "--source", str(tmp_path / "data"))
        sid_map = SIDMap.load(tmp_path / "s.parquet", [2, 2, 2])
        sizes = {"batch_size": 3, "max_history_seqlen": 9, "max_num_candidates": 2}
        (batch,) = get_data_loader("sid-parquet", dataset_path=tmp_path / "data", sid_map=sid_map, **sizes)
        raw = vocabularies_of(path, "parquet")["iid"]
        items = {tuple(codes): raw[item] for item, codes in zip(sid_map.item_ids, sid_map.codes.tolist())}
        candidates = batch.labels.values().view(-1, 2, 3).tolist()
        assert [[items[tuple(codes)] for codes in row] for row in candidates] == [
            [f"i{item}" for item in row[-2:]] for row in users
        ]
        assert "run `evenrank preprocess parquet" in mistake(*command, "--source", str(tmp_path))

    def test_a_map_of_other_items_is_refused(self, tmp_path, told):
        """An id is a place among the sorted items, so one item less or another one changes what ids mean."""

        def preprocessed(folder, items):
            events = {"uid": [user for user in range(4) for _ in items], "iid": items * 4, "ts": range(4 * len(items))}
            pq.write_table(pa.table({name: list(values) for name, values in events.items()}), tmp_path / "log.parquet")
            columns = EventColumns("uid", "iid", "ts")
            preprocess_parquet(columns, tmp_path / "log.parquet", tmp_path / folder, test_fraction=0)
            return tmp_path / folder

        data = preprocessed("data", ["a", "b", "c"])
        command = ["make-sids", "parquet", "--output", str(tmp_path / "s.parquet"), "--codebook-sizes", "2", "2"]
        told(*command, "--source", str(data))
        options = {"sid_map": SIDMap.load(tmp_path / "s.parquet", [2, 2]), "batch_size": 4, "max_history_seqlen": 9}
        for folder, items in (("same", ["c", "b", "a", "b"]), ("data", ["a", "b", "c"])):  # more events, equal items
            assert get_data_loader("sid-parquet", dataset_path=preprocessed(folder, items), **options)
        for items in (["b", "c"], ["a", "b", "d"]):
            with pytest.raises(ValueError, match="was made for items with the digest .*: make the map again"):
                get_data_loader("sid-parquet", dataset_path=preprocessed("other", items), **options)
        # A map of one's own for raw items would give almost every item the code of another.
        np.save(tmp_path / "own.npy", np.array([[0, 0], [0, 1], [1, 0], [1, 1]]))
        options["sid_map"] = SIDMap.load(tmp_path / "own.npy", [2, 2])
        assert get_data_loader("sid-parquet", dataset_path=preprocessed("whole", [0, 1, 2, 3]), **options)
        with pytest.raises(ValueError, match="the map has items from 0 to 3, and an id of .* among 3 items, counted"):
            get_data_loader("sid-parquet", dataset_path=preprocessed("gap", [0, 2, 3]), **options)

    def test_mistakes_are_one_line(self, tmp_path, mistake):
        command = ["make-sids", "parquet", "--source", "no.parquet", "--output"]
        assert "a map is a .parquet file: rename it\n" in mistake(*command, str(tmp_path / "s.npy"))
        assert "no.parquet does not exist" in mistake(*command, str(tmp_path / "s.parquet"))
