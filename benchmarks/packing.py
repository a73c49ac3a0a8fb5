"""How many groups do the allocators make, how even are the groups, and how long does packing take?

Four allocators pack the same values under the same capacity: plain first-fit decreasing as in training code (plain.py),
and "ffd", "kk" and "refined" of commons.micro_batching. One thread; the algorithms alternate, so that a change of the
machine's speed affects all equally; times are medians. Groups are compared with the Martello–Toth L2 bound.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.shared.command_line import Quick, from_command_line
from benchmarks.shared.lengths import COSTS, described, draw
from benchmarks.shared.plain import plain_first_fit
from benchmarks.shared.report import Page, every, interleaved_medians, measured, milliseconds, query, share, values
from commons.micro_batching import (
    MicroBatchSpec,
    ffd_allocate,
    kk_allocate,
    packing_metrics,
    padded_allocate,
    refined_allocate,
)
from commons.micro_batching.joint_plan import plan_jointly

LENGTHS = ("zipf", "lognormal", "bimodal", "gsm8k-like")
JOINT_LENGTHS = ("zipf", "lognormal", "user-like")
ALGORITHMS: dict[str, Callable[..., list[list[int]]]] = {
    "plain": plain_first_fit,
    "ffd": ffd_allocate,
    "kk": kk_allocate,
    "refined": refined_allocate,
}
_GROUPS = """
    SELECT lengths, capacity, algorithm, sum(bound)::INT AS bound, sum(groups - bound)::INT AS "groups above it",
        avg(spread) AS "spread, mean", median(spread) AS "spread, median", avg(used) AS used
    FROM found GROUP BY ALL ORDER BY min(number)
"""
_NAMES = ", ".join(f"'{name}'" for name in ALGORITHMS)
_PACKED = f"""
    PIVOT (SELECT rows, lengths, capacity, divisor, seed, bound, room_used, algorithm, groups FROM found)
    ON algorithm IN ({_NAMES}) USING first(groups) ORDER BY ALL
"""
_JOINT = """
    SELECT lengths, budget, micro_batches, avg(ratio) AS "largest ÷ mean", max(ratio) AS "largest ÷ mean, worst",
        avg(moved) AS moved, max(moved) AS "moved, most"
    FROM found GROUP BY ALL ORDER BY min(number)
"""
_TIME = f"""
    PIVOT (SELECT rows, lengths, algorithm, ms FROM found)
    ON algorithm IN ({_NAMES}) USING median(ms) AS median, max(ms) AS slowest ORDER BY ALL
