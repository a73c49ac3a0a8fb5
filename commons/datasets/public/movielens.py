"""MovieLens-1M and MovieLens-20M: from the raw archives to the columnar files.

One row per user: `movie_id` (list of ids), `rating` (list), `timestamp` (list, seconds), oldest first, and `split`.
MovieLens-1M has `user_id`, `gender`, `age`, `occupation` and `zip` for each user and ratings of 1 to 5 stars;
MovieLens-20M has `user_id` alone, and its ratings count half stars, 1 to 10. The items are all of the archive's movies,
rated or not. Ids are the ranks of the raw values among the sorted ones. Tasks: 4 stars or more, and 5 stars.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from commons.datasets.public.raw_files import RawFiles, RawKind, open_raw_files
from commons.datasets.public.raw_tables import Column, CsvLayout, LineLayout, Listed, add_events, read_listing
from commons.datasets.sequences.event_store import EventStore
from commons.datasets.sequences.file import AtLeast, SequenceSchema
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
    tasks=(AtLeast(4), AtLeast(5)),
)
SCHEMA_20M = SequenceSchema(
    dataset_name="ml-20m",
    contextual_feature_names=("user_id",),
    item_feature_name="movie_id",
    action_feature_name="rating",
    tasks=(AtLeast(8), AtLeast(10)),
)
# Ratings are used as they are: an embedding table for them has a row 0 that nothing uses.
_RATING_VALUES, _RATINGS_20M = 6, 11

_1M = RawKind("MovieLens-1M", "ml-1m.zip", "ml-1m", ("ratings.dat", "users.dat", "movies.dat"))
# At most nine digits: they fit an int32.
_ID = (r"\d{1,9}", pa.int32())
_RATINGS = LineLayout(
    "UserID::MovieID::Rating::Timestamp with a rating of 1 to 5",
    {"user": _ID, "item": _ID, "action": ("[1-5]", pa.int16()), "time": (r"\d{1,18}", pa.int64())},
)
_USERS = LineLayout(
    "UserID::Gender::Age::Occupation::Zip-code with a gender of F or M",
    {
        **{"user_id": _ID, "gender": ("[FM]", pa.string()), "age": _ID},
        **{"occupation": _ID, "zip": (r"[^:\r]+", pa.string())},
    },
)
_MOVIES = LineLayout(
    "MovieID::Title::Genres",
    {"movie_id": _ID, "title": (".+", pa.string()), "genres": (r"[^:\r]+", pa.string())},
)

_20M = RawKind("MovieLens-20M", "ml-20m.zip", "ml-20m", ("ratings.csv", "movies.csv"))
_LARGEST_ID = 99_999_999
_ID_RULE = f"a number of 0 to {_LARGEST_ID:,}"
_MOVIE = Column("movieId", pa.int32(), 0, _LARGEST_ID, _ID_RULE)
_RATINGS_CSV = CsvLayout(
    "MovieLens-20M's ratings, userId,movieId,rating,timestamp",
    (
        Column("userId", pa.int32(), 0, _LARGEST_ID, _ID_RULE),
        _MOVIE,
        Column("rating", pa.float32(), 0.5, 5, "0.5 to 5 in steps of 0.5", step=0.5),
        Column("timestamp", pa.int64(), 0, 10**11, "a number of seconds since 1970"),
    ),
)
_MOVIES_CSV = CsvLayout("MovieLens-20M's movies, movieId,title,genres", (_MOVIE,))


def _read_ml_1m(source: Path, store: EventStore, show_progress: bool) -> SequenceSource:
    files = open_raw_files(_1M, source, store.folder, show_progress=show_progress)
    users = read_listing(files, "users.dat", _USERS, "user_id")
    movies = read_listing(files, "movies.dat", _MOVIES, "movie_id")["movie_id"].combine_chunks()
    listed = {
        "user": Listed(users["user_id"], "user_id", "users.dat"),
        "item": Listed(movies, "movie_id", "movies.dat"),
    }
    add_events(
        store,
        files,
        ["ratings.dat"],
        _RATINGS,
        lambda batch: dict(zip(batch.schema.names, batch.columns)),
        listed,
        show_progress=show_progress,
    )
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


def _read_ml_20m(source: Path, store: EventStore, show_progress: bool) -> SequenceSource:
    files = open_raw_files(_20M, source, store.folder, show_progress=show_progress)
    _require_20m(files)
    # Titles have commas and quotes, but no line breaks.
    movies = read_listing(files, "movies.csv", _MOVIES_CSV, "movieId")["movieId"].combine_chunks()
    listed = {"item": Listed(movies, "movieId", "movies.csv")}
    add_events(store, files, ["ratings.csv"], _RATINGS_CSV, _event_20m, listed, show_progress=show_progress)
    return SequenceSource(
        schema=SCHEMA_20M,
        users=store.values("user"),
        items=movies,
        action_vocabulary_size=_RATINGS_20M,
        generated=files.is_generated,
        sha256=files.sha256,
    )


def _event_20m(batch: pa.RecordBatch) -> Mapping[str, Any]:
    user, item, rating, time = (batch.column(column.name) for column in _RATINGS_CSV.columns)
    return {"user": user, "item": item, "action": (rating.to_numpy() * 2).astype(np.int16), "time": time}


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
