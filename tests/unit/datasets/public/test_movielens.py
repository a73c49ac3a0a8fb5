"""MovieLens: raw archives to columnar files, and generated ratings."""

import hashlib
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks.raw_data.archive import lengths_with
from benchmarks.raw_data.movielens import NUM_USERS_20M, QUANTILES_20M, generate_movielens, generate_movielens_20m
from commons.datasets.loader.data_loader import get_data_loader
from commons.datasets.public.generated_ratings import _user_lengths, generate_ratings
from commons.datasets.public.movielens import SCHEMA_20M, preprocess_movielens, preprocess_movielens_20m
from commons.datasets.sequences.file import SequenceFile
from tests.helpers.datasets.movielens import (
    HEADER_20M,
    MOVIES_20M,
    RATINGS,
    RATINGS_20M,
    write_zip,
    write_zip_20m,
)
from tests.helpers.datasets.stored_users import users_of, vocabularies_of


class TestPreprocess:
    def test_columns_and_manifest(self, tmp_path):
        path = preprocess_movielens(write_zip(tmp_path / "ml-1m.zip"), tmp_path / "data", seed=4)
        assert path == tmp_path / "data" / "ml-1m.parquet"
        types = {field.name: str(field.type) for field in pq.read_table(path).schema}
        lists = {"movie_id": "int32", "rating": "int8", "timestamp": "int64"}
        assert types == {
            **dict.fromkeys(("user_id", "gender", "age", "occupation", "zip"), "int32"),
            **{name: f"list<element: {kind}>" for name, kind in lists.items()},
            "split": "string",
        }
        metadata = SequenceFile(path, "ml-1m", []).metadata
        assert metadata.columns == types
        assert metadata.length_histogram == {"0": 1, "1": 1, "2": 0, "4": 1}
        assert metadata.source_sha256 == hashlib.sha256((tmp_path / "ml-1m.zip").read_bytes()).hexdigest()
        assert (metadata.num_users, metadata.num_interactions) == (3, 5)
        assert (metadata.min_length, metadata.max_length, metadata.mean_length) == (0, 4, 5 / 3)
        sizes = {"user_id": 3, "gender": 2, "age": 3, "occupation": 3, "zip": 3, "movie_id": 3, "rating": 6}
        assert metadata.vocabulary_sizes == sizes
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
            rows = users_of(path, "ml-1m")
            file = SequenceFile(path, "ml-1m", ["user_id"])
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

    def test_a_file_that_several_threads_read_keeps_its_order(self, tmp_path):
        """A thread reads 8 MB at a time."""
        movies = [50, 9, 1193, 9] * 75_000
        (tmp_path / "movies.csv").write_text(MOVIES_20M)
        lines = [f"7,{movie},4.0,100,{'x' * 100}\n" for movie in movies]
        (tmp_path / "ratings.csv").write_text("userId,movieId,rating,timestamp,note\n" + "".join(lines))
        users = lists_of(preprocess_movielens_20m(tmp_path, tmp_path / "data"))
        assert users[7]["movie_id"] == movies

    def test_labels(self, tmp_path):
        preprocess_movielens_20m(write_zip_20m(tmp_path / "ml-20m.zip"), tmp_path, test_fraction=0)
        loader = get_data_loader(
            "ml-20m", dataset_path=tmp_path, batch_size=2, max_history_seqlen=4, num_tasks=len(SCHEMA_20M.tasks)
        )
        (batch,) = loader
        labels = {key: batch.labels[key].values().tolist() for key in batch.labels.keys()}
        assert labels == {"task_0": [0, 0, 1, 0, 1], "task_1": [0, 0, 0, 0, 1]}


@pytest.fixture(scope="module")
def archive_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("generated") / "ml-1m.zip"
    generate_movielens(path, num_users=900, seed=1)
    return path


def columns_of(archive_path, name, *columns):
    """Columns of a file of the raw archive, as texts."""
    with zipfile.ZipFile(archive_path) as members:
        lines = members.read(f"ml-1m/{name}.dat").decode("latin-1").splitlines()
    return dict(zip(columns, zip(*(line.split("::") for line in lines))))


def test_lengths_follow_the_published_statistics():
    small, large = _user_lengths(6040), lengths_with(NUM_USERS_20M, QUANTILES_20M, 20_000_263 / NUM_USERS_20M)
    for lengths, longest, mean, quartiles in (
        (small, 2314, 1_000_209 / 6040, [44, 96, 208]),
        (large, 9254, 144.41, [35, 68, 155]),
    ):
        assert (lengths.min(), lengths.max()) == (20, longest) and lengths.mean() == pytest.approx(mean, rel=1e-4)
        assert np.percentile(lengths, [25, 50, 75]) == pytest.approx(quartiles, rel=0.02)
    assert small.std() == pytest.approx(192.7, rel=0.02)
    assert lengths_with(30, QUANTILES_20M, 144.4).mean() == pytest.approx(144.4, abs=0.5)


