"""How long does a shuffle, or a window of batches, take on 8 to 16,384 ranks, and what does each part grow with?

One process acts as one of W ranks: it reads the gathered table, plans, compares and builds its exchange with the code
of training, on the messages that the other ranks would send. This is measured in processor time of one thread. Network
times come from a model of links with its parameters on the command line; `benchmarks/shared/link_model.py` has the
sources of the defaults. A window is prepared on its own thread while the previous window is trained, so its
milliseconds are divided by its steps. docs/scale.md explains the result.

Examples:
    python -m benchmarks.scale
    python -m benchmarks.scale --quick
    python -m benchmarks.scale --ranks 64 512 --features 20 --link.hop-us 130 --windows 4
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import matplotlib
import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator
from tqdm import tqdm

from benchmarks.shared.command_line import Quick, from_command_line
from benchmarks.shared.lengths import NODE, described, draw, make_batch
from benchmarks.shared.link_model import LinkModel, connections
from benchmarks.shared.one_of_many_ranks import SIZES, MovedRows, fake_ranks, record_all_ranks
from benchmarks.shared.report import ROOT, Page, milliseconds, timed
from commons.distributed.channel.groups import ring_sizes
from commons.distributed.engine import shuffle_session
from commons.distributed.options import ShufflerOptions
from commons.distributed.stats import WindowStats
from commons.perf_model.partitioner import core, partition_grid
from hstu import HSTUBalancedBatchShuffler

ROWS = 32  # rows per rank and batch
LENGTHS = ("user-like, mean 165", "lognormal", "zipf")
# Functions that the worker calls, in order.
STAGES: dict[str, tuple[Any, str]] = {"plan": (core, "shuffle"), "exchange": (shuffle_session.RowExchange, "of")}
# Options besides `ranks_per_node=8`; these batches cannot gain 60 %.
OPTIONS: dict[str, dict[str, Any]] = {
    "ranks_per_node=8": {},
    "ranks_per_node=64": {"ranks_per_node": 64},
    "ranks_per_node=None": {"ranks_per_node": None},
    "equal_size=False": {"equal_size": False},
    "slack=0.05": {"slack": 0.05},
    "min_gain=0.6": {"min_gain": 0.6},
}
OPTIONS_AT = (512, 1024, 4096)  # ranks; windows too
LINK = LinkModel()
STEP_MS = 100.0
GOAL_MS = 20.0
PICTURE = ROOT / "docs" / "scale.svg"
# What was played, by the first columns of its rows: ranks, and features, lengths, window or option.
Played = dict[tuple[Any, ...], "OneRank"]


@dataclass(frozen=True)
class OneRank:
    """The work of one rank of `world_size` for a batch or a window; times are processor milliseconds of one thread."""

    world_size: int
    message_bytes: int  # bytes that a rank sends to the gather of rows
    compared_bytes: int  # bytes that a rank sends to the gather of the plans' digests
    sent_bytes: int  # bytes that a rank sends in its exchange
    stage_ms: dict[str, float]  # by stage; "rest" is all other work
    # Most memory beyond that of the process before, in 10^6 bytes: messages, plan, and what is held for a while.
    peak_mb: float
    indices_mb: float  # of that, what stays with the batch for its exchange
    stats: WindowStats  # over all batches
    moved: MovedRows | None  # only for a single batch
    sampler_ms: float  # of a sampler's plan, whose rows have no home

    @property
    def worker_ms(self) -> float:
        return sum(self.stage_ms.values())


def play_rank(
    world_size: int, features: int, kind: str, repeats: int, window: int | None = None, **options: Any
) -> OneRank:
    """Let one of `world_size` ranks prepare a shuffle.

    Args:
        world_size: ranks.
        features: keys of a row besides its label: items, actions and one-value context.
        kind: of lengths, as `benchmarks.shared.lengths.draw` takes it.
        repeats: timed runs, after one that is not timed; the least processor time counts.
        window: batches that are planned together; None for a batch by itself.
        **options: of the shuffler.
    """
    rank, steps = world_size // 2, window or 1
    lengths = draw(kind, world_size * steps * ROWS, 0).reshape(world_size, steps, ROWS)
    context = [f"context_{key}" for key in range(features - 2)]
    options = {"ranks_per_node": NODE if world_size % NODE == 0 else None} | options

    def batches(of_rank: np.ndarray) -> list[Any]:
        return [make_batch(each, context) for each in of_rank]

    with (
        fake_ranks(world_size, rank),
        closing(HSTUBalancedBatchShuffler(**SIZES, options=ShufflerOptions(**options))) as shuffler,
    ):
        own = batches(lengths[rank])
        before = _memory("VmRSS", reset_peak=True)
        shown = tqdm(lengths, desc=f"messages of {world_size} ranks, {features} features", leave=False)
        record_all_ranks(shuffler, (made if window else made[0] for made in map(batches, shown)), window)
        session: Any = shuffler.engine._session(None) if window is None else shuffler.engine._session(None, window)
        local = [shuffler.engine.costs.describe(batch) for batch in own]
        times, prepared = [], None
        for step in range(repeats + 1):
            prepared = None  # release the previous step's memory
            total: list[float] = []
            with _timed_stages() as clock:
                prepared = timed(session.prepare, total)(step, local)
            times.append({**clock, "rest": total[0] * 1e3 - sum(clock.values())})
        assert prepared is not None and prepared.plan is not None and prepared.exchange is not None
        indices = prepared.exchange.indices
        return OneRank(
            world_size,
            session.channel.message_bytes,
            session.channel.compared_bytes,
            prepared.exchange.bytes_sent,
            min(times[1:], key=lambda each: sum(each.values())),
            (_memory("VmHWM") - before) / 1e6,
            indices.numel() * indices.element_size() / 1e6,
            WindowStats.of(0, prepared.describe(), 0.0),
            None if window else MovedRows.of(prepared.plan, prepared.exchange.layout),
            _sampler_ms(prepared.plan.gathered.workloads, world_size, window, repeats) if window else 0.0,
        )


def _sampler_ms(workloads: np.ndarray, world_size: int, window: int, repeats: int) -> float:
    """Least processor milliseconds of a sampler's plan: as many rows in each batch, in order."""
    batch_of_row = np.arange(len(workloads)) * window // len(workloads)
    plan = partial(partition_grid, workloads, world_size, window, home_step=batch_of_row)
    return milliseconds(plan, repeats, clock=time.thread_time, of=min)


