"""What `benchmarks.on_device` measures: one function a part, each in a process of its own, which prints Markdown.

On the CPU a part is rehearsed: the same code, with sizes that tell nothing.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks import cost_model
from benchmarks.attention_on_device import HEADER as ATTENTION_HEADER
from benchmarks.attention_on_device import attention_table, describe_fit, time_follows_pairs
from benchmarks.exchange import CONTEXT, make_batch
from benchmarks.one_of_many_ranks import packed_rows, planned_exchange
from benchmarks.report import draw_lengths, rows_table, table
from commons.distributed.payload import PayloadLayout
from commons.perf_model.shuffle_plan import plan_shuffle
from commons.perf_model.task_estimator import HSTUAttentionTask
from commons.sequence_batch.schema import BatchSchema
from hstu.model.execution import choose_execution
from hstu.train_config import ModelArgs

ROOT = Path(__file__).parents[1]
PUBLISHED_GAIN = 1.53  # recsys-examples' balanced shuffler on 16 × H100, the setting of hstu/configs/benchmark.toml


class PartFailedError(RuntimeError):
    """A part has run and something in it failed; the message is the part's text."""


def warm_up(device: torch.device) -> str:
    """Compile what the parts after this one use: kernels of three widths, and what torch.compile needs."""
    rows = []
    for head_dim in (16,) if device.type == "cpu" else (64, 128, 256):
        config = ModelArgs(num_attention_heads=4, kv_channels=head_dim, compute_dtype="bf16").on(device)
        hstu = config.ranking_config(max_sequence_length=4096, tables={"item": 1}, num_tasks=1).hstu
        started = time.monotonic()
        chosen = choose_execution(hstu, device)
        rows.append([head_dim, f"{time.monotonic() - started:.0f}", chosen.uses_triton, chosen.compiles])
    return table(["channels of a head", "seconds", "by Triton", "compiled"], rows)


def cases_on_device(device: torch.device) -> str:
    """All of tests/gpu but the layers, by ci/test_gpu.sh."""
    if device.type == "cpu":
        return _run_cases(["ci/test_gpu.sh", "--cpu", "2", "-k", "transports"])
    return _run_cases(["ci/test_gpu.sh", "--share", "-k", "not layers"])


def cases_of_layers(device: torch.device) -> str:
    """Those of HSTU's layers, for which most kernels are compiled."""
    arguments = ["tests/gpu/test_hstu_layers_on_device.py", "--device", device.type, "-p", "no:cacheprovider"]
    chosen = ["-k", "a_model and fp32"] if device.type == "cpu" else []
    return _run_cases([*_launch(device), "-m", "pytest", *arguments, *chosen])


def cases_under_sanitizer(device: torch.device) -> str:
    """The pipelines under torch's CUDA sanitizer, which looks for races between streams."""
    arguments = ["tests/gpu/test_pipelines_on_device.py", "--device", device.type, "-p", "no:cacheprovider"]
    cases = "lite" if device.type == "cpu" else "unshuffled and device_id"  # on the groups that the trainer makes
    command = [*_launch(device), "-m", "pytest", *arguments, "-k", cases]
    # Without CUDA torch cannot be imported with it.
    return _run_cases(command, {"TORCH_CUDA_SANITIZER": "1"} if device.type == "cuda" else None)


def _launch(device: torch.device) -> list[str]:
    """The launch of torchrun with a rank on every GPU or, where there is one, two that share it; two on the CPU."""
    gpus = torch.cuda.device_count() if device.type == "cuda" else 0
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={max(gpus, 2)}"]
    return [*launch, "--no-python", "ci/share_gpu.sh", sys.executable] if gpus == 1 else launch


def _run_cases(command: Sequence[str], environment: dict[str, str] | None = None) -> str:
    """Run cases of pytest; a part's text is what pytest sums up at the end."""
    status, output = _streamed(command, environment)
    lines = [line.strip("= \n") for line in output.splitlines()]
    sums = [line for line in lines if re.search(r"\d+ (passed|failed|error)", line)]
    failures = sorted({line for line in lines if line.startswith(("FAILED", "ERROR", "error:"))})
    text = "\n".join([f"`{' '.join(command[-6:])}`", "", *(f"- {line}" for line in [*sums, *failures])])
    if status:
        last = "\n".join(output.splitlines()[-20:])
        raise PartFailedError(f"{text}\n\nIt ended with status {status}:\n\n```\n{last}\n```")
    return text


