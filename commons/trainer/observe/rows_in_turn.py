"""What a sampler by work gains: the loads that its rows would have had, dealt to the ranks in turn.

    sampler's plan ─► rows of each step ─► the same number of rows in the data set's order ─► row i to rank i mod W

A sampler deals rows as they are read, so the shuffler sees ranks that are even already and cannot measure what
that gained. The sampler knows what each row costs and the order it dealt from.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from commons.datasets.samplers.epoch import Place
from commons.datasets.samplers.planned import PlannedSampler
from commons.distributed.stats import ShuffleStats
from commons.perf_model.loads import imbalance, sum_by_rank


class RowsInTurn:
    """The rows of a sampler's epochs as a loader without it deals them: row i of a step to rank i mod W.

    A step has as many rows as the sampler's. With a window above 1 they are other rows than those that the sampler
    trains in that step; the rows of the whole window are the same, so that sums over the window compare.

    Args:
        sampler: deals the rows by their work.
        workloads: int64 `(num_rows,)`, what each row of the data set costs, in the shuffler's unit.
        num_ranks: ranks that share the data.
    """

    def __init__(self, sampler: PlannedSampler, workloads: np.ndarray, num_ranks: int) -> None:
        self._sampler, self._workloads, self._num_ranks = sampler, workloads, num_ranks
        self._steps: Iterator[np.ndarray] = iter(())

    def open(self, epoch: int, start: Place) -> None:
        """Begin an epoch at a place; the next `beside` is of the step there."""
        self._steps = self.loads(epoch, start)

    def loads(self, epoch: int, start: Place) -> Iterator[np.ndarray]:
        """int64 `(num_ranks,)` for each step of an epoch from a place on: the load of every rank, dealt in turn."""
        order = self._sampler.order(len(self._workloads), epoch)
        begin = self._sampler.first_row(start.row, self._sampler.first_rows(order))
        # The place may lie within a window, whose first steps have taken their share of its rows.
        for index, num_rows in enumerate(self._sampler.step_rows(epoch, Place(start.row))):
            rows = order[begin : begin + num_rows]
            begin += num_rows
            if index >= start.steps:
                ranks = np.arange(num_rows) % self._num_ranks
                yield sum_by_rank(ranks, self._workloads[rows], self._num_ranks)

    def beside(self, stats: ShuffleStats | None) -> ShuffleStats | None:
        """The stats of the next step, "before" being its rows dealt in turn and "after" its rows as they were read.

        `stats` are what a shuffler that moves nothing has observed; None where it has not looked.
        """
        loads = next(self._steps, None)
        if stats is None or loads is None:
            return stats
        before, after = loads.tolist(), max(stats.loads_after, default=0)
        return dataclasses.replace(
            stats,
            window=self._sampler.window,
            loads_before=tuple(before),
            imbalance_before=imbalance(before),
            imbalance_after=imbalance(list(stats.loads_after)),
            largest_load_before=max(before),
            largest_load_after=after,
            optimality_gap=after / stats.lower_bound - 1.0 if stats.lower_bound else 0.0,
            predicted_saving=(max(before) - after) / max(before) if max(before) else 0.0,
            predicted_saving_ms=None,  # it was of the plan that was not carried out
        )
