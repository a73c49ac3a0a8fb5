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
import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from tqdm import tqdm

from benchmarks.shared.command_line import Quick, from_command_line
from benchmarks.shared.lengths import NODE, described, draw, make_batch
from benchmarks.shared.link_model import LinkModel, connections
from benchmarks.shared.one_of_many_ranks import SIZES, fake_ranks, record_all_ranks, words_of_rows
from benchmarks.shared.pictures import picture
from benchmarks.shared.report import ROOT, Page, every, measured, milliseconds, query, timed, values
from commons.distributed.channel.groups import ring_sizes
from commons.distributed.engine import shuffle_session
from commons.distributed.exchange.payload import WORD_BYTES
from commons.distributed.exchange.row_exchange import RowExchange
from commons.distributed.options import ShufflerOptions
from commons.distributed.stats import WindowStats
from commons.perf_model.partitioner import core, partition_grid
from commons.perf_model.shuffle_plan import ShufflePlan
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
FIRST = next(iter(OPTIONS))
OPTIONS_AT = (512, 1024, 4096)  # ranks; windows too
LINK = LinkModel()
STEP_MS = 100.0
GOAL_MS = 20.0
Row = dict[str, Any]

_BEFORE = f"""
    SELECT ranks, features, lengths, message_kb AS "message, kB", one_ring AS "one ring", short_rings AS "short rings",
        plan, exchange, rest, computed AS "all computed", total AS "gather and computed",
        CASE WHEN total <= {GOAL_MS} THEN 'within the goal' WHEN total <= {STEP_MS} THEN 'hidden'
            ELSE '**beyond a step**' END AS verdict
    FROM found ORDER BY number
"""
_PLANS = f"""
    SELECT ranks, features, lengths, option, before, after, bound AS "÷ bound", moved AS "tokens moved",
        crossed AS "leave their {NODE}", sent_kb AS "sent kB, mean", busiest_kb AS "busiest", peers AS "its peers",
        rows_ms AS "all-to-all ms", plan, computed AS "all computed"
    FROM found ORDER BY number
"""
_RESOURCES = """
    SELECT ranks, features, gathered_mb AS "gathered, MB", peak_mb AS "peak, MB",
        indices_mb AS "kept for the exchange, MB", of_ring AS "connections, one ring", of_rings AS "short rings",
        ranks * of_ring AS "addresses in the store, one ring", ranks * of_rings AS "short rings."
    FROM found ORDER BY number
"""
_WINDOWS = """
    SELECT ranks, lengths, "window", short_rings AS gather, plan, exchange, rest, computed AS "all computed",
        total / "window" AS "gather and computed, per step", sampler / "window" AS "without a home, per step",
        before AS "as loaded", after AS planned, bound AS "÷ bound", moved AS "tokens moved"
    FROM found ORDER BY number
"""


