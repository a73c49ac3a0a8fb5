"""Checks the arguments of `partition` and `partition_grid`, and calls the core with them."""

from __future__ import annotations

from typing import Any

import numpy as np

from commons.checks import as_boolean, as_count
from commons.perf_model.loads import sum_by_rank
from commons.perf_model.partitioner.core import METHODS, PlanArguments, address, make_plan
from commons.perf_model.partitioner.inputs import INT64_MAX, as_groups, as_home, as_int64_workloads, as_slack, as_speeds

# Rows and cells are counted in 32 bits.
MOST_CELLS = 2**31 - 1
METHODS_WITH_SPEEDS = ("refined", "lpt")


class CheckedArguments(PlanArguments):
    """The checked arguments of `partition` or `partition_grid` as the core's structure, with the arrays it points to.

    `parts_name` is the name of `k_partitions` in messages. The cell of rank `r` and step `s` is `r · steps + s`; a grid
    of one step is planned as a batch.

    Attributes:
        arrays: int64 arrays by name; None for those not given, and for equal speeds.

    Raises:
        ValueError: an argument out of its range, of the wrong length or an unknown method.
    """

    def __init__(
        self,
        workloads: Any,
        k_partitions: int,
        *,
        method: str = "refined",
        equal_size: bool = True,
        tokens: Any = None,
        max_tokens: int | None = None,
        home: Any = None,
        ranks_per_node: int | None = None,
        slack: float = 0.0,
        parts_name: str = "k_partitions",
        steps: int = 1,
        home_step: Any = None,
        seed: int = 0,
        groups: Any = None,
        speeds: Any = None,
    ) -> None:
        weights = as_int64_workloads(workloads)
        rows, k, num_steps = len(weights), as_count(k_partitions, parts_name, 1), as_count(steps, "steps", 1)
        if k * num_steps > MOST_CELLS:
            raise ValueError(
                f"{parts_name} × steps is {k} × {num_steps}; there must be fewer than 2^31 cells: plan fewer at once"
            )
        if method not in METHODS:
            names = ", ".join(METHODS)
            raise ValueError(f"method is {method!r}; it must be one of {names}: choose one of these")
        of_parts = None if speeds is None else as_speeds(speeds, k, weights, parts_name)
        if of_parts is not None and method not in METHODS_WITH_SPEEDS:
            raise ValueError(
                f"method is {method!r}, speeds are given; it makes equal loads, and "
                f"{' and '.join(METHODS_WITH_SPEEDS)} follow speeds: choose one of these"
            )
        if max_tokens is not None:
            max_tokens = min(as_count(max_tokens, "max_tokens", 1), INT64_MAX)
            if tokens is None:
                raise ValueError(
                    f"max_tokens is {max_tokens}, tokens is None; a cap needs the tokens of each row: pass tokens"
                )
        self.arrays: dict[str, np.ndarray | None] = {
            "workloads": weights,
            "tokens": None if tokens is None else as_int64_workloads(tokens, "tokens", rows),
            "home": None if home is None else as_home(home, rows, k),
            "home_step": None if home_step is None else as_home(home_step, rows, num_steps, "home_step", "step"),
            "groups": None if groups is None else as_groups(groups, rows),
            "speeds": of_parts,
        }
        super().__init__(
            *(None if array is None else address(array) for array in self.arrays.values()),
            *(rows, k, METHODS.index(method), as_boolean(equal_size, "equal_size")),
            *(max_tokens is not None, max_tokens or 0),
            k if ranks_per_node is None else min(as_count(ranks_per_node, "ranks_per_node", 1), k),
            num_steps,
            as_count(seed, "seed", 0) % 2**64,
            as_slack(slack),
        )


def plan_of(given: CheckedArguments, best_effort: bool) -> tuple[np.ndarray, np.ndarray, int]:
    """Assignment, loads and bound from `core.make_plan`; ValueError for a broken cap, unless `best_effort` is set."""
    as_boolean(best_effort, "best_effort")
    if given.num_rows == 0:
        return np.empty(0, np.int64), np.zeros(given.num_parts * given.num_steps, np.int64), 0
    tokens = None if best_effort or not given.has_cap else given.arrays["tokens"]
    if tokens is not None:
        refuse_above_cap(tokens, given.arrays["groups"], given.max_tokens, "sample")
    assignment, loads, bound, most_tokens = make_plan(given)
    if tokens is not None and most_tokens > given.max_tokens:
        parts = f"{given.num_parts} partitions"
        if given.num_steps > 1:
            parts = f"{given.num_steps} steps of {given.num_parts} ranks"
        cap = given.max_tokens
        while most_tokens > given.max_tokens:  # the search may miss the same plan under this larger cap
            given.max_tokens = most_tokens
            most_tokens = make_plan(given)[3]
        raise ValueError(
            f"max_tokens is {cap}; no plan was found that keeps it for {int(tokens.sum())} tokens in {parts}, one was "
            f"found for {most_tokens}, {most_tokens - cap} more: raise max_tokens, use more partitions or fewer samples"
        )
    return assignment, loads, bound


def refuse_above_cap(tokens: np.ndarray, groups: np.ndarray | None, limit: int, what: str) -> None:
    """Raise ValueError if a row (in messages a `what`) or a group of rows has more tokens than the limit."""
    if len(tokens) and int(tokens.max()) > limit:
        row = int(tokens.argmax())
        raise ValueError(
            f"{what} {row} alone has {int(tokens[row])} tokens, max_tokens is {limit}; no plan can keep that: raise "
            f"max_tokens or truncate the {what}"
        )
    if groups is None or not len(tokens):
        return
    numbers, group_of, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    of_groups = sum_by_rank(group_of, tokens, len(numbers))
    largest = int(of_groups.argmax())
    if int(of_groups[largest]) > limit:
        raise ValueError(
            f"group {int(numbers[largest])} has {int(of_groups[largest])} tokens in {int(sizes[largest])} {what}s, "
            f"max_tokens is {limit}; they stay together: raise max_tokens or make the group smaller"
        )
