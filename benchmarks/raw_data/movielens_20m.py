"""A generated archive in the raw format of MovieLens-20M, at any size.

Lengths follow the published statistics (138,493 users, mean 144.4, quartiles 35, 68 and 155, 20 to 9,254), ratings the
published histogram; what is watched and how it is liked comes from `histories`. The genome files are left out.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as pcsv
from tqdm import tqdm

from benchmarks.raw_data.archive import ArchiveForm, GeneratedArchive, check_request, generated_archive
from benchmarks.raw_data.histories import Items, Rows, draw_histories, lengths_with
from commons.datasets.raw_archive import GENERATED_MARK

NUM_USERS = 138_493
_NUM_RATINGS = 20_000_263
_QUANTILES = {0.0: 20, 0.25: 35, 0.5: 68, 0.75: 155, 0.9: 340, 0.95: 560, 0.99: 1_150, 1 - 0.5 / NUM_USERS: 9_254}
_NUM_MOVIES, _NUM_RATED_MOVIES, _MAX_MOVIE_ID = 27_278, 26_744, 131_262
# Published numbers of ratings of 0.5, 1, … 5 stars.
_RATING_COUNTS = (239125, 680732, 279252, 1430997, 883398, 4291193, 2200156, 5561926, 1534824, 2898660)
_FIRST_SECOND, _LAST_SECOND = 789_652_009, 1_427_784_002  # January 1995 to March 2015
_GENRES = (
    *("Action", "Adventure", "Animation", "Children", "Comedy", "Crime", "Documentary", "Drama", "Fantasy"),
    *("Film-Noir", "Horror", "Musical", "Mystery", "Romance", "Sci-Fi", "Thriller", "War", "Western"),
)
_BYTES_PER_USER = 80  # memory: their lengths
_FORM = ArchiveForm("ml-20m", "README.txt", ("links.csv", "movies.csv", "ratings.csv", "tags.csv"))
_README = f"""{GENERATED_MARK}: this is not MovieLens-20M.

The files have the format of MovieLens-20M (https://grouplens.org/datasets/movielens/20m/), and the
lengths its published statistics. Users, movies and ratings were drawn at random; none of them is real.

users: {{num_users}}
ratings: {{num_ratings}}
seed: {{seed}}
"""


def generate_movielens_20m(
    output: str | Path, *, num_users: int = NUM_USERS, seed: int = 0, show_progress: bool = False
) -> GeneratedArchive:
    """Write a generated archive.

    Args:
        output: a path that ends in `.zip` becomes a zip file, any other a folder. It appears when it is complete.
        num_users: users; the published number if not given.
        seed: the same seed gives the same archive.
        show_progress: show a progress bar on stderr, if that is a terminal.

    Returns:
        Where it is and what it holds.

    Raises:
        FileExistsError: something at `output` that is not an earlier archive of the same kind.
        ValueError: `num_users` below 1 or more than there is memory for, or a negative seed.

    """
    output = Path(output)
    check_request(output, _FORM, num_users=num_users, seed=seed, bytes_per_user=_BYTES_PER_USER)
    rng = np.random.default_rng(seed)
    lengths = lengths_with(num_users, _QUANTILES, _NUM_RATINGS / NUM_USERS)
    num_ratings, longest = int(lengths.sum()), int(lengths.max())
    with generated_archive(output, _FORM) as folder:
        movie_ids = _write_movies(folder, rng)
        items = Items.draw(_NUM_RATED_MOVIES, rng)
        with (
            (folder / "ratings.csv").open("wb") as file,
            tqdm(
                total=num_ratings,
                desc="generate ml-20m",
                unit="row",
                unit_scale=True,
                disable=None if show_progress else True,
            ) as progress,
        ):
            file.write(b"userId,movieId,rating,timestamp\n")
            thresholds: np.ndarray | None = None
            for rows in draw_histories(items, rng.permutation(lengths), rng, distinct=True):
                if thresholds is None:  # the first million rows stand for all
                    shares = np.cumsum(_RATING_COUNTS)[:-1] / sum(_RATING_COUNTS)
                    thresholds = np.quantile(rows.utility, shares)
                _write_ratings(file, rows, movie_ids, thresholds, rng)
                progress.update(len(rows.users))
        readme = _README.format(num_users=num_users, num_ratings=num_ratings, seed=seed)
        (folder / "README.txt").write_text(readme)
    return GeneratedArchive(output, num_users, num_ratings, longest)


def _write_movies(folder: Path, rng: np.random.Generator) -> np.ndarray:
    """movies.csv, links.csv and an empty tags.csv; returns the ids of the rated movies in the order of Items."""
    ids = np.append(1 + np.sort(rng.permutation(_MAX_MOVIE_ID - 1)[: _NUM_MOVIES - 1]), _MAX_MOVIE_ID)
    genres = rng.integers(len(_GENRES), size=(_NUM_MOVIES, 2))
    years = rng.integers(1919, 2015, _NUM_MOVIES)
    # Commas in titles, as in the published file.
    movies = [
        f'{movie},"Generated, No. {movie} ({year})",{"|".join(_GENRES[genre] for genre in sorted(set(own)))}\n'
        for movie, year, own in zip(ids.tolist(), years.tolist(), genres.tolist())
    ]
    (folder / "movies.csv").write_text("movieId,title,genres\n" + "".join(movies))
    links = "".join(f"{movie},{movie:07d},{movie}\n" for movie in ids.tolist())
    (folder / "links.csv").write_text("movieId,imdbId,tmdbId\n" + links)
    (folder / "tags.csv").write_text("userId,movieId,tag,timestamp\n")
    return rng.permutation(ids)[:_NUM_RATED_MOVIES]


def _write_ratings(
    file: object, rows: Rows, movie_ids: np.ndarray, thresholds: np.ndarray, rng: np.random.Generator
) -> None:
    movies = movie_ids[rows.items]
    stars = pa.array([f"{half / 2:.1f}" for half in range(1, 11)])
    timestamps = _draw_timestamps(rows, rng)
    order = np.lexsort((movies, rows.users))  # as in the published file
    table = pa.table(
        {
            "userId": rows.users[order] + 1,
            "movieId": movies[order],
            "rating": stars.take(pa.array(np.searchsorted(thresholds, rows.utility[order]))),
            "timestamp": timestamps[order],
        }
    )
    pcsv.write_csv(table, file, pcsv.WriteOptions(include_header=False, quoting_style="none"))


def _draw_timestamps(rows: Rows, rng: np.random.Generator) -> np.ndarray:
    """Seconds, rising within a user: most rate for a few days, some for years."""
    user = rows.users - rows.users[0]
    num_users = int(user[-1]) + 1
    span = np.minimum(rng.lognormal(np.log(20 * 86_400), 2.0, num_users), _LAST_SECOND - _FIRST_SECOND)
    start = _FIRST_SECOND + rng.random(num_users) * (_LAST_SECOND - _FIRST_SECOND - span)
    return (start[user] + span[user] * rows.progress).astype(np.int64)
