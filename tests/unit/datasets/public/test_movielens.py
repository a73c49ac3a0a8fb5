"""MovieLens-1M and -20M: the raw archives to the columnar files, and every way in which an archive can be wrong."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from commons.datasets.loader.data_loader import get_data_loader
from commons.datasets.public.movielens import (
    DATASET_NAME,
    SCHEMA_20M,
    preprocess_movielens,
    preprocess_movielens_20m,
)
from commons.datasets.sequences.file import SequenceFile
from tests.helpers.datasets.archives import error_of
from tests.helpers.datasets.movielens import (
    HEADER_20M,
    MOVIES,
    MOVIES_20M,
    RATINGS,
    RATINGS_20M,
    USERS,
    write_zip,
    write_zip_20m,
)
from tests.helpers.datasets.stored_users import users_of


class TestPreprocess:
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
            rows = users_of(path, DATASET_NAME)
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

    def test_a_file_of_others_is_not_replaced(self, tmp_path):
        pq.write_table(pa.table({"movie_id": [[1]]}), tmp_path / "ml-1m.parquet")
        with pytest.raises(FileExistsError, match="not a preprocessed data set"):
            preprocess_movielens(write_zip(tmp_path / "a.zip"), tmp_path)

    @pytest.mark.parametrize("arguments", [{"test_fraction": 1.5}, {"test_fraction": float("nan")}, {"seed": -1}])
    def test_bad_arguments(self, tmp_path, arguments):
        with pytest.raises(ValueError, match=next(iter(arguments))):
            preprocess_movielens(write_zip(tmp_path / "a.zip"), tmp_path, **arguments)


def lists_of(path: Path) -> dict[int, dict]:
    """The lists of each user."""
    rows = users_of(path, "ml-20m")
    return {user: {name: row[name] for name in ("movie_id", "rating", "timestamp")} for user, row in rows.items()}


class TestPreprocess20M:
    def test_sequences(self, tmp_path):
        source = write_zip_20m(tmp_path / "ml-20m.zip")
        path = preprocess_movielens_20m(source, tmp_path / "data")
        assert lists_of(path) == {
            3: {"movie_id": [9], "rating": [1], "timestamp": [5]},
            7: {"movie_id": [50, 9, 1193, 50], "rating": [6, 8, 5, 10], "timestamp": [99, 100, 100, 200]},
        }
        metadata = SequenceFile(path, "ml-20m", []).metadata
        assert metadata.vocabulary_sizes == {"user_id": 2, "movie_id": 3, "rating": 11}
        assert metadata.source_sha256 == hashlib.sha256(source.read_bytes()).hexdigest()
        assert not metadata.generated

    def test_line_ends_and_quotes_make_no_difference(self, tmp_path):
        expected = lists_of(preprocess_movielens_20m(write_zip_20m(tmp_path / "a.zip"), tmp_path / "a"))
        for ratings in (
            RATINGS_20M.replace("\n", "\r\n"),
            RATINGS_20M.rstrip("\n"),
            RATINGS_20M.replace("\n", "\n\n"),
            "\ufeff" + RATINGS_20M,
            RATINGS_20M.replace(HEADER_20M, '"userId","movieId","rating","timestamp"\n'),
        ):
            source = write_zip_20m(tmp_path / "b.zip", ratings=ratings)
            assert lists_of(preprocess_movielens_20m(source, tmp_path / "b")) == expected, ratings

    def test_labels(self, tmp_path):
        preprocess_movielens_20m(write_zip_20m(tmp_path / "ml-20m.zip"), tmp_path, test_fraction=0)
        loader = get_data_loader(
            "ml-20m", dataset_path=tmp_path, batch_size=2, max_history_seqlen=4, num_tasks=len(SCHEMA_20M.tasks)
        )
        (batch,) = loader
        labels = {key: batch.labels[key].values().tolist() for key in batch.labels.keys()}
        assert labels == {"task_0": [0, 0, 1, 0, 1], "task_1": [0, 0, 0, 0, 1]}


LAYOUT = "UserID::MovieID::Rating::Timestamp"
MALFORMED = ["7::50::5", "7::50::5::200::1", "7::::5::200", "7::50::6::200", "7::99999999999::3::200", LAYOUT]


class TestBadArchives:
    def test_missing(self, tmp_path):
        assert "does not exist" in error_of(preprocess_movielens, tmp_path / "ml-1m.zip", FileNotFoundError)

    def test_folder_of_something_else(self, tmp_path):
        (tmp_path / "empty").mkdir()
        assert "found: nothing" in error_of(preprocess_movielens, tmp_path / "empty")
        for index in range(20):
            (tmp_path / "empty" / f"{index:02}.txt").touch()
        assert "07.txt and 12 more" in error_of(preprocess_movielens, tmp_path / "empty")

    @pytest.mark.parametrize(
        ("files", "message"),
        [
            *(
                ({"ratings": f"{RATINGS}{line}\n"}, f"ratings.dat line 6 is {line!r}; a line is {LAYOUT}")
                for line in MALFORMED
            ),
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
    def test_malformed_lines(self, tmp_path, files, message):
        found = error_of(preprocess_movielens, write_zip(tmp_path / "a.zip", **files))
        assert message in found
        assert len(found) < 500


class TestBadArchives20M:
    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ("7,50,3.5,yesterday", "line 4 has timestamp 'yesterday'; timestamp is a number of seconds since 1970"),
            ("7,50,3.5", "line 4 is '7,50,3.5', 3 fields; the header has 4"),
            ("7,50,3.7,1", "line 4 has rating '3.7'; rating is 0.5 to 5 in steps of 0.5"),
            ("7,51,3.5,1", "line 4 has movieId 51, which movies.csv does not list"),
            ("100000000,50,3.5,1", "line 4 has userId '100000000'; userId is a number of 0 to 99,999,999"),
            ("1e2,50,3.5,1", "line 4 has userId '1e2'"),
        ],
    )
    def test_malformed_line(self, tmp_path, line, message):
        lines = RATINGS_20M.splitlines()
        lines.insert(3, line)
        found = error_of(preprocess_movielens_20m, write_zip_20m(tmp_path / "a.zip", ratings="\n".join(lines) + "\n"))
        assert f"ratings.csv {message}" in found

    @pytest.mark.parametrize(
        ("files", "message"),
        [
            (
                {"ratings": "userId,movieId,rating\n1,2,3\n"},
                "ratings.csv has columns userId, movieId, rating; it must be",
            ),
            (
                {"ratings": RATINGS_20M + "7,50,3.0,99\n" * 5000 + "7,50,3.0,x\n"},
                "ratings.csv line 5007 has timestamp 'x'",
            ),
            ({"ratings": ""}, "ratings.csv has columns none; it must be"),
            ({"ratings": HEADER_20M}, "ratings.csv has no line below its header"),
            (
                {"movies": MOVIES_20M + "9,Again,Drama\n"},
                "movies.csv line 5 has movieId 9 again; every movieId has",
            ),
            ({"movies": "movieId,title,genres\n"}, "movies.csv has no line below its header"),
            ({"movies": "id,title\n1,2\n"}, "movies.csv has columns id, title; it must be"),
            ({"readme": "Summary: this dataset (ml-25m) describes"}, "contains ml-25m, not MovieLens-20M"),
            ({"folder": "ml-latest-small/"}, "contains ml-latest-small, not MovieLens-20M"),
        ],
    )
    def test_other_damage(self, tmp_path, files, message):
        assert message in error_of(preprocess_movielens_20m, write_zip_20m(tmp_path / "a.zip", **files))