def measure_rank(
    ranks: int, features: int, lengths: str, option: str, window: int, *, repeats: int, link: LinkModel
) -> Row:
    """Let one of the ranks prepare a shuffle; milliseconds, bytes and loads of the whole batch or window.

    Args:
        ranks: how many.
        features: keys of a row besides its label: items, actions and one-value context.
        lengths: as `benchmarks.shared.lengths.draw` takes it.
        option: one of `OPTIONS`.
        window: batches that are planned together; 0 for a batch by itself.
        repeats: timed runs, after one that is not timed; the least processor time counts.
        link: the model of network times.
    """
    rank, steps = ranks // 2, window or 1
    drawn = draw(lengths, ranks * steps * ROWS, 0).reshape(ranks, steps, ROWS)
    context = [f"context_{key}" for key in range(features - 2)]
    options = {"ranks_per_node": NODE if ranks % NODE == 0 else None} | OPTIONS[option]

    def batches(of_rank: np.ndarray) -> list[Any]:
        return [make_batch(each, context) for each in of_rank]

    with (
        fake_ranks(ranks, rank),
        closing(HSTUBalancedBatchShuffler(**SIZES, options=ShufflerOptions(**options))) as shuffler,
    ):
        own = batches(drawn[rank])
        before = _memory("VmRSS", reset_peak=True)
        shown = tqdm(drawn, desc=f"messages of {ranks} ranks, {features} features", leave=False)
        record_all_ranks(shuffler, (made if window else made[0] for made in map(batches, shown)), window or None)
        session: Any = shuffler.engine._session(None, *([window] if window else []))
        local = [shuffler.engine.costs.describe(batch) for batch in own]
        times, prepared = [], None
        for step in range(repeats + 1):
            prepared = None  # release the previous step's memory
            total: list[float] = []
            with _timed_stages() as clock:
                prepared = timed(session.prepare, total)(step, local)
            times.append({**clock, "rest": total[0] * 1e3 - sum(clock.values())})
        assert prepared is not None and prepared.plan is not None and prepared.exchange is not None
        stage_ms = min(times[1:], key=lambda each: sum(each.values()))
        message, digests = session.channel.message_bytes, session.channel.compared_bytes
        gathers = [
            link.gather_ms(message, rings) + link.gather_ms(digests, rings) for rings in ((ranks,), ring_sizes(ranks))
        ]
        stats, indices = WindowStats.of(0, prepared.describe(), 0.0), prepared.exchange.indices
        return {
            "one_ring": gathers[0],
            "short_rings": gathers[1],
            **stage_ms,
            "computed": sum(stage_ms.values()),
            "total": gathers[1] + sum(stage_ms.values()),
            "message_kb": message / 1e3,
            "before": 1 + stats.imbalance_before,
            "after": 1 + stats.imbalance_after,
            "bound": 1 + stats.optimality_gap,
            "moved": stats.token_fraction_moved,
            # Most memory beyond that of the process before: messages, plan, and what is held for a while.
            "gathered_mb": message * ranks / 1e6,
            "peak_mb": (_memory("VmHWM") - before) / 1e6,
            "indices_mb": indices.numel() * indices.element_size() / 1e6,
            "of_ring": connections((ranks,)),
            "of_rings": connections(ring_sizes(ranks)),
            **(
                {"sampler": _sampler_ms(prepared.plan.gathered.workloads, ranks, window, repeats)}
                if window
                else _traffic(prepared.plan, prepared.exchange, rank, link)
            ),
        }


