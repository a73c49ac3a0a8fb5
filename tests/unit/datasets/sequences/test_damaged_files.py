"""Data sets, semantic-ID maps and raw data that are damaged in any way: success, or a user's mistake in one line."""

import json
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commons.datasets.loader.data_loader import get_data_loader
from commons.datasets.public.movielens import preprocess_movielens, preprocess_movielens_20m
from commons.datasets.sequences.event_columns import EventColumns
from commons.datasets.sequences.metadata import MANIFEST
from commons.datasets.sequences.own_parquet import EventFiles, preprocess_parquet
from commons.datasets.sids.map import SIDMap, is_sid_map
from tests.helpers.datasets import kuairand, movielens
from tests.helpers.datasets.fuzzing import (
    ODD_PLACES,
    damaged_bytes,
    damaged_json,
    damaged_text,
    fuzzed,
    odd_place,
    require_answer,
)
from tests.helpers.datasets.own_events import COLUMNS, EVENTS

RANDOM = st.randoms(use_true_random=False)


def odd_column(random, rows):
    """A column of another type."""
    values = [None, 1, "a", [1], [None], {"a": 1}, 1.5, float("nan"), 2**63 - 1, -(2**63), b"\xff", [[1]], True, "\x00"]
    typed = [pa.uint64(), pa.timestamp("ns"), pa.date32(), pa.duration("s"), pa.decimal128(20, 2)]
    chosen = random.randrange(len(values) + len(typed) + 3)
    if chosen < len(values):
        return pa.array([values[chosen]] * rows)
    if chosen < len(values) + len(typed):
        return pa.array([random.choice([0, 1])] * rows, typed[chosen - len(values)])
    return random.choice(
        [
            pa.array(["a"] * rows).dictionary_encode(),
            pa.nulls(rows, pa.int64()),
            pa.array([[]] * rows, pa.list_(pa.int8())),
        ]
    )


@pytest.fixture(scope="module")
def data_sets(tmp_path_factory):
    """Folders with a data set each, by name."""
    folder = tmp_path_factory.mktemp("whole")
    preprocess_movielens(movielens.write_zip(folder / "a.zip"), folder / "ml-1m", test_fraction=0)
    pq.write_table(pa.table(EVENTS), folder / "events.parquet")
    preprocess_parquet(COLUMNS, folder / "events.parquet", folder / "parquet", test_fraction=0)
    return {name: folder / name for name in ("ml-1m", "parquet")}


def read(name, folder):
    def go():
        loader = get_data_loader(name, batch_size=2, max_history_seqlen=5, dataset_path=folder)
        list(loader)
        list(loader.dataset.length_only_batches())

    return go


