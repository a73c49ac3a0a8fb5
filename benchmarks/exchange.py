"""What does a shuffle cost the thread that launches?

Measured on one rank; the messages of the other ranks come from a list. benchmarks/scale.py counts the bytes that a
shuffle sends.
"""

from __future__ import annotations

import hashlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from tqdm import tqdm

from benchmarks.shared.command_line import Quick, from_command_line
from benchmarks.shared.lengths import described, draw, make_batch
from benchmarks.shared.one_of_many_ranks import SIZES, fake_ranks, record_all_ranks
from benchmarks.shared.report import Page, every, measured, milliseconds, timed
from commons.perf_model.partitioner import core
from hstu import HSTUBalancedBatchShuffler

ROWS = 32
LAUNCHES = 2000


def measure_launching(ranks: int, keys: int, *, rounds: int) -> dict[str, Any]:
    """Measure how much time a thread that launches small operations loses beside a shuffle's worker; medians, ms.

    Each round launches undisturbed, beside equally long hashing, beside a shuffle, and undisturbed again. Losses are
    differences to the mean of the two undisturbed times; the page explains each column.
    """
    tensor = torch.zeros(4)

    def launch() -> float:
        started = time.perf_counter()
        for _ in range(LAUNCHES):
            tensor.add_(1.0)
        return (time.perf_counter() - started) * 1e3

    contextual = [f"user_{key}" for key in range(keys - 2)]
    batches = [make_batch(each, contextual) for each in draw("zipf", ranks * ROWS, 0).reshape(ranks, ROWS)]
    found: dict[str, list[float]] = defaultdict(list)
    with (
        fake_ranks(ranks, rank=0),
        closing(HSTUBalancedBatchShuffler(**SIZES)) as shuffler,
        without_gil() as native_seconds,
    ):
        record_all_ranks(shuffler, batches)
        worker = shuffler.engine._worker

        def worker_ms(between: Callable[[], Any]) -> float:
            """The worker's CPU time between two jobs that read it, without native calls that release the GIL."""
            native_seconds.clear()
            before = worker.submit(time.thread_time).result()
            between()
            return (worker.submit(time.thread_time).result() - before - sum(native_seconds)) * 1e3

        shuffle_ms = milliseconds(lambda: shuffler.start_shuffle(batches[0]).prepared(), 30, of=min)
        block = bytes(2**20)
        hashed = bytes(int(2**20 * shuffle_ms / milliseconds(lambda: hashlib.sha256(block), 30, of=min)))
        for _ in tqdm(range(rounds), desc="rounds", leave=False):
            first = launch()
            hashing = worker.submit(lambda: hashlib.sha256(hashed))
            beside_hashing = launch()
            hashing.result()
            handle = shuffler.start_shuffle(batches[0])
            beside = launch()
            prepared = handle.prepared()
            alone = (first + launch()) / 2
            assert prepared.plan is not None and prepared.plan.num_moved
            found[f"{LAUNCHES} operations undisturbed, ms"].append(alone)
            found["lost beside equally long hashing"].append(beside_hashing - alone)
            found["lost beside one shuffle"].append(beside - alone)
            found["difference"].append(beside - beside_hashing)
        for _ in range(rounds):
            empty = worker_ms(lambda: None)
            shuffled = worker_ms(lambda: shuffler.start_shuffle(batches[0]).prepared())
            found["GIL held by the worker"].append(shuffled - empty)
    low, high = np.quantile(found["difference"], [0.25, 0.75])
    medians: dict[str, Any] = {name: float(np.median(values)) for name, values in found.items()}
    return medians | {"difference": f"{medians['difference']:.2f} ({low:.2f} to {high:.2f})"}


@contextmanager
def without_gil() -> Iterator[list[float]]:
    """A context that collects the CPU seconds of every native call that releases the GIL, on any thread."""
    seconds: list[float] = []
    with mock.patch.dict(core._UNLOCKED, {name: timed(call, seconds) for name, call in core._UNLOCKED.items()}):
        yield seconds


def main(quick: Quick = False) -> None:
    torch.set_num_threads(1)
    page = Page(
        "Exchange: what it costs beside",
        f"{ROWS} samples per rank; five contextual features, items, actions and a label per item; slack 1 %. "
        f"{described(['zipf'])}",
    )
    cases = every(ranks=(8,), keys=(3,)) if quick else every(ranks=(8, 64), keys=(3, 102))
    page.section(
        "Beside the launching thread",
        f"One rank's worker gathers, plans and prepares a shuffle ({ROWS} rows per rank, keys and labels, Zipf; the "
        "messages of the other ranks come from a list) while another thread launches small operations on the CPU. "
        "Beside native hashing, which needs no GIL, that thread only loses time because cores and memory are shared; "
        "beside a shuffle it also waits for the GIL. The difference is taken per round. The last column is also valid "
        "on a busy machine: the worker's CPU time for a shuffle without a launching thread, queue and future included, "
        "minus that of native calls that release the GIL, and of the job that reads the time. Medians, middle half in "
        "brackets, ms. The goals are 0.1 ms at 8 ranks and 0.2 ms at 64.",
        measured(measure_launching, cases, rounds=50 if quick else 300),
    )
    page.finish(quick=quick)


if __name__ == "__main__":
    from_command_line(main, __doc__)
