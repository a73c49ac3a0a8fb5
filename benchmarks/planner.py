"""How good are the plans, and how long do they take?

Plans are compared with their lower bound and with the plain Karmarkar-Karp of most training code: a heap of states in
pure Python (plain.py). CPU time of one thread, medians. benchmarks/exchange.py measures how much planning slows other
threads.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.shared.command_line import Quick, from_command_line
from benchmarks.shared.lengths import COSTS, NODE, described, draw
from benchmarks.shared.plain import plain_karmarkar_karp
from benchmarks.shared.report import Page, every, interleaved_medians, measured, milliseconds, query, values
from commons.perf_model.partitioner import core, partition
from commons.perf_model.partitioner.arguments import CheckedArguments

LENGTHS = ("zipf", "lognormal", "bimodal", "user-like")
# Keywords of `partition`.
BALANCED: dict[str, dict[str, Any]] = {
    "KK": {"method": "karmarkar_karp"},
    "refined": {},
    "KK, free counts": {"method": "karmarkar_karp", "equal_size": False},
    "refined, free counts": {"equal_size": False},
}
LIMITED = ("near home", "token cap", "speeds", "speeds, free counts")
cpu_ms = partial(milliseconds, clock=time.process_time)

_BALANCE = f"""
    SELECT lengths, cost, plan, printf('%.5f', avg(bound)) AS mean, max(bound) AS worst
    FROM found WHERE plan IN {tuple(BALANCED)} GROUP BY ALL ORDER BY min(number)
"""
_MEDIANS = """
    SELECT plan, ranks, lengths, cost, median(native_ms) AS "native, ms", median(ms) AS "partition(), ms",
        median(slower) AS "÷ ms of refined", median(bound) AS "load ÷ bound", max(bound) AS worst,
        median(load) AS "load ÷ load of refined", median(tokens) AS "most tokens ÷ mean",
        median(moved) AS "tokens that leave their rank", median(crossed) AS "their node",
        avg(dominated::INT) AS dominated
    FROM found WHERE rows = 32 AND ranks <> 256 AND (cost = 'HSTU' OR plan = 'token cap')
    GROUP BY ALL ORDER BY min(number)
