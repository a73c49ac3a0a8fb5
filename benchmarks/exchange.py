"""How many bytes does a shuffle send, how long does the exchange take, and what does it cost the thread that launches?

Bytes are counted on 2 and 4 real gloo ranks, and by the plan's own arithmetic up to 1024 ranks. The reference is what a
shuffler does that gathers every row of every rank on every rank. What the worker thread costs the launching thread is
measured on one rank, which hears of the others from a list.

Examples:
    python -m benchmarks.exchange
    python -m benchmarks.exchange --quick
"""

from __future__ import annotations

import hashlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from itertools import product
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from tqdm import tqdm

from benchmarks.command_line import from_command_line
from benchmarks.one_of_many_ranks import (
    fake_ranks,
    packed_rows,
    planned_exchange,
    tell_of_all_ranks,
    words_of_rows,
)
from benchmarks.report import Page, draw_lengths, mean_of, rows_table, run_ranks
from commons.datasets.hstu_batch import HSTUBatch
from commons.distributed.options import ShufflerOptions
from commons.distributed.payload import WORD_BYTES, PayloadLayout
from commons.perf_model.partitioner import core
from commons.perf_model.shuffle_plan import plan_shuffle
from commons.sequence_batch.schema import BatchSchema
from hstu import HSTUBalancedBatchShuffler

SIZES = {"hidden_size": 256, "num_heads": 4, "head_dim": 64, "num_layers": 4}
LAUNCHES = 2000
CONTEXT = ["user_id", "gender", "age", "occupation", "zip"]


def make_batch(lengths: np.ndarray, contextual: list[str] = CONTEXT) -> HSTUBatch:
    """A ranking batch: contextual features, items, actions, and one label per item."""
    rows, total = len(lengths), int(lengths.sum())
    item_lengths = torch.from_numpy(lengths).to(torch.int32)
    context_lengths = torch.ones(len(contextual) * rows, dtype=torch.int32)
    return HSTUBatch(
        features=KeyedJaggedTensor(
            keys=[*contextual, "item", "action"],
            values=torch.arange(len(contextual) * rows + 2 * total),
            lengths=torch.cat([context_lengths, item_lengths, item_lengths]),
        ),
        batch_size=rows,
        feature_to_max_seqlen={"item": 4096, "action": 4096},
        contextual_feature_names=contextual,
        labels=KeyedJaggedTensor(keys=["task_0"], values=torch.rand(total), lengths=item_lengths),
        item_feature_name="item",
        action_feature_name="action",
    )


def on_real_ranks(rank: int, lengths_name: str, rows: int, transport: str, repeats: int) -> list[dict[str, Any]]:
    """Shuffle batches by one transport; bytes and host time of each."""
    shuffler = HSTUBalancedBatchShuffler(**SIZES, options=ShufflerOptions(transport=transport))  # type: ignore[arg-type]
    measured = []
    for step in range(repeats + 3):
        lengths = draw_lengths(lengths_name, rows * dist.get_world_size(), step)
        batch = make_batch(lengths[rank * rows : (rank + 1) * rows])
        handle = shuffler.start_shuffle(batch)
        handle.prepared()
        dist.barrier()
        started = time.perf_counter()
        shuffler.finish_shuffle(batch, handle)
        stats = shuffler.last_stats
        assert stats is not None
        if step >= 3:
            measured.append({"bytes": stats.bytes_sent, "ms": (time.perf_counter() - started) * 1e3})
    shuffler.close()
    return measured


