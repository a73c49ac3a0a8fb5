"""MovieLens-20M: the raw archive to the columnar files, every way in which it can be wrong, and the generated one."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from benchmarks.raw_data.histories import lengths_with
from benchmarks.raw_data.movielens import NUM_USERS_20M, QUANTILES_20M, generate_movielens_20m
from commons.datasets.loader.data_loader import get_data_loader
from commons.datasets.public.movielens import SCHEMA_20M, preprocess_movielens_20m
from commons.datasets.sequences.file import SequenceFile
from tests.helpers.datasets.movielens_20m import HEADER, MOVIES, RATINGS, write_archive


def rows_of(path: Path) -> dict[int, dict]:
    """Rows by raw user id, with raw movie ids."""
    file = SequenceFile(path, "ml-20m", ["user_id", "movie_id", "rating", "timestamp"])
    vocabularies = file.vocabularies()
    rows = {}
    for row in range(file.metadata.num_users):
        selection = file.select(np.array([row]))
        length = selection.lengths("movie_id")
        lists = {name: selection.tails(name, length).tolist() for name in ("movie_id", "rating", "timestamp")}
        lists["movie_id"] = [vocabularies["movie_id"][item] for item in lists["movie_id"]]
        rows[vocabularies["user_id"][selection.values("user_id")[0]]] = lists
    return rows


class TestPreprocess:
    def test_sequences(self, tmp_path):
        source = write_archive(tmp_path / "ml-20m.zip")
        path = preprocess_movielens_20m(source, tmp_path / "data")
        assert rows_of(path) == {
            3: {"movie_id": [9], "rating": [1], "timestamp": [5]},
            7: {"movie_id": [50, 9, 1193, 50], "rating": [6, 8, 5, 10], "timestamp": [99, 100, 100, 200]},
        }
        metadata = SequenceFile(path, "ml-20m", []).metadata
        assert metadata.vocabulary_sizes == {"user_id": 2, "movie_id": 3, "rating": 11}
        assert metadata.source_sha256 == hashlib.sha256(source.read_bytes()).hexdigest()
        assert not metadata.generated

    def test_line_ends_and_quotes_make_no_difference(self, tmp_path):
        expected = rows_of(preprocess_movielens_20m(write_archive(tmp_path / "a.zip"), tmp_path / "a"))
        for ratings in (
            RATINGS.replace("\n", "\r\n"),
            RATINGS.rstrip("\n"),
            RATINGS.replace("\n", "\n\n"),
            "\ufeff" + RATINGS,
            RATINGS.replace(HEADER, '"userId","movieId","rating","timestamp"\n'),
        ):
            source = write_archive(tmp_path / "b.zip", ratings=ratings)
            assert rows_of(preprocess_movielens_20m(source, tmp_path / "b")) == expected, ratings

    def test_labels(self, tmp_path):
        preprocess_movielens_20m(write_archive(tmp_path / "ml-20m.zip"), tmp_path, test_fraction=0)
        loader = get_data_loader(
            "ml-20m", dataset_path=tmp_path, batch_size=2, max_history_seqlen=4, num_tasks=len(SCHEMA_20M.tasks)
        )
        (batch,) = loader
        labels = {key: batch.labels[key].values().tolist() for key in batch.labels.keys()}
        assert labels == {"task_0": [0, 0, 1, 0, 1], "task_1": [0, 0, 0, 0, 1]}


def error_of(source: Path) -> str:
    output = source.parent / "output"
    with pytest.raises(ValueError) as caught:
        preprocess_movielens_20m(source, output)
    message = str(caught.value)
    assert "\n" not in message
    assert str(source) in message
    assert not output.exists()
    return message


class TestBadArchives:
    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ("7,50,3.5,yesterday", "line 4 has timestamp 'yesterday'; timestamp is a number of seconds since 1970"),
            ("7,50,3.5,", "line 4 has timestamp ''"),
            ("7,50,3.5,-1", "line 4 has timestamp '-1'"),
            ("7,50,3.5,99999999999999999999", "line 4 has timestamp '99999999999999999999'"),
            ("7,50,3.5", "line 4 is '7,50,3.5', 3 fields; the header has 4"),
            ("7,50,3.5,1,1", "line 4 is '7,50,3.5,1,1', 5 fields"),
            ("7,50,nan,1", "line 4 has rating 'nan'"),
            ("7,50,0.0,1", "line 4 has rating '0.0'"),
            ("7,50,5.5,1", "line 4 has rating '5.5'"),
            ("7,50,3.7,1", "line 4 has rating '3.7'; rating is 0.5 to 5 in steps of 0.5"),
            ("7,51,3.5,1", "line 4 has movieId 51, which movies.csv does not list"),
            ("7,x,3.5,1", "line 4 has movieId 'x'"),
            (",50,3.5,1", "line 4 has userId ''"),
            ("100000000,50,3.5,1", "line 4 has userId '100000000'; userId is a number of 0 to 99,999,999"),
            ("1e2,50,3.5,1", "line 4 has userId '1e2'"),
        ],
    )
    def test_malformed_line(self, tmp_path, line, message):
        lines = RATINGS.splitlines()
        lines.insert(3, line)
        found = error_of(write_archive(tmp_path / "a.zip", ratings="\n".join(lines) + "\n"))
        assert f"ratings.csv {message}" in found

    def test_a_malformed_line_far_into_the_file(self, tmp_path):
        rows = "7,50,3.0,99\n"
        source = write_archive(tmp_path / "a.zip", ratings=RATINGS + rows * 5000 + "7,50,3.0,x\n" + rows * 99)
        assert "ratings.csv line 5007 has timestamp 'x'" in error_of(source)

    @pytest.mark.parametrize(
        ("files", "message"),
        [
            (
                {"ratings": "userId,movieId,rating\n1,2,3\n"},
                "ratings.csv has columns userId, movieId, rating, but not timestamp",
            ),
            ({"ratings": ""}, "ratings.csv has columns none, but not userId"),
            ({"ratings": HEADER}, "ratings.csv has no line below its header"),
            (
                {"movies": MOVIES + "9,Again,Drama\n"},
                "movies.csv line 5 has movieId 9 again; every movieId has",
            ),
            ({"movies": "movieId,title,genres\n"}, "movies.csv has no line below its header"),
            ({"movies": "id,title\n1,2\n"}, "movies.csv has columns id, title, but not movieId"),
            ({"readme": "Summary: this dataset (ml-25m) describes"}, "holds ml-25m, not MovieLens-20M"),
            ({"folder": "ml-latest-small/"}, "holds ml-latest-small, not MovieLens-20M"),
        ],
    )
    def test_other_damage(self, tmp_path, files, message):
        assert message in error_of(write_archive(tmp_path / "a.zip", **files))

    def test_no_archive_at_all(self, tmp_path):
        (tmp_path / "ratings.csv").write_text(RATINGS)
        for source in (tmp_path / "ratings.csv", Path("/dev/zero")):
            with pytest.raises(
                ValueError, match="is neither .*; the source is ml-20m.zip as published, or its unpacked"
            ):
                preprocess_movielens_20m(source, tmp_path / "output")


class TestGenerator:
    def test_lengths_follow_the_published_statistics(self):
        lengths = lengths_with(NUM_USERS_20M, QUANTILES_20M, 20_000_263 / NUM_USERS_20M)
        assert (lengths.min(), lengths.max()) == (20, 9_254)
        assert lengths.mean() == pytest.approx(144.41, rel=1e-4)
        assert np.percentile(lengths, [25, 50, 75]) == pytest.approx([35, 68, 155], abs=1)
        assert lengths_with(30, QUANTILES_20M, 144.4).mean() == pytest.approx(144.4, abs=0.5)

    def test_archive(self, tmp_path):
        written = generate_movielens_20m(tmp_path / "ml-20m.zip", num_users=300, seed=1)
        assert written.mean_length == pytest.approx(144.4, abs=0.5)
        path = preprocess_movielens_20m(written.path, tmp_path)
        metadata = SequenceFile(path, "ml-20m", []).metadata
        assert metadata.generated
        assert (metadata.num_users, metadata.num_interactions) == (300, written.num_interactions)
        assert metadata.max_length == written.max_length
        assert metadata.vocabulary_sizes["movie_id"] == 27_278
        ratings = np.concatenate([row["rating"] for row in rows_of(path).values()])
        published = [0.012, 0.034, 0.014, 0.072, 0.044, 0.215, 0.110, 0.278, 0.077, 0.145]
        assert np.bincount(ratings)[1:] / len(ratings) == pytest.approx(published, abs=0.002)
        for row in rows_of(path).values():
            assert len(set(row["movie_id"])) == len(row["movie_id"])  # nobody rates a movie twice