"""
_USERS, _NEAR = "lengths IN ('lognormal', 'user-like')", "plan = 'near home' AND ranks = 64"
# What is at most a limit in every case: a column of the plans, and which of them.
_LIMITS = (
    ("balance, equal counts, 256 samples or more", 1.001, "bound", "plan = 'refined' AND ranks * rows >= 256"),
    ("balance, equal counts, 8 × 8", 1.002, "bound", "plan = 'refined' AND ranks * rows < 256"),
    ("balance, free counts", 1.0002, "bound", "plan = 'refined, free counts'"),
    ("largest load ÷ speed", 1.002, "bound", "plan LIKE 'speeds%'"),
    (
        "load ÷ load without the cap, tokens ≤ 1.03 × mean, where no sample dominates",
        *(1.01, "if(tokens <= 1.03, load, 'inf')", "plan = 'token cap' AND NOT dominated"),
    ),
)
# The same of medians over the seeds.
_LIMITS_OF_MEDIANS = (
    ("native, ms, 8 × 32", 0.03, '"native, ms"', "plan = 'refined' AND ranks = 8"),
    ("native, ms, 64 × 32", 0.5, '"native, ms"', "plan = 'refined' AND ranks = 64"),
    ("native, ms, 1024 × 32, bimodal", 60, '"native, ms"', "plan = 'refined' AND ranks = 1024 AND lengths = 'bimodal'"),
    ("native, ms, 1024 × 32, others", 20, '"native, ms"', "plan = 'refined' AND ranks = 1024 AND lengths <> 'bimodal'"),
    ("partition(), ms, 8 × 32", 0.1, '"partition(), ms"', "plan = 'refined' AND ranks = 8"),
    ("time of a plan with speeds ÷ without", 1.3, '"÷ ms of refined"', "plan LIKE 'speeds%'"),
    ("tokens moved, 64 × 32, lognormal and user-like", 0.10, '"tokens that leave their rank"', f"{_NEAR} AND {_USERS}"),
    ("tokens moved, 64 × 32, Zipf 1.2", 0.17, '"tokens that leave their rank"', f"{_NEAR} AND lengths = 'zipf'"),
    (f"tokens across nodes of {NODE}, 64 × 32, lognormal and user-like", 0.03, '"their node"', f"{_NEAR} AND {_USERS}"),
    (f"tokens across nodes of {NODE}, 64 × 32, Zipf 1.2", 0.03, '"their node"', f"{_NEAR} AND lengths = 'zipf'"),
    ("near home, ms, 64 × 32", 10, '"partition(), ms"', _NEAR),
)
# How much faster than a plain Karmarkar-Karp plans are to be, by method and counts.
_LEAST = {("KK", "equal"): 40, ("refined", "equal"): 6, ("KK", "free"): 1000, ("refined", "free"): 1000}


def options_of(plan: str, tokens: np.ndarray, home: np.ndarray, seed: int) -> dict[str, Any]:
    """The keywords of `partition` for a plan that is limited by more than equal counts."""
    ranks = int(home[-1]) + 1
    speeds = {"speeds": np.random.default_rng(seed).integers(500, 1001, ranks)}
    limited: dict[str, dict[str, Any]] = {
        "near home": {"tokens": tokens, "home": home, "ranks_per_node": NODE, "slack": 0.01},
        "token cap": {"tokens": tokens, "max_tokens": int(1.03 * tokens.sum() / ranks), "best_effort": True},
        "speeds": speeds,
        "speeds, free counts": speeds | {"equal_size": False},
    }
    return (BALANCED | limited)[plan]


def measure_plan(ranks: int, rows: int, lengths: str, cost: str, plan: str, seed: int, repeats: int) -> dict[str, Any]:
    """Balance, traffic and memory of a plan; with 32 rows per rank also its times."""
    tokens, home = draw(lengths, ranks * rows, seed), np.arange(ranks * rows) // rows
    work, options = COSTS[cost](tokens), options_of(plan, tokens, home, seed)
    call, refined = partial(partition, work, ranks, **options), partial(partition, work, ranks)
    made, total = call(), tokens.sum()
    found: dict[str, Any] = {
        "bound": 1 + made.optimality_gap,
        "load": made.loads.max() / refined().loads.max(),
        "tokens": np.bincount(made.assignment, weights=tokens).max() * ranks / total,
        "moved": tokens[made.assignment != home].sum() / total,
        "crossed": tokens[made.assignment // NODE != home // NODE].sum() / total,
        "dominated": bool(work.max() > 0.5 * work.sum() / ranks),
    }
    if rows == 32:
        repeats = max(3, repeats // 10) if ranks > 64 else repeats
        seconds = interleaved_medians({"own": call, "refined": refined}, repeats, show=False)
        found |= {"ms": seconds["own"] * 1e3, "slower": seconds["own"] / seconds["refined"]}
        if plan in BALANCED:
            arguments = CheckedArguments(work, ranks, **options)
            found["native_ms"] = cpu_ms(partial(core.make_plan, arguments), repeats)
    return found


def measure_peer(ranks: int, rows: int, counts: str, lengths: str, repeats: int) -> dict[str, Any]:
    """Time and balance against the plain pure-Python Karmarkar-Karp."""
    work, free = COSTS["HSTU"](draw(lengths, ranks * rows, 0)), "" if counts == "equal" else ", free counts"
    plain = partial(plain_karmarkar_karp, work.tolist(), ranks, counts == "equal")
    ours = {name: partial(partition, work, ranks, **BALANCED[name + free]) for name in ("KK", "refined")}
    times = {"plain KK": cpu_ms(plain, 3 if ranks > 8 else repeats)}
    times |= {name: cpu_ms(call, repeats) for name, call in ours.items()}
    plan = ours["refined"]()
    return {
        **{f"{name}, ms": ms for name, ms in times.items()},
        **{f"{name} faster, ×": times["plain KK"] / times[name] for name in ours},
        "plain KK, load ÷ bound": max(int(work[group].sum()) for group in plain()) / plan.lower_bound,
        "refined, load ÷ bound": 1 + plan.optimality_gap,
    }


def main(quick: Quick = False) -> None:
    torch.set_num_threads(1)
    ranks, rows, seeds, repeats = ((8, 64), (8, 32), 2, 10) if quick else ((8, 64, 256, 1024), (8, 32, 128), 5, 50)
    timed: dict[str, Any] = {"ranks": [each for each in ranks if each != 256], "rows": (32,), "lengths": LENGTHS}
    each_seed = {"seed": range(seeds)}
    cases = every(ranks=ranks, rows=rows, lengths=LENGTHS, cost=COSTS, plan=BALANCED, **each_seed)
    cases += every(**timed, cost=("HSTU",), plan=LIMITED, **each_seed)
    cases += every(**timed, cost=("L²",), plan=("token cap",), **each_seed)
    found = measured(measure_plan, cases, repeats=repeats)
    medians = query(found, _MEDIANS)
    of_peers = every(**timed, counts=("equal",)) + every(**timed | {"ranks": (8, 64)}, counts=("free",))
    peers = measured(measure_peer, of_peers, repeats=repeats)
    page = Page("Planner: balance, speed, locality, memory", f"{described(LENGTHS)} Cost HSTU: 5120·L + L².")
    for rows_of, limits in ((found, _LIMITS), (medians, _LIMITS_OF_MEDIANS)):
        for what, limit, column, where in limits:
            page.at_most(what, limit, values(rows_of, column, where))
    for (plan, counts), least in _LEAST.items():
        slowest = min(values(peers, f'"{plan} faster, ×"', f"ranks = 64 AND counts = '{counts}'"))
        what = f"{plan} faster than plain KK, 64 × 32, {counts} counts"
        page.target(what, f"≥ {least}×", f"{slowest:.0f}×", slowest >= least)
    page.section(
        "Balance",
        "Largest load ÷ lower bound, mean and worst over ranks, rows per rank and seeds. The optimum lies between the "
        "bound and the plan, so the ratio limits the loss of a plan. Ratios above 1.001 occur in batches whose load is "
        "in a few rows per rank; there, exchanges of two or three rows rarely improve a plan.",
        query(found, _BALANCE),
    )
    page.section(
        "Time, traffic and memory",
        f"Plans of 32 rows per rank, medians of {seeds} seeds. Near home: slack 1 %, nodes of {NODE}. Token cap: 1.03 "
        "× the mean. Speeds are drawn between 0.5 and 1, and loads are those of the fastest rank in equal time; plans "
        "with and without speeds are made alternately. Milliseconds of the native call, and of `partition()` from "
        "Python with all checks. A batch is dominated if one sample is more than half of the mean load.",
        medians,
    )
    page.section(
        "Against a plain Karmarkar-Karp in Python",
        "Milliseconds per plan, cost HSTU; ours through `partition()`, all checks and the lower bound included. "
        "Balance is largest load ÷ lower bound.",
        peers,
    )
    page.finish(quick=quick)


if __name__ == "__main__":
    from_command_line(main, __doc__)
