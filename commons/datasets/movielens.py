"""MovieLens-1M and MovieLens-20M: from the raw archives to the columnar files.

One row per user: `movie_id` (list of ids), `rating` (list), `timestamp` (list, seconds), oldest first, and `split`.
MovieLens-1M has `user_id`, `gender`, `age`, `occupation` and `zip` for each user and ratings of 1 to 5 stars;
MovieLens-20M has `user_id` alone, and its ratings count half stars, 1 to 10. The items are all of the archive's movies,
rated or not. Ids are the ranks of the raw values among the sorted ones.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa

from commons.datasets.csv_member import CsvColumn, CsvLayout, read_csv_member
from commons.datasets.movielens_archive import read_movielens_archive
from commons.datasets.preprocessing import OpenedArchive, Preprocessor
from commons.datasets.raw_archive import GENERATED_MARK, RawArchive, open_archive
from commons.datasets.sequence_file import SequenceSchema
from commons.datasets.sequence_writer import IdMap, SeenIds, SequenceSource, UserTable, ids_of_values
from commons.datasets.user_partitions import UserPartitions, partitions_for

DATASET_NAME = "ml-1m"
_CONTEXTUAL = ("user_id", "gender", "age", "occupation", "zip")


def is_liked(ratings: np.ndarray) -> np.ndarray:
    """Whether a rating is 4 or 5 stars."""
    return ratings >= 4


def is_top_rated(ratings: np.ndarray) -> np.ndarray:
    """Whether a rating is 5 stars."""
    return ratings == 5


def is_liked_in_halves(ratings: np.ndarray) -> np.ndarray:
    """Whether a rating in half stars is 4 stars or more."""
    return ratings >= 8


def is_top_rated_in_halves(ratings: np.ndarray) -> np.ndarray:
    """Whether a rating in half stars is 5 stars."""
    return ratings == 10


SCHEMA = SequenceSchema(
    dataset_name=DATASET_NAME,
    contextual_feature_names=_CONTEXTUAL,
    item_feature_name="movie_id",
    action_feature_name="rating",
    tasks=(is_liked, is_top_rated),
)
SCHEMA_20M = SequenceSchema(
    dataset_name="ml-20m",
    contextual_feature_names=("user_id",),
    item_feature_name="movie_id",
    action_feature_name="rating",
    tasks=(is_liked_in_halves, is_top_rated_in_halves),
)
# Ratings are used as they are: an embedding table for them has a row 0 that nothing uses.
RATING_VALUES, _RATINGS_20M = 6, 11
_BYTES_PER_RATING_1M = 21


def _open_1m(source: str | Path, show_progress: bool) -> OpenedArchive:
    archive = read_movielens_archive(source)

    def read(folder: Path, on_bytes: Callable[[int], object]) -> SequenceSource:
        partitions = UserPartitions(folder, partitions_for(archive.num_bytes / _BYTES_PER_RATING_1M))
        for num_bytes, ratings in archive.rating_batches():
            partitions.add(*(ratings[name].to_numpy() for name in ("user_id", "movie_id", "rating", "timestamp")))
            on_bytes(num_bytes)
        return SequenceSource(
            interactions=partitions,
            users=user_table(archive.users),
            items=IdMap(np.sort(archive.movies["movie_id"].to_numpy())),
            action_vocabulary_size=RATING_VALUES,
            generated=archive.generated,
            sha256=archive.checksum(),
        )

    return OpenedArchive(SCHEMA, archive.num_bytes, read)


preprocess_movielens = Preprocessor(_open_1m)


def user_table(users: pa.Table) -> UserTable:
    """The users of MovieLens-1M, with ids for what is known of them.

    Args:
        users: user_id int32, each once, and the contextual features.

    """
    user_ids = users["user_id"].to_numpy()
    order = np.argsort(user_ids)
    encoded = {name: ids_of_values(users[name]) for name in _CONTEXTUAL[1:]}
    return UserTable(
        user_ids[order],
        {name: ids[order] for name, (ids, _) in encoded.items()},
        {name: values for name, (_, values) in encoded.items()},
    )


# Ids of a stream are looked up in tables with a place for each possible one; published ids are far smaller.
_LARGEST_ID = 99_999_999
_ID_RULE = f"a number of 0 to {_LARGEST_ID:,}"
_LARGEST_SECOND = 10**11
_RATINGS_FILE, _MOVIES_FILE = "ratings.csv", "movies.csv"
_RATINGS_CSV = CsvLayout(
    "MovieLens-20M's ratings, userId,movieId,rating,timestamp",
    (
        CsvColumn("userId", "int32", 0, _LARGEST_ID, _ID_RULE),
        CsvColumn("movieId", "int32", 0, _LARGEST_ID, _ID_RULE),
        CsvColumn("rating", "float32", 0.5, 5, "0.5 to 5 in steps of 0.5"),
        CsvColumn("timestamp", "int64", 0, _LARGEST_SECOND, "a number of seconds since 1970"),
    ),
)
_MOVIES_CSV = CsvLayout(
    "MovieLens-20M's movies, movieId,title,genres", (CsvColumn("movieId", "int32", 0, _LARGEST_ID, _ID_RULE),)
)
_BYTES_PER_RATING = 26


def _open_20m(source: str | Path, show_progress: bool) -> OpenedArchive:
    archive = open_archive(
        source,
        ["ml-20m"],
        "the source is ml-20m.zip as published, or its unpacked folder: correct the path",
        show_progress=show_progress,
    )
    archive.require(
        [_RATINGS_FILE, _MOVIES_FILE], "MovieLens-20M", "give the path of ml-20m.zip or of its unpacked folder"
    )
    readme = archive.readme()
    _require_20m(archive, readme)

    def read(folder: Path, on_bytes: Callable[[int], object]) -> SequenceSource:
        items = IdMap(_movie_ids(archive))
        partitions = UserPartitions(folder, partitions_for(archive.sizes[_RATINGS_FILE] / _BYTES_PER_RATING))
        users = SeenIds()
        for name, stream in archive.streams([_RATINGS_FILE]):
            for line, columns in read_csv_member(f"{archive.path}: {name}", stream, _RATINGS_CSV, on_bytes):
                halves = np.rint(columns["rating"] * 2).astype(np.int16)
                _check_ratings(archive, line, columns, halves, items)
                users.add(columns["userId"])
                partitions.add(columns["userId"], columns["movieId"], halves, columns["timestamp"])
        return SequenceSource(
            interactions=partitions,
            users=UserTable(users.values(), {}, {}),
            items=items,
            action_vocabulary_size=_RATINGS_20M,
            generated=readme.startswith(GENERATED_MARK.encode()),
            sha256=archive.checksum([_RATINGS_FILE, _MOVIES_FILE]),
        )

    return OpenedArchive(SCHEMA_20M, archive.sizes[_RATINGS_FILE], read)


preprocess_movielens_20m = Preprocessor(_open_20m)


def _require_20m(archive: RawArchive, readme: bytes) -> None:
    """Raise ValueError for MovieLens archives of another size, which have files of the same names."""
    top = archive.folder.split("/")[0]
    stated = [name for name in (b"ml-25m", b"ml-10m", b"ml-32m", b"ml-latest") if b"(" + name in readme]
    if top not in ("", "ml-20m") or (stated and b"(ml-20m)" not in readme):
        found = stated[0].decode() if stated else top
        raise ValueError(
            f"{archive.path} holds {found}, not MovieLens-20M: give the path of ml-20m.zip or of its unpacked folder"
        )


def _movie_ids(archive: RawArchive) -> np.ndarray:
    # Titles have commas and quotes, but no line breaks.
    batches = [
        columns["movieId"]
        for name, stream in archive.streams([_MOVIES_FILE])
        for _, columns in read_csv_member(f"{archive.path}: {name}", stream, _MOVIES_CSV, lambda count: None)
    ]
    movies, counts = np.unique(np.concatenate(batches), return_counts=True)
    if counts.max() > 1:
        raise ValueError(
            f"{archive.path}: {_MOVIES_FILE} has movieId {movies[counts.argmax()]} more than once; every movie has one "
            "line: download the archive again"
        )
    return movies


def _check_ratings(
    archive: RawArchive, line: int, columns: dict[str, np.ndarray], halves: np.ndarray, items: IdMap
) -> None:
    where = f"{archive.path}: {_RATINGS_FILE}"
    between = columns["rating"] * 2 != halves
    if between.any():
        index = int(between.argmax())
        raise ValueError(
            f"{where} line {line + index} has rating {columns['rating'][index]:g}; a rating is 0.5 to 5 in steps of "
            "0.5: mend it or download the archive again"
        )
    unknown = items.ids(columns["movieId"]) < 0
    if unknown.any():
        index = int(unknown.argmax())
        raise ValueError(
            f"{where} line {line + index} has movieId {columns['movieId'][index]}, which {_MOVIES_FILE} does not list; "
            "both files come from one archive: download it again"
        )
