"""Generated ratings in the columnar files of MovieLens-1M: data for the demos.

Users, movies and ratings come from a small latent model, so that a recommender can learn from them:

- A movie has one to three genres, a quality and a vector close to the vectors of its genres.
- A user has a taste that drifts, phase by phase, from a start to an end; gender and age shift both.
- In each phase the user picks unseen movies one by one, each with probability proportional to popularity × exp(taste ·
  vector), so the next movies can be predicted from the latest ones.
- The rating is the quantile, under the published histogram, of quality + opinion · vector + mildness + noise. The
  opinion is correlated with the taste, so ratings can be predicted from past movies *with* their ratings.

Lengths follow the published statistics: 20 plus a Weibull variable of shape 0.76 fits the mean (165.6), quartiles (44,
96, 208) and maximum (2,314) of the 6,040 users. All randomness comes from one numpy Generator.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from tqdm import tqdm

from commons.available_memory import require_memory
from commons.datasets.public.movielens import ML_1M
from commons.datasets.sequences.event_store import EventStore
from commons.datasets.sequences.writer import SequenceSource, preprocess

NUM_USERS = 6_040
_MIN_LENGTH, _MAX_LENGTH, _MEAN_LENGTH = 20, 2_314, 1_000_209 / 6_040
_WEIBULL_SHAPE = 0.76
_NUM_MOVIES, _NUM_RATED_MOVIES, _MAX_MOVIE_ID = 3_883, 3_706, 3_952
_RATING_SHARES = (0.056, 0.108, 0.261, 0.349, 0.226)  # published shares of ratings 1 to 5
_AGES, _AGE_SHARES = (1, 18, 25, 35, 45, 50, 56), (0.037, 0.183, 0.347, 0.198, 0.091, 0.082, 0.062)
_FEMALE_SHARE = 0.283
_NUM_OCCUPATIONS = 21
_NUM_ZIPS = 3_439
_FIRST_SECOND, _LAST_SECOND = 956_703_932, 1_046_454_590  # April 2000 to February 2003
NUM_GENRES = 18

_LATENT_SIZE = 16
_NUM_PHASES = 8
_TASTE_SCALE = 1.5  # standard deviation of taste · vector over the movies: the influence of taste on the choice
_DRIFT = 0.8  # distance of a taste's end from its start: 0 for equal, 1 for independent
_SHARED_OPINION = 0.5  # correlation of opinion and taste
_QUALITY_SCALE, _OPINION_SCALE, _MILDNESS_SCALE, _NOISE_SCALE = 0.6, 1.0, 0.4, 0.6
_BYTES_PER_USER = 33_000  # memory of the drawn ratings, all in memory until they are sorted
_USERS_PER_CHUNK = 128


@dataclass(frozen=True)
class Ratings:
    """Generated ratings, with their users and movies."""

    movies: Movies
    users: Users
    # user_id, movie_id, rating (1 to 5) and timestamp (seconds since 1970), int64; users in order, the ratings of each
    # user in random order
    table: pa.Table

    @classmethod
    def draw(cls, num_users: int = NUM_USERS, *, seed: int = 0, show_progress: bool = False) -> Ratings:
        """Draw ratings; equal seeds give equal ratings. ValueError for more users than memory allows."""
        require_memory(num_users * _BYTES_PER_USER, f"num_users is {num_users:,}", "give fewer")
        rng = np.random.default_rng(seed)
        genres = _unit(_normal(rng, NUM_GENRES, _LATENT_SIZE))  # one vector each
        movies = _draw_movies(genres, rng)
        users = _draw_users(num_users, genres, rng)
        return cls(movies, users, _draw_ratings(movies, users, rng, show_progress))


def generate_ratings(
    output: str | Path,
    *,
    num_users: int = NUM_USERS,
    test_fraction: float = 0.1,
    seed: int = 0,
    show_progress: bool = False,
) -> Path:
    """Write generated ratings in the format of MovieLens-1M's preprocessor; returns the folder.

    Arguments and errors as for `preprocess` and `Ratings.draw`. `seed` is for the ratings and the split; equal seeds
    give equal files.
    """
    drawn = Ratings.draw(num_users, seed=seed, show_progress=show_progress)

    def read(source: Path, store: EventStore) -> SequenceSource:
        event = "user_id AS user, movie_id AS item, rating::SMALLINT AS action, timestamp AS time"
        store.add(f"SELECT {event} FROM drawn", drawn=drawn.table)  # noqa: S608
        movies = pa.table({"movie_id": pa.array(drawn.movies.all_ids, pa.int32())})  # ascending
        return ML_1M.describe(store, {"user": drawn.users.table, "item": movies}, generated=True)

    name = ML_1M.schema.dataset_name
    return preprocess(
        name, read, os.devnull, output, test_fraction=test_fraction, seed=seed, show_progress=show_progress
    )


@dataclass(frozen=True)
class Movies:
    """The rated movies, most popular first."""

    ids: np.ndarray  # int64 `(num_movies,)`
    vectors: np.ndarray  # float32 `(num_movies, latent_size)`; products with a unit vector have standard deviation 1
    quality: np.ndarray  # float32 `(num_movies,)`, mean 0 and standard deviation 1
    popularity: np.ndarray  # float32 `(num_movies,)`, weights in the choice of a movie
    all_ids: np.ndarray  # int64 `(num_all,)`, ascending, with movies that no user rates
    all_genres: np.ndarray  # int64 `(num_all, 3)`, three genres of each movie, which may be equal
    years: np.ndarray  # int64 `(num_all,)`


@dataclass(frozen=True)
class Users:
    """The users in the order of their ids, 1 to num_users."""

    lengths: np.ndarray  # int64 `(num_users,)`, ratings of each user
    taste_start: np.ndarray  # float32 `(num_users, latent_size)`, unit vectors
    taste_end: np.ndarray  # float32 `(num_users, latent_size)`, unit vectors
    opinion: np.ndarray  # float32 `(num_users, latent_size)`, unit vectors: the opinion's part independent of the taste
    mildness: np.ndarray  # float32 `(num_users,)`, mean 0 and standard deviation 1
    table: pa.Table  # user_id int32, age and occupation int64, gender and zip string


def _unit(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


def _normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape, dtype=np.float32)


def _draw_movies(genres: np.ndarray, rng: np.random.Generator) -> Movies:
    ids = 1 + np.sort(rng.permutation(_MAX_MOVIE_ID - 1)[: _NUM_MOVIES - 1])
    ids = np.append(ids, _MAX_MOVIE_ID)
    # Three draws per movie; with repeated draws a movie has fewer genres.
    genre_ids = rng.integers(NUM_GENRES, size=(_NUM_MOVIES, 3))
    genre_ids[:, 1:] = np.where(rng.random((_NUM_MOVIES, 2)) < 0.5, genre_ids[:, :1], genre_ids[:, 1:])
    years = rng.integers(1919, 2001, _NUM_MOVIES)
    by_popularity = rng.permutation(_NUM_MOVIES)[:_NUM_RATED_MOVIES]
    own_part = _unit(_normal(rng, _NUM_RATED_MOVIES, _LATENT_SIZE))
    vectors = _unit(_unit(genres[genre_ids[by_popularity]].sum(axis=1)) + 0.5 * own_part)
    # Roughly how the number of ratings of the published movies falls with their rank.
    popularity = np.exp(-np.arange(_NUM_RATED_MOVIES, dtype=np.float32) / 650) + np.float32(0.002)
    vectors = vectors * np.float32(np.sqrt(_LATENT_SIZE))
    return Movies(ids[by_popularity], vectors, _normal(rng, _NUM_RATED_MOVIES), popularity, ids, genre_ids, years)


def _user_lengths(num_users: int) -> np.ndarray:
    """Ratings per user, ascending: int64 `(num_users,)`, the quantiles of the distribution in the module docstring."""
    probabilities = (np.arange(num_users) + 0.5) / num_users
    excess = (-np.log1p(-probabilities)) ** (1 / _WEIBULL_SHAPE)
    low, high = 0.0, 1e4
    for _ in range(60):  # bisection of the scale; the mean rises with it
        scale = (low + high) / 2
        lengths = np.clip(np.rint(_MIN_LENGTH + scale * excess), _MIN_LENGTH, _MAX_LENGTH).astype(np.int64)
        low, high = (scale, high) if lengths.mean() < _MEAN_LENGTH else (low, scale)
    return lengths


def _draw_users(num_users: int, genres: np.ndarray, rng: np.random.Generator) -> Users:
    is_female = rng.random(num_users) < _FEMALE_SHARE
    age = rng.choice(len(_AGES), num_users, p=np.array(_AGE_SHARES) / sum(_AGE_SHARES))
    occupation = rng.integers(_NUM_OCCUPATIONS, size=num_users)
    zips = [
        f"{code:05d}" if code % 50 else f"{code:05d}-{code % 9999:04d}"
        for code in rng.integers(100_000, size=_NUM_ZIPS)
    ]
    zip_ids = rng.integers(_NUM_ZIPS, size=num_users)
    table = pa.table(
        {
            "user_id": np.arange(1, num_users + 1, dtype=np.int32),
            "gender": pa.array(["M", "F"]).take(pa.array(is_female.astype(np.int8))),
            "age": np.array(_AGES, np.int64)[age],
            "occupation": occupation,
            "zip": pa.array(zips).take(pa.array(zip_ids)),
        }
    )
    # A taste is the sum of two genres, the taste of the user's gender and age, and noise.
    group_taste = _unit(_normal(rng, 2, len(_AGES), _LATENT_SIZE))[is_female.astype(np.int64), age]

    def draw_taste() -> np.ndarray:
        own_genres = genres[rng.integers(NUM_GENRES, size=(num_users, 2))].sum(axis=1)
        return _unit(
            own_genres + np.float32(0.5) * group_taste + np.float32(0.1) * _normal(rng, num_users, _LATENT_SIZE)
        )

    start = draw_taste()
    lengths = rng.permutation(_user_lengths(num_users))
    end = _unit((1 - _DRIFT) * start + _DRIFT * draw_taste())
    return Users(lengths, start, end, draw_taste(), _normal(rng, num_users), table)


def _draw_ratings(movies: Movies, users: Users, rng: np.random.Generator, show_progress: bool) -> pa.Table:
    """The ratings as a table, users in order, each user's ratings in random order."""
    num_users = len(users.lengths)
    # Users of similar length in one chunk, because a chunk draws as many movies per user as its longest user needs.
    by_length = np.argsort(users.lengths, kind="stable")
    parts: list[tuple[np.ndarray, ...]] = []
    with tqdm(total=num_users, desc="generate", unit="user", disable=None if show_progress else True) as progress:
        for start in range(0, num_users, _USERS_PER_CHUNK):
            chunk = by_length[start : start + _USERS_PER_CHUNK]
            parts += _pick_movies(movies, users, chunk, rng)
            progress.update(len(chunk))
    columns = [np.concatenate(parts) for parts in zip(*parts)]
    order = np.lexsort((columns[2], columns[0]))  # stable: within a phase, the order in which movies were picked
    user, movie, phase, opinion = (column[order] for column in columns)
    utility = (
        _QUALITY_SCALE * movies.quality[movie]
        + _OPINION_SCALE * opinion
        + _MILDNESS_SCALE * users.mildness[user]
        + _NOISE_SCALE * _normal(rng, len(user))
    )
    thresholds = np.quantile(utility, np.cumsum(_RATING_SHARES)[:-1])
    shuffled = np.lexsort((rng.random(len(user)), user))
    table = {
        "user_id": user + 1,
        "movie_id": movies.ids[movie],
        "rating": 1 + np.searchsorted(thresholds, utility),
        "timestamp": _draw_timestamps(user, phase, rng),
    }
    return pa.table({name: values[shuffled] for name, values in table.items()})


