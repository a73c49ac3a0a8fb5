"""Rows that stay together: blocks of neighbours, or rows of equal numbers wherever they lie."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from commons.micro_batching.spec import MicroBatchSpec
from commons.perf_model.loads import sum_by_rank

# Rows of a block that an error names.
_NAMED = 8


@dataclass(frozen=True, eq=False)
class RowBlocks:
    """The rows of a batch in blocks, which are packed as one row is."""

    of_row: np.ndarray  # int64 `(rows,)`, the block of each row; numbered by their first rows

    @classmethod
    def of(cls, spec: MicroBatchSpec, num_rows: int, groups: np.ndarray | None = None) -> RowBlocks:
        """The blocks of some rows.

        Args:
            spec: how many neighbours stay together.
            num_rows: rows.
            groups: int64 `(rows,)`: rows of equal numbers stay together; None where neighbours do.

        Raises:
            ValueError: rows that are no whole number of blocks, or both groups and blocks of neighbours.
        """
        if groups is not None:
            if spec.granularity != 1:
                raise ValueError(
                    f"groups are given and granularity is {spec.granularity}; both say which rows stay together: leave "
                    "granularity at 1"
                )
            return cls(_numbered(groups))
        if num_rows % spec.granularity:
            raise ValueError(
                f"the batch has {num_rows} rows, granularity is {spec.granularity}; every row belongs to a whole "
                "block: bring a multiple of granularity, or correct it"
            )
        return cls(np.arange(num_rows) // spec.granularity)

    def __len__(self) -> int:
        return int(self.of_row.max()) + 1 if len(self.of_row) else 0

    def __str__(self) -> str:
        """As messages say it: "6 rows in 3 blocks", without the blocks where each is one row."""
        return f"{len(self.of_row)} rows" + ("" if len(self) == len(self.of_row) else f" in {len(self)} blocks")

    @property
    def first_rows(self) -> np.ndarray:
        """int64 `(blocks,)`, the first row of each."""
        return np.unique(self.of_row, return_index=True)[1]

    def sums(self, values: np.ndarray) -> np.ndarray:
        """From int64 `(rows,)` to int64 `(blocks,)`."""
        return sum_by_rank(self.of_row, values, len(self))

    def rows_of_each(self, packed: list[list[int]]) -> list[list[int]]:
        """The rows of each group of blocks, ascending; every block is in one."""
        group_of = np.empty(len(self), np.int64)
        for group, blocks in enumerate(packed):
            group_of[blocks] = group
        of_row = group_of[self.of_row]
        ends = np.cumsum(np.bincount(of_row, minlength=len(packed)))[:-1]
        return [rows.tolist() for rows in np.split(np.argsort(of_row, kind="stable"), ends)]

    def rows_of(self, block: int) -> list[int]:
        """The rows of a block, ascending."""
        return np.flatnonzero(self.of_row == block).tolist()

    def select(self, rows: np.ndarray) -> RowBlocks:
        """The blocks of some rows, whole ones."""
        return RowBlocks(_numbered(self.of_row[rows]))

    def name(self, block: int) -> str:
        """As an error names it: "row 3", "rows 2 to 5", "rows 1, 4 and 9"."""
        rows = self.rows_of(block)
        if len(rows) == 1:
            return f"row {rows[0]}"
        if rows[-1] - rows[0] == len(rows) - 1:
            return f"rows {rows[0]} to {rows[-1]}"
        last = str(rows[-1]) if len(rows) <= _NAMED else f"{len(rows) - _NAMED + 1} more"
        return f"rows {', '.join(map(str, rows[: min(_NAMED, len(rows)) - 1]))} and {last}"


def _numbered(numbers: np.ndarray) -> np.ndarray:
    """int64 `(rows,)`: equal numbers as one, numbered by first appearance."""
    _, first, inverse = np.unique(numbers, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[inverse.reshape(-1)]
