"""Files that are damaged in any way: their reader succeeds, or names a user's mistake in one line.

Data sets, semantic-ID maps, raw data, configs and calibrations.
"""

import json
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from commons.datasets.loader.data_loader import get_data_loader
from commons.datasets.public.movielens import preprocess_movielens
from commons.datasets.sequences.event_columns import EventColumns
from commons.datasets.sequences.metadata import MANIFEST
from commons.datasets.sequences.own_parquet import EventFiles, preprocess_parquet
from commons.datasets.sids.map import SIDMap, is_sid_map
from commons.perf_model.calibration import CalibratedTask, load_calibration
from commons.trainer.config.files import tomllib
from commons.trainer.config.load import load_config_file
from hstu.train_config import TrainConfig
from tests.helpers.datasets import movielens
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
from tests.helpers.datasets.raw_data import ARCHIVES
from tests.helpers.models.calibrations import TASK, make_calibration

TOML = Path("hstu/configs/parquet.toml").read_text()
CONFIG = tomllib.loads(TOML)
ODD_VALUES = [None, 1, "a", [1], [None], {"a": 1}, 1.5, float("nan"), 2**63 - 1, -(2**63), b"\xff", [[1]], True, "\x00"]
ODD_TYPES = [pa.uint64(), pa.timestamp("ns"), pa.date32(), pa.duration("s"), pa.decimal128(20, 2)]


def odd_column(random, rows):
    """A column of another type."""
    columns = [pa.array([value] * rows) for value in ODD_VALUES]
    columns += [pa.array([random.choice([0, 1])] * rows, kind) for kind in ODD_TYPES]
    columns += [pa.array(["a"] * rows).dictionary_encode(), pa.nulls(rows, pa.int64())]
    return random.choice([*columns, pa.array([[]] * rows, pa.list_(pa.int8()))])


@pytest.fixture(scope="module")
def data_sets(tmp_path_factory):
    """Folders with a data set each, by name."""
    folder = tmp_path_factory.mktemp("whole")
    preprocess_movielens(movielens.write_zip(folder / "a.zip"), folder / "ml-1m", test_fraction=0)
    pq.write_table(pa.table(EVENTS), folder / "events.parquet")
    preprocess_parquet(COLUMNS, folder / "events.parquet", folder / "parquet", test_fraction=0)
    return {name: folder / name for name in ("ml-1m", "parquet")}


def read(name, folder):
    loader = get_data_loader(name, batch_size=2, max_history_seqlen=5, dataset_path=folder)
    list(loader)
    list(loader.dataset.length_only_batches())


def preprocess(preprocessor, path):
    return preprocessor(path, path.parent / "out")


def calibrate(path):
    return CalibratedTask(TASK, load_calibration(path)).get_workloads(5)


