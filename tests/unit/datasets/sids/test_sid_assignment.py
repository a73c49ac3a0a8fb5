"""Semantic IDs from histories: alike items get like codes, all SIDs differ, and the command that makes them."""

from __future__ import annotations

import itertools

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commons import available_memory
from commons.cli.main import main
from commons.datasets.loader.data_loader import get_data_loader
from commons.datasets.sequences.event_columns import EventColumns
from commons.datasets.sequences.own_parquet import preprocess_parquet
from commons.datasets.sids.assignment import _Codebook, assign_sids, count_cooccurrences
from commons.datasets.sids.map import SIDMap
from tests.helpers.datasets.sid_users import Users
from tests.helpers.datasets.stored_users import vocabularies_of


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


def test_leading_codes_are_shared_within_a_group():
    sid_map = assign_sids(grouped_users(), np.arange(50), [5, 4, 16], vector_size=4, seed=3)
    first = sid_map.codes[:48, 0].reshape(4, 12)
    assert (first == first[:, :1]).all() and len(set(first[:, 0])) == 4


def test_the_same_seed_gives_the_same_map():
    maps = [assign_sids(grouped_users(), np.arange(50), [6, 6, 6], seed=seed) for seed in (1, 1, 2)]
    assert np.array_equal(maps[0].codes, maps[1].codes)
    assert not np.array_equal(maps[0].codes, maps[2].codes)


@settings(max_examples=15)
@given(
    sizes=st.lists(st.integers(1, 8), min_size=1, max_size=3),
    num_items=st.integers(2, 60),
    seed=st.integers(0, 5),
)
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
    with pytest.raises(
        ValueError, match=r"vector_size is 64 for 50 items, codebook_sizes is \[8, 4, 16\]; that takes ab"
    ):
        assign_sids(**arguments)
    monkeypatch.setattr(available_memory, "available_memory", lambda: 4_000_000)
    with pytest.raises(ValueError, match=r"65,536 codes for 50 items with equal earlier codes; that takes"):
        assign_sids(**arguments | {"codebook_sizes": [1, 65_536], "vector_size": 1, "item_ids": np.arange(50)})


class TestCommand:
    def test_movielens_from_end_to_end(self, generated, tmp_path, capsys):
        sizes = ["--codebook-sizes", "32", "32", "32"]
        output = ["--output", str(tmp_path / "sids.parquet")]
        assert main(["make-sids", "ml-1m", "--source", str(generated), *output, *sizes]) == 0
        shown = capsys.readouterr().out
        assert "32 × 32 × 32" in shown and "3,883" in shown
        sid_map = SIDMap.load(tmp_path / "sids.parquet", [32, 32, 32])
        assert sid_map.item_ids.tolist() == list(range(3883))

    def test_parquet(self, tmp_path):
        table = pa.table({"seen": [[10, 20, 30], [20, 30, 99]], "split": ["train", "test"]})
        pq.write_table(table, tmp_path / "h.parquet")
        command = ["make-sids", "parquet", "--source", str(tmp_path / "h.parquet"), "--history-column", "seen"]
        assert main([*command, "--output", str(tmp_path / "s.parquet"), "--codebook-sizes", "2", "2", "2"]) == 0
        assert SIDMap.load(tmp_path / "s.parquet", [2, 2, 2]).item_ids.tolist() == [10, 20, 30, 99]

    def test_a_preprocessed_log_of_ones_own(self, tmp_path, capsys):
        users = [[3, 5, 7, 11], [5, 7, 13], [3, 13, 5, 11]]
        log = [(f"u{user}", f"i{item}", time) for user, items in enumerate(users) for time, item in enumerate(items)]
        events = pa.table(dict(zip(("uid", "iid", "ts"), map(list, zip(*log)))))
        pq.write_table(events, tmp_path / "log.parquet")
        columns = EventColumns("uid", "iid", "ts")
        path = preprocess_parquet(columns, tmp_path / "log.parquet", tmp_path / "data", test_fraction=0)
        command = ["make-sids", "parquet", "--output", str(tmp_path / "s.parquet"), "--codebook-sizes", "2", "2", "2"]
        assert main([*command, "--source", str(tmp_path / "data")]) == 0
        sid_map = SIDMap.load(tmp_path / "s.parquet", [2, 2, 2])
        sizes = {"batch_size": 3, "max_history_seqlen": 9, "max_num_candidates": 2}
        (batch,) = get_data_loader("sid-parquet", dataset_path=tmp_path / "data", sid_map=sid_map, **sizes)
        raw = vocabularies_of(path, "parquet")["iid"]
        items = {tuple(codes): raw[item] for item, codes in zip(sid_map.item_ids, sid_map.codes.tolist())}
        candidates = batch.labels.values().view(-1, 2, 3).tolist()
        assert [[items[tuple(codes)] for codes in row] for row in candidates] == [
            [f"i{item}" for item in row[-2:]] for row in users
        ]
        assert main([*command, "--source", str(tmp_path)]) == 2
        assert "run `evenrank preprocess parquet" in capsys.readouterr().err

    def test_mistakes_are_one_line(self, tmp_path, capsys):
        assert main(["make-sids", "parquet", "--source", "no.parquet", "--output", str(tmp_path / "s.npy")]) == 2
        assert "a map is a .parquet file: rename it\n" in capsys.readouterr().err
        assert main(["make-sids", "parquet", "--source", "no.parquet", "--output", str(tmp_path / "s.parquet")]) == 2
        assert "no.parquet does not exist" in capsys.readouterr().err