def _pick_movies(
    movies: Movies, users: Users, chunk: np.ndarray, rng: np.random.Generator
) -> list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
    """The movies of a chunk of users: for each phase the user and movie indices, the phase, and the opinion.

    The smallest values of Exp(1) ÷ weight are a weighted draw without replacement (Efraimidis and Spirakis 2006).
    """
    seen = np.zeros((len(chunk), len(movies.ids)), dtype=bool)
    parts = []
    for phase in range(_NUM_PHASES):
        progress = np.float32(phase / (_NUM_PHASES - 1))
        taste = _unit((1 - progress) * users.taste_start[chunk] + progress * users.taste_end[chunk])
        preference = taste @ movies.vectors.T  # (users, movies)
        waiting = rng.standard_exponential(preference.shape, dtype=np.float32)
        waiting /= movies.popularity
        waiting *= np.exp(np.float32(-_TASTE_SCALE) * preference)
        waiting[seen] = np.inf
        wanted = users.lengths[chunk] * (phase + 1) // _NUM_PHASES - users.lengths[chunk] * phase // _NUM_PHASES
        most = int(wanted.max())
        nearest = np.argpartition(waiting, most - 1, axis=1)[:, :most]
        nearest = np.take_along_axis(nearest, np.argsort(np.take_along_axis(waiting, nearest, axis=1), axis=1), axis=1)
        row, column = np.nonzero(np.arange(most) < wanted[:, None])
        movie = nearest[row, column]
        seen[row, movie] = True
        opinion = _SHARED_OPINION * taste + np.sqrt(1 - _SHARED_OPINION**2) * users.opinion[chunk]
        agreement = np.einsum("nd,nd->n", opinion[row], movies.vectors[movie])
        parts.append((chunk[row], movie, np.full(len(row), phase), agreement))
    return parts


def _draw_timestamps(user: np.ndarray, phase: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Timestamps in seconds, ascending within a user: most users rate in one session, some return days later."""
    num_users = int(user[-1]) + 1
    latest_start = _LAST_SECOND - _FIRST_SECOND - 90 * 86_400
    start = _FIRST_SECOND + rng.beta(0.6, 2.5, num_users) * latest_start
    gap = rng.exponential(20.0, len(user))  # often less than a second after rounding: ties, as in the published data
    new_phase = np.append(False, (user[1:] == user[:-1]) & (phase[1:] != phase[:-1]))
    comes_back = new_phase & (rng.random(len(user)) < 0.3)
    gap[comes_back] += rng.exponential(5 * 86_400.0, int(comes_back.sum()))
    elapsed = np.cumsum(gap)
    first = np.searchsorted(user, np.arange(num_users))  # every user has ratings
    elapsed -= elapsed[first][user]
    return np.minimum(start[user] + elapsed, _LAST_SECOND).astype(np.int64)
