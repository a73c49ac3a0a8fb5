"""One rank of many in one process: what its worker does for one batch, measured, with the code that training runs.

The other ranks' messages are made from their batches as they would make them, and listed; see `one_of_many_ranks`.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
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
from commons.distributed.local_rows import LocalRows
from commons.distributed.options import ShufflerOptions
from commons.distributed.payload import WORD_BYTES
from commons.distributed.shuffle_handle import PreparedShuffle
from commons.distributed.shuffle_session import ShuffleSession
from commons.perf_model.partitioner import core
from hstu import HSTUBalancedBatchShuffler

# What the worker calls, in the order of a batch; where a name is missing its time falls to the rest.
STAGES: dict[str, tuple[tuple[Any, str], ...]] = {
    "plan": ((core, "shuffle"),),
    "exchange": ((shuffle_session.RowExchange, "of"),),
    "stats": ((shuffle_session, "stats_of_plan"),),
}


@dataclass(frozen=True)
class OneRank:
    """What one rank of `world_size` does for a batch; times are processor milliseconds of one thread.

    Attributes:
        world_size: ranks.
        features: keys of a row besides its label.
        message_bytes: what a rank sends to the gather.
        stage_ms: by stage, and the "rest".
        peak_mb: most memory beyond that of the process before, in 10^6 bytes: messages, plan, routes, and what is only
            held for a while.
        indices_mb: of that, what stays with the batch for its exchange.
        imbalance_before: largest ÷ mean load.
        imbalance_after: the same with the plan.
        gap: largest load ÷ the planner's lower bound − 1.
        tokens_moved: as a fraction of all.
        tokens_crossing: those that leave their host.
        sent: float64 `(world_size,)`, bytes that each rank sends to others.
        received: the same of what arrives.
        peers: most ranks that one rank sends rows to.
    """

    world_size: int
    features: int
    message_bytes: int
    stage_ms: dict[str, float]
    peak_mb: float
    indices_mb: float
    imbalance_before: float
    imbalance_after: float
    gap: float
    tokens_moved: float
    tokens_crossing: float
    sent: np.ndarray
    received: np.ndarray
    peers: int

    @property
    def worker_ms(self) -> float:
        """All that the worker computes."""
        return sum(self.stage_ms.values())


def play_rank(world_size: int, rows: int, features: int, lengths_name: str, repeats: int, **options: Any) -> OneRank:
    """Let one of `world_size` ranks prepare a shuffle.

    Args:
        world_size: ranks.
        rows: of each rank.
        features: keys of a row besides its label: items, actions and one-value context.
        lengths_name: as `benchmarks.report.draw_lengths` takes it.
        repeats: after one run that is not timed; the least processor time counts.
        **options: of the shuffler.
    """
    rank = world_size // 2
    lengths = draw_lengths(lengths_name, world_size * rows, 0).reshape(world_size, rows)
    context = [f"context_{key}" for key in range(features - 2)]
    sizes: dict[str, Any] = dict(SIZES)
    options = {"ranks_per_node": NODE if world_size % NODE == 0 else None} | options
    with (
        fake_ranks(world_size, rank),
        closing(HSTUBalancedBatchShuffler(**sizes, options=ShufflerOptions(**options))) as shuffler,
    ):
        batch = make_batch(lengths[rank], context)
        before = _reset_peak()
        told = tqdm(lengths, desc=f"messages of {world_size} ranks, {features} features", leave=False)
        tell_of_all_ranks(shuffler, (make_batch(each, context) for each in told))
        session = shuffler.engine._session(None)
        local = [shuffler.engine.costs.describe(batch, None)]
        prepared, best = timed_prepare(session, local, repeats)
        peak = _peak() - before
        channel: Any = session.channel
        return _describe(prepared, features, channel.message_bytes, best, peak)


def timed_prepare(
    session: ShuffleSession, local: Sequence[LocalRows], repeats: int
) -> tuple[PreparedShuffle, dict[str, float]]:
    """Let a session prepare a shuffle; what came of it, and processor milliseconds by stage of its fastest run.

    Args:
        session: of the one rank, which knows what the others bring.
        local: what this rank brings.
        repeats: after one run that is not timed.
    """
    times: list[dict[str, float]] = []
    prepared: PreparedShuffle | None = None
    for step in range(repeats + 1):
        prepared = None  # what the step before has left behind is not held beside this one
        with _timed_stages() as clock:
            started = time.thread_time()
            prepared = session.prepare(step, local)
            total = (time.thread_time() - started) * 1e3
        times.append({**clock, "rest": total - sum(clock.values())})
    assert prepared is not None and prepared.plan is not None and prepared.exchange is not None
    return prepared, min(times[1:] or times, key=lambda each: sum(each.values()))


def _describe(
    prepared: PreparedShuffle, features: int, message_bytes: int, stage_ms: dict[str, float], peak: int
) -> OneRank:
    plan, exchange = prepared.plan, prepared.exchange
    assert plan is not None and exchange is not None
    gathered, world_size = plan.gathered, plan.gathered.num_ranks
    moved = np.flatnonzero(plan.moves)
    sender, receiver = gathered.home[moved], plan.destination[moved]
    row_bytes = np.zeros(len(moved))
    for some in np.array_split(np.arange(len(moved)), len(moved) // 4096 + 1):
        row_bytes[some] = words_of_rows(gathered.lengths(moved[some]), exchange.layout) * WORD_BYTES
    pairs = np.unique(sender * world_size + receiver)
    peers = [np.bincount(ends, minlength=world_size).max() for ends in (pairs // world_size, pairs % world_size)]
    crosses = sender // NODE != receiver // NODE
    tokens = gathered.tokens
    return OneRank(
        world_size,
        features,
        message_bytes,
        stage_ms,
        peak / 1e6,
        exchange.indices.numel() * exchange.indices.element_size() / 1e6,
        float(plan.loads_before.max() / plan.loads_before.mean()),
        float(plan.loads_after.max() / plan.loads_after.mean()),
        float(plan.loads_after.max() / plan.lower_bound - 1),
        float(tokens[moved].sum() / tokens.sum()),
        float(tokens[moved][crosses].sum() / tokens.sum()),
        np.bincount(sender, weights=row_bytes, minlength=world_size),
        np.bincount(receiver, weights=row_bytes, minlength=world_size),
        int(max(peers)),
    )


@contextlib.contextmanager
def _timed_stages() -> Iterator[dict[str, float]]:
    """Processor milliseconds of this thread in each stage, while the block runs."""
    clock: dict[str, float] = defaultdict(float)

    def timed(stage: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*arguments: Any, **keywords: Any) -> Any:
            started = time.thread_time()
            try:
                return call(*arguments, **keywords)
            finally:
                clock[stage] += (time.thread_time() - started) * 1e3

        return wrapper

    with contextlib.ExitStack() as stack:
        for stage, places in STAGES.items():
            for owner, name in places:
                stack.enter_context(mock.patch.object(owner, name, timed(stage, getattr(owner, name))))
        yield clock


def _reset_peak() -> int:
    """Bytes that the process holds; from here on `_peak` counts."""
    Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets the peak of the resident set
    return _status("VmRSS")


def _peak() -> int:
    return _status("VmHWM")


def _status(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024
