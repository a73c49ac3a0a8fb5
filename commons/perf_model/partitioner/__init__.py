"""Which rank computes which sample: plans that are provably near the optimum, deterministic, and in integers only.

Workloads in, `Partition` out. `partition` is the planner; `lower_bound` is the proof that comes with every plan.

    request.py        what is asked, checked by inputs.py
    reference.py      the planner in numpy: name → algorithm, then the cap on tokens, then rows kept home
      bounds.py, lpt.py, differencing.py, snake.py, refined.py     plans from workloads alone
      swaps.py, refinement.py                                      swaps of rows that lower the largest load
      token_cap.py; home_rows.py, locality.py                      under a cap on tokens; near home
    native_core.py    the same planner in C++ (native/), where it has been built: the same plans, bit for bit
    partitioning.py   the public functions
"""

from commons.perf_model.partitioner.grid import Grid, partition_grid
from commons.perf_model.partitioner.inputs import as_int64_workloads
from commons.perf_model.partitioner.partitioning import karmarkar_karp, lower_bound, partition
from commons.perf_model.partitioner.reference import METHODS
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
]
