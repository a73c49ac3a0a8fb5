"""Generated archives in the raw formats of public data sets, drawn by DuckDB: marked as such, never half written."""

from __future__ import annotations

import os
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import duckdb
import numpy as np

from commons.datasets.public.raw_files import GENERATED_MARK

_TIME = 946_684_800  # of every file, so that the same contents give the same bytes
# What a row is drawn with depends on what is drawn, on the row's numbers and the seed alone: memory does not grow with
# the number of rows, and threads and a second reading give the same.
_MACROS = """
    CREATE MACRO uniform(what, a, b := 0) AS (hash(what, a, b, {seed}) >> 11)::DOUBLE / 2 ** 53;
    CREATE MACRO normal(what, a) AS sqrt(-2 * ln(1 - uniform(what, a, 1))) * cos(2 * pi() * uniform(what, a, 2));
    CREATE MACRO below(what, bound, a, b := 0) AS floor(uniform(what, a, b) * bound)::BIGINT;
    -- The rank of an item: the popularity of one falls with the power 0.8 of its rank + 10.
    CREATE MACRO popular(quantile, items) AS
        least(items - 1, floor((quantile * ((items + 10) ** 0.2 - 10 ** 0.2) + 10 ** 0.2) ** 5 - 10)::BIGINT);
"""


@dataclass(frozen=True)
class GeneratedArchive:
    """What was written: where, users, interactions of all of them, and of the one with the most."""

    path: Path
    num_users: int
    num_interactions: int
    max_length: int

    @property
    def mean_length(self) -> float:
        return self.num_interactions / self.num_users


def lengths_with(num_users: int, quantiles: Mapping[float, int], mean: float) -> np.ndarray:
    """Lengths of histories, int64 `(num_users,)` ascending, that follow published statistics.

    Between two quantiles the logarithm of the length is linear in −log(1 − p), as in a Pareto distribution; then what
    exceeds the shortest is scaled, so that the mean is right for any number of users.

    Args:
        num_users: how many.
        quantiles: the length at each probability p, from 0, the shortest, to almost 1, the longest.
        mean: of the result, to within one item.
    """
    probabilities = (np.arange(num_users) + 0.5) / num_users
    knots = -np.log1p(-np.array(list(quantiles)))
    drawn = np.exp(np.interp(-np.log1p(-probabilities), knots, np.log(list(quantiles.values()))))
    shortest, longest = min(quantiles.values()), max(quantiles.values())
    drawn = shortest + (drawn - shortest) * (mean - shortest) / (drawn.mean() - shortest)
    return np.clip(np.rint(drawn), shortest, longest).astype(np.int64)


def connect(seed: int, lengths: np.ndarray, *, show_progress: bool) -> duckdb.DuckDBPyConnection:
    """DuckDB with what rows are drawn by, and a relation `users` (number, length) of users whose lengths are these."""
    database = duckdb.connect(config={"temp_directory": tempfile.gettempdir(), "memory_limit": "4GB"})
    # DuckDB shows it on standard output, which may be a file.
    database.execute(f"SET enable_progress_bar = {show_progress and sys.stdout.isatty()}")
    database.execute(_MACROS.format(seed=seed))
    mixed = np.random.default_rng(seed).permutation(lengths)
    database.register("users", {"number": np.arange(len(mixed)), "length": mixed})
    return database


def one_of(quantile: str, choices: Sequence[float], shares: Sequence[float]) -> str:
    """SQL of the choice at a quantile that SQL states; `shares` are weights."""
    ends = np.cumsum(shares) / np.sum(shares)
    cases = [f"WHEN {quantile} < {end!r} THEN {choice}" for end, choice in zip(ends.tolist(), choices)]
    return f"CASE {' '.join(cases)} END"


def write_csv(database: duckdb.DuckDBPyConnection, path: Path, query: str) -> None:
    database.execute(f"COPY ({query}) TO '{path}' (HEADER)")


def write_archive(
    output: str | Path, top: str, url: str, readme: str, write: Callable[[Path], np.ndarray], seed: int
) -> GeneratedArchive:
    """Write files and pack them; the archive appears when it is complete.

    Args:
        output: a path that ends in `.zip` or `.tar.gz` becomes such a file, any other a folder.
        top: the folder that holds everything in a zip or tar file, such as "ml-20m".
        url: of the published data.
        readme: name of the file that says that the data are generated; the preprocessor knows them by its first words.
        write: writes the files into a folder; returns the length of every user's history.
        seed: of what is drawn; the same seed gives the same files.

    Raises:
        FileExistsError: something is at `output`.
    """
    output = Path(output)
    if os.path.lexists(output):
        raise FileExistsError(f"{output} exists and is not overwritten: remove it, or give another path")
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent) as temporary:
        contents = Path(temporary, top)
        contents.mkdir()
        lengths = write(contents)
        (contents / readme).write_text(
            f"{GENERATED_MARK}: this is not {top}.\n\nThe files have the format of {top} ({url}), and the lengths its\n"
            "statistics. Users, items and feedback were drawn at random; none of them is real.\n\n"
            f"users: {len(lengths)}\ninteractions: {lengths.sum()}\nseed: {seed}\n"
        )
        for path in [contents, *contents.rglob("*")]:
            os.utime(path, (_TIME, _TIME))
        _packed(contents, output.name).rename(output)
    return GeneratedArchive(output, len(lengths), int(lengths.sum()), int(lengths.max()))


def _packed(contents: Path, name: str) -> Path:
    """The archive of a folder, or the folder itself, by the ending of a name."""
    if name.endswith(".zip"):
        return Path(shutil.make_archive(str(contents.with_name("packed")), "zip", contents.parent, contents.name))
    if not name.endswith(".tar.gz"):
        return contents
    packed = contents.with_name("packed.tar.gz")
    with tarfile.open(packed, "w:gz", compresslevel=1) as archive:  # a higher level takes most of the time
        archive.add(contents, contents.name)
    return packed