@contextlib.contextmanager
def _timed_stages() -> Iterator[dict[str, float]]:
    """Processor milliseconds of this thread in each stage, once the block has run."""
    seconds: dict[str, list[float]] = {stage: [] for stage in STAGES}
    clock: dict[str, float] = {}
    with contextlib.ExitStack() as stack:
        for stage, (owner, name) in STAGES.items():
            stack.enter_context(mock.patch.object(owner, name, timed(getattr(owner, name), seconds[stage])))
        yield clock
    clock |= {stage: sum(of_calls) * 1e3 for stage, of_calls in seconds.items()}


def _memory(name: str, *, reset_peak: bool = False) -> int:
    """Resident bytes of the process (VmRSS), or their peak since the reset (VmHWM); see proc(5)."""
    if reset_peak:
        Path("/proc/self/clear_refs").write_text("5")
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def main(
    ranks: tuple[int, ...] = (8, 64, 512, 1024, 4096, 16384),
    features: tuple[int, ...] = (5, 20, 200),
    windows: tuple[int, ...] = (1, 4, 8),
    link: LinkModel = LINK,
    quick: Quick = False,
) -> None:
    """Act as one rank; write scale.md and scale_windows.md in benchmarks/results, and docs/scale.svg.

    Args:
        ranks: numbers of ranks; options and windows are measured with 512, 1,024 and 4,096 of these.
        features: keys of a row besides its label, at least 2; the first is the one that all lengths are measured with.
        windows: batches that are planned together.
        link: parameters of the network model.
    """
    torch.set_num_threads(1)
    if quick:
        ranks, features, windows = (8, 64), (5, 20), (1, 4)
    repeats, few = (1, ranks) if quick else (8, [size for size in OPTIONS_AT if size in ranks])
    keys, users = features[0], LENGTHS[0]
    cases = [(size, keys, kind) for size, kind in itertools.product(ranks, LENGTHS)]
    cases += [(size, more, users) for size, more in itertools.product(ranks, features[1:])]
    played = {case: play_rank(*case, repeats) for case in tqdm(cases, desc="batches")}
    with_options = {
        (size, name): play_rank(size, keys, users, repeats, **OPTIONS[name])
        for size, name in tqdm(list(itertools.product(few, OPTIONS)), desc="options")
    }
    in_windows = {
        (size, kind, window): play_rank(size, keys, kind, repeats, window)
        for size, kind, window in tqdm(list(itertools.product(few, LENGTHS, windows)), desc="windows")
    }
    _page_of_batches(played, with_options, keys, link).finish(quick=quick)
    _page_of_windows(in_windows, keys, link).finish(quick=quick)
    if not quick:
        _draw({key[:2]: each for key, each in played.items() if key[2] == users}, link)


