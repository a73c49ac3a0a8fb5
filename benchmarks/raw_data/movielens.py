"""Generated archives in the raw formats of MovieLens-1M and -20M; of the latter the files that are read.

The ratings of the smaller one are those of the demos, `commons.datasets.public.generated_ratings`. Lengths of the
larger one follow the published statistics (138,493 users, mean 144.4, quartiles 35, 68 and 155, 20 to 9,254), ratings
the published histogram.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks.raw_data.archive import GeneratedArchive, connect, lengths_with, one_of, write_archive, write_csv
from commons.datasets.public.generated_ratings import NUM_USERS as NUM_USERS_1M
from commons.datasets.public.generated_ratings import Ratings
from commons.datasets.public.movielens import ENCODING

NUM_USERS_20M = 138_493
QUANTILES_20M = {
    **{0.0: 20, 0.25: 35, 0.5: 68, 0.75: 155, 0.9: 340, 0.95: 560, 0.99: 1_150},
    **{1 - 0.5 / NUM_USERS_20M: 9_254},
}
_NUM_RATINGS = 20_000_263
_NUM_RATED_MOVIES = 26_744
# Published numbers of ratings of 0.5, 1, … 5 stars.
_RATING_COUNTS = (239125, 680732, 279252, 1430997, 883398, 4291193, 2200156, 5561926, 1534824, 2898660)
_GENRES = (
    *("Action", "Adventure", "Animation", "Children's", "Comedy", "Crime", "Documentary", "Drama", "Fantasy"),
    *("Film-Noir", "Horror", "Musical", "Mystery", "Romance", "Sci-Fi", "Thriller", "War", "Western"),
)
# 27,278 movies with ids up to 131,262, each with its rank by popularity.
_MOVIES = """
    CREATE TABLE movies AS
    SELECT id, row_number() OVER (ORDER BY uniform('popularity', id)) - 1 AS rank
    FROM (SELECT id FROM range(1, 131_262) ids(id) ORDER BY uniform('movie', id) LIMIT 27_277)
        UNION ALL SELECT 131_262, 27_277
"""
# Commas in titles, as in the published file.
_MOVIE_LINES = """
    SELECT id AS movieId, format('Generated, No. {} (1999)', id) AS title, 'Drama' AS genres FROM movies ORDER BY id
"""
_RATING = one_of("uniform('rating', number, place)", [half / 2 for half in range(1, 11)], _RATING_COUNTS)
# Nobody rates a movie twice: evenly spread quantiles of the popularity, and the next movie where one is taken. Most
# users rate for a few days, some for years, from January 1995 to March 2015.
_RATING_LINES = f"""
    WITH places AS (SELECT *, unnest(range(length)) AS place FROM users),
    ranks AS (
        SELECT *, place + max(popular((place + uniform('item', number, place)) / length, {_NUM_RATED_MOVIES}) - place)
            OVER (PARTITION BY number ORDER BY place) AS rank
        FROM places
    ),
    periods AS (
        SELECT number, least(20 * 86_400 * exp(2 * normal('span', number)), 638_131_993) AS span,
            789_652_009 + uniform('start', number) * (638_131_993 - span) AS start
        FROM users
    )
    SELECT number + 1 AS userId, id AS movieId, {_RATING}::DECIMAL(2, 1) AS rating,
        (start + span * uniform('time', number, place))::BIGINT AS timestamp
    FROM ranks JOIN movies USING (rank) JOIN periods USING (number) ORDER BY ALL
"""


def generate_movielens(
    output: str | Path, *, num_users: int = NUM_USERS_1M, seed: int = 0, show_progress: bool = False
) -> GeneratedArchive:
    """Write a generated archive of MovieLens-1M's format; see `write_archive`."""

    def write(folder: Path) -> np.ndarray:
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

    return write_archive(output, "ml-1m", "https://grouplens.org/datasets/movielens/1m/", "README", write, seed)


def generate_movielens_20m(
    output: str | Path, *, num_users: int = NUM_USERS_20M, seed: int = 0, show_progress: bool = False
) -> GeneratedArchive:
    """Write a generated archive of MovieLens-20M's format; see `write_archive`."""

    def write(folder: Path) -> np.ndarray:
        lengths = lengths_with(num_users, QUANTILES_20M, _NUM_RATINGS / NUM_USERS_20M)
        with connect(seed, lengths, show_progress=show_progress) as database:
            database.execute(_MOVIES)
            write_csv(database, folder / "movies.csv", _MOVIE_LINES)
            write_csv(database, folder / "ratings.csv", _RATING_LINES)
        return lengths

    return write_archive(output, "ml-20m", "https://grouplens.org/datasets/movielens/20m/", "README.txt", write, seed)


def _genres(numbers: list[int]) -> str:
    return "|".join(_GENRES[genre] for genre in sorted(set(numbers)))