def by_arithmetic(world_size: int, lengths_name: str, rows: int, seed: int) -> dict[str, float]:
    """Bytes of one shuffle over `world_size` ranks, from the plan."""
    lengths = draw_lengths(lengths_name, world_size * rows, seed)
    layout = PayloadLayout.of(BatchSchema.of(make_batch(lengths[:1])))
    table_of_lengths = np.concatenate(
        [np.ones((len(lengths), len(CONTEXT)), dtype=np.int64), np.repeat(lengths[:, None], 3, axis=1)], axis=1
    )
    counts = np.full(world_size, rows, dtype=np.int64)
    shuffler = HSTUBalancedBatchShuffler(**SIZES)
    workloads = shuffler.task.get_workloads(len(CONTEXT) + 2 * lengths)
    shuffler.close()
    plan = plan_shuffle(
        packed_rows(counts, counts, workloads, len(CONTEXT) + 2 * lengths, table_of_lengths),
        slack=0.01,
        ranks_per_node=8,
    )
    row_bytes = words_of_rows(table_of_lengths, layout) * WORD_BYTES
    sent = np.bincount(plan.gathered.home[plan.moves], weights=row_bytes[plan.moves], minlength=world_size)
    busiest = int(sent.argmax())
    exchange = planned_exchange(plan.gathered, plan.destination, layout, busiest)
    everything = row_bytes.sum() / world_size * (world_size - 1)
    moved = row_bytes[plan.moves & (plan.gathered.home == busiest)].sum()
    return {
        "sent kB, mean rank": sent.mean() / 1e3,
        "busiest rank": exchange.bytes_sent / 1e3,
        "its bytes ÷ its moved rows": exchange.bytes_sent / max(moved, 1),
        "gathering everything, kB": everything / 1e3,
        "fewer bytes, ×": everything / max(sent.mean(), 1),
        "tokens moved": plan.gathered.tokens[plan.moves].sum() / plan.gathered.tokens.sum(),
        "largest ÷ mean load": plan.loads_after.max() / plan.loads_after.mean(),
    }


def beside_a_launching_thread(world_size: int, rows: int, keys: int, rounds: int) -> dict[str, Any]:
    """What a thread that launches small operations loses while the worker prepares one shuffle; medians, ms.

    Each round launches alone, beside as much hashing, beside a shuffle, and alone again. Losses are differences to the
    mean of the first and the last; the page says what each column means.
    """
    tensor = torch.zeros(4)

    def launch() -> float:
        started = time.perf_counter()
        for _ in range(LAUNCHES):
            tensor.add_(1.0)
        return (time.perf_counter() - started) * 1e3

    lengths = draw_lengths("zipf", world_size * rows, 0).reshape(world_size, rows)
    contextual = [f"user_{key}" for key in range(keys - 2)]
    batches = [make_batch(each, contextual) for each in lengths]
    found: dict[str, list[float]] = defaultdict(list)
    with (
        fake_ranks(world_size, rank=0),
        closing(HSTUBalancedBatchShuffler(**SIZES)) as shuffler,
        without_gil() as native_seconds,
    ):
        tell_of_all_ranks(shuffler, batches)
        worker = shuffler.engine._worker

        def seconds_of(job: Callable[[], Any]) -> float:
            started = time.perf_counter()
            job()
            return time.perf_counter() - started

        shuffle = min(seconds_of(lambda: shuffler.start_shuffle(batches[0]).prepared()) for _ in range(30))
        block = bytes(2**20)
        hashed = bytes(int(2**20 * shuffle / min(seconds_of(lambda: hashlib.sha256(block)) for _ in range(30))))
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
            found[f"{LAUNCHES} operations alone, ms"].append(alone)
            found["lost beside hashing as long"].append(beside_hashing - alone)
            found["lost beside one shuffle"].append(beside - alone)
            found["difference"].append(beside - beside_hashing)
        for _ in range(rounds):
            native_seconds.clear()
            before = worker.submit(time.thread_time).result()
            shuffler.start_shuffle(batches[0]).prepared()
            held = worker.submit(time.thread_time).result() - before - sum(native_seconds)
            found["GIL held by the worker"].append(held * 1e3)
    low, high = np.quantile(found["difference"], [0.25, 0.75])
    medians: dict[str, Any] = {name: float(np.median(values)) for name, values in found.items()}
    return medians | {"difference": f"{medians['difference']:.2f} ({low:.2f} to {high:.2f})"}


