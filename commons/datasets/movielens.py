"""MovieLens-1M: from the raw archive to the columnar file, and the data set that reads it.

Input: the archive (see movielens_archive). Output: `ml-1m.parquet` with one row per user: `user_id`, `gender`, `age`,
`occupation`, `zip` (ids), `movie_id` (list of ids), `rating` (list, 1 to 5), `timestamp` (list, seconds), oldest first,
and `split`. Ids are the ranks of the raw values among the sorted ones; the footer keeps the raw values.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from commons.datasets.movielens_archive import MovieLensArchive, read_movielens_archive
from commons.datasets.sequence_file import SequenceFileMetadata, SequenceSchema, write_sequence_file

DATASET_NAME = "ml-1m"
_CONTEXTUAL = ("user_id", "gender", "age", "occupation", "zip")


def is_liked(ratings: np.ndarray) -> np.ndarray:
    """Whether a rating is 4 or 5."""
    return ratings >= 4


def is_top_rated(ratings: np.ndarray) -> np.ndarray:
    """Whether a rating is 5."""
    return ratings == 5


SCHEMA = SequenceSchema(
    dataset_name=DATASET_NAME,
    contextual_feature_names=_CONTEXTUAL,
    item_feature_name="movie_id",
    action_feature_name="rating",
    tasks=(is_liked, is_top_rated),
)


def preprocess_movielens(
    source: str | Path,
    output: str | Path,
    *,
    test_fraction: float = 0.1,
    seed: int = 0,
) -> Path:
    """Write the columnar file of an archive.

    A user belongs to the test split if a hash of `seed` and the raw user id lies below `test_fraction`, whatever other
    users the archive has. Ratings of the same second keep the order of `ratings.dat`.

    Args:
        source: `ml-1m.zip` or its unpacked folder.
        output: folder for `ml-1m.parquet`, made if missing.
        test_fraction: expected part of the users in the test split, in `[0, 1]`.
        seed: of the split.

    Returns:
        The file.

    Raises:
        FileNotFoundError: nothing at `source`.
        ValueError: a damaged or foreign archive, a malformed line, a fraction outside `[0, 1]` or a negative
            seed.

    """
    if not 0 <= test_fraction <= 1:
        raise ValueError(f"test_fraction is {test_fraction}; it is a part of all users: give a number between 0 and 1")
    if seed < 0:
        raise ValueError(f"seed is {seed}; seeds are not negative: give 0 or more")
    archive = read_movielens_archive(source)
    table, vocabularies = _encode(archive, test_fraction, seed)
    lengths = np.diff(table["movie_id"].combine_chunks().offsets.to_numpy())
    num_test = int(np.sum(table["split"].to_numpy() == "test"))
    metadata = SequenceFileMetadata(
        dataset_name=DATASET_NAME,
        generated=archive.generated,
        num_users=table.num_rows,
        num_interactions=archive.ratings.num_rows,
        min_length=int(lengths.min()),
        max_length=int(lengths.max()),
        splits={"train": table.num_rows - num_test, "test": num_test},
        # A rating is used as it is, 1 to 5: an embedding table for it has a row 0 that nothing uses.
        vocabulary_sizes={**{name: len(values) for name, values in vocabularies.items()}, "rating": 6},
        options={"test_fraction": test_fraction, "seed": seed},
    )
    path = Path(output) / f"{DATASET_NAME}.parquet"
    write_sequence_file(path, table, metadata, vocabularies)
    return path


def _encode(archive: MovieLensArchive, test_fraction: float, seed: int) -> tuple[pa.Table, dict[str, list[Any]]]:
    """One row per user, the train split first, and the vocabularies."""
    ratings = {name: archive.ratings[name].to_numpy() for name in archive.ratings.column_names}
    vocabularies: dict[str, np.ndarray] = {}
    ids: dict[str, np.ndarray] = {}  # by contextual feature, one per line of users.dat
    for name in _CONTEXTUAL:
        vocabularies[name], ids[name] = np.unique(archive.users[name].to_numpy(), return_inverse=True)
    vocabularies["movie_id"] = np.sort(archive.movies["movie_id"].to_numpy())

    is_test = _hash_of_users(vocabularies["user_id"], seed) < test_fraction  # by user id, as all below
    row_of_user = np.argsort(np.argsort(is_test, kind="stable"))
    line_of_user = np.argsort(ids["user_id"])
    users = np.argsort(row_of_user)  # the user of each row

    rows = row_of_user[np.searchsorted(vocabularies["user_id"], ratings["user_id"])]
    order = np.lexsort((ratings["timestamp"], rows))  # stable: the order of the file among equals
    offsets = np.searchsorted(rows[order], np.arange(len(users) + 1)).astype(np.int32)
    movie_ids = np.searchsorted(vocabularies["movie_id"], ratings["movie_id"])
    columns: dict[str, pa.Array] = {
        name: pa.array(values[line_of_user][users].astype(np.int32)) for name, values in ids.items()
    }
    for name, values, dtype in (
        ("movie_id", movie_ids, np.int32),
        ("rating", ratings["rating"], np.int8),
        ("timestamp", ratings["timestamp"], np.int64),
    ):
        columns[name] = pa.ListArray.from_arrays(offsets, values[order].astype(dtype))
    columns["split"] = pa.array(np.where(is_test[users], "test", "train"))
    return pa.table(columns), {name: values.tolist() for name, values in vocabularies.items()}


def _hash_of_users(user_ids: np.ndarray, seed: int) -> np.ndarray:
    """A float64 in [0, 1) per user: SplitMix64 (Steele, Lea, Flood 2014) of the user id, in the stream of `seed`."""
    with np.errstate(over="ignore"):
        state = user_ids.astype(np.uint64) + np.random.SeedSequence(seed).generate_state(1, np.uint64)
        state = (state + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state = state ^ (state >> np.uint64(31))
    return (state >> np.uint64(11)).astype(np.float64) / 2.0**53