def damaged_copy(data_sets, name, folder, change):
    """A copy of a data set whose manifest is what `change` makes of it."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(data_sets[name], folder)
    manifest = folder / f"{name}.parquet" / MANIFEST
    manifest.write_text(json.dumps(change(json.loads(manifest.read_text()))))
    return folder


def manifest(random, folder, data_sets):
    name = random.choice(["ml-1m", "parquet"])
    copy = damaged_copy(data_sets, name, folder / "copy", lambda content: damaged_json(content, random))
    return lambda: read(name, copy)


def file_of_a_data_set(random, folder, data_sets):
    name = random.choice(["ml-1m", "parquet"])
    copy = damaged_copy(data_sets, name, folder / "copy", lambda content: content)
    path = random.choice(sorted(path for path in copy.rglob("*") if path.is_file()))
    path.write_bytes(damaged_bytes(path.read_bytes(), random))
    return lambda: read(name, copy)


def map_of_semantic_ids(random, folder, data_sets):
    codes = np.array([[0, 1], [1, 1], [0, 0]])
    SIDMap(np.array([3, 1, 2]), codes, (2, 2)).save(folder / "whole.parquet")
    np.save(folder / "whole.npy", codes)
    path = folder / random.choice(["a.parquet", "a.npy"])
    table = pq.read_table(folder / "whole.parquet")
    if path.suffix == ".parquet" and random.random() < 0.5:
        ((key, footer),) = table.schema.metadata.items()
        damaged = [json.dumps(damaged_json(json.loads(footer), random)).encode(), damaged_text(footer.decode(), random)]
        table = table.replace_schema_metadata({key: random.choice(damaged)})
        if random.random() < 0.5:
            table = table.set_column(1, "sid", odd_column(random, 3))
        pq.write_table(table, path)
    else:
        path.write_bytes(damaged_bytes((folder / f"whole{path.suffix}").read_bytes(), random))
    is_sid_map(path)
    return lambda: SIDMap.load(path, (2, 2))


def parquet_of_ones_own(random, folder, data_sets):
    path, table = folder / "a.parquet", pa.table(EVENTS)
    if damage_bytes := random.random() < 0.5:
        pq.write_table(table, path)
        path.write_bytes(damaged_bytes(path.read_bytes(), random))
    for _ in range(0 if damage_bytes else random.randint(1, 2)):
        index = random.randrange(len(EVENTS))
        table = table.set_column(index, table.column_names[index], odd_column(random, 5))
        pq.write_table(table, path)
    return lambda: preprocess_parquet(COLUMNS, path, folder / "out")


def raw_archive(random, folder, data_sets):
    name = random.choice(sorted(ARCHIVES))
    texts, write, preprocessor = ARCHIVES[name]
    path = write(folder / ("a.tar.gz" if "kuairand" in name else "a.zip"))
    if random.random() < 0.5:
        path.write_bytes(damaged_bytes(path.read_bytes(), random))
    else:
        part = random.choice(sorted(texts))
        write(path, **{part: damaged_text(texts[part], random).decode("latin-1")})
    return lambda: preprocess(preprocessor, path)


def calibration(random, folder, data_sets):
    path = folder / "a.toml"
    make_calibration().save(path)
    path.write_bytes(damaged_text(path.read_text(), random))
    return lambda: calibrate(path)


def config(suffix, random, folder, data_sets):
    path = folder / f"a.{suffix}"
    if suffix != "toml" and random.random() < 0.5:  # whole, but for what it says
        damaged = damaged_json(CONFIG, random)
        text = json.dumps(damaged) if suffix == "json" else yaml.safe_dump(damaged, allow_unicode=True)
        path.write_text(text, "utf-8", errors="surrogatepass")
    else:
        whole = {"toml": TOML, "yaml": yaml.safe_dump(CONFIG), "json": json.dumps(CONFIG, indent=1)}
        path.write_bytes(damaged_text(whole[suffix], random))
    return lambda: load_config_file(TrainConfig, path)


@pytest.mark.parametrize(
    ("damage", "examples"),
    [
        pytest.param(manifest, 15, id="manifest"),
        pytest.param(file_of_a_data_set, 15, id="file of a data set"),
        pytest.param(map_of_semantic_ids, 15, id="map of semantic IDs"),
        pytest.param(parquet_of_ones_own, 15, id="parquet of one's own"),
        pytest.param(raw_archive, 30, id="raw archive"),
        pytest.param(calibration, 40, id="calibration"),
        *(pytest.param(partial(config, suffix), 35, id=f"config.{suffix}") for suffix in ("toml", "yaml", "json")),
    ],
)
def test_whatever_is_damaged_the_reader_answers(tmp_path, data_sets, damage, examples):
    @fuzzed(examples)
    @given(random=st.randoms(use_true_random=False))
    def check(random):
        require_answer(damage(random, tmp_path, data_sets))

    check()


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
    assert answer in require_answer(lambda: read(name, folder))


@pytest.mark.parametrize(
    "footer",
    [
        *("[" * 50_000, "[]", "{}"),
        *(
            f'{{"format_version": 1, {rest}}}'
            for rest in ('"codebook_sizes": 3', '"options": 1', '"codebook_sizes": ["a"]')
        ),
    ],
)
def test_a_map_whose_footer_is_damaged(tmp_path, footer):
    path = tmp_path / "a.parquet"
    SIDMap(np.array([1]), np.array([[0, 1]]), (2, 2)).save(path)
    pq.write_table(pq.read_table(path).replace_schema_metadata({b"evenrank.sids": footer.encode()}), path)
    assert "the footer of the map is damaged" in require_answer(lambda: SIDMap.load(path, (2, 2)))


@pytest.mark.parametrize("kind", ODD_PLACES)
@pytest.mark.parametrize(
    ("use", "suffix"),
    [
        *((lambda path, name=name: preprocess(ARCHIVES[name][2], path), "zip") for name in ARCHIVES),
        (lambda path: preprocess_parquet(COLUMNS, path, path.parent / "out"), "parquet"),
        (lambda path: SIDMap.load(path, (2, 2)), "parquet"),
        (lambda path: SIDMap.load(path, (2, 2)), "npy"),
        *((lambda path, name=name: read(name, path), "parquet") for name in ("ml-1m", "parquet")),
        *((lambda path: load_config_file(TrainConfig, path), suffix) for suffix in ("toml", "yaml", "json")),
        (calibrate, "toml"),
    ],
)
def test_what_is_no_file_is_named(tmp_path, use, suffix, kind):
    assert require_answer(lambda: use(odd_place(tmp_path / f"a.{suffix}", kind))) is not None


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
