"""Generated archives in the raw formats of MovieLens-1M and -20M; of the latter the files that are read.

The ratings of the smaller one are those of the demos, `commons.datasets.public.generated_ratings`. Lengths of the
larger one follow the published statistics (138,493 users, mean 144.4, quartiles 35, 68 and 155, 20 to 9,254), ratings
the published histogram; what is watched comes from `histories`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as pcsv

from benchmarks.raw_data.archive import GeneratedArchive, write_archive
from benchmarks.raw_data.histories import Rows, draw_histories, lengths_with, spread_evenly
from commons.console import progress_bar
from commons.datasets.public.generated_ratings import NUM_USERS as NUM_USERS_1M
from commons.datasets.public.generated_ratings import Ratings
from commons.datasets.public.movielens import ENCODING

NUM_USERS_20M = 138_493
QUANTILES_20M = {
    **{0.0: 20, 0.25: 35, 0.5: 68, 0.75: 155, 0.9: 340, 0.95: 560, 0.99: 1_150},
    **{1 - 0.5 / NUM_USERS_20M: 9_254},
}
_NUM_RATINGS = 20_000_263
_NUM_MOVIES, _NUM_RATED_MOVIES, _MAX_MOVIE_ID = 27_278, 26_744, 131_262
# Published numbers of ratings of 0.5, 1, … 5 stars.
_RATING_COUNTS = (239125, 680732, 279252, 1430997, 883398, 4291193, 2200156, 5561926, 1534824, 2898660)
_FIRST_SECOND, _LAST_SECOND = 789_652_009, 1_427_784_002  # January 1995 to March 2015
_GENRES = (
    *("Action", "Adventure", "Animation", "Children's", "Comedy", "Crime", "Documentary", "Drama", "Fantasy"),
    *("Film-Noir", "Horror", "Musical", "Mystery", "Romance", "Sci-Fi", "Thriller", "War", "Western"),
)


def generate_movielens(
    output: str | Path, *, num_users: int = NUM_USERS_1M, seed: int = 0, show_progress: bool = False
) -> GeneratedArchive:
    """Write a generated archive of MovieLens-1M's format; see `write_archive`."""

    def write(folder: Path, _: np.random.Generator) -> np.ndarray:
        drawn = Ratings.draw(num_users, seed=seed, show_progress=show_progress)
        movies = zip(drawn.movies.all_ids.tolist(), drawn.movies.all_genres.tolist(), drawn.movies.years.tolist())
        rows = {
            "movies.dat": (
                (movie, f"Generated n° {movie}: {_GENRES[own[0]]} ({year})", _genres(own))
                for movie, own, year in movies
            ),
            "users.dat": (user.values() for user in drawn.users.table.to_pylist()),
            "ratings.dat": zip(*(column.to_pylist() for column in drawn.table.columns)),
        }
        for name, of_file in rows.items():
            lines = "".join("::".join(map(str, row)) + "\n" for row in of_file)
            (folder / name).write_bytes(lines.encode(ENCODING))
        return drawn.users.lengths

    url = "https://grouplens.org/datasets/movielens/1m/"
    return write_archive(output, "ml-1m", url, "README", write, num_users=num_users, seed=seed)


def generate_movielens_20m(
    output: str | Path, *, num_users: int = NUM_USERS_20M, seed: int = 0, show_progress: bool = False
) -> GeneratedArchive:
    """Write a generated archive of MovieLens-20M's format; see `write_archive`."""

    def write(folder: Path, rng: np.random.Generator) -> np.ndarray:
        lengths = rng.permutation(lengths_with(num_users, QUANTILES_20M, _NUM_RATINGS / NUM_USERS_20M))
        movie_ids = _write_movies(folder, rng)
        with (
            (folder / "ratings.csv").open("wb") as file,
            progress_bar("generate ml-20m", int(lengths.sum()), "row", show=show_progress) as progress,
        ):
            file.write(b"userId,movieId,rating,timestamp\n")
            for rows in draw_histories(_NUM_RATED_MOVIES, lengths, rng, distinct=True):
                ratings = _ratings(rows, movie_ids, rng)
                pcsv.write_csv(ratings, file, pcsv.WriteOptions(include_header=False, quoting_style="none"))
                progress.update(len(rows.users))
        return lengths

    url = "https://grouplens.org/datasets/movielens/20m/"
    return write_archive(output, "ml-20m", url, "README.txt", write, num_users=num_users, seed=seed)


def _genres(numbers: list[int]) -> str:
    return "|".join(_GENRES[genre] for genre in sorted(set(numbers)))


def _write_movies(folder: Path, rng: np.random.Generator) -> np.ndarray:
    """movies.csv; returns the ids of the rated movies, the most popular first."""
    ids = np.append(1 + np.sort(rng.permutation(_MAX_MOVIE_ID - 1)[: _NUM_MOVIES - 1]), _MAX_MOVIE_ID)
    genres = rng.integers(len(_GENRES), size=(_NUM_MOVIES, 2))
    years = rng.integers(1919, 2015, _NUM_MOVIES)
    # Commas in titles, as in the published file.
    movies = [
        f'{movie},"Generated, No. {movie} ({year})",{_genres(own)}\n'
        for movie, year, own in zip(ids.tolist(), years.tolist(), genres.tolist())
    ]
    (folder / "movies.csv").write_text("movieId,title,genres\n" + "".join(movies))
    return rng.permutation(ids)[:_NUM_RATED_MOVIES]


def _ratings(rows: Rows, movie_ids: np.ndarray, rng: np.random.Generator) -> pa.Table:
    movies = movie_ids[rows.items]
    stars = pa.array([f"{half / 2:.1f}" for half in range(1, 11)])
    shares = np.cumsum(_RATING_COUNTS)[:-1] / sum(_RATING_COUNTS)
    # Times rise within a user: most rate for a few days, some for years.
    user = rows.users - rows.users[0]
    num_users, period = int(user[-1]) + 1, _LAST_SECOND - _FIRST_SECOND
    span = np.minimum(rng.lognormal(np.log(20 * 86_400), 2.0, num_users), period)
    start = _FIRST_SECOND + rng.random(num_users) * (period - span)
    timestamps = (start[user] + span[user] * rows.progress).astype(np.int64)
    order = np.lexsort((movies, rows.users))  # as in the published file
    return pa.table(
        {
            "userId": rows.users[order] + 1,
            "movieId": movies[order],
            "rating": stars.take(pa.array(np.searchsorted(shares, spread_evenly(len(movies), rng)))),
            "timestamp": timestamps[order],
        }
    )
