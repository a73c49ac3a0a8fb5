"""MovieLens-1M and MovieLens-20M: from the raw archives to the columnar files.

One row per user: `movie_id` (list of ids), `rating` (list), `timestamp` (list, seconds), oldest first, and `split`.
MovieLens-1M has `user_id`, `gender`, `age`, `occupation` and `zip` for each user, and ratings of 1 to 5 stars.
MovieLens-20M has only `user_id`, and ratings in half stars, 1 to 10. The items are all movies of the archive, rated or
not. An id is the position of the raw value among the sorted raw values. Tasks: 4 stars or more, and 5 stars.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from commons.datasets.public.dataset import PublicDataset, TextLayout
from commons.datasets.public.raw_files import RawFiles, RawKind
from commons.datasets.sequences.file import SequenceSchema

ENCODING = "latin-1"

SCHEMA = SequenceSchema(
    dataset_name="ml-1m",
    contextual_feature_names=("user_id", "gender", "age", "occupation", "zip"),
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
_RATINGS = TextLayout(
    "lines of UserID::MovieID::Rating::Timestamp",
    {"user": "INTEGER", "item": "INTEGER", "action": "ENUM('1', '2', '3', '4', '5')", "time": "BIGINT"},
    "::",
)
_USERS = TextLayout(
    "lines of UserID::Gender::Age::Occupation::Zip-code",
    {"user_id": "INTEGER", "gender": "VARCHAR", "age": "BIGINT", "occupation": "BIGINT", "zip": "VARCHAR"},
    "::",
)
_MOVIES = TextLayout(
    "lines of MovieID::Title::Genres", {"movie_id": "INTEGER", "title": "VARCHAR", "genres": "VARCHAR"}, "::"
)
_STARS = "ENUM('0.5', '1', '1.0', '1.5', '2', '2.0', '2.5', '3', '3.0', '3.5', '4', '4.0', '4.5', '5', '5.0')"
_HALF_STARS = "(2 * rating::VARCHAR::FLOAT)::SMALLINT"
_RATINGS_CSV = TextLayout(
    "MovieLens-20M's ratings, userId,movieId,rating,timestamp",
    {"userId": "INTEGER", "movieId": "INTEGER", "rating": _STARS, "timestamp": "BIGINT"},
)
_MOVIES_CSV = TextLayout("MovieLens-20M's movies, movieId,title,genres", {"movieId": "INTEGER"})


def _require_20m(files: RawFiles) -> None:
    """Raise ValueError for a MovieLens archive of another size, which has the same file names."""
    path = next(path for path in files.members if path.endswith("ratings.csv"))
    top = path.split("/")[0] if "/" in path else ""
    stated = [name for name in (b"ml-25m", b"ml-10m", b"ml-32m", b"ml-latest") if b"(" + name in files.readme]
    if top not in ("", "ml-20m") or (stated and b"(ml-20m)" not in files.readme):
        found = stated[0].decode() if stated else top
        raise ValueError(
            f"{files.source} contains {found}, not MovieLens-20M: give the path of ml-20m.zip or of its unpacked folder"
        )


ML_1M = PublicDataset(
    schema=SCHEMA,
    raw=RawKind("MovieLens-1M", "ml-1m.zip", "ml-1m"),
    event_files=("ratings.dat",),
    layout=_RATINGS,
    event={"user": "user", "item": "item", "action": "action::VARCHAR::SMALLINT", "time": "time"},
    # Ratings 1 to 5 are used directly as ids: row 0 of an embedding table of ratings stays unused.
    action_vocabulary_size=6,
    listings={"user": ("users.dat", _USERS), "item": ("movies.dat", _MOVIES)},
)
ML_20M = PublicDataset(
    schema=SCHEMA_20M,
    raw=RawKind("MovieLens-20M", "ml-20m.zip", "ml-20m"),
    event_files=("ratings.csv",),
    layout=_RATINGS_CSV,
    event={"user": "userId", "item": "movieId", "action": _HALF_STARS, "time": "timestamp"},
    action_vocabulary_size=11,
    listings={"item": ("movies.csv", _MOVIES_CSV)},  # titles have commas and quotes, but no line breaks
    check=_require_20m,
)
preprocess_movielens, preprocess_movielens_20m = ML_1M.preprocess, ML_20M.preprocess
