"""What does a window of several batches take on many ranks, and how evenly does it share the load there?

As benchmarks/scale.py: one process plays one of W ranks with the code that training runs, in processor time of one
thread, and what the wire takes comes from a model of links. A window is prepared on a thread of its own while the
batches of the one before are trained, so that its milliseconds are shared by its steps.

Examples:
    python -m benchmarks.scale_windows
    python -m benchmarks.scale_windows --quick
    python -m benchmarks.scale_windows --ranks 1024 --windows 2
"""

from __future__ import annotations

import itertools
import time
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from benchmarks.command_line import from_command_line
from benchmarks.exchange import SIZES, make_batch
from benchmarks.link_model import LinkModel, grid
from benchmarks.one_of_many_ranks import fake_ranks, tell_of_all_ranks
from benchmarks.planner import NODE
from benchmarks.report import draw_lengths, heading, table, write_page
from benchmarks.scale_parts import STAGES, timed_prepare
from commons.distributed.options import ShufflerOptions
from commons.distributed.stats import WindowStats
from commons.perf_model.partitioner import partition_grid
from hstu import HSTUBalancedBatchShuffler

LENGTHS = ("user-like", "lognormal", "zipf")
CONTEXT = [f"context_{key}" for key in range(3)]
LINK = LinkModel()


@dataclass(frozen=True)
class PlayedWindow:
    """What one of many ranks does for a window.

    Attributes:
        message_bytes: what a rank sends to the gather.
        stage_ms: processor milliseconds of one thread by stage, and the "rest".
        sampler_ms: the same of a plan without a home, which a sampler makes of lengths that it knows beforehand.
        stats: of the whole window.
    """

    message_bytes: int
    stage_ms: dict[str, float]
    sampler_ms: float
    stats: WindowStats

    @property
    def worker_ms(self) -> float:
        """All that the thread of windows computes before the exchange."""
        return sum(self.stage_ms.values())


def main(
    ranks: tuple[int, ...] = (512, 4096),
    windows: tuple[int, ...] = (1, 4, 8),
    rows: int = 32,
    repeats: int = 3,
    link: LinkModel = LINK,
    quick: bool = False,
) -> None:
    """Play one rank of every number of ranks; write benchmarks/results/scale_windows.md.

    Args:
        ranks: numbers of ranks.
        windows: batches that are planned together.
        rows: of each rank in a batch.
        repeats: of every measurement; the least counts.
        link: what the wire takes.
        quick: few ranks, for a look; writes nothing.
    """
    torch.set_num_threads(1)
    if quick:
        ranks, windows, repeats = (8, 64), (1, 4), 1
    cases = list(itertools.product(ranks, LENGTHS, windows))
    played: dict[tuple[int, str, int], PlayedWindow] = {}
    for world_size, kind, window in tqdm(cases, desc="cases"):
        played[world_size, kind, window] = play_window(world_size, kind, window, rows, repeats)
    page = "\n".join(
        [
            heading("Many ranks: what a window takes", "python -m benchmarks.scale_windows"),
            f"{rows} rows per rank and batch, {len(CONTEXT) + 2} features, hosts of {link.ranks_per_host}, slack 1 %.",
            "Computed times are processor time of one thread for a whole window, the least of a few runs; the gather",
            f"in a grid of √W × √W ranks is modelled. The model: {link.described()}.",
            "\n## What a window takes\n",
            "Milliseconds of a window, and the sum ÷ its steps; with a window of 1 each batch is planned by itself.",
            "The last column is a sampler's plan, which has no home, and gathers and exchanges nothing.\n",
            _times(played, link),
            "\n## What it gains\n",
            "Sum over the steps of the largest load ÷ mean load, as loaded and planned; the planned sum ÷ its lower",
            "bound; tokens that change their rank.\n",
            _gains(played),
        ]
    )
    print(page)
    if not quick:
        print(f"\nwritten to {write_page('scale_windows', page)}")


def play_window(world_size: int, lengths_name: str, window: int, rows: int, repeats: int) -> PlayedWindow:
    """Let one of `world_size` ranks prepare a window.

    Args:
        world_size: ranks.
        lengths_name: as `benchmarks.report.draw_lengths` takes it.
        window: batches of each rank.
        rows: of each batch.
        repeats: after one run that is not timed; the least processor time counts.
    """
    rank = world_size // 2
    lengths = draw_lengths(lengths_name, world_size * window * rows, 0).reshape(world_size, window, rows)
    options = ShufflerOptions(ranks_per_node=NODE if world_size % NODE == 0 else None)
    sizes: dict[str, Any] = dict(SIZES)
    with (
        fake_ranks(world_size, rank),
        closing(HSTUBalancedBatchShuffler(**sizes, options=options)) as shuffler,
    ):
        told = tqdm(lengths, desc=f"messages of {world_size} ranks, {window} batches", leave=False)
        tell_of_all_ranks(shuffler, map(_batches, told), window)
        session = shuffler.engine._session(None, window)
        local = [shuffler.engine.costs.describe(batch, None) for batch in _batches(lengths[rank])]
        prepared, stage_ms = timed_prepare(session, local, repeats)
        channel: Any = session.channel
        assert prepared.plan is not None
        sampler_ms = _planned_without_home(prepared.plan.gathered.workloads, world_size, window, repeats)
        return PlayedWindow(channel.message_bytes, stage_ms, sampler_ms, WindowStats.of(0, prepared.describe(), 0.0))


def _planned_without_home(workloads: np.ndarray, world_size: int, window: int, repeats: int) -> float:
    """Least processor milliseconds of a sampler's plan: as many rows in each batch, in order."""
    times = []
    batch_of_row = np.arange(len(workloads)) * window // len(workloads)
    for _ in range(repeats):
        started = time.thread_time()
        partition_grid(workloads, world_size, window, home_step=batch_of_row)
        times.append((time.thread_time() - started) * 1e3)
    return min(times)


def _batches(lengths: np.ndarray) -> list[Any]:
    """The batches of a rank, of lengths `(window, rows)`."""
    return [make_batch(each, CONTEXT) for each in lengths]


def _times(played: dict[tuple[int, str, int], PlayedWindow], link: LinkModel) -> str:
    names = [*STAGES, "rest"]
    body = []
    for (world_size, kind, window), each in played.items():
        gather = link.gather_ms(world_size, each.message_bytes, grid(world_size))
        stages = [f"{each.stage_ms.get(name, 0.0):.2f}" for name in names]
        per_step = (gather + each.worker_ms) / window
        sampler = f"{each.sampler_ms / window:.1f}"
        computed = f"{each.worker_ms:.1f}"
        body.append([world_size, kind, window, f"{gather:.2f}", *stages, computed, f"{per_step:.1f}", sampler])
    head = ["ranks", "lengths", "window", "gather", *names, "all computed"]
    return table([*head, "gather and computed, per step", "without a home, per step"], body)


def _gains(played: dict[tuple[int, str, int], PlayedWindow]) -> str:
    body = [
        [
            world_size,
            kind,
            window,
            f"{1 + each.stats.imbalance_before:.3f}",
            f"{1 + each.stats.imbalance_after:.3f}",
            f"{1 + each.stats.optimality_gap:.4f}",
            f"{each.stats.token_fraction_moved:.3f}",
        ]
        for (world_size, kind, window), each in played.items()
    ]
    return table(["ranks", "lengths", "window", "as loaded", "planned", "÷ bound", "tokens moved"], body)


if __name__ == "__main__":
    from_command_line(main, __doc__, {"ranks": 2})
