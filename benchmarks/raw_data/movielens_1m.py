"""The generated ratings of the demos as an archive in the raw format of MovieLens-1M."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.csv as pcsv

from benchmarks.raw_data.archive import ArchiveForm, GeneratedArchive, check_request, generated_archive
from commons.datasets.generated_ratings import NUM_USERS, Movies, Ratings
from commons.datasets.movielens_archive import ENCODING, FILE_NAMES
from commons.datasets.raw_archive import GENERATED_MARK

_FORM = ArchiveForm("ml-1m", "README", FILE_NAMES)
_BYTES_PER_USER = 33_000  # memory: drawn ratings, which are all held until they are sorted
_GENRES = (
    *("Action", "Adventure", "Animation", "Children's", "Comedy", "Crime", "Documentary", "Drama", "Fantasy"),
    *("Film-Noir", "Horror", "Musical", "Mystery", "Romance", "Sci-Fi", "Thriller", "War", "Western"),
)
_README = f"""{GENERATED_MARK}: this is not MovieLens-1M.

The files have the format of MovieLens-1M (https://grouplens.org/datasets/movielens/1m/), and the lengths its published
statistics. Users, movies and ratings were drawn at random; none of them is real.

users: {{num_users}}
ratings: {{num_ratings}}
seed: {{seed}}
"""


def generate_movielens(
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
    drawn = Ratings.draw(num_users, seed=seed, show_progress=show_progress)
    users = drawn.users.table.to_pylist()
    readme = _README.format(num_users=num_users, num_ratings=drawn.table.num_rows, seed=seed)
    contents = {
        "README": readme.encode(ENCODING),
        "movies.dat": _format_movies(drawn.movies).encode(ENCODING),
        "ratings.dat": _format_ratings(drawn.table),
        "users.dat": "".join("::".join(map(str, user.values())) + "\n" for user in users).encode(ENCODING),
    }
    with generated_archive(output, _FORM) as folder:
        for name, data in contents.items():
            (folder / name).write_bytes(data)
    return GeneratedArchive(output, num_users, drawn.table.num_rows, int(drawn.users.lengths.max()))


def _format_movies(movies: Movies) -> str:
    columns = (movies.all_ids.tolist(), movies.all_genres.tolist(), movies.years.tolist())
    return "".join(
        f"{movie}::Generated n° {movie}: {_GENRES[own[0]]} ({year})::{'|'.join(_GENRES[g] for g in sorted(set(own)))}\n"
        for movie, own, year in zip(*columns)
    )


def _format_ratings(ratings: pa.Table) -> bytes:
    # `a::b` is `a`, nothing and `b`, separated by single colons.
    nothing = pa.nulls(ratings.num_rows, pa.string())
    columns: list[pa.ChunkedArray | pa.Array] = []
    for column in ratings.columns:
        columns += [column, nothing]
    table = pa.table(columns[:-1], names=[str(index) for index in range(len(columns) - 1)])
    sink = pa.BufferOutputStream()
    pcsv.write_csv(table, sink, pcsv.WriteOptions(include_header=False, delimiter=":", quoting_style="none"))
    return sink.getvalue().to_pybytes()