def _traffic(plan: ShufflePlan, exchange: RowExchange, rank: int, link: LinkModel) -> Row:
    """Bytes that ranks send, compared with their moved rows and with a gather of every row on every rank."""
    gathered, ranks = plan.gathered, plan.gathered.num_ranks
    row_bytes = words_of_rows(gathered, exchange.layout) * float(WORD_BYTES)
    moved = np.flatnonzero(plan.moves)
    sender, receiver = gathered.home[moved], plan.destination[moved]
    sent, received = (np.bincount(end, row_bytes[moved], ranks) for end in (sender, receiver))
    pairs = np.unique(sender * ranks + receiver)
    peers = int(max(np.bincount(ends, minlength=1).max() for ends in np.divmod(pairs, ranks)))
    crossing = gathered.tokens[moved][sender // NODE != receiver // NODE]
    return {
        "sent_kb": sent.mean() / 1e3,
        "busiest_kb": max(sent.max(), received.max()) / 1e3,
        "peers": peers,
        "crossed": crossing.sum() / gathered.tokens.sum(),
        "rows_ms": link.rows_ms(sent, received, peers),
        "sent_ratio": exchange.bytes_sent / sent[rank] if sent[rank] else None,
        "fewer": row_bytes.sum() / ranks * (ranks - 1) / max(sent.mean(), 1),
    }


def _sampler_ms(workloads: np.ndarray, ranks: int, window: int, repeats: int) -> float:
    """Least processor milliseconds of a sampler's plan: as many rows in each batch, in order."""
    batch_of_row = np.arange(len(workloads)) * window // len(workloads)
    plan = partial(partition_grid, workloads, ranks, window, home_step=batch_of_row)
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
    keys, users = features[:1], LENGTHS[:1]
    batch: Row = {"option": (FIRST,), "window": (0,)}
    play = partial(measured, measure_rank, repeats=repeats, link=link)
    batches = play(every(ranks=ranks, features=keys, lengths=LENGTHS, **batch))
    batches += play(every(ranks=ranks, features=features[1:], lengths=users, **batch))
    options = play(every(ranks=few, features=keys, lengths=users, option=OPTIONS, window=(0,)))
    of_windows = play(every(ranks=few, features=keys, lengths=LENGTHS, option=(FIRST,), window=windows))
    model = f"The model: {link.described()}. {described(LENGTHS)}"
    _page_of_batches(batches, options, keys[0], model).finish(quick=quick)
    _page_of_windows(of_windows, model).finish(quick=quick)
    if not quick:
        _draw(query(batches, f"SELECT * FROM found WHERE lengths = '{users[0]}' ORDER BY number"))


def _page_of_batches(batches: list[Row], options: list[Row], keys: int, model: str) -> Page:
    page = Page(
        "Many ranks: what a shuffle takes and where its limits are",
        f"{ROWS} rows per rank, slack 1 %. Computed times are processor time of one thread, the least of a few runs; "
        f"network times are modelled. [docs/scale.md](../../docs/scale.md) explains them. {model}",
    )
    for size, goal in ((4096, GOAL_MS), (16384, 100)):
        times = values(batches, "total", f"ranks = {size} AND features = {keys}")
        page.at_most(f"gather and computed, {size:,} ranks, ms", goal, times)
    page.at_most("bytes sent ÷ moved rows", 1.05, values(batches, "sent_ratio"))
    fewer = values(batches, "fewer")
    reached = f"{min(fewer):,.0f} to {max(fewer):,.0f}×"
    page.target("bytes sent, beside gathering every row on every rank", "≥ 5× fewer", reached, min(fewer) >= 5)
    page.section(
        "Before the exchange",
        "Milliseconds. Gather: modelled, of the rows and then of the digests of the plans, as one ring and as the "
        "short rings in which ranks gather. Then the worker's computation, by stage, and the sum with the short rings.",
        query(batches, _BEFORE),
    )
    page.section(
        "The plan and its exchange, and what options change",
        "Largest ÷ mean load, largest load ÷ the planner's lower bound, tokens moved, and milliseconds as above.",
        query(batches + options, _PLANS),
    )
    page.section(
        "Memory, connections and the store",
        "Of one rank. Connections belong to the control group; each is a file descriptor.",
        query(batches, _RESOURCES),
    )
    return page


def _page_of_windows(windows: list[Row], model: str) -> Page:
    page = Page(
        "Many ranks: what a window takes",
        f"{ROWS} rows per rank and batch, slack 1 %. Computed times are processor time of one thread for a whole "
        f"window, the least of a few runs; the gather is modelled. {model}",
        suffix="_windows",
    )
    for size, goal in ((1024, 10), (4096, 100)):
        times = values(windows, 'plan / "window"', f'ranks = {size} AND "window" > 1')
        page.at_most(f"plan near home per step, {size:,} ranks, ms", goal, times)
    page.section(
        "What a window takes and gains",
        "Milliseconds of a window, and the sum ÷ its steps; a window of 1 is a single batch. Without a home: a "
        "sampler's plan, which gathers and exchanges nothing. Then the sum over the steps of the largest load ÷ mean "
        "load, as loaded and planned; the planned sum ÷ its lower bound; tokens that change their rank.",
        query(windows, _WINDOWS),
    )
    return page


def _draw(found: list[Row]) -> None:
    """Time against ranks for each number of features: gather, plan and all together."""
    lines = {
        "gather, one ring (modelled)": (":", "tab:blue", "one_ring"),
        "gather, short rings (modelled)": ("--", "tab:blue", "short_rings"),
        "planning (measured)": ("o-", "tab:orange", "plan"),
        "all computed (measured)": ("s-", "tab:red", "computed"),
        "exchange (modelled)": ("-.", "tab:green", "rows_ms"),
        "gather and computed": ("-", "black", "total"),
    }
    keys = sorted({row["features"] for row in found})
    with picture(ROOT / "docs" / "scale.svg", (1, len(keys)), (3.6 * len(keys), 3.8), sharey=True) as axes:
        for axis, key in zip(axes[0], keys):
            own = [row for row in found if row["features"] == key]
            sizes = [row["ranks"] for row in own]
            for name, (style, color, column) in lines.items():
                axis.plot(sizes, [row[column] for row in own], style, color=color, label=name, markersize=3)
            for limit, name in ((GOAL_MS, "20 ms"), (STEP_MS, "a 100 ms step")):
                axis.axhline(limit, color="grey", linewidth=0.8)
                axis.text(sizes[0], limit * 1.08, name, color="grey", fontsize=8)
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            axis.set_xticks(sizes, [f"{size:,}" for size in sizes], rotation=45)
            axis.minorticks_off()
            axis.set_title(f"{key} features")
            axis.set_xlabel("ranks")
        axes[0, 0].set_ylabel("milliseconds")


if __name__ == "__main__":
    from_command_line(main, __doc__, {"ranks": 2, "features": 2})
