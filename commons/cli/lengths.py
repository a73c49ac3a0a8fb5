"""Lengths of rows for `evenrank simulate`: from a file, a histogram, or a distribution that is named."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from commons.cli.lengths_file import HISTOGRAM, count_events, read_lengths
from commons.datasets.random.distribution import RandomDistribution

# Rows that are drawn from a distribution for its summary.
_SUMMARY_ROWS = 200_000
_DISTRIBUTIONS = "zipf:EXPONENT:LONGEST, lognormal:MEDIAN:SIGMA or lognormal:MEDIAN:SIGMA:LONGEST"

# So many lengths, int64.
_Draw = Callable[[int, np.random.Generator], np.ndarray]


@dataclass(frozen=True, eq=False)
class Lengths:
    """Lengths of rows: all that there are, or a way to draw them."""

    name: str  # as the user named them
    values: np.ndarray | None = None  # int64 `(num_rows,)`; None for lengths that are drawn
    draw: _Draw | None = None  # so many lengths; None for those of `values`
    in_order: bool = False  # whether rows are loaded in the order of the file; in a random one otherwise

    @property
    def num_rows(self) -> int | None:
        """Rows that there are; None for any number."""
        return None if self.values is None else len(self.values)

    def take(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """int64 `(count,)`, lengths in the order in which they are loaded; at most `num_rows`, none of them twice."""
        if self.values is None:
            assert self.draw is not None  # noqa: S101  one of them is given
            return self.draw(count, rng)
        return self.values[:count] if self.in_order else self.values[rng.permutation(len(self.values))[:count]]

    def summary(self, rng: np.random.Generator) -> np.ndarray:
        """int64 `(n,)`, lengths to describe the whole by."""
        return self.take(_SUMMARY_ROWS, rng) if self.values is None else self.values


def find_lengths(
    source: str,
    column: str | None,
    *,
    group_by: str | None = None,
    in_order: bool = False,
    with_replacement: bool = False,
) -> Lengths:
    """Lengths as a user names them.

    Args:
        source: a parquet, csv, npy or jsonl file, a folder of parquet files, or a distribution: "zipf:1.2:4096",
            "lognormal:130:1.4". A file with the columns `length` and `count` is a histogram.
        column: of lengths, or of lists whose lengths count; None if there is one column only.
        group_by: column of users, where rows are events: a user's length is the number of them.
        in_order: rows are loaded as they lie in the file.
        with_replacement: rows are drawn as often as needed, where the file is a sample of more data.

    Raises:
        FileNotFoundError: no such file.
        ValueError: an unknown distribution, file type or column, or lengths that are no counts.
    """
    if not source:
        raise ValueError(f"lengths is ''; it names a file or a distribution: {_DISTRIBUTIONS}")
    path = Path(source)
    named = re.fullmatch(r"([A-Za-z_]+):([^/\\]*)", source)
    if named and not path.exists():
        if column is not None or group_by is not None or in_order or with_replacement:
            raise ValueError(
                f"lengths is {source!r}, a distribution; --column, --group-by, --in-order and --with-replacement "
                "belong to a file: leave them out"
            )
        return Lengths(source, draw=_distribution(source, named[1], named[2].split(":")))
    if not path.exists():
        known = "" if path.suffix else f"; distributions are {_DISTRIBUTIONS}"
        if "://" in source:
            known = " on this machine: copy it here"
        raise FileNotFoundError(f"{source} does not exist; --lengths names a file of lengths{known}")
    if column is not None and group_by is not None:
        raise ValueError(
            f"--column is {column} and --group-by is {group_by}; the one holds lengths, of the other they are counted: "
            "give one of them"
        )
    columns = read_lengths(path, column) if group_by is None else {group_by: count_events(path, group_by)}
    if len(columns) == len(HISTOGRAM):
        if in_order or with_replacement:
            raise ValueError(
                f"{source} is a histogram, from which rows are drawn; --in-order and --with-replacement belong to a "
                "file with one length per row: leave them out"
            )
        return Lengths(source, draw=_histogram(source, columns))
    (values,) = columns.values()
    if with_replacement and in_order:
        raise ValueError("with_replacement and in_order exclude each other: choose one")
    if with_replacement:
        return Lengths(source, draw=lambda count, rng: values[rng.integers(0, len(values), count)])
    return Lengths(source, values, in_order=in_order)


def _distribution(source: str, name: str, parts: list[str]) -> _Draw:
    try:
        numbers = [float(part) for part in parts]
    except ValueError:
        numbers = [math.nan]
    if not all(math.isfinite(number) for number in numbers) or (name, len(numbers)) not in (
        ("zipf", 2),
        ("lognormal", 2),
        ("lognormal", 3),
    ):
        raise ValueError(f"lengths is {source!r}, neither a file nor a known distribution: give {_DISTRIBUTIONS}")
    longest = numbers[-1] if (name, len(numbers)) != ("lognormal", 2) else 2.0**31
    if longest != int(longest) or not 1 <= longest <= 2**31:
        raise ValueError(f"lengths is {source!r}; the longest row has a whole number of items, 1 to 2**31: correct it")
    if name == "zipf":
        if numbers[0] <= 1:
            raise ValueError(f"lengths is {source!r}; a Zipf distribution has an exponent above 1: raise it")
        law = RandomDistribution("zipf", low=1, high=int(longest), alpha=numbers[0])
    else:
        median, sigma = numbers[:2]
        if median <= 0 or not 0 <= sigma <= 10:
            raise ValueError(f"lengths is {source!r}; a median is positive and a sigma in [0, 10]: correct it")
        # RandomDistribution takes the mean and the standard deviation.
        mean = median * math.exp(sigma**2 / 2)
        deviation = mean * math.sqrt(math.expm1(sigma**2))
        law = RandomDistribution("lognormal", low=1, high=int(longest), mean=mean, std=deviation)

    def draw(count: int, rng: np.random.Generator) -> np.ndarray:
        generator = torch.Generator().manual_seed(int(rng.integers(0, 2**62)))
        return law.sample(count, generator=generator).numpy()

    return draw


def _histogram(source: str, columns: dict[str, np.ndarray]) -> _Draw:
    lengths, counts = (columns[name] for name in HISTOGRAM)
    total = sum(counts.tolist())  # of Python's integers, which do not overflow
    if total == 0:
        raise ValueError(f"{source} has no row; all counts are 0: check the file")
    if total >= 2**63:
        raise ValueError(f"the counts of {source} add up to {total}; there are fewer than 2**63 rows: scale them down")
    bounds = np.cumsum(counts)
    return lambda count, rng: lengths[np.searchsorted(bounds, rng.integers(0, total, count), side="right")]