def _page_of_batches(played: Played, with_options: Played, keys: int, link: LinkModel) -> Page:
    page = Page(
        "Many ranks: what a shuffle takes and where its limits are",
        f"{ROWS} rows per rank, hosts of {link.ranks_per_host}, slack 1 %. Computed times are processor time of one "
        "thread, the least of a few runs; network times are modelled. [docs/scale.md](../../docs/scale.md) "
        f"explains them. The model: {link.described()}. {described(LENGTHS)}",
    )
    for size, goal in ((4096, 20), (16384, 100)):
        of_size = [_total_ms(each, link) for key, each in played.items() if key[:2] == (size, keys)]
        if of_size:
            page.at_most(f"gather and computed, {size:,} ranks", goal, of_size, " ms")
    _note_bytes(page, [each for key, each in played.items() if key[1] == keys])
    before, plans, resources = [], [], []
    for (size, of_keys, kind), each in played.items():
        case = {"ranks": size, "features": of_keys, "lengths": kind}
        one_ring, short_rings = _gathers(each, link)
        total, times = _total_ms(each, link), {"one ring": one_ring, "short rings": short_rings}
        verdict = "within the goal" if total <= GOAL_MS else "hidden" if total <= STEP_MS else "**beyond a step**"
        before.append(
            case
            | {"message, kB": each.message_bytes / 1e3, **times, **each.stage_ms, "all computed": each.worker_ms}
            | {"gather and computed": total, "": verdict}
        )
        moved = each.moved
        assert moved is not None
        busiest = max(moved.sent.max(), moved.received.max()) / 1e3
        sent = {"sent kB, mean": moved.sent.mean() / 1e3, "busiest": busiest, "its peers": moved.peers}
        plans.append(case | {"before": 1 + each.stats.imbalance_before} | _plan(each) | sent | _rows_ms(each, link))
        if kind == LENGTHS[0]:
            of_ring, of_rings = connections((size,)), connections(ring_sizes(size))
            resources.append(
                {
                    **{"ranks": size, "features": of_keys, "gathered, MB": each.message_bytes * size / 1e6},
                    **{"peak, MB": each.peak_mb, "kept for the exchange, MB": each.indices_mb},
                    **{"connections, one ring": of_ring, "short rings": of_rings},
                    **{"addresses in the store, one ring": size * of_ring, "short rings.": size * of_rings},
                }
            )
    page.section(
        "Before the exchange",
        "Milliseconds. Gather: modelled, of the rows and then of the digests of the plans, as one ring and as the "
        "short rings in which ranks gather. Then the worker's computation, by stage, and the sum with the short rings.",
        before,
    )
    page.section(
        "The plan and its exchange",
        "Largest ÷ mean load, largest load ÷ the planner's lower bound, tokens moved, and modelled milliseconds.",
        plans,
    )
    if with_options:
        body = [
            {"ranks": size, "option": name, "plan": each.stage_ms["plan"], "all computed": each.worker_ms}
            | _plan(each)
            | _rows_ms(each, link)
            for (size, name), each in with_options.items()
        ]
        page.section("What options change", f"User-like, {keys} features; milliseconds as above.", body)
    page.section(
        "Memory, connections and the store",
        "Of one rank. Connections belong to the control group; each is a file descriptor.",
        resources,
    )
    return page


