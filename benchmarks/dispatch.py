"""Does each rank receive only its share, and how much does this save compared with a broadcast of the whole batch?

One rank has a batch of 64 rows per rank, the other ranks receive their shares, on real gloo ranks. All received bytes
are counted, including structure and row numbers, and divided by the bytes of the share's tensors.
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

from benchmarks.shared.command_line import Quick, from_command_line
from benchmarks.shared.lengths import draw, make_batch
from benchmarks.shared.report import Page, each_column, run_ranks
from commons.dispatch import Trim, redistribute_balanced, scatter_balanced
from commons.perf_model.task_estimator import SelfAttentionTask
from commons.sequence_batch.rows import Rows, select_rows

ROWS = 64
TASK = SelfAttentionTask(hidden_size=1024, num_heads=16, head_dim=64, num_layers=24)
TRIM = Trim("attention_mask", fields=["input_ids", "logprobs"])
BATCHES = ("padded text, trimmed", "padded text", "TensorDict of ragged text", "HSTUBatch")


def make(kind: str, lengths: np.ndarray) -> Any:
    """A batch of rows with these lengths."""
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


def scattered(rank: int, kind: str, repeats: int) -> list[dict[str, float]]:
    """Received bytes ÷ bytes of the share, bytes, and milliseconds, for each step after the first three."""
    measured = []
    for step in range(repeats + 3):
        lengths = draw("lognormal", ROWS * dist.get_world_size(), step)
        batch = make(kind, lengths)
        given = (batch, TASK.get_workloads(lengths)) if rank == 0 else (None, None)
        dist.barrier()
        started = time.perf_counter()
        share = scatter_balanced(*given, trim=TRIM if kind.endswith("trimmed") else None)
        dist.barrier()
        took = time.perf_counter() - started
        measured.append(
            {
                "received ÷ share": share.bytes_received / Rows.of(share.batch).nbytes,
                "received kB": share.bytes_received / 1e3,
                "whole batch, kB": Rows.of(batch).nbytes / 1e3,
                "ms": took * 1e3,
                "largest ÷ mean load": 1 + share.imbalance,
            }
        )
    return measured[3:]


def redistributed(rank: int, repeats: int) -> dict[str, float]:
    """Bytes sent by all ranks ÷ bytes of the moved rows, and ÷ bytes of all rows; means."""
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


def main(quick: Quick = False) -> None:
    """Measure and write benchmarks/results/dispatch.md."""
    repeats, sizes = (3, (2,)) if quick else (20, (2, 4))
    page = Page(
        "Dispatch: bytes and time",
        f"{ROWS} rows per rank, lognormal lengths of mean 512, {repeats} steps, medians. Time is from the call to the "
        "end on all ranks; with four ranks on two cores, times are not meaningful.",
    )
    body = []
    for size, kind in tqdm(list(itertools.product(sizes, BATCHES)), desc="scatter"):
        others = [step for rank in run_ranks(scattered, size, kind, repeats)[1:] for step in rank]
        worst = {"received ÷ share, worst": max(step.pop("received ÷ share") for step in others)}
        body.append({"ranks": size, "batch": kind} | worst | each_column(others))
    page.target_of_cases("received ÷ share, worst step", 1.05, [row["received ÷ share, worst"] for row in body])
    page.section("scatter_balanced", body)
    page.section(
        "redistribute_balanced",
        "Rank 0 has half as many rows as the other ranks on average; ragged text.",
        [{"ranks": size} | run_ranks(redistributed, size, repeats)[0] for size in tqdm(sizes, desc="redistribute")],
    )
    page.finish(quick=quick)


if __name__ == "__main__":
    from_command_line(main, __doc__)
