"""MovieLens-1M and MovieLens-20M: from the raw archives to the columnar files.

One row per user: `movie_id` (list of ids), `rating` (list), `timestamp` (list, seconds), oldest first, and `split`.
MovieLens-1M has `user_id`, `gender`, `age`, `occupation` and `zip` for each user, and ratings of 1 to 5 stars.
MovieLens-20M has only `user_id`, and ratings in half stars, 1 to 10. The items are all movies of the archive, rated or
not. An id is the position of the raw value among the sorted raw values. Tasks: 4 stars or more, and 5 stars.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from commons.datasets.public.dataset import ID, Column, PublicDataset, TextLayout
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
_INTEGER, _NUMBER = ("INTEGER", r"\d{1,9}"), ("BIGINT", r"\d{1,9}")
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
        *(Column("user_id", *_INTEGER), Column("gender", "VARCHAR", "F|M"), Column("age", *_NUMBER)),
        *(Column("occupation", *_NUMBER), Column("zip", "VARCHAR", r"[^:\r]+")),
    ),
    "::",
)
_MOVIES = TextLayout(
    "MovieID::Title::Genres",
    (Column("movie_id", *_INTEGER), Column("title", "VARCHAR", ".+"), Column("genres", "VARCHAR", r"[^:\r]+")),
    "::",
)

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
    event={column.name: column.name for column in _RATINGS.columns},
    # Ratings 1 to 5 are used directly as ids: row 0 of an embedding table of ratings stays unused.
    action_vocabulary_size=6,
    listings={"user": ("users.dat", _USERS), "item": ("movies.dat", _MOVIES)},
)
ML_20M = PublicDataset(
    schema=SCHEMA_20M,
    raw=RawKind("MovieLens-20M", "ml-20m.zip", "ml-20m"),
    event_files=("ratings.csv",),
    layout=_RATINGS_CSV,
    event={"user": "userId", "item": "movieId", "action": "(2 * rating)::SMALLINT", "time": "timestamp"},
    action_vocabulary_size=11,
    listings={"item": ("movies.csv", _MOVIES_CSV)},  # titles have commas and quotes, but no line breaks
    check=_require_20m,
)
preprocess_movielens, preprocess_movielens_20m = ML_1M.preprocess, ML_20M.preprocess
