"""Which rank computes which sample: plans that are provably near the optimum, deterministic, and in integers only.

Workloads in, `Partition` out. `partition` is the planner; `lower_bound` is the proof that comes with every plan.
`partition_grid` plans several steps at once: workloads in, `Grid` out.

    arguments.py, inputs.py   what is asked, checked: a request (request.py)
    reference.py              the planner in numpy
      plan.py                 name → algorithm, then the cap on tokens, then rows kept home
        bounds.py, lpt.py, differencing.py, snake.py, refined.py   plans from workloads alone
        swaps.py, refinement.py                                    swaps of rows that lower the largest load
        token_cap.py; home_rows.py, locality.py                    under a cap on tokens; near home
      grid_plan.py            the same for steps × ranks, by limits that differ from step to step
        grid_bound.py, home_deal.py                                the bound of the sum; rows dealt to their own rank
    native_core.py            the same planner in C++ (native/), where it has been built: the same plans, bit for bit;
                              the routes of a plan (commons/perf_model/routes.py), what is summed over all rows
                              (commons/perf_model/row_sums.py), and rows as they are packed (row_table.py there)
    partitioning.py, grid.py  the public functions
"""

from commons.perf_model.partitioner.core import METHODS
from commons.perf_model.partitioner.grid import Grid, partition_grid
from commons.perf_model.partitioner.inputs import as_int64_workloads
from commons.perf_model.partitioner.partitioning import karmarkar_karp, lower_bound, partition, refine
from commons.perf_model.partitioner.result import Partition

__all__ = [
    "METHODS",
    "Grid",
    "Partition",
    "as_int64_workloads",
    "karmarkar_karp",
    "lower_bound",
    "partition",
    "partition_grid",
    "refine",
]