def test_archive_has_the_published_format(archive_path):
    ratings = columns_of(archive_path, "ratings", "user", "movie", "rating", "time")
    ratings = {name: np.array(values, np.int64) for name, values in ratings.items()}
    lengths = np.bincount(ratings["user"])[1:]
    assert sorted(lengths) == _user_lengths(900).tolist()
    assert lengths.mean() == pytest.approx(165.6, rel=0.001)
    users = columns_of(archive_path, "users", "user", "gender", "age")
    assert users["user"] == tuple(map(str, range(1, 901)))
    assert set(users["gender"]) == {"F", "M"}
    assert set(users["age"]) == {"1", "18", "25", "35", "45", "50", "56"}
    movies = columns_of(archive_path, "movies", "movie")["movie"]
    assert (len(movies), movies[-1]) == (3883, "3952")
    assert len(set(ratings["movie"])) > 3000
    pairs = ratings["user"] * 10_000 + ratings["movie"]
    assert len(np.unique(pairs)) == len(pairs)  # nobody rates a movie twice
    shares = np.bincount(ratings["rating"])[1:] / len(pairs)
    assert shares == pytest.approx([0.056, 0.108, 0.261, 0.349, 0.226], abs=0.001)
    assert ratings["time"].min() >= 956_703_932 and ratings["time"].max() <= 1_046_454_590
    with zipfile.ZipFile(archive_path) as members:
        assert members.read("ml-1m/README").startswith(b"GENERATED DATA")


def test_the_files_are_those_that_the_archive_becomes(tmp_path):
    written = generate_ratings(tmp_path / "written", num_users=80, seed=2, test_fraction=0.2)
    archive = generate_movielens(tmp_path / "ml-1m.zip", num_users=80, seed=2)
    expected = preprocess_movielens(archive.path, tmp_path / "read", seed=2, test_fraction=0.2)
    files = [path.relative_to(expected) for path in sorted(expected.rglob("*.parquet"))]
    assert len(files) > 4 and files == [path.relative_to(written) for path in sorted(written.rglob("*.parquet"))]
    assert all((written / file).read_bytes() == (expected / file).read_bytes() for file in files)
    assert SequenceFile(written, "ml-1m", []).metadata.generated


def test_the_latest_movies_tell_what_comes_next(archive_path, tmp_path):
    """Ranks of the last ten movies of long histories: by popularity, with all genres seen, with those seen last.

    That ratings can be learnt, too: tests/distributed/hstu/test_retrieval.py.
    """
    path = preprocess_movielens(archive_path, tmp_path, test_fraction=0.3)
    rows = pq.read_table(path).select(["movie_id", "split"]).to_pylist()
    movies = columns_of(archive_path, "movies", "movie", "title", "genres")
    assert list(map(int, movies["movie"])) == vocabularies_of(path, "ml-1m")["movie_id"]
    genres = [names.split("|") for names in movies["genres"]]
    names = sorted({name for own in genres for name in own})
    genres = np.array([[name in own for name in names] for own in genres], dtype=np.float64)  # (movies, genres)
    genres /= np.linalg.norm(genres, axis=1, keepdims=True)
    watched = np.concatenate([row["movie_id"] for row in rows if row["split"] == "train"])
    popularity = np.log(np.bincount(watched, minlength=len(genres)) + 1)
    log_ranks = {"popularity": [], "history": [], "latest": []}
    for row in rows:
        past, future = np.array(row["movie_id"][:-10]), row["movie_id"][-10:]
        if row["split"] == "train" or len(past) < 100:
            continue
        unseen = np.setdiff1d(np.arange(len(popularity)), past)
        for name, seen in (("popularity", None), ("history", past), ("latest", past[-20:])):
            score = popularity + (0 if seen is None else 6 * genres @ genres[seen].mean(axis=0))
            ranks = 1 + (score[unseen] > score[future][:, None]).sum(axis=1)
            log_ranks[name].append(np.log(ranks).mean())
    mean = {name: np.mean(values) for name, values in log_ranks.items()}
    assert mean["history"] < mean["popularity"] - 0.25
    assert mean["latest"] < mean["history"] - 0.1


def test_an_archive_of_20m(tmp_path):
    written = generate_movielens_20m(tmp_path / "ml-20m.zip", num_users=300, seed=1)
    assert written.mean_length == pytest.approx(144.4, abs=0.5)
    path = preprocess_movielens_20m(written.path, tmp_path)
    metadata = SequenceFile(path, "ml-20m", []).metadata
    assert metadata.generated
    assert (metadata.num_users, metadata.num_interactions) == (300, written.num_interactions)
    assert metadata.max_length == written.max_length
    assert metadata.vocabulary_sizes["movie_id"] == 27_278
    ratings = np.concatenate([row["rating"] for row in users_of(path, "ml-20m").values()])
    published = [0.012, 0.034, 0.014, 0.072, 0.044, 0.215, 0.110, 0.278, 0.077, 0.145]
    assert np.bincount(ratings)[1:] / len(ratings) == pytest.approx(published, abs=0.002)
    for row in users_of(path, "ml-20m").values():
        assert len(set(row["movie_id"])) == len(row["movie_id"])  # nobody rates a movie twice
