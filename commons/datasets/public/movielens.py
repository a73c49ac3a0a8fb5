"""MovieLens-1M and MovieLens-20M: from the raw archives to the columnar files.

One row per user: `movie_id` (list of ids), `rating` (list), `timestamp` (list, seconds), oldest first, and `split`.
MovieLens-1M has `user_id`, `gender`, `age`, `occupation` and `zip` for each user and ratings of 1 to 5 stars;
MovieLens-20M has `user_id` alone, and its ratings count half stars, 1 to 10. The items are all of the archive's movies,
rated or not. Ids are the ranks of the raw values among the sorted ones. Tasks: 4 stars or more, and 5 stars.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa

from commons.datasets.public.raw_files import RawFiles, RawKind, open_raw_files
from commons.datasets.public.raw_tables import ID, Column, Listed, RawTables, TextLayout
from commons.datasets.sequences.event_store import EventStore
from commons.datasets.sequences.file import SequenceSchema
from commons.datasets.sequences.preprocessing import Preprocessor
from commons.datasets.sequences.writer import SequenceSource

DATASET_NAME = "ml-1m"
ENCODING = "latin-1"
_CONTEXTUAL = ("user_id", "gender", "age", "occupation", "zip")

SCHEMA = SequenceSchema(
    dataset_name=DATASET_NAME,
    contextual_feature_names=_CONTEXTUAL,
    item_feature_name="movie_id",
    action_feature_name="rating",
    tasks=(partial(np.less_equal, 4), partial(np.less_equal, 5)),
)
SCHEMA_20M = SequenceSchema(
    dataset_name="ml-20m",
    contextual_feature_names=("user_id",),
    item_feature_name="movie_id",
    action_feature_name="rating",
    tasks=(partial(np.less_equal, 8), partial(np.less_equal, 10)),
)
# Ratings are used as they are: an embedding table for them has a row 0 that nothing uses.
_RATING_VALUES, _RATINGS_20M = 6, 11

_1M = RawKind("MovieLens-1M", "ml-1m.zip", "ml-1m", ("ratings.dat", "users.dat", "movies.dat"))
_INTEGER = ("INTEGER", r"\d{1,9}")
_RATINGS = TextLayout(
    "UserID::MovieID::Rating::Timestamp with a rating of 1 to 5",
    (
        *(Column("user", *_INTEGER), Column("item", *_INTEGER)),
        *(Column("action", "SMALLINT", "1|2|3|4|5"), Column("time", "BIGINT", r"\d{1,18}")),
    ),
    "::",
)
_USERS = TextLayout(
    "UserID::Gender::Age::Occupation::Zip-code with a gender of F or M",
    (
        *(Column("user_id", *_INTEGER), Column("gender", "VARCHAR", "F|M"), Column("age", *_INTEGER)),
        *(Column("occupation", *_INTEGER), Column("zip", "VARCHAR", r"[^:\r]+")),
    ),
    "::",
)
_MOVIES = TextLayout(
    "MovieID::Title::Genres",
    (Column("movie_id", *_INTEGER), Column("title", "VARCHAR", ".+"), Column("genres", "VARCHAR", r"[^:\r]+")),
    "::",
)

_20M = RawKind("MovieLens-20M", "ml-20m.zip", "ml-20m", ("ratings.csv", "movies.csv"))
_MOVIE = Column("movieId", *ID)
_RATINGS_CSV = TextLayout(
    "MovieLens-20M's ratings, userId,movieId,rating,timestamp",
    (
        *(Column("userId", *ID), _MOVIE),
        Column(
            "rating",
            "FLOAT",
            r"0\.5|1|1\.0|1\.5|2|2\.0|2\.5|3|3\.0|3\.5|4|4\.0|4\.5|5|5\.0",
            "0.5 to 5 in steps of 0.5",
        ),
        Column("timestamp", "BIGINT", r"\d{1,11}", "a number of seconds since 1970"),
    ),
)
_MOVIES_CSV = TextLayout("MovieLens-20M's movies, movieId,title,genres", (_MOVIE,))


def _read_ml_1m(source: Path, store: EventStore) -> SequenceSource:
    files = open_raw_files(_1M, source, store.folder, show_progress=store.show_progress)
    tables = RawTables(files, store)
    users = tables.listing("users.dat", _USERS)
    movies = tables.listing("movies.dat", _MOVIES)["movie_id"].combine_chunks()
    listed = {
        "user": Listed(users["user_id"], "user_id", "users.dat"),
        "item": Listed(movies, "movie_id", "movies.dat"),
    }
    tables.add_events(["ratings.dat"], _RATINGS, {column.name: column.name for column in _RATINGS.columns}, listed)
    return ml_1m_of(users, movies, generated=files.is_generated, sha256=files.sha256)


def ml_1m_of(users: pa.Table, movies: pa.Array, *, generated: bool, sha256: str = "") -> SequenceSource:
    """What is known of a data set with the columns of MovieLens-1M.

    Args:
        users: user_id, each once and sorted, and the contextual features.
        movies: movie ids, each once and sorted.
        generated: whether they are.
        sha256: of the archive.

    """
    context = {name: users[name].combine_chunks() for name in _CONTEXTUAL[1:]}
    context |= {name: context[name].cast(pa.int64()) for name in ("age", "occupation")}
    return SequenceSource(
        schema=SCHEMA,
        users=users["user_id"].combine_chunks(),
        context=context,
        items=movies,
        action_vocabulary_size=_RATING_VALUES,
        generated=generated,
        sha256=sha256,
    )


def _read_ml_20m(source: Path, store: EventStore) -> SequenceSource:
    files = open_raw_files(_20M, source, store.folder, show_progress=store.show_progress)
    _require_20m(files)
    tables = RawTables(files, store)
    # Titles have commas and quotes, but no line breaks.
    movies = tables.listing("movies.csv", _MOVIES_CSV)["movieId"].combine_chunks()
    event = {"user": "userId", "item": "movieId", "action": "(2 * rating)::SMALLINT", "time": "timestamp"}
    tables.add_events(["ratings.csv"], _RATINGS_CSV, event, {"item": Listed(movies, "movieId", "movies.csv")})
    return SequenceSource(
        schema=SCHEMA_20M,
        users=store.values("user"),
        items=movies,
        action_vocabulary_size=_RATINGS_20M,
        generated=files.is_generated,
        sha256=files.sha256,
    )


def _require_20m(files: RawFiles) -> None:
    """Raise ValueError for MovieLens archives of another size, which have files of the same names."""
    path = next(path for path in files.members if path.endswith("ratings.csv"))
    top = path.split("/")[0] if "/" in path else ""
    stated = [name for name in (b"ml-25m", b"ml-10m", b"ml-32m", b"ml-latest") if b"(" + name in files.readme]
    if top not in ("", "ml-20m") or (stated and b"(ml-20m)" not in files.readme):
        found = stated[0].decode() if stated else top
        raise ValueError(
            f"{files.source} holds {found}, not MovieLens-20M: give the path of ml-20m.zip or of its unpacked folder"
        )


preprocess_movielens = Preprocessor(DATASET_NAME, _read_ml_1m)
preprocess_movielens_20m = Preprocessor("ml-20m", _read_ml_20m)
