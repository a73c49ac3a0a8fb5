"""The arguments of `partition` and `partition_grid`, checked, and what both refuse."""

from __future__ import annotations

from typing import Any

import numpy as np

from commons.checks import as_count
from commons.perf_model.partitioner.core import METHODS, PlanArguments, sum_at
from commons.perf_model.partitioner.inputs import INT64_MAX, as_groups, as_home, as_int64_workloads, as_slack, as_speeds

# Rows and cells are counted in 32 bits.
MOST_CELLS = 2**31 - 1
METHODS_WITH_SPEEDS = ("refined", "lpt")


def checked_arguments(
    workloads: Any,
    k_partitions: int,
    *,
    method: str,
    equal_size: bool,
    tokens: Any,
    max_tokens: int | None,
    home: Any,
    ranks_per_node: int | None,
    slack: float,
    parts_name: str = "k_partitions",
    steps: int = 1,
    home_step: Any = None,
    groups: Any = None,
    speeds: Any = None,
) -> PlanArguments:
    """Check everything.

    Raises:
        ValueError: an argument out of its range, of the wrong length or an unknown method.

    """
    weights = as_int64_workloads(workloads)
    k, num_steps = as_count(k_partitions, parts_name, 1), as_count(steps, "steps", 1)
    if num_steps > 1 and k * num_steps > MOST_CELLS:
        raise ValueError(
            f"{parts_name} × steps is {k} × {num_steps}; there must be fewer than 2^31 cells: plan fewer steps at once"
        )
    if method not in METHODS:
        names = ", ".join(METHODS)
        raise ValueError(f"method is {method!r}; it must be one of {names}: choose one of these")
    of_parts = None if speeds is None else as_speeds(speeds, k, weights, parts_name)
    if of_parts is not None and method not in METHODS_WITH_SPEEDS:
        raise ValueError(
            f"method is {method!r}, speeds are given; it makes equal loads, and {' and '.join(METHODS_WITH_SPEEDS)} "
            "follow speeds: choose one of these"
        )
    if max_tokens is not None:
        max_tokens = min(as_count(max_tokens, "max_tokens", 1), INT64_MAX)
        if tokens is None:
            raise ValueError(
                f"max_tokens is {max_tokens}, tokens is None; a cap needs the tokens of each row: pass tokens"
            )
    loaded = None if home_step is None else as_home(home_step, len(weights), num_steps, "home_step", "step")
    return PlanArguments(
        weights,
        k,
        method=method,
        equal_size=bool(equal_size),
        tokens=None if tokens is None else as_int64_workloads(tokens, "tokens", len(weights)),
        max_tokens=max_tokens,
        home=None if home is None else as_home(home, len(weights), k),
        ranks_per_node=k if ranks_per_node is None else min(as_count(ranks_per_node, "ranks_per_node", 1), k),
        slack=as_slack(slack),
        num_steps=num_steps if num_steps > 1 else 0,  # a grid of one step is planned as a batch
        home_step=loaded if num_steps > 1 else None,
        groups=None if groups is None else as_groups(groups, len(weights)),
        speeds=of_parts,
    )


def refuse_sample_above_cap(given: PlanArguments) -> None:
    """ValueError if a sample or group alone has more tokens than a partition may hold."""
    tokens = given.arrays["tokens"]
    if given.has_cap and tokens is not None:
        refuse_above_cap(tokens, given.arrays["groups"], given.max_tokens, "sample")


def refuse_above_cap(tokens: np.ndarray, groups: np.ndarray | None, limit: int, what: str) -> None:
    """ValueError if a row, which messages call `what`, or a group of rows has more tokens than the limit."""
    if len(tokens) and int(tokens.max()) > limit:
        row = int(tokens.argmax())
        raise ValueError(
            f"{what} {row} alone has {int(tokens[row])} tokens, max_tokens is {limit}; no plan can keep that: raise "
            f"max_tokens or truncate the {what}"
        )
    if groups is None or not len(tokens):
        return
    numbers, group_of, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    of_groups = sum_at(group_of.astype(np.int64), tokens, len(numbers))
    largest = int(of_groups.argmax())
    if int(of_groups[largest]) > limit:
        raise ValueError(
            f"group {int(numbers[largest])} has {int(of_groups[largest])} tokens in {int(sizes[largest])} {what}s, "
            f"max_tokens is {limit}; they stay together: raise max_tokens or make the group smaller"
        )


def refuse_plan_above_cap(given: PlanArguments, most_tokens: int) -> None:
    """ValueError if a plan whose fullest partition holds `most_tokens` exceeds the cap."""
    tokens, limit = given.arrays["tokens"], given.max_tokens
    if given.has_cap and tokens is not None and most_tokens > limit:
        parts = f"{given.num_parts} partitions"
        if given.num_steps > 1:
            parts = f"{given.num_steps} steps of {given.num_parts} ranks"
        raise ValueError(
            f"max_tokens is {limit}, the best plan found holds {most_tokens} tokens in one partition, "
            f"{most_tokens - limit} more; {int(tokens.sum())} tokens do not fit {parts}: raise max_tokens, use more "
            "partitions or fewer samples"
        )