def damaged_copy(data_sets, name, folder, change):
    """A copy of a data set whose manifest is what `change` makes of it."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(data_sets[name], folder)
    manifest = folder / f"{name}.parquet" / MANIFEST
    manifest.write_text(json.dumps(change(json.loads(manifest.read_text()))))
    return folder


@fuzzed(15)
@given(random=RANDOM, name=st.sampled_from(["ml-1m", "parquet"]))
def test_manifests(tmp_path, data_sets, random, name):
    folder = damaged_copy(data_sets, name, tmp_path / "copy", lambda content: damaged_json(content, random))
    require_answer(read(name, folder))


@fuzzed(15)
@given(random=RANDOM, name=st.sampled_from(["ml-1m", "parquet"]))
def test_files_of_a_data_set(tmp_path, data_sets, random, name):
    folder = damaged_copy(data_sets, name, tmp_path / "copy", lambda content: content)
    path = random.choice(sorted(path for path in folder.rglob("*") if path.is_file()))
    path.write_bytes(damaged_bytes(path.read_bytes(), random))
    require_answer(read(name, folder))


@pytest.mark.parametrize(
    ("name", "change", "answer"),
    [
        ("ml-1m", {"columns": "x"}, "is damaged"),
        ("ml-1m", {"columns": {"movie_id": 1}}, "is damaged"),
        ("ml-1m", {"splits": {"train": 99, "test": 0}}, "rows differ: shards 3, splits 99, num_users 3"),
        ("ml-1m", {"splits": {"train": 4, "test": -1}}, "a count is negative"),
        *(
            ("ml-1m", {"shards": [{"file": name, "row_groups": [3], "num_interactions": 1}]}, "not a file name")
            for name in ("../x.parquet", "/etc/x.parquet", "..", "")
        ),
        ("ml-1m", {"format_version": "a\nb"}, r"format version 'a\nb'"),
        ("ml-1m", {"format_version": 99}, "format version 99"),
        ("parquet", {"options": {}}, "options of the manifest are damaged"),
        *(
            ("parquet", {"options": {"columns": columns, "timestamps_per_second": per_second}}, f"damaged ({message}")
            for columns, per_second, message in (
                ({"user": "", "item": "iid"}, 1, "no column of users or of items"),
                ({"user": "uid", "itme": "iid"}, 1, 'can not match "itme"'),
                (None, 1, "'NoneType'"),
                ({"user": "uid", "item": "iid"}, 0, "timestamps_per_second is 0"),
                ({"user": "uid", "item": "iid"}, "1", "timestamps_per_second is '1'"),
            )
        ),
    ],
)
def test_a_manifest_that_says_what_cannot_be(tmp_path, data_sets, name, change, answer):
    folder = damaged_copy(data_sets, name, tmp_path / "copy", lambda content: content | change)
    assert answer in require_answer(read(name, folder))


@fuzzed(15)
@given(random=RANDOM)
def test_maps_of_semantic_ids(tmp_path, random):
    codes = np.array([[0, 1], [1, 1], [0, 0]])
    SIDMap(np.array([3, 1, 2]), codes, (2, 2)).save(tmp_path / "whole.parquet")
    np.save(tmp_path / "whole.npy", codes)
    path = tmp_path / random.choice(["a.parquet", "a.npy"])
    table = pq.read_table(tmp_path / "whole.parquet")
    if path.suffix == ".parquet" and random.random() < 0.5:
        ((key, footer),) = table.schema.metadata.items()
        damaged = [json.dumps(damaged_json(json.loads(footer), random)).encode(), damaged_text(footer.decode(), random)]
        table = table.replace_schema_metadata({key: random.choice(damaged)})
        if random.random() < 0.5:
            table = table.set_column(1, "sid", odd_column(random, 3))
        pq.write_table(table, path)
    else:
        path.write_bytes(damaged_bytes((tmp_path / f"whole{path.suffix}").read_bytes(), random))
    is_sid_map(path)
    require_answer(lambda: SIDMap.load(path, (2, 2)))


@pytest.mark.parametrize(
    "footer", ["[" * 50_000, "[]", '{"codebook_sizes": 3}', '{"options": 1}', '{"codebook_sizes": ["a"]}']
)
def test_a_map_whose_footer_is_damaged(tmp_path, footer):
    path = tmp_path / "a.parquet"
    SIDMap(np.array([1]), np.array([[0, 1]]), (2, 2)).save(path)
    pq.write_table(pq.read_table(path).replace_schema_metadata({b"evenrank.sids": footer.encode()}), path)
    assert "the footer of the map is damaged" in require_answer(lambda: SIDMap.load(path, (2, 2)))


@fuzzed(15)
@given(random=RANDOM)
def test_own_parquet_files(tmp_path, random):
    path, table = tmp_path / "a.parquet", pa.table(EVENTS)
    if damage_bytes := random.random() < 0.5:
        pq.write_table(table, path)
        path.write_bytes(damaged_bytes(path.read_bytes(), random))
    for _ in range(0 if damage_bytes else random.randint(1, 2)):
        index = random.randrange(len(EVENTS))
        table = table.set_column(index, table.column_names[index], odd_column(random, 5))
        pq.write_table(table, path)
    require_answer(lambda: preprocess_parquet(COLUMNS, path, tmp_path / "out"))


# Texts, writer and preprocessor of an archive.
ARCHIVES = {
    "ml-1m": (
        {"ratings": movielens.RATINGS, "users": movielens.USERS, "movies": movielens.MOVIES},
        movielens.write_zip,
        preprocess_movielens,
    ),
    "ml-20m": (
        {"ratings": movielens.RATINGS_20M, "movies": movielens.MOVIES_20M},
        movielens.write_zip_20m,
        preprocess_movielens_20m,
    ),
    "kuairand-pure": (
        {"early": kuairand.EARLY, "late": kuairand.LATE, "users": kuairand.USERS},
        lambda path, **texts: kuairand.write_tar(path, kuairand.files_of(**texts)),
        kuairand.PURE.preprocess,
    ),
}


@fuzzed(30)
@given(random=RANDOM, name=st.sampled_from(sorted(ARCHIVES)))
def test_archives(tmp_path, random, name):
    texts, write, preprocess = ARCHIVES[name]
    path = write(tmp_path / ("a.tar.gz" if "kuairand" in name else "a.zip"))
    if random.random() < 0.5:
        path.write_bytes(damaged_bytes(path.read_bytes(), random))
    else:
        part = random.choice(sorted(texts))
        write(path, **{part: damaged_text(texts[part], random).decode("latin-1")})
    require_answer(lambda: preprocess(path, tmp_path / "out"))


@pytest.mark.parametrize("kind", ODD_PLACES)
@pytest.mark.parametrize(
    "use",
    [
        lambda path: preprocess_movielens(path, path.parent / "out"),
        lambda path: preprocess_movielens_20m(path, path.parent / "out"),
        lambda path: kuairand.PURE.preprocess(path, path.parent / "out"),
        lambda path: preprocess_parquet(COLUMNS, path, path.parent / "out"),
        lambda path: SIDMap.load(path.rename(path.with_suffix(".npy")) if path.is_dir() else path, (2, 2)),
        lambda path: list(get_data_loader("ml-1m", batch_size=2, max_history_seqlen=5, dataset_path=path)),
        lambda path: list(get_data_loader("parquet", batch_size=2, max_history_seqlen=5, dataset_path=path)),
    ],
)
def test_no_file(tmp_path, use, kind):
    assert require_answer(lambda: use(odd_place(tmp_path / "a.parquet", kind))) is not None


def test_a_bit_of_every_byte_of_a_parquet_footer(tmp_path):
    """Arrow has several errors for what a flipped bit makes of a footer, such as integers of more than 64 bits."""
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({name: EVENTS[name] for name in ("uid", "iid")}), path)
    whole = path.read_bytes()
    footer = int.from_bytes(whole[-8:-4], "little") + 8
    refused = 0
    for place in range(len(whole) - footer, len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        refused += require_answer(lambda: EventFiles(path, EventColumns("uid", "iid"))) is not None
    assert refused
