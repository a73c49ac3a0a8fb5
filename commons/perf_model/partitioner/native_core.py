"""The native core, where it has been built: the plans, routes and sums of the reference, beside other threads."""

from __future__ import annotations

import logging
from functools import cache
from typing import Protocol

import numpy as np

from commons.perf_model.partitioner import reference
from commons.perf_model.partitioner.request import Plan, Request

logger = logging.getLogger(__name__)

# Raised, here and in native/plan.hpp, whenever the same request gives another answer, a plan another digest or rows
# other words, or there are new ones: a core that was built before must not meet ranks that plan by the new code.
PLANS = 9


class Core(Protocol):
    """What turns requests into plans: the native core or `reference`."""

    def plan(self, request: Request) -> Plan:
        """Plan."""

    def plan_grid(self, request: Request) -> Plan:
        """Plan a grid."""

    def lower_bound(self, workloads: np.ndarray, num_parts: int, equal_size: bool) -> int:
        """Lower bound of the largest load."""


class NativeCore:
    """The compiled module behind the interface of `reference`.

    Attributes:
        module: the extension, with the twins of `commons.perf_model.row_sums` and `row_table`.
        methods: names of the algorithms that it knows.
        route_rows: the twin of `commons.perf_model.routes.reference_routes`.

    Raises:
        ImportError: the extension has not been built, or from sources that planned otherwise.

    """

    def __init__(self) -> None:
        from commons.perf_model.partitioner import _native

        if _native.PLANS != PLANS:
            raise ImportError(f"it was built for plans {_native.PLANS}, the sources make plans {PLANS}")
        self.module = _native
        self.methods: tuple[str, ...] = _native.METHODS
        self.route_rows = _native.route_rows

    def plan(self, request: Request) -> Plan:
        """Plan."""
        return self._plan(request, None, None)

    def plan_grid(self, request: Request) -> Plan:
        """Plan a grid."""
        return self._plan(request, request.num_steps, request.home_step)

    def _plan(self, request: Request, num_steps: int | None, home_step: np.ndarray | None) -> Plan:
        return Plan(
            *self.module.plan(
                request.workloads,
                request.num_parts,
                request.method,
                request.equal_size,
                request.tokens,
                request.max_tokens,
                request.home,
                request.ranks_per_node,
                request.slack,
                num_steps,
                home_step,
            )
        )

    def lower_bound(self, workloads: np.ndarray, num_parts: int, equal_size: bool) -> int:
        """Lower bound of the largest load."""
        return self.module.lower_bound(workloads, num_parts, equal_size)


@cache
def native_core() -> NativeCore | None:
    """The native core, or None, said once, where it has not been built."""
    try:
        return NativeCore()
    except ImportError as error:
        logger.warning(
            "the planner's native core is missing (%s): plans are the same, but take longer and hold the interpreter "
            "lock; install evenrank again where there is a C++ compiler",
            error,
        )
        return None


def core_for(method: str | None = None) -> Core:
    """What plans by `method`: the native core where it is there and knows it, else the reference."""
    native = native_core()
    return native if native is not None and (method is None or method in native.methods) else reference
