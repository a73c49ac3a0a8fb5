"""MovieLens-1M: the raw archive to the columnar files, and every way in which an archive can be wrong."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from commons.datasets.public.movielens import DATASET_NAME, SCHEMA, preprocess_movielens
from commons.datasets.sequences import writer as sequence_writer
from commons.datasets.sequences.file import SequenceFile
from tests.helpers.datasets.movielens import MOVIES, RATINGS, USERS, write_zip


def _rows(path: Path) -> dict[int, dict]:
    """Rows of a file by raw user id, with raw values."""
    vocabularies = SequenceFile(path, DATASET_NAME, []).vocabularies()
    rows = {}
    for row in pq.read_table(path).to_pylist():
        raw = {name: vocabularies[name][row[name]] for name in SCHEMA.contextual_feature_names}
        raw["movie_id"] = [vocabularies["movie_id"][item] for item in row["movie_id"]]
        rows[raw["user_id"]] = {**row, **raw}
    return rows


class TestPreprocess:
    def test_sequences_are_sorted_by_time_and_ties_keep_the_order_of_the_file(self, tmp_path):
        rows = _rows(preprocess_movielens(write_zip(tmp_path / "ml-1m.zip"), tmp_path / "data"))
        assert sorted(rows) == [3, 7, 9]
        assert rows[7]["movie_id"] == [50, 9, 1193, 50]
        assert rows[7]["rating"] == [3, 4, 2, 5]
        assert rows[7]["timestamp"] == [99, 100, 100, 200]
        assert (rows[3]["movie_id"], rows[3]["rating"], rows[3]["timestamp"]) == ([9], [1], [5])
        assert rows[9]["movie_id"] == []
        user = {name: rows[3][name] for name in ("gender", "age", "occupation", "zip")}
        assert user == {"gender": "F", "age": 1, "occupation": 10, "zip": "48067-1234"}

    def test_columns_and_manifest(self, tmp_path):
        path = preprocess_movielens(write_zip(tmp_path / "ml-1m.zip"), tmp_path / "data", seed=4)
        assert path == tmp_path / "data" / "ml-1m.parquet"
        types = {field.name: str(field.type) for field in pq.read_table(path).schema}
        assert types == {
            "user_id": "int32",
            "gender": "int32",
            "age": "int32",
            "occupation": "int32",
            "zip": "int32",
            "movie_id": "list<element: int32>",
            "rating": "list<element: int8>",
            "timestamp": "list<element: int64>",
            "split": "string",
        }
        metadata = SequenceFile(path, DATASET_NAME, []).metadata
        assert metadata.columns == types
        assert metadata.length_histogram == {"0": 1, "1": 1, "2": 0, "4": 1}
        assert metadata.source_sha256 == hashlib.sha256((tmp_path / "ml-1m.zip").read_bytes()).hexdigest()
        assert (metadata.num_users, metadata.num_interactions) == (3, 5)
        assert (metadata.min_length, metadata.max_length, metadata.mean_length) == (0, 4, 5 / 3)
        assert metadata.vocabulary_sizes == {
            "user_id": 3,
            "gender": 2,
            "age": 3,
            "occupation": 3,
            "zip": 3,
            "movie_id": 3,
            "rating": 6,
        }
        assert not metadata.generated
        assert metadata.options == {"test_fraction": 0.1, "seed": 4}

    def test_zip_folder_and_line_ends_make_no_difference(self, tmp_path):
        expected = pq.read_table(preprocess_movielens(write_zip(tmp_path / "a.zip"), tmp_path / "a"))
        with zipfile.ZipFile(tmp_path / "a.zip") as archive:
            archive.extractall(tmp_path / "unpacked")
        sources = [
            tmp_path / "unpacked",
            tmp_path / "unpacked" / "ml-1m",
            write_zip(tmp_path / "flat.zip", folder=""),
            write_zip(tmp_path / "crlf.zip", newline="\r\n"),
            write_zip(tmp_path / "open_end.zip", ratings=RATINGS.rstrip("\n")),
        ]
        for source in sources:
            table = pq.read_table(preprocess_movielens(source, tmp_path / "b"))
            assert table.equals(expected), source

    def test_split_is_by_user_and_repeats(self, tmp_path):
        users = range(1, 2001)
        source = write_zip(
            tmp_path / "a.zip",
            users="".join(f"{user}::F::1::1::1\n" for user in users),
            ratings="".join(f"{user}::9::3::1\n" for user in users),
        )

        def test_users(**arguments):
            path = preprocess_movielens(source, tmp_path / "data", **arguments)
            rows = _rows(path)
            file = SequenceFile(path, DATASET_NAME, ["user_id"])
            for split in ("train", "test"):
                ids = file.select(np.array(file.split_rows(split), dtype=int)).values("user_id")
                assert {rows[user + 1]["split"] for user in ids.tolist()} <= {split}
                assert len(ids) == sum(row["split"] == split for row in rows.values())
            return {user for user, row in rows.items() if row["split"] == "test"}

        tenth = test_users()
        assert 150 <= len(tenth) <= 250
        assert tenth == test_users()
        assert tenth < test_users(test_fraction=0.5)  # a larger test split keeps its users
        assert len(tenth & test_users(seed=1)) < 60
        assert test_users(test_fraction=0) == set()
        assert test_users(test_fraction=1) == set(users)

    def test_a_failure_leaves_the_earlier_file(self, tmp_path, monkeypatch):
        source = write_zip(tmp_path / "a.zip")
        path = preprocess_movielens(source, tmp_path / "data")
        before = {entry: entry.read_bytes() for entry in path.rglob("*") if entry.is_file()}

        def fail_half_way(table, where, **options):
            Path(where).write_bytes(b"PAR1 half")
            raise OSError("disk full")

        monkeypatch.setattr(sequence_writer.pq, "write_table", fail_half_way)
        with pytest.raises(OSError, match="disk full"):
            preprocess_movielens(source, tmp_path / "data", seed=1)
        assert {entry: entry.read_bytes() for entry in path.rglob("*") if entry.is_file()} == before
        assert [entry.name for entry in path.parent.iterdir()] == ["ml-1m.parquet"]

    def test_a_file_of_an_earlier_version_is_replaced_and_one_of_others_is_not(self, tmp_path):
        source, target = write_zip(tmp_path / "a.zip"), tmp_path / "data" / "ml-1m.parquet"
        target.parent.mkdir()
        table = pa.table({"movie_id": [[1]]})
        pq.write_table(table, target)
        with pytest.raises(FileExistsError, match="no preprocessed data set"):
            preprocess_movielens(source, target.parent)
        pq.write_table(table.replace_schema_metadata({"evenrank": "{}"}), target)
        with pytest.raises(ValueError, match="single files of earlier versions .* run `evenrank preprocess ml-1m"):
            SequenceFile(target, DATASET_NAME, [])
        preprocess_movielens(source, target.parent)
        assert SequenceFile(target, DATASET_NAME, []).metadata.num_users == 3

    @pytest.mark.parametrize("arguments", [{"test_fraction": 1.5}, {"test_fraction": float("nan")}, {"seed": -1}])
    def test_bad_arguments(self, tmp_path, arguments):
        with pytest.raises(ValueError, match=next(iter(arguments))):
            preprocess_movielens(write_zip(tmp_path / "a.zip"), tmp_path, **arguments)


def _error_of(source: Path, kind: type[Exception] = ValueError) -> str:
    with pytest.raises(kind) as caught:
        preprocess_movielens(source, source.parent / "output")
    message = str(caught.value)
    assert "\n" not in message and not (source.parent / "output").exists()
    assert str(source) in message
    return message


class TestBadArchives:
    def test_missing(self, tmp_path):
        assert "does not exist" in _error_of(tmp_path / "ml-1m.zip", FileNotFoundError)

    def test_damaged_compression(self, tmp_path):
        data = bytearray(write_zip(tmp_path / "whole.zip").read_bytes())
        start = data.index(b"ratings.dat") + len("ratings.dat")
        data[start : start + 20] = b"\xff" * 20
        source = tmp_path / "a.zip"
        source.write_bytes(bytes(data))
        assert "no complete zip file" in _error_of(source)

    def test_folder_of_something_else(self, tmp_path):
        (tmp_path / "empty").mkdir()
        assert "found: nothing" in _error_of(tmp_path / "empty")
        for index in range(20):
            (tmp_path / "empty" / f"{index:02}.txt").touch()
        assert "07.txt and 12 more" in _error_of(tmp_path / "empty")

    @pytest.mark.parametrize(
        "line",
        [
            "7::50::5",
            "7::50::5::200::1",
            "7:50:5:200",
            "7::::5::200",
            "7::50::6::200",
            "7::50::3.5::200",
            "7::99999999999::3::200",
            "7::50::3::99999999999999999999",
            "UserID::MovieID::Rating::Timestamp",
        ],
    )
    def test_malformed_rating(self, tmp_path, line):
        lines = RATINGS.splitlines()
        lines.insert(3, line)
        source = write_zip(tmp_path / "a.zip", ratings="\n".join(lines) + "\n")
        message = _error_of(source)
        assert f"ratings.dat line 4 is {line!r}" in message
        assert "UserID::MovieID::Rating::Timestamp" in message

    @pytest.mark.parametrize(
        ("files", "message"),
        [
            ({"users": USERS + "4::X::1::10::48067\n"}, "users.dat line 4 is '4::X::1::10::48067'"),
            ({"movies": "1193::No genres\n" + MOVIES}, "movies.dat line 1 is '1193::No genres'"),
            ({"users": USERS + "7::M::1::10::48067\n"}, "users.dat line 4 has user_id 7 again"),
            ({"movies": MOVIES + "9::A::B\n"}, "movies.dat line 4 has movie_id 9 again"),
            ({"ratings": RATINGS + "8::50::5::200\n"}, "ratings.dat line 6 has user_id 8, which users.dat"),
            ({"ratings": "7::51::5::200\n" + RATINGS}, "ratings.dat line 1 has movie_id 51, which movies.dat"),
            ({"ratings": RATINGS + "\0" * 50}, "ratings.dat line 6 is '\\x00"),
            ({"ratings": ""}, "ratings.dat is empty"),
            ({"ratings": "x" * 500}, "xxx' …;"),
        ],
    )
    def test_other_malformed_lines(self, tmp_path, files, message):
        found = _error_of(write_zip(tmp_path / "a.zip", **files))
        assert message in found
        assert len(found) < 500
