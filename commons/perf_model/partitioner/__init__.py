"""Which rank computes which sample: plans that are provably near the optimum, deterministic, and in integers only.

Workloads in, `Partition` out. `partition` is the planner; `lower_bound` is the proof that comes with every plan.

    request.py      what is asked, checked by inputs.py
    reference.py    the planner in numpy: name → algorithm, then cap, then home
      bounds.py, lpt.py, differencing.py, snake.py, refined.py     plans from workloads alone
      exchange.py, refinement.py                                   exchanges that lower the largest load
      memory.py, locality.py, staying.py                           under a token cap; near home
    native_core.py  the same planner in C++ (native/), where it has been built: the same plans, bit for bit
    planning.py     the public functions
"""

from commons.perf_model.partitioner.inputs import as_int64_workloads
from commons.perf_model.partitioner.planning import karmarkar_karp, lower_bound, partition
from commons.perf_model.partitioner.reference import METHODS
from commons.perf_model.partitioner.result import Partition

__all__ = ["METHODS", "Partition", "as_int64_workloads", "karmarkar_karp", "lower_bound", "partition"]