"""


def measure_packing(
    rows: int, lengths: str, capacity: int, divisor: int, seed: int, repeats: int
) -> list[dict[str, Any]]:
    """Pack one batch by all algorithms, and check the packings; `capacity` is in multiples of the longest row."""
    tokens = draw(lengths, rows, seed).tolist()
    room, found = capacity * max(tokens), []
    calls = {name: partial(allocate, tokens, room, 1, divisor) for name, allocate in ALGORITHMS.items()}
    seconds = interleaved_medians(calls, repeats, show=False)
    for name, call in calls.items():
        groups = call()
        metrics = packing_metrics(tokens, groups, room)
        assert metrics["max_load"] <= room and len(groups) % divisor == 0 and all(groups)
        bound = -(-metrics["lower_bound"] // divisor) * divisor
        found.append(
            {
                "algorithm": name,
                "bound": bound,
                "groups": len(groups),
                "ms": seconds[name] * 1e3,
                "spread": metrics["imbalance_ratio"],
                "used": metrics["utilization"],
                "room_used": round(sum(tokens) / (bound * room), 4),
            }
        )
    return found


def measure_padded(rows: int, lengths: str, repeats: int) -> dict[str, float]:
    """Time of `padded_allocate`; tests/unit/perf_model/partitioner tests that its groups are optimal."""
    tokens, cost = draw(lengths, rows, 0), COSTS["HSTU"]
    call = partial(padded_allocate, tokens, cost=cost)
    limit = max(len(group) * int(cost(tokens[group]).max()) for group in call(num_groups=rows // 8))
    given = {"ms, number of groups": {"num_groups": rows // 8}, "ms, most that a group costs": {"max_cost": limit}}
    return {
        name: milliseconds(partial(call, **options), repeats, clock=time.process_time)
        for name, options in given.items()
    }


def measure_joint(lengths: str, budget: str, micro_batches: int, seed: int) -> dict[str, float]:
    """The plan of `pack_micro_batches(..., joint=True)` for 64 ranks × 64 rows."""
    tokens, home = draw(lengths, 64 * 64, seed), np.arange(64).repeat(64)
    limit = max(int(1.3 * tokens.sum() / (64 * micro_batches)), int(tokens.max())) if budget == "1.3" else None
    spec = MicroBatchSpec(n_mbs=micro_batches, max_tokens_per_mb=limit, packing_algorithm="refined")
    plan = plan_jointly(spec, tokens, COSTS["HSTU"](tokens), np.full(64, 64))
    return {
        "ratio": plan.costs.max(axis=0).sum() / plan.costs.mean(axis=0).sum(),
        "moved": tokens[plan.rank != home].sum() / tokens.sum(),
    }


def main(quick: Quick = False) -> None:
    torch.set_num_threads(1)
    sizes, seeds, repeats = ((64, 256), 2, 3) if quick else ((64, 256, 1024), 10, 7)
    cases = every(rows=sizes, lengths=LENGTHS, capacity=(1, 2, 3, 4), divisor=(1, 4, 8), seed=range(seeds))
    found = measured(measure_packing, cases, repeats=repeats)
    padded = measured(measure_padded, every(rows=(256, 2048), lengths=LENGTHS), repeats=3 * repeats)
    packed = query(found, _PACKED)
    page = Page(
        "Packing: groups, spread, time",
        f"{described(LENGTHS)} Capacity in multiples of the longest row; plain: first-fit decreasing in Python.",
    )
    fewer = values(packed, "refined <= least(plain, ffd, kk)")
    page.target("groups, refined against all others", "never more", f"{share(fewer)} cases", all(fewer))
    at_bound = {name: values(found, "avg((groups = bound)::INT)", f"algorithm = '{name}'")[0] for name in ALGORITHMS}
    reached = ", ".join(f"{name} {part:.2%}" for name, part in at_bound.items())
    page.target("cases at the L2 bound, refined", "≥ 99 %", reached, at_bound["refined"] >= 0.99)
    of_large = "algorithm = 'refined' AND rows = 1024"
    page.at_most("ms, refined, 1024 rows, median", 4, values(found, "median(ms)", of_large))
    page.at_most("ms, refined, 1024 rows, slowest", 30, values(found, "max(ms)", of_large))
    slowest = 'greatest("ms, number of groups", "ms, most that a group costs")'
    page.at_most("ms, padded_allocate", 5, values(padded, slowest))
    page.section(
        "Groups, spread, utilisation",
        f"Rows {sizes}, divisors 1, 4 and 8 and {seeds} seeds together. Groups: the bound in total, and how many more "
        "an algorithm makes. Spread: (largest − smallest load) ÷ mean; if one row fills a group, no packing has a "
        "small spread. Used: values ÷ (groups · capacity).",
        query(found, _GROUPS),
    )
    page.section(
        "Above the bound",
        "Cases in which refined makes more groups than the bound. It is not known whether the bound can be reached "
        "there; room used is the part that would be used at the bound.",
        query(packed, "SELECT * EXCLUDE number FROM found WHERE refined > bound ORDER BY number") or "None.",
    )
    page.section(
        "Time",
        "Milliseconds of CPU from a Python list to a list of lists, checks included: median and slowest of all cases.",
        query(found, _TIME),
    )
    page.section(
        "Padded",
        "`padded_allocate` with an eighth of the rows as groups: a group costs its number of rows × the cost of its "
        "longest row, cost HSTU. Milliseconds of CPU from an array to lists, checks included: for a given number of "
        "groups, and for a limit on the cost of a group, which is the cost of the costliest of those groups.",
        padded,
    )
    joint = every(lengths=JOINT_LENGTHS, budget=("none", "1.3"), micro_batches=(2, 4, 8), seed=range(seeds))
    page.section(
        "Joint",
        "64 ranks × 64 rows in micro-batches, `joint=True`, cost HSTU: sum over the micro-batches of the largest cost "
        "of a rank ÷ sum of the mean costs, and the part of the tokens that change rank. Budget: none, or 1.3 × the "
        f"mean tokens of a micro-batch, at least the longest row. {described(JOINT_LENGTHS)}",
        query(measured(measure_joint, joint), _JOINT),
    )
    page.finish(quick=quick)


if __name__ == "__main__":
    from_command_line(main, __doc__)