@contextmanager
def without_gil() -> Iterator[list[float]]:
    """Within it, CPU seconds of every call of the core that releases the GIL, on whatever thread."""
    seconds: list[float] = []

    def timed(function: Callable[..., int]) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            started = time.thread_time()
            try:
                return function(*arguments)
            finally:
                seconds.append(time.thread_time() - started)

        return call

    with mock.patch.dict(core._UNLOCKED, {name: timed(function) for name, function in core._UNLOCKED.items()}):
        yield seconds


def _real_row(world_size: int, kind: str, rows: int, repeats: int) -> dict[str, Any]:
    kilobytes, milliseconds = {}, {}
    for transport in ("all_to_all", "all_gather"):
        run = run_ranks(on_real_ranks, world_size, kind, rows, transport, repeats)
        name = transport.replace("_", "-")
        kilobytes[f"{name} kB"] = float(np.mean([step["bytes"] for each in run for step in each])) / 1e3
        milliseconds[f"{name} ms"] = float(np.median([step["ms"] for each in run for step in each]))
    return {"ranks": world_size, "lengths": kind} | kilobytes | milliseconds


def main(rows: int = 32, repeats: int = 30, quick: bool = False) -> None:
    """Measure and write benchmarks/results/exchange.md.

    Args:
        rows: samples per rank.
        repeats: shuffles per case on real ranks.
        quick: fewer cases, for a look; writes nothing.
    """
    torch.set_num_threads(1)
    kinds = ["lognormal"] if quick else ["zipf", "lognormal", "user-like"]
    repeats = 5 if quick else repeats
    real = list(product((2,) if quick else (2, 4), kinds))
    planned = list(product((8,) if quick else (8, 64, 256, 1024), kinds))
    launching = [(8, 3)] if quick else list(product((8, 64), (3, 102)))
    page = Page(
        "exchange",
        "Exchange: bytes, time and what it costs beside",
        "python -m benchmarks.exchange",
        f"{rows} samples per rank; five contextual features, items, actions and a label per item; slack 1 %.",
    )
    page.section(
        "On real gloo ranks",
        "Bytes sent per rank (both transports send moved rows alone; all-gather sends them to everyone). Time of "
        "`finish_shuffle` on the host, the plan being ready; median over ranks and steps.",
        rows_table([_real_row(*case, rows, repeats) for case in tqdm(real, desc="real ranks")]),
    )
    page.section(
        "By the plan's arithmetic",
        "All-to-all, nodes of 8, mean of 3 seeds. The reference gathers every row of every rank on every rank.",
        rows_table(
            [
                {"ranks": size, "lengths": kind} | mean_of([by_arithmetic(size, kind, rows, seed) for seed in range(3)])
                for size, kind in tqdm(planned, desc="by arithmetic")
            ]
        ),
    )
    page.section(
        "Beside the launching thread",
        f"One rank's worker gathers, plans and prepares a shuffle ({rows} rows per rank, keys and labels, Zipf; the "
        "messages of the other ranks come from a list) while another thread launches small operations on the CPU. What "
        "it loses beside hashing, which is native and holds no GIL, is cores and memory that both use, the floor of "
        "this measure; what it loses beyond that, round by round, is the GIL. The last column needs no idle machine: "
        "the worker's CPU time for a shuffle that nobody launches beside, queue and future included, less that within "
        "the core's calls that release the GIL. Medians, middle half in brackets, ms. The goals are 0.1 ms at 8 ranks "
        "and 0.2 ms at 64.",
        rows_table(
            [
                {"ranks": size, "keys": keys} | beside_a_launching_thread(size, rows, keys, 10 * repeats)
                for size, keys in tqdm(launching, desc="launching thread")
            ]
        ),
    )
    page.finish(quick=quick)


if __name__ == "__main__":
    from_command_line(main, __doc__)
