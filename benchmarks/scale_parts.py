"""One rank of many in one process: what its worker does for one batch or window, with the code that training runs.

The other ranks' messages are made from their batches as they would make them, and listed; see `one_of_many_ranks`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from tqdm import tqdm

from benchmarks.exchange import SIZES, make_batch
from benchmarks.one_of_many_ranks import fake_ranks, tell_of_all_ranks, words_of_rows
from benchmarks.planner import NODE
from benchmarks.report import draw_lengths
from commons.distributed import shuffle_session
from commons.distributed.options import ShufflerOptions
from commons.distributed.payload import WORD_BYTES
from commons.distributed.row_exchange import RowExchange
from commons.distributed.stats import WindowStats
from commons.perf_model.partitioner import core, partition_grid
from commons.perf_model.shuffle_plan import ShufflePlan
from hstu import HSTUBalancedBatchShuffler

# What the worker calls, in the order of a batch.
STAGES: dict[str, tuple[Any, str]] = {
    "plan": (core, "shuffle"),
    "exchange": (shuffle_session.RowExchange, "of"),
}


@dataclass(frozen=True)
class Exchange:
    """The rows that a plan moves."""

    tokens_crossing: float  # tokens that leave their host, as a fraction of all
    sent: np.ndarray  # float64 `(world_size,)`, bytes that each rank sends to others
    received: np.ndarray  # the same of what arrives
    peers: int  # most ranks that one rank sends rows to


@dataclass(frozen=True)
class OneRank:
    """What one rank of `world_size` does for a batch or a window; times are processor milliseconds of one thread."""

    world_size: int
    message_bytes: int  # what a rank sends to the gather
    stage_ms: dict[str, float]  # by stage, and the "rest"
    # Most memory beyond that of the process before, in 10^6 bytes: messages, plan, and what is held for a while.
    peak_mb: float
    indices_mb: float  # of that, what stays with the batch for its exchange
    stats: WindowStats  # of all batches together
    exchange: Exchange | None  # of a batch that is planned by itself
    sampler_ms: float  # of a plan without a home, which a sampler makes of lengths that it knows beforehand

    @property
    def worker_ms(self) -> float:
        """All that the worker computes."""
        return sum(self.stage_ms.values())


def play_rank(
    world_size: int, rows: int, features: int, kind: str, repeats: int, window: int | None = None, **options: Any
) -> OneRank:
    """Let one of `world_size` ranks prepare a shuffle.

    Args:
        world_size: ranks.
        rows: of each rank in a batch.
        features: keys of a row besides its label: items, actions and one-value context.
        kind: of lengths, as `benchmarks.report.draw_lengths` takes it.
        repeats: after one run that is not timed; the least processor time counts.
        window: batches that are planned together; None for a batch by itself.
        **options: of the shuffler.
    """
    rank, steps = world_size // 2, window or 1
    lengths = draw_lengths(kind, world_size * steps * rows, 0).reshape(world_size, steps, rows)
    context = [f"context_{key}" for key in range(features - 2)]
    options = {"ranks_per_node": NODE if world_size % NODE == 0 else None} | options
    sizes: dict[str, Any] = dict(SIZES)

    def batches(of_rank: np.ndarray) -> list[Any]:
        return [make_batch(each, context) for each in of_rank]

    with (
        fake_ranks(world_size, rank),
        closing(HSTUBalancedBatchShuffler(**sizes, options=ShufflerOptions(**options))) as shuffler,
    ):
        own = batches(lengths[rank])
        before = _memory("VmRSS", reset_peak=True)
        told = tqdm(lengths, desc=f"messages of {world_size} ranks, {features} features", leave=False)
        tell_of_all_ranks(shuffler, (made if window else made[0] for made in map(batches, told)), window)
        session: Any = shuffler.engine._session(None) if window is None else shuffler.engine._session(None, window)
        local = [shuffler.engine.costs.describe(batch, None) for batch in own]
        times, prepared = [], None
        for step in range(repeats + 1):
            prepared = None  # what the step before has left behind is not held beside this one
            with _timed_stages() as clock:
                started = time.thread_time()
                prepared = session.prepare(step, local)
                total = (time.thread_time() - started) * 1e3
            times.append({**clock, "rest": total - sum(clock.values())})
        assert prepared is not None and prepared.plan is not None and prepared.exchange is not None
        indices = prepared.exchange.indices
        return OneRank(
            world_size,
            session.channel.message_bytes,
            min(times[1:], key=lambda each: sum(each.values())),
            (_memory("VmHWM") - before) / 1e6,
            indices.numel() * indices.element_size() / 1e6,
            WindowStats.of(0, prepared.describe(), 0.0),
            None if window else _exchange(prepared.plan, prepared.exchange),
            _sampler_ms(prepared.plan.gathered.workloads, world_size, window, repeats) if window else 0.0,
        )


def _exchange(plan: ShufflePlan, exchange: RowExchange) -> Exchange:
    gathered, world_size = plan.gathered, plan.gathered.num_ranks
    moved = np.flatnonzero(plan.moves)
    sender, receiver = gathered.home[moved], plan.destination[moved]
    row_bytes = np.zeros(len(moved))
    for some in np.array_split(np.arange(len(moved)), len(moved) // 4096 + 1):  # not the lengths of all at once
        row_bytes[some] = words_of_rows(gathered.lengths(moved[some]), exchange.layout) * WORD_BYTES
    pairs = np.unique(sender * world_size + receiver)
    count = partial(np.bincount, minlength=world_size)
    crosses = sender // NODE != receiver // NODE
    return Exchange(
        float(gathered.tokens[moved][crosses].sum() / gathered.tokens.sum()),
        count(sender, weights=row_bytes),
        count(receiver, weights=row_bytes),
        int(max(count(ends).max() for ends in np.divmod(pairs, world_size))),
    )


def _sampler_ms(workloads: np.ndarray, world_size: int, window: int, repeats: int) -> float:
    """Least processor milliseconds of a sampler's plan: as many rows in each batch, in order."""
    times = []
    batch_of_row = np.arange(len(workloads)) * window // len(workloads)
    for _ in range(repeats):
        started = time.thread_time()
        partition_grid(workloads, world_size, window, home_step=batch_of_row)
        times.append((time.thread_time() - started) * 1e3)
    return min(times)


@contextlib.contextmanager
def _timed_stages() -> Iterator[dict[str, float]]:
    """Processor milliseconds of this thread in each stage, while the block runs."""
    clock = dict.fromkeys(STAGES, 0.0)

    def timed(stage: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*arguments: Any, **keywords: Any) -> Any:
            started = time.thread_time()
            try:
                return call(*arguments, **keywords)
            finally:
                clock[stage] += (time.thread_time() - started) * 1e3

        return wrapper

    with contextlib.ExitStack() as stack:
        for stage, (owner, name) in STAGES.items():
            stack.enter_context(mock.patch.object(owner, name, timed(stage, getattr(owner, name))))
        yield clock


def _memory(name: str, *, reset_peak: bool = False) -> int:
    """Bytes that the process holds (VmRSS) or has held at most since the reset (VmHWM); see proc(5)."""
    if reset_peak:
        Path("/proc/self/clear_refs").write_text("5")
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024