def _streamed(command: Sequence[str], environment: dict[str, str] | None = None) -> tuple[int, str]:
    """Run a program whose output goes to standard error as it comes; its status, and the output."""
    lines = []
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | (environment or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as job:
        assert job.stdout is not None
        for line in job.stdout:
            print(line, end="", file=sys.stderr, flush=True)
            lines.append(line)
    return job.returncode, "".join(lines)


def exchange(device: torch.device) -> str:
    """What finishing a shuffle costs one rank of many: time of the host and of the device, less that on the wire."""
    rehearse = device.type == "cpu"
    rows = []
    for world_size in (4,) if rehearse else (8, 64):
        for batch_rows, longest in ((8, 64),) if rehearse else ((32, 1024), (32, 4096), (128, 1024)):
            cost = _finish_cost(device, world_size, batch_rows, longest, 3 if rehearse else 40)
            rows.append({"ranks": world_size, "rows": batch_rows, "to": longest} | cost)
    return (
        "Pack, hand over to the collective, unpack; the peers' rows are made up and the collective sends nothing, so "
        "that the wire is not in it. On CUDA a wait of the host for the device would be an error. Medians.\n\n"
        + rows_table(rows)
    )


def _finish_cost(device: torch.device, world_size: int, rows: int, longest: int, repeats: int) -> dict[str, Any]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    rank = min(3, world_size - 1)
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    lengths = np.minimum(draw_lengths("zipf", world_size * rows, 0), longest)
    batch = make_batch(lengths[rank * rows : (rank + 1) * rows])
    layout = PayloadLayout.of(BatchSchema.of(batch))
    by_key = np.repeat(lengths[:, None], len(CONTEXT) + 3, axis=1)
    by_key[:, : len(CONTEXT)] = 1
    counts = np.full(world_size, rows, dtype=np.int64)
    tokens = len(CONTEXT) + 2 * lengths
    plan = plan_shuffle(
        packed_rows(counts, counts, HSTUAttentionTask(256, 4, 64, 8).get_workloads(tokens), tokens, by_key),
        slack=0.01,
    )
    on_cuda = device.type == "cuda"
    on_device = (batch.pin_memory() if on_cuda else batch).to(device, non_blocking=True)
    host_seconds, device_ms, sent = [], [], 0
    for turn in range(repeats + 5):
        made = planned_exchange(plan.gathered, plan.destination, layout, rank, pin_memory=on_cuda)
        sent = made.bytes_sent
        begin, end = _events(on_cuda)
        if on_cuda and turn >= 5:  # the allocator and the kernels are warm
            torch.cuda.set_sync_debug_mode("error")
        begin()
        started = time.perf_counter()
        buffer, sent_rows, indices = made.pack([on_device])
        made.send_rows(buffer, sent_rows, dist.group.WORLD, async_op=False)
        made.unpack(on_device, buffer, indices)
        host_seconds.append(time.perf_counter() - started)
        if on_cuda:
            torch.cuda.set_sync_debug_mode("default")
        device_ms.append(end())
    dist.destroy_process_group()
    return {
        "sent kB": sent / 1e3,
        "host ms": statistics.median(host_seconds[5:]) * 1e3,
        "device ms": statistics.median(device_ms[5:]) if on_cuda else "–",
    }


def _events(on_cuda: bool) -> tuple[Callable[[], None], Callable[[], float]]:
    """What starts and what reads the device's clock, in milliseconds; on the CPU nothing."""
    if not on_cuda:
        return lambda: None, lambda: 0.0
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def read() -> float:
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)

    torch.cuda.synchronize()
    return begin.record, read


def attention(device: torch.device) -> str:
    """HSTU's attention: time against the arithmetic floor, and against the blocks of dense products."""
    # One width of a head: for every further one a dozen kernels are compiled.
    sizes = {"longest": 16, "repeats": 1} if device.type == "cpu" else {}
    rows = attention_table(device, rows=2 if sizes else 32, head_dims=(64,), **sizes)
    fit = time_follows_pairs(device, **sizes)
    return "\n".join([ATTENTION_HEADER, *(row.text() for row in rows), "", f"{describe_fit(fit)}."])


