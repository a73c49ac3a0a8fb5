"""Generated archives in the raw formats of MovieLens-1M and -20M; of the latter the files that are read.

The ratings of the smaller one are those of the demos, `commons.datasets.public.generated_ratings`. Lengths of the
larger one follow the published statistics (138,493 users, mean 144.4, quartiles 35, 68 and 155, 20 to 9,254), ratings
the published histogram; what is watched comes from `histories`.
"""

from __future__ import annotations

from pathlib import Path
from typing import IO

import numpy as np
import pyarrow as pa
import pyarrow.csv as pcsv

from benchmarks.raw_data.archive import GeneratedArchive, generated_archive, readme
from benchmarks.raw_data.histories import Rows, draw_histories, lengths_with, spread_evenly
from commons.console import progress_bar
from commons.datasets.public.generated_ratings import NUM_USERS as NUM_USERS_1M
from commons.datasets.public.generated_ratings import Ratings
from commons.datasets.public.movielens import ENCODING

NUM_USERS_20M = 138_493
QUANTILES_20M = {
    0.0: 20,
    0.25: 35,
    0.5: 68,
    0.75: 155,
    0.9: 340,
    0.95: 560,
    0.99: 1_150,
    1 - 0.5 / NUM_USERS_20M: 9_254,
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
_PLAIN = pcsv.WriteOptions(include_header=False, quoting_style="none")


def generate_movielens(
    output: str | Path, *, num_users: int = NUM_USERS_1M, seed: int = 0, show_progress: bool = False
) -> GeneratedArchive:
    """Write a generated archive of MovieLens-1M's format.

    Args:
        output: a path that ends in `.zip` or `.tar.gz` becomes such a file, any other a folder. It appears when it is
            complete.
        num_users: users; the published number if not given.
        seed: the same seed gives the same archive.
        show_progress: show a progress bar on stderr, if that is a terminal.

    Raises:
        FileExistsError: something is at `output`.
        ValueError: `num_users` below 1 or more than there is memory for, or a negative seed.
    """
    with generated_archive(Path(output), "ml-1m", num_users=num_users, seed=seed) as folder:
        drawn = Ratings.draw(num_users, seed=seed, show_progress=show_progress)
        movies = zip(drawn.movies.all_ids.tolist(), drawn.movies.all_genres.tolist(), drawn.movies.years.tolist())
        lines = {
            "movies.dat": [
                f"{movie}::Generated n° {movie}: {_GENRES[own[0]]} ({year})::{_genres(own)}"
                for movie, own, year in movies
            ],
            "users.dat": ["::".join(map(str, user.values())) for user in drawn.users.table.to_pylist()],
            "ratings.dat": [
                "::".join(map(str, row)) for row in zip(*(column.to_pylist() for column in drawn.table.columns))
            ],
        }
        for name, of_file in lines.items():
            (folder / name).write_bytes("".join(f"{line}\n" for line in of_file).encode(ENCODING))
        url, num_ratings = "https://grouplens.org/datasets/movielens/1m/", drawn.table.num_rows
        (folder / "README").write_text(readme("MovieLens-1M", url, num_users, num_ratings, seed))
    return GeneratedArchive(Path(output), num_users, num_ratings, int(drawn.users.lengths.max()))


def generate_movielens_20m(
    output: str | Path, *, num_users: int = NUM_USERS_20M, seed: int = 0, show_progress: bool = False
) -> GeneratedArchive:
    """Write a generated archive of MovieLens-20M's format; arguments and errors as `generate_movielens`."""
    with generated_archive(Path(output), "ml-20m", num_users=num_users, seed=seed) as folder:
        rng = np.random.default_rng(seed)
        lengths = lengths_with(num_users, QUANTILES_20M, _NUM_RATINGS / NUM_USERS_20M)
        num_ratings = int(lengths.sum())
        movie_ids = _write_movies(folder, rng)
        with (
            (folder / "ratings.csv").open("wb") as file,
            progress_bar("generate ml-20m", num_ratings, "row", show=show_progress) as progress,
        ):
            file.write(b"userId,movieId,rating,timestamp\n")
            for rows in draw_histories(_NUM_RATED_MOVIES, rng.permutation(lengths), rng, distinct=True):
                _write_ratings(file, rows, movie_ids, rng)
                progress.update(len(rows.users))
        url = "https://grouplens.org/datasets/movielens/20m/"
        (folder / "README.txt").write_text(readme("MovieLens-20M", url, num_users, num_ratings, seed))
    return GeneratedArchive(Path(output), num_users, num_ratings, int(lengths.max()))


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


def _write_ratings(file: IO[bytes], rows: Rows, movie_ids: np.ndarray, rng: np.random.Generator) -> None:
    movies = movie_ids[rows.items]
    stars = pa.array([f"{half / 2:.1f}" for half in range(1, 11)])
    shares = np.cumsum(_RATING_COUNTS)[:-1] / sum(_RATING_COUNTS)
    timestamps = _draw_timestamps(rows, rng)
    order = np.lexsort((movies, rows.users))  # as in the published file
    table = pa.table(
        {
            "userId": rows.users[order] + 1,
            "movieId": movies[order],
            "rating": stars.take(pa.array(np.searchsorted(shares, spread_evenly(len(movies), rng)))),
            "timestamp": timestamps[order],
        }
    )
    pcsv.write_csv(table, file, _PLAIN)


def _draw_timestamps(rows: Rows, rng: np.random.Generator) -> np.ndarray:
    """Seconds, rising within a user: most rate for a few days, some for years."""
    user = rows.users - rows.users[0]
    num_users = int(user[-1]) + 1
    span = np.minimum(rng.lognormal(np.log(20 * 86_400), 2.0, num_users), _LAST_SECOND - _FIRST_SECOND)
    start = _FIRST_SECOND + rng.random(num_users) * (_LAST_SECOND - _FIRST_SECOND - span)
    return (start[user] + span[user] * rows.progress).astype(np.int64)
