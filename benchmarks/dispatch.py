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
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tensordict import TensorDict
from tqdm import tqdm

from benchmarks.command_line import from_command_line
from benchmarks.lengths import draw, make_batch
from benchmarks.report import Page, each_column, run_ranks
from commons.dispatch import Trim, redistribute_balanced, scatter_balanced
from commons.perf_model.partitioner import partition
from commons.perf_model.task_estimator import SelfAttentionTask
from commons.sequence_batch.rows import Rows, select_rows
from commons.sequence_batch.wire import MessageBuffer, decode, encode

ROWS = 64
TASK = SelfAttentionTask(hidden_size=1024, num_heads=16, head_dim=64, num_layers=24)
TRIM = Trim("attention_mask", fields=["input_ids", "logprobs"])
BATCHES = ("padded text, trimmed", "padded text", "TensorDict of ragged text", "HSTUBatch")


def make(kind: str, lengths: np.ndarray) -> Any:
    """A batch of rows of these lengths."""
    if kind == "HSTUBatch":
        return make_batch(lengths)
    tokens = [torch.arange(length) for length in lengths.tolist()]
    if kind.startswith("TensorDict"):
        nested = torch.nested.nested_tensor(tokens, layout=torch.jagged)
        return TensorDict({"input_ids": nested, "reward": torch.rand(len(lengths))}, batch_size=[len(lengths)])
    mask = torch.arange(int(lengths.max())) < torch.from_numpy(lengths).unsqueeze(1)
    return {
        "input_ids": torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True),
        "attention_mask": mask,
        "logprobs": torch.rand(mask.shape) * mask,
        "reward": torch.rand(len(lengths)),
    }


def broadcast_and_select(batch: Any, workloads: Any) -> int:
    """The reference: everything to everyone, and the plan with it; returns the bytes."""
    message = MessageBuffer(0, on_accelerator=False)
    if dist.get_rank() == 0:
        message.append(encode(batch, torch.from_numpy(partition(workloads, dist.get_world_size()).assignment)))
    size = torch.tensor(message.bytes.numel())
    dist.broadcast(size, 0)
    received = message.bytes if dist.get_rank() == 0 else torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(received, 0)
    (whole, assignment), _ = decode(received)
    select_rows(whole, torch.nonzero(assignment == dist.get_rank())[:, 0])
    return received.numel()


def scattered(rank: int, kind: str, repeats: int) -> list[dict[str, float]]:
    """Bytes over share, bytes, and milliseconds both ways, of each step after the first three."""
    measured = []
    for step in range(repeats + 3):
        batch = workloads = None
        if rank == 0:
            lengths = draw("lognormal", ROWS * dist.get_world_size(), step)
            batch, workloads = make(kind, lengths), TASK.get_workloads(lengths)
        dist.barrier()
        started = time.perf_counter()
        share = scatter_balanced(batch, workloads, trim=TRIM if kind.endswith("trimmed") else None)
        dist.barrier()
        between = time.perf_counter()
        whole = broadcast_and_select(batch, workloads)
        dist.barrier()
        ended = time.perf_counter()
        measured.append(
            {
                "received ÷ share": share.bytes_received / Rows.of(share.batch).nbytes,
                "received kB": share.bytes_received / 1e3,
                "broadcast kB": whole / 1e3,
                "scatter ms": (between - started) * 1e3,
                "broadcast ms": (ended - between) * 1e3,
                "largest ÷ mean load": 1 + share.imbalance,
            }
        )
    return measured[3:]


def redistributed(rank: int, repeats: int) -> dict[str, float]:
    """Bytes sent by all ranks over those of the rows that moved, and over those of all rows; means."""
    measured = []
    for step in range(repeats):
        others = dist.get_world_size() - 1
        counts = [ROWS // 2] + [ROWS + ROWS // (2 * others)] * others
        lengths = draw("lognormal", sum(counts), step)
        own = np.split(lengths, np.cumsum(counts)[:-1])[rank]
        batch = make("TensorDict", own)
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
    return each_column(measured, np.mean)


def main(repeats: int = 20, quick: bool = False) -> None:
    """Measure and write benchmarks/results/dispatch.md.

    Args:
        repeats: steps per case.
        quick: fewer cases, for a look; writes nothing.
    """
    repeats, sizes = (3, (2,)) if quick else (repeats, (2, 4))
    page = Page(
        "dispatch",
        "Dispatch: bytes and time",
        "python -m benchmarks.dispatch",
        f"{ROWS} rows per rank, lognormal lengths of mean 512, {repeats} steps. Time is that of rank 0, from the call "
        "to the end on all ranks; on two cores the times of four ranks say little.",
    )
    body = []
    for size, kind in tqdm(list(itertools.product(sizes, BATCHES)), desc="scatter"):
        of_source, *of_others = run_ranks(scattered, size, kind, repeats)
        others = [step for rank in of_others for step in rank]
        means, medians = each_column(others, np.mean), each_column(of_source)
        worst = {"received ÷ share, worst": max(step["received ÷ share"] for step in others)}
        times = {name: value for name, value in medians.items() if name.endswith(" ms")}
        body.append({"ranks": size, "batch": kind} | worst | {name: means[name] for name in list(means)[1:]} | times)
    page.target_of_cases("received ÷ share, worst step", 1.05, [row["received ÷ share, worst"] for row in body])
    page.section("scatter_balanced", body)
    page.section(
        "redistribute_balanced",
        "Rank 0 has half as many rows as the others bring on average; ragged text.",
        [{"ranks": size} | run_ranks(redistributed, size, repeats)[0] for size in tqdm(sizes, desc="redistribute")],
    )
    page.finish(quick=quick)


if __name__ == "__main__":
    from_command_line(main, __doc__)
