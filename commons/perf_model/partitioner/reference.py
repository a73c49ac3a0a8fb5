"""The planner in numpy: the definition that the native core is checked against, and what serves without it."""

from commons.perf_model.partitioner.grid_plan import plan_grid
from commons.perf_model.partitioner.plan import METHODS, lower_bound, plan

__all__ = ["METHODS", "lower_bound", "plan", "plan_grid"]
