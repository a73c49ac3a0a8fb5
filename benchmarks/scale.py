"""What does a shuffle take on 8 to 16,384 ranks, and which part of it grows with what? And a window of batches?

One process plays one of W ranks: it reads the gathered table, plans, compares and builds its exchange with the code
that training runs, on messages that the other ranks would send. That is measured, in processor time of one thread. What
the wire takes comes from a model of links with its parameters on the command line; `benchmarks/link_model.py` says
where the defaults come from. A window is prepared on a thread of its own while the batches of the one before are
trained, so that its milliseconds are shared by its steps. docs/scale.md explains the result.

Examples:
    python -m benchmarks.scale
    python -m benchmarks.scale --quick
    python -m benchmarks.scale --ranks 64 512 --features 20 --link.hop-us 130 --windows 4
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import matplotlib
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator
from tqdm import tqdm

from benchmarks.command_line import from_command_line
from benchmarks.link_model import LinkModel, connections, grid
from benchmarks.planner import NODE
from benchmarks.report import Page, rows_table
from benchmarks.scale_parts import OneRank, play_rank

LENGTHS = ("user-like", "lognormal", "zipf")
# What is asked for beside `ranks_per_node=8`; a gain of 60 % is more than these batches can have.
OPTIONS: dict[str, dict[str, Any]] = {
    "ranks_per_node=8": {},
    "ranks_per_node=64": {"ranks_per_node": 64},
    "ranks_per_node=None": {"ranks_per_node": None},
    "equal_size=False": {"equal_size": False},
    "slack=0.05": {"slack": 0.05},
    "min_gain=0.6": {"min_gain": 0.6},
}
OPTIONS_AT = WINDOWS_AT = (512, 4096)
LINK = LinkModel()
STEP_MS = 100.0
GOAL_MS = 20.0
PICTURE = Path(__file__).parents[1] / "docs" / "scale.svg"
COMMAND = "python -m benchmarks.scale"
# What was played, by the first columns of its rows: ranks, and features, lengths, window or option.
Played = dict[tuple[Any, ...], OneRank]


def main(
    ranks: tuple[int, ...] = (8, 64, 512, 1024, 4096, 16384),
    features: tuple[int, ...] = (5, 20, 200),
    windows: tuple[int, ...] = (1, 4, 8),
    rows: int = 32,
    repeats: int = 3,
    link: LinkModel = LINK,
    quick: bool = False,
) -> None:
    """Play one rank; write scale.md and scale_windows.md in benchmarks/results, and docs/scale.svg.

    Args:
        ranks: numbers of ranks; options and windows are played with 512 and 4,096 of these.
        features: keys of a row besides its label, at least 2; the first is the one that all lengths are measured with.
        windows: batches that are planned together.
        rows: of each rank in a batch.
        repeats: of every measurement; the least counts.
        link: what the wire takes.
        quick: few ranks, for a look; writes nothing.
    """
    torch.set_num_threads(1)
    if quick:
        ranks, features, windows, repeats = (8, 64), (5, 20), (1, 4), 1
    few = [world_size for world_size in (ranks if quick else WINDOWS_AT) if world_size in ranks]
    cases = [(world_size, features[0], kind) for world_size, kind in itertools.product(ranks, LENGTHS)]
    cases += [(world_size, keys, LENGTHS[0]) for world_size, keys in itertools.product(ranks, features[1:])]
    played = {(size, keys, kind): play_rank(size, rows, keys, kind, repeats) for size, keys, kind in _shown(cases)}
    with_options = {
        (size, name): play_rank(size, rows, features[0], LENGTHS[0], repeats, **OPTIONS[name])
        for size, name in _shown(itertools.product(few, OPTIONS))
    }
    in_windows = {
        (size, kind, window): play_rank(size, rows, features[0], kind, repeats, window)
        for size, kind, window in _shown(itertools.product(few, LENGTHS, windows))
    }
    _page_of_batches(played, with_options, f"{rows} rows per rank", features[0], link).finish(quick=quick)
    _page_of_windows(in_windows, f"{rows} rows per rank and batch", features[0], link).finish(quick=quick)
    if not quick:
        _draw({key[:2]: each for key, each in played.items() if key[2] == LENGTHS[0]}, link)


def _shown(cases: Any) -> Any:
    return tqdm(list(cases), desc="cases")


def _page_of_batches(played: Played, with_options: Played, about: str, keys: int, link: LinkModel) -> Page:
    page = Page(
        "scale",
        "Many ranks: what a shuffle takes and where its limits are",
        COMMAND,
        f"{about}, hosts of {link.ranks_per_host}, slack 1 %. Computed times are processor time of one thread, the "
        "least of a few runs; times of the wire are modelled. [docs/scale.md](../../docs/scale.md) explains them. The "
        f"model: {link.described()}.",
    )
    page.section(
        "Before the exchange",
        "Milliseconds. Gather: modelled, as one ring, as a grid of √W × √W ranks, and hosts first.",
        rows_table([_of(*key) | _before_exchange(each, link) for key, each in played.items()]),
    )
    page.section(
        "What the worker computes",
        "Milliseconds by stage.",
        rows_table([_of(*key) | each.stage_ms for key, each in played.items()]),
    )
    page.section(
        "The plan and its exchange",
        "Largest ÷ mean load, largest load ÷ the planner's lower bound, tokens moved, and modelled milliseconds.",
        rows_table([_of(*key) | _exchange(each, link) for key, each in played.items()]),
    )
    if with_options:
        body = [
            {"ranks": size, "option": name, "plan": each.stage_ms["plan"], "all computed": each.worker_ms}
            | _plan(each)
            | {"all-to-all ms": _rows_ms(each, link)}
            for (size, name), each in with_options.items()
        ]
        about = f"User-like lengths, {keys} features; milliseconds as above."
        page.section("What options change", about, rows_table(body))
    page.section(
        "Memory, connections and the store",
        "Of one rank. Connections are those of the control group, each of which is a file descriptor.",
        rows_table([_resources(*key[:2], each) for key, each in played.items() if key[2] == LENGTHS[0]]),
    )
    return page


def _page_of_windows(played: Played, about: str, keys: int, link: LinkModel) -> Page:
    page = Page(
        "scale_windows",
        "Many ranks: what a window takes",
        COMMAND,
        f"{about}, {keys} features, hosts of {link.ranks_per_host}, slack 1 %. Computed times are processor time of "
        "one thread for a whole window, the least of a few runs; the gather in a grid of √W × √W ranks is modelled. "
        f"The model: {link.described()}.",
    )
    times, gains = [], []
    for (size, kind, window), each in played.items():
        case = {"ranks": size, "lengths": kind, "window": window}
        gather = link.gather_ms(size, each.message_bytes, grid(size))
        per_step = {"gather and computed, per step": (gather + each.worker_ms) / window}
        sampler = {"without a home, per step": each.sampler_ms / window}
        times.append(case | {"gather": gather, **each.stage_ms, "all computed": each.worker_ms} | per_step | sampler)
        before, after = 1 + each.stats.imbalance_before, 1 + each.stats.imbalance_after
        bound, moved = 1 + each.stats.optimality_gap, each.stats.token_fraction_moved
        gains.append(case | {"as loaded": before, "planned": after, "÷ bound": bound, "tokens moved": moved})
    if played:
        page.section(
            "What a window takes",
            "Milliseconds of a window, and the sum ÷ its steps; with a window of 1 each batch is planned by itself. "
            "The last column is a sampler's plan, which has no home, and gathers and exchanges nothing.",
            rows_table(times),
        )
        page.section(
            "What it gains",
            "Sum over the steps of the largest load ÷ mean load, as loaded and planned; the planned sum ÷ its lower "
            "bound; tokens that change their rank.",
            rows_table(gains),
        )
    return page


def _of(size: int, keys: int, kind: str) -> dict[str, Any]:
    return {"ranks": size, "features": keys, "lengths": kind}


def _gathers(each: OneRank, link: LinkModel) -> tuple[float, float, float]:
    """Milliseconds of the gather as one ring, in a grid, and hosts first."""
    size, message = each.world_size, each.message_bytes
    ring, in_grid = (link.gather_ms(size, message, shape) for shape in (None, grid(size)))
    return ring, in_grid, link.by_host_ms(size, message)


def _rows_ms(each: OneRank, link: LinkModel) -> float:
    assert each.exchange is not None
    return link.rows_ms(each.exchange.sent, each.exchange.received, each.exchange.peers)


def _before_exchange(each: OneRank, link: LinkModel) -> dict[str, Any]:
    ring, in_grid, by_host = _gathers(each, link)
    total = min(ring, in_grid) + each.worker_ms
    return {
        "message, kB": each.message_bytes / 1e3,
        "ring": ring,
        "grid": in_grid,
        "hosts first": by_host,
        "plan": each.stage_ms["plan"],
        "all computed": each.worker_ms,
        "gather and computed": total,
        "": "within the goal" if total <= GOAL_MS else "hidden" if total <= STEP_MS else "**beyond a step**",
    }


def _plan(each: OneRank) -> dict[str, Any]:
    assert each.exchange is not None
    return {
        "after": 1 + each.stats.imbalance_after,
        "÷ bound": 1 + each.stats.optimality_gap,
        "tokens moved": each.stats.token_fraction_moved,
        f"leave their {NODE}": each.exchange.tokens_crossing,
    }


def _exchange(each: OneRank, link: LinkModel) -> dict[str, Any]:
    exchange = each.exchange
    assert exchange is not None
    busiest = max(exchange.sent.max(), exchange.received.max()) / 1e3
    bytes_sent = {"sent kB, mean": exchange.sent.mean() / 1e3, "busiest": busiest, "its peers": exchange.peers}
    before = {"before": 1 + each.stats.imbalance_before}
    return before | _plan(each) | bytes_sent | {"all-to-all ms": _rows_ms(each, link)}


def _resources(size: int, keys: int, each: OneRank) -> dict[str, Any]:
    ring, in_grid = connections(size, None), connections(size, grid(size))
    return {
        "ranks": size,
        "features": keys,
        "gathered, MB": each.message_bytes * size / 1e6,
        "peak, MB": each.peak_mb,
        "kept for the exchange, MB": each.indices_mb,
        "connections, ring": ring,
        "grid": in_grid,
        "addresses in the store, ring": size * ring,
        "grid.": size * in_grid,
    }


def _draw(played: Played, link: LinkModel) -> None:
    """Time against ranks for each number of features: gather, plan and all together."""
    keys = sorted({key for _, key in played})
    with matplotlib.rc_context({"svg.hashsalt": "evenrank", "font.size": 9}):
        figure = Figure(figsize=(3.6 * len(keys), 3.8), layout="constrained")
        axes = figure.subplots(1, len(keys), sharey=True, squeeze=False)[0]
        for axis, key in zip(axes, keys):
            sizes = [size for size, other in played if other == key]
            each = [played[size, key] for size in sizes]
            ring, in_grid, by_host = zip(*(_gathers(one, link) for one in each))
            computed = [one.worker_ms for one in each]
            together = [min(times) + own for times, own in zip(zip(ring, in_grid), computed)]
            axis.plot(sizes, ring, ":", color="tab:blue", label="gather, ring (modelled)")
            axis.plot(sizes, in_grid, "--", color="tab:blue", label="gather, grid (modelled)")
            axis.plot(sizes, by_host, "-", color="tab:cyan", linewidth=1, label="gather, hosts first (modelled)")
            plan = [one.stage_ms["plan"] for one in each]
            axis.plot(sizes, plan, "o-", color="tab:orange", markersize=3, label="planning (measured)")
            axis.plot(sizes, computed, "s-", color="tab:red", markersize=3, label="all computed (measured)")
            rows_ms = [_rows_ms(one, link) for one in each]
            axis.plot(sizes, rows_ms, "-.", color="tab:green", label="exchange (modelled)")
            axis.plot(sizes, together, color="black", linewidth=2, label="gather and computed")
            for limit, name in ((GOAL_MS, "20 ms"), (STEP_MS, "a 100 ms step")):
                axis.axhline(limit, color="grey", linewidth=0.8)
                axis.text(sizes[0], limit * 1.08, name, color="grey", fontsize=8)
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            axis.xaxis.set_major_locator(FixedLocator(sizes))
            axis.xaxis.set_minor_locator(NullLocator())
            axis.set_xticklabels([f"{size:,}" for size in sizes], rotation=45)
            axis.set_title(f"{key} features")
            axis.set_xlabel("ranks")
        axes[0].set_ylabel("milliseconds")
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(keys) + 1, fontsize=8, frameon=False)
        figure.savefig(PICTURE, metadata={"Date": None})


if __name__ == "__main__":
    from_command_line(main, __doc__, {"ranks": 2, "features": 2})