def traced_step(device: torch.device) -> str:
    """Steps of `hstu.train` on random data, balanced, under torch's profiler."""
    rehearse = device.type == "cpu"
    first, traced = (2, 2) if rehearse else (10, 6)
    sizes = {
        "max-history-seqlen": (16, 1024),
        "hidden-size": (8, 512),
        "num-layers": (1, 8),
        "num-attention-heads": (1, 4),
        "kv-channels": (8, 128),
        "train-batch-size": (2, 32),
    }
    size = {name: str(small if rehearse else real) for name, (small, real) in sizes.items()}
    with tempfile.TemporaryDirectory() as folder:
        trainer = {
            "device": device.type,
            "train-batch-size": size["train-batch-size"],
            "eval-batch-size": "2",
            "max-train-iters": str(first + traced + 1),
            "run-dir": folder,
            "profile-step-start": str(first),
            "profile-step-end": str(first + traced),
        }
        data = {"dataset-name": "random", "num-batches": "20", "max-history-seqlen": size["max-history-seqlen"]}
        model = {name: size[name] for name in ("hidden-size", "num-layers", "num-attention-heads", "kv-channels")}
        model["compute-dtype"] = "bf16"
        flags = [("trainer", trainer), ("dataset", data), ("model", model), ("optimizer", {"sharding": "row_wise"})]
        arguments = [word for group, named in flags for name in named for word in (f"--{group}.{name}", named[name])]
        switches = ["--trainer.profile", "--trainer.enable-balanced-shuffler", "--trainer.sinks"]
        command = [*_launch(device), "-m", "hstu.train", *arguments, *switches, "--trainer.eval-interval", "1000"]
        status, output = _streamed(command)
        if status:
            raise PartFailedError("\n".join(["```", *output.splitlines()[-20:], "```"]))
        trace = json.loads(Path(folder, "trace-rank0.json").read_text())
    ranks = max(torch.cuda.device_count(), 2) if device.type == "cuda" else 2
    shared = ", two ranks on one GPU" if device.type == "cuda" and torch.cuda.device_count() == 1 else ""
    rows = [[key, value] for key, value in describe_trace(trace["traceEvents"]).items()]
    return f"{ranks} ranks{shared}; rank 0, {traced} steps.\n\n" + table(["", "median of the steps"], rows)


def describe_trace(events: Iterable[dict[str, Any]]) -> dict[str, str]:
    """What the device does in the forward passes of a trace, as torch.profiler writes it.

    Args:
        events: with `name`, `cat`, and `ts` and `dur` in microseconds.

    Returns:
        By what it is: milliseconds, or a share.
    """
    spans = [event for event in events if event.get("ph") == "X" and "dur" in event]
    forwards = [each for each in spans if each["cat"] == "user_annotation" and each["name"].startswith("## forward")]
    kernels = sorted((each for each in spans if each["cat"] == "kernel"), key=lambda each: each["ts"])
    found = {"forward pass on the host": f"{_median(each['dur'] for each in forwards):.2f} ms"}
    if not kernels:
        return found | {"gap before the first layer": "– (no kernels in the trace)"}
    begins = np.array([each["ts"] for each in kernels])
    ends = np.maximum.accumulate([each["ts"] + each["dur"] for each in kernels])
    gaps, busy = [], []
    for forward in forwards:
        begin, end = forward["ts"], forward["ts"] + forward["dur"]
        following = int(np.searchsorted(begins, begin))
        if following == len(begins):
            continue
        done = max(begin, ends[following - 1] if following else begin)
        gaps.append(max(0.0, begins[following] - done))
        busy.append(_covered(kernels, begin, end) / forward["dur"])
    return found | {
        "gap before the first layer, the device idle": f"{_median(gaps):.3f} ms",
        "device busy during it": f"{statistics.median(busy):.0%}" if busy else "–",
        "kernels in a step": f"{len(kernels) / max(len(forwards), 1):.0f}",
    }


def _covered(kernels: list[dict[str, Any]], begin: float, end: float) -> float:
    """How much of an interval any kernel covers; kernels in order of their start."""
    covered, upto = 0.0, begin
    for kernel in kernels:
        first, last = max(kernel["ts"], upto), min(kernel["ts"] + kernel["dur"], end)
        covered += max(0.0, last - first)
        upto = max(upto, last)
    return covered


def _median(microseconds: Iterable[float]) -> float:
    values = list(microseconds)
    return statistics.median(values) / 1e3 if values else float("nan")


def balance(device: torch.device) -> str:
    """How well calibrated costs predict steps here, and what balancing by them gains in time; see `cost_model`."""
    longest, rows, ranks, mixes, repeats, steps = (
        (256, 4, 2, 24, 2, 1) if device.type == "cpu" else (4096, 32, 16, 100, 3, 4)
    )
    sizes = cost_model.Sizes(longest, rows, ranks, mixes, repeats, steps)
    target = cost_model.hstu_target(sizes, device)
    calibration, _ = cost_model.fit(target, sizes)
    replayed = cost_model.replay(target, calibration, "zipf", sizes)
    return (
        f"{mixes} mixes fitted; then {ranks} ranks × {rows} rows, {steps} batches, Zipf 1.2 to {longest}: largest "
        f"÷ mean time of the ranks, every rank's batch in turn. Published for 16 × H100: {PUBLISHED_GAIN}×.\n\n"
        f"{rows_table([cost_model.fit_row('HSTU', calibration)])}\n\n"
        f"{rows_table([cost_model.balance_row('HSTU', 'zipf', replayed)])}"
    )