def _note_bytes(page: Page, played: list[OneRank]) -> None:
    """Targets for the bytes that a rank sends, compared with its moved rows and with a gather of every row."""
    ratios, fewer = [], []
    for each in played:
        moved, size = each.moved, each.world_size
        assert moved is not None
        if own := moved.sent[size // 2]:
            ratios.append(each.sent_bytes / own)
        fewer.append(moved.everything / size * (size - 1) / max(moved.sent.mean(), 1))
    page.at_most("bytes sent", 1.05, ratios, " × moved rows")
    reached = f"{min(fewer):,.0f} to {max(fewer):,.0f}×"
    page.target("bytes sent, beside gathering every row on every rank", "≥ 5× fewer", reached, min(fewer) >= 5)


def _page_of_windows(played: Played, keys: int, link: LinkModel) -> Page:
    page = Page(
        "Many ranks: what a window takes",
        f"{ROWS} rows per rank and batch, {keys} features, hosts of {link.ranks_per_host}, slack 1 %. Computed times "
        "are processor time of one thread for a whole window, the least of a few runs; the gather is modelled. "
        f"The model: {link.described()}. {described(LENGTHS)}",
        suffix="_windows",
    )
    for size, goal in ((1024, 10), (4096, 100)):
        of_size = [
            each.stage_ms["plan"] / window for (of, _, window), each in played.items() if of == size and window > 1
        ]
        if of_size:
            page.at_most(f"plan near home per step, {size:,} ranks", goal, of_size, " ms")
    times, gains = [], []
    for (size, kind, window), each in played.items():
        case = {"ranks": size, "lengths": kind, "window": window}
        gather = _gathers(each, link)[1]
        per_step = {"gather and computed, per step": (gather + each.worker_ms) / window}
        sampler = {"without a home, per step": each.sampler_ms / window}
        times.append(case | {"gather": gather, **each.stage_ms, "all computed": each.worker_ms} | per_step | sampler)
        before, after = 1 + each.stats.imbalance_before, 1 + each.stats.imbalance_after
        bound, moved = 1 + each.stats.optimality_gap, each.stats.token_fraction_moved
        gains.append(case | {"as loaded": before, "planned": after, "÷ bound": bound, "tokens moved": moved})
    if played:
        page.section(
            "What a window takes",
            "Milliseconds of a window, and the sum ÷ its steps; a window of 1 is a single batch. The last column is a "
            "sampler's plan, whose rows have no home; it gathers and exchanges nothing.",
            times,
        )
        page.section(
            "What it gains",
            "Sum over the steps of the largest load ÷ mean load, as loaded and planned; the planned sum ÷ its lower "
            "bound; tokens that change their rank.",
            gains,
        )
    return page


def _gathers(each: OneRank, link: LinkModel) -> tuple[float, float]:
    """Milliseconds of both gathers as one ring, and in short rings."""
    size, rows, digests = each.world_size, each.message_bytes, each.compared_bytes
    rings = ((size,), ring_sizes(size))
    one, short = (link.gather_ms(rows, sizes) + link.gather_ms(digests, sizes) for sizes in rings)
    return one, short


def _total_ms(each: OneRank, link: LinkModel) -> float:
    return _gathers(each, link)[1] + each.worker_ms


def _rows_ms(each: OneRank, link: LinkModel) -> dict[str, float]:
    assert each.moved is not None
    return {"all-to-all ms": link.rows_ms(each.moved.sent, each.moved.received, each.moved.peers)}


def _plan(each: OneRank) -> dict[str, Any]:
    assert each.moved is not None
    return {
        "after": 1 + each.stats.imbalance_after,
        "÷ bound": 1 + each.stats.optimality_gap,
        "tokens moved": each.stats.token_fraction_moved,
        f"leave their {NODE}": each.moved.tokens_crossing,
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
            one_ring, short_rings = zip(*(_gathers(one, link) for one in each))
            lines = {
                "gather, one ring (modelled)": (":", "tab:blue", one_ring),
                "gather, short rings (modelled)": ("--", "tab:blue", short_rings),
                "planning (measured)": ("o-", "tab:orange", [one.stage_ms["plan"] for one in each]),
                "all computed (measured)": ("s-", "tab:red", [one.worker_ms for one in each]),
                "exchange (modelled)": ("-.", "tab:green", [_rows_ms(one, link)["all-to-all ms"] for one in each]),
                "gather and computed": ("-", "black", [_total_ms(one, link) for one in each]),
            }
            for name, (style, color, values) in lines.items():
                axis.plot(sizes, values, style, color=color, label=name, markersize=3)
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
