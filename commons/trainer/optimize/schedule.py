"""The schedule of a run: whether something is due, counted in steps or in rows of the global batches."""

from __future__ import annotations

from collections.abc import Iterator


class Schedule:
    """Counts the steps of a run and their rows over all ranks, also for steps that are not trained yet.

    The samplers compute the rows of all steps, equal on every rank, so nothing is communicated.

    Args:
        in_rows: intervals count rows; otherwise steps.
        look_back: number of steps before the last one whose rows may still be needed.
        step: steps before a resumed run.
        rows: rows that these steps have trained.
    """

    def __init__(self, *, in_rows: bool = False, look_back: int = 1, step: int = 0, rows: int = 0) -> None:
        self.in_rows = in_rows
        self._look_back = look_back
        # After step `_first + i` the run has trained `_ends[i]` rows.
        self._first, self._ends = step, [rows]
        self._counts: Iterator[int] = iter(())

    def begin_epoch(self, step: int, counts: Iterator[int]) -> None:
        """Continue after a step with an epoch; `counts` has the rows of its steps, over all ranks."""
        del self._ends[step - self._first + 1 :]
        forgotten = max(0, len(self._ends) - 1 - self._look_back)
        del self._ends[:forgotten]
        self._first += forgotten
        self._counts = counts

    def rows_after(self, step: int) -> int:
        """Rows that the run has trained after a step, counted from 1; at most at the end of the epoch."""
        index = max(0, step - self._first)
        while index >= len(self._ends):
            count = next(self._counts, None)
            if count is None:
                return self._ends[-1]
            self._ends.append(self._ends[-1] + count)
        return self._ends[index]

    def done_after(self, step: int) -> int:
        """Steps or, with `in_rows`, rows of the run after a step."""
        return self.rows_after(step) if self.in_rows else step

    def is_due(self, interval: int, step: int, *, every: int = 1) -> bool:
        """Whether something is due after a step, because the step reaches the next multiple of the interval.

        Something is due only after multiples of `every` steps.

        >>> schedule = Schedule(in_rows=True)
        >>> schedule.begin_epoch(0, iter([30, 40, 50, 60]))
        >>> [schedule.is_due(60, step) for step in range(1, 5)]
        [False, True, True, True]
        """
        if step % every:
            return False
        return self.done_after(step) // interval > self.done_after(step - every) // interval
