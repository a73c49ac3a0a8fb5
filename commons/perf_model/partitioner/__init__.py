"""The planner: decides which rank computes which sample; deterministic, in integers, with a proof of quality.

`partition` makes a `Partition` from workloads; its `lower_bound` proves how near the plan is to the optimum.
`partition_grid` plans several steps at once and makes a `Grid`.

    arguments.py, inputs.py   checks of arguments
    partitioning.py, grid.py, padded.py  the public functions
    core.py                   the native core, a plain C library: plans, packed rows, and the one call from gathered
                              messages to a plan and its exchange (../shuffle_plan.py)
    native/                   one C++ header per algorithm, with its source: problem, bounds, starts, differencing,
                              swaps, refinement; speeds, speed_bound, speed_plan; locality, home_deal, many_parts,
                              many_rows (near home); plan, whole_plan; grid, grid_bound, level_bound, step_shares,
                              drawn_order; groups; padded; gathered_rows, row_table, row_sums, shuffle (gates), routes,
                              gathered_shuffle (one call)
    sources.py                a hash of the core's sources
"""

from commons.perf_model.partitioner.core import METHODS
from commons.perf_model.partitioner.grid import Grid, partition_grid
from commons.perf_model.partitioner.inputs import as_int64_workloads
from commons.perf_model.partitioner.padded import padded_groups
from commons.perf_model.partitioner.partitioning import Partition, karmarkar_karp, lower_bound, partition, refine

__all__ = [
    "METHODS",
    "Grid",
    "Partition",
    "as_int64_workloads",
    "karmarkar_karp",
    "lower_bound",
    "padded_groups",
    "partition",
    "partition_grid",
    "refine",
]
