"""From the arguments of `partition` and `partition_grid` to a request, and what both refuse."""

from __future__ import annotations

from typing import Any

from commons.checks import as_count
from commons.perf_model.partitioner.core import METHODS
from commons.perf_model.partitioner.inputs import INT64_MAX, as_home, as_int64_workloads, as_slack
from commons.perf_model.partitioner.request import Plan, Request

# Rows and cells are counted in 32 bits.
MOST_CELLS = 2**31 - 1


def as_request(
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
) -> Request:
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
    if max_tokens is not None:
        max_tokens = min(as_count(max_tokens, "max_tokens", 1), INT64_MAX)
        if tokens is None:
            raise ValueError(
                f"max_tokens is {max_tokens}, tokens is None; a cap needs the tokens of each row: pass tokens"
            )
    return Request(
        workloads=weights,
        num_parts=k,
        method=method,
        equal_size=bool(equal_size),
        tokens=None if tokens is None else as_int64_workloads(tokens, "tokens", len(weights)),
        max_tokens=max_tokens,
        home=None if home is None else as_home(home, len(weights), k),
        ranks_per_node=k if ranks_per_node is None else min(as_count(ranks_per_node, "ranks_per_node", 1), k),
        slack=as_slack(slack),
        num_steps=num_steps,
        home_step=None if home_step is None else as_home(home_step, len(weights), num_steps, "home_step", "step"),
    )


def refuse_sample_above_cap(request: Request) -> None:
    """ValueError if a sample alone has more tokens than a partition may hold."""
    tokens, limit = request.tokens, request.max_tokens
    if tokens is not None and limit is not None and int(tokens.max()) > limit:
        sample = int(tokens.argmax())
        raise ValueError(
            f"sample {sample} alone has {int(tokens[sample])} tokens, max_tokens is {limit}; no plan can keep that: "
            "raise max_tokens or truncate the sample"
        )


def refuse_plan_above_cap(request: Request, plan: Plan) -> None:
    """ValueError if the plan holds more tokens than a partition may."""
    tokens, limit = request.tokens, request.max_tokens
    if tokens is not None and limit is not None and plan.most_tokens > limit:
        parts = f"{request.num_parts} partitions"
        if request.num_steps > 1:
            parts = f"{request.num_steps} steps of {request.num_parts} ranks"
        raise ValueError(
            f"max_tokens is {limit}, the best plan found holds {plan.most_tokens} tokens in one partition, "
            f"{plan.most_tokens - limit} more; {int(tokens.sum())} tokens do not fit {parts}: "
            "raise max_tokens, use more partitions or fewer samples"
        )
