"""SIDMap: files that are read, files that are refused, and how mistakes are reported."""

from __future__ import annotations

import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commons.datasets.sids.map import SIDMap, random_sid_map

CODES = np.array([[0, 1], [2, 0], [1, 1], [0, 0]])


def test_a_map_is_sorted_by_item():
    sid_map = SIDMap(np.array([7, 3, 5, 40]), CODES, (3, 2))
    assert sid_map.item_ids.tolist() == [3, 5, 7, 40]
    assert sid_map.codes.tolist() == [[2, 0], [1, 1], [0, 1], [0, 0]]
    assert (sid_map.num_items, sid_map.num_hierarchies) == (4, 2)


class TestFiles:
    def test_parquet_of_our_own_keeps_sizes_and_options(self, tmp_path):
        SIDMap(np.arange(4) * 3, CODES, (3, 2), {"seed": 5}).save(tmp_path / "sids.parquet")
        loaded = SIDMap.load(tmp_path / "sids.parquet", [3, 2])
        assert loaded.codes.tolist() == CODES.tolist() and loaded.item_ids.tolist() == [0, 3, 6, 9]
        assert loaded.options == {"seed": 5}
        with pytest.raises(ValueError, match=r"codebook_sizes is \[4, 2\], the map was made with \[3, 2\]"):
            SIDMap.load(tmp_path / "sids.parquet", [4, 2])

    @pytest.mark.parametrize("kind", [pa.list_(pa.int16()), pa.large_list(pa.int64()), pa.list_(pa.int32(), 2)])
    def test_parquet_of_others(self, tmp_path, kind):
        table = pa.table({"sid": pa.array(CODES.tolist(), kind), "item_id": pa.array([4, 3, 2, 1], pa.uint32())})
        pq.write_table(table, tmp_path / "sids.parquet")
        loaded = SIDMap.load(tmp_path / "sids.parquet", [3, 2])
        assert loaded.codes.tolist() == CODES[::-1].tolist()

    def test_npy(self, tmp_path):
        np.save(tmp_path / "sids.npy", CODES.astype(np.int32))
        loaded = SIDMap.load(tmp_path / "sids.npy", [3, 2])
        assert loaded.item_ids.tolist() == [0, 1, 2, 3] and loaded.codes.dtype == np.int64

    def test_a_failed_save_leaves_what_was_there(self, tmp_path):
        path = tmp_path / "sids.parquet"
        path.write_text("before")
        with pytest.raises(TypeError):
            SIDMap(np.arange(4), CODES, (3, 2), {"not json": object()}).save(path)
        assert path.read_text() == "before" and len(list(tmp_path.iterdir())) == 1
        with pytest.raises(ValueError, match="maps are written as .parquet"):
            SIDMap(np.arange(4), CODES, (3, 2)).save(tmp_path / "sids.npy")

    @pytest.mark.parametrize("suffix", [".pt", ".pth", ".pkl"])
    def test_pickles_are_refused_with_the_remedy(self, tmp_path, suffix):
        (tmp_path / f"sids{suffix}").write_bytes(b"anything")
        with pytest.raises(ValueError, match=r"a pickle, which can run code .* numpy.save\('sids.npy'"):
            SIDMap.load(tmp_path / f"sids{suffix}", [3, 2])

    def test_other_files(self, tmp_path):
        with pytest.raises(ValueError, match=r"ends in '.csv'; SID maps are .parquet or .npy"):
            SIDMap.load(tmp_path / "sids.csv", [3, 2])
        with pytest.raises(FileNotFoundError, match="evenrank make-sids"):
            SIDMap.load(tmp_path / "sids.npy", [3, 2])
        (tmp_path / "folder.parquet").mkdir()
        with pytest.raises(IsADirectoryError, match="is a folder; .*: give the file"):
            SIDMap.load(tmp_path / "folder.parquet", [2])
        for name in ("sids.npy", "sids.parquet"):
            (tmp_path / name).write_text("no such thing")
            with pytest.raises(ValueError, match="the file is no "):
                SIDMap.load(tmp_path / name, [3, 2])
        np.save(tmp_path / "sids.npy", np.array([object()]), allow_pickle=True)
        with pytest.raises(ValueError, match="no array of numbers"):
            SIDMap.load(tmp_path / "sids.npy", [3, 2])
        # numpy takes the header apart with Python's own tokenizer, whose errors are none of numpy's.
        np.save(tmp_path / "sids.npy", CODES)
        (tmp_path / "sids.npy").write_bytes((tmp_path / "sids.npy").read_bytes().replace(b"}", b"(", 1))
        with pytest.raises(ValueError, match="no array of numbers"):
            SIDMap.load(tmp_path / "sids.npy", [3, 2])
        np.save(tmp_path / "sids.npy", np.ones((3, 2)))
        with pytest.raises(ValueError, match="float64"):
            SIDMap.load(tmp_path / "sids.npy", [3, 2])

    @pytest.mark.parametrize(
        ("columns", "message"),
        [
            ({"item": [1], "sid": [[0, 1]]}, "a map has item_id and sid"),
            ({"item_id": [1], "sid": [3]}, "sid of type int64"),
            ({"item_id": ["a"], "sid": [[0, 1]]}, "item_id is of type string"),
            ({"item_id": [1, 2], "sid": [[0, 1], None]}, "the file has nulls"),
            ({"item_id": [1, 2], "sid": [[0, 1], [0, None]]}, "the file has nulls"),
            ({"item_id": [1, 2], "sid": [[0, 1], [0]]}, "lists of [1, 2] codes"),
            ({"item_id": [1], "sid": [[0, 1, 1]]}, "codes have shape (1, 3)"),
        ],
    )
    def test_parquet_with_mistakes(self, tmp_path, columns, message):
        pq.write_table(pa.table(columns), tmp_path / "sids.parquet")
        with pytest.raises(ValueError) as caught:
            SIDMap.load(tmp_path / "sids.parquet", [3, 2])
        assert message in str(caught.value) and str(tmp_path) in str(caught.value)


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
    with pytest.raises(ValueError, match=f"num_items is {capacity + 1}"):
        random_sid_map(capacity + 1, sizes, seed)
