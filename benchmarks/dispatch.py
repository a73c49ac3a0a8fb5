"""Does each rank receive its share and no more, and what does that save against a broadcast?

One rank holds a batch of 64 rows per rank, the other ranks receive their shares on real gloo ranks. Bytes are counted
as they arrive, structure and row numbers included, and divided by the bytes of the share's tensors. The reference
broadcasts the whole batch, of which every rank keeps its rows.

Examples:
    python -m benchmarks.dispatch
    python -m benchmarks.dispatch --quick
"""

from __future__ import annotations

import itertools
import statistics
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tensordict import TensorDict
from tqdm import tqdm

from benchmarks.command_line import from_command_line
from benchmarks.exchange import make_batch
from benchmarks.report import Page, draw_lengths, mean_of, rows_table, run_ranks
from commons.dispatch import Trim, redistribute_balanced, scatter_balanced
from commons.perf_model.partitioner import partition
from commons.perf_model.task_estimator import SelfAttentionTask
from commons.sequence_batch.rows import Rows, select_rows
from commons.sequence_batch.wire import MessageBuffer, decode, encode

TASK = SelfAttentionTask(hidden_size=1024, num_heads=16, head_dim=64, num_layers=24)
TRIM = Trim("attention_mask", fields=["input_ids", "logprobs"])
LENGTHS = "lognormal"
CASES = {
    "padded text, trimmed": ("padded", TRIM),
    "padded text": ("padded", None),
    "TensorDict of ragged text": ("ragged", None),
    "HSTUBatch": ("hstu", None),
}


def make(kind: str, lengths: np.ndarray) -> Any:
    """A batch of rows of these lengths."""
    if kind == "hstu":
        return make_batch(lengths)
    tokens = [torch.arange(length) for length in lengths.tolist()]
    if kind == "ragged":
        nested = torch.nested.nested_tensor(tokens, layout=torch.jagged)
        return TensorDict({"input_ids": nested, "reward": torch.rand(len(lengths))}, batch_size=[len(lengths)])
    mask = torch.arange(int(lengths.max())) < torch.from_numpy(lengths).unsqueeze(1)
    return {
        "input_ids": torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True),
        "attention_mask": mask,
        "logprobs": torch.rand(mask.shape) * mask,
        "reward": torch.rand(len(lengths)),
    }


def broadcast_and_select(batch: Any, workloads: Any) -> Any:
    """The reference: everything to everyone, and the plan with it."""
    message = MessageBuffer(0, on_accelerator=False)
    if dist.get_rank() == 0:
        message.append(encode(batch, torch.from_numpy(partition(workloads, dist.get_world_size()).assignment)))
    size = torch.tensor(message.bytes.numel())
    dist.broadcast(size, 0)
    received = message.bytes if dist.get_rank() == 0 else torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(received, 0)
    (whole, assignment), _ = decode(received)
    return select_rows(whole, torch.nonzero(assignment == dist.get_rank())[:, 0]), received.numel()


def on_real_ranks(rank: int, kind: str, trim: Trim | None, lengths_name: str, rows: int, repeats: int) -> Any:
    """Bytes over share, bytes, and milliseconds both ways, of each step after the first three."""
    measured = []
    for step in range(repeats + 3):
        batch = workloads = None
        if rank == 0:
            lengths = draw_lengths(lengths_name, rows * dist.get_world_size(), step)
            batch, workloads = make(kind, lengths), TASK.get_workloads(lengths)
        dist.barrier()
        started = time.perf_counter()
        share = scatter_balanced(batch, workloads, trim=trim)
        dist.barrier()
        between = time.perf_counter()
        _, whole = broadcast_and_select(batch, workloads)
        dist.barrier()
        ended = time.perf_counter()
        if step >= 3:
            measured.append(
                {
                    "ratio": share.bytes_received / Rows.of(share.batch).nbytes,
                    "received": share.bytes_received,
                    "whole": whole,
                    "scatter": (between - started) * 1e3,
                    "broadcast": (ended - between) * 1e3,
                    "imbalance": share.imbalance,
                }
            )
    return measured


def redistribute_on_real_ranks(rank: int, rows: int, repeats: int) -> Any:
    """Bytes sent by all ranks over those of the rows that moved, and over those of all rows."""
    measured = []
    for step in range(repeats):
        counts = [rows // 2] + [rows + rows // (2 * (dist.get_world_size() - 1))] * (dist.get_world_size() - 1)
        lengths = draw_lengths(LENGTHS, sum(counts), step)
        own = np.split(lengths, np.cumsum(counts)[:-1])[rank]
        batch = make("ragged", own)
        moved = redistribute_balanced(batch, TASK.get_workloads(own))
        foreign = np.flatnonzero(moved.home.numpy() != rank)
        totals = torch.tensor(
            [moved.bytes_received, Rows.of(select_rows(moved.batch, foreign)).nbytes, Rows.of(batch).nbytes],
            dtype=torch.float64,
        )
        dist.all_reduce(totals)
        received, moved_bytes, whole = totals.tolist()
        before, after = moved.loads_before.double(), moved.loads_after.double()
        measured.append(
            {
                "received ÷ moved rows": received / moved_bytes,
                "moved ÷ all bytes": moved_bytes / whole,
                "largest ÷ mean load before": float(before.max() / before.mean()),
                "after": float(after.max() / after.mean()),
            }
        )
    return mean_of(measured)


def _scattered(world_size: int, name: str, rows: int, repeats: int) -> dict[str, Any]:
    runs = run_ranks(on_real_ranks, world_size, *CASES[name], LENGTHS, rows, repeats)
    steps = [step for rank in runs[1:] for step in rank]
    mean, own = mean_of(steps), runs[0]
    return {
        "ranks": world_size,
        "batch": name,
        "received ÷ share, worst": max(step["ratio"] for step in steps),
        "received kB": mean["received"] / 1e3,
        "broadcast kB": mean["whole"] / 1e3,
        "scatter ms": statistics.median(step["scatter"] for step in own),
        "broadcast ms": statistics.median(step["broadcast"] for step in own),
        "largest ÷ mean load": 1 + mean["imbalance"],
    }


def main(rows: int = 64, repeats: int = 20, quick: bool = False) -> None:
    """Measure and write benchmarks/results/dispatch.md.

    Args:
        rows: rows of the batch per rank.
        repeats: steps per case.
        quick: fewer cases, for a look; writes nothing.
    """
    repeats, sizes = (3, (2,)) if quick else (repeats, (2, 4))
    page = Page(
        "dispatch",
        "Dispatch: bytes and time",
        "python -m benchmarks.dispatch",
        f"{rows} rows per rank, {LENGTHS} lengths of mean 512, {repeats} steps. The target for received ÷ share is at "
        "most 1.05. Time is that of rank 0, from the call to the end on all ranks; on two cores the times of four "
        "ranks say little.",
    )
    cases = tqdm(list(itertools.product(sizes, CASES)), desc="scatter")
    page.section("scatter_balanced", rows_table([_scattered(*case, rows, repeats) for case in cases]))
    page.section(
        "redistribute_balanced",
        "Rank 0 has half as many rows as the others bring on average; ragged text.",
        rows_table(
            [
                {"ranks": size} | run_ranks(redistribute_on_real_ranks, size, rows, repeats)[0]
                for size in tqdm(sizes, desc="redistribute")
            ]
        ),
    )
    page.finish(quick=quick)


if __name__ == "__main__":
    from_command_line(main, __doc__)
