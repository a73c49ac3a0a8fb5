"""All tests and measurements that need a GPU, in under half an hour and on one page, benchmarks/results/on_device.md.

Compilation of the kernels, the cases of tests/gpu (two ranks share a single GPU), the pipelines under torch's CUDA
sanitizer, the cost of the exchange and of HSTU's attention, a traced training step, and the gain of balancing in time,
with every rank's batch run one after another on one GPU. Every part has its own process and time limit: if a part
fails, the page names it and the other parts still run. Their output is in runs/on_device while they run.

Examples:
    python -m benchmarks.on_device
    python -m benchmarks.on_device --only exchange balance
    python -m benchmarks.on_device --rehearse          # the same code on the CPU; its numbers have no meaning
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.models.attention import device_milliseconds, device_sections
from benchmarks.models.cost_model import load_target, replay
from benchmarks.shared.command_line import from_command_line
from benchmarks.shared.lengths import draw, make_batch
from benchmarks.shared.one_of_many_ranks import fake_ranks, plan_batch, planned_exchange
from benchmarks.shared.report import RESULTS, ROOT, TORCHRUN, every, heading, measured, table
from commons.console import print_error
from hstu.model.execution import choose_execution
from hstu.train_config import ModelArgs

PartName = Literal["warm_up", "cases", "layers", "sanitizer", "exchange", "attention", "step", "balance"]
LOGS = Path("runs", "on_device")  # what the parts print, while they run
LAYER_CASES = "test_hstu_layers_on_device"  # the file of tests/gpu that has its own part
PUBLISHED_GAIN = 1.53  # recsys-examples' balanced shuffler on 16 × H100, the setting of hstu/configs/benchmark.toml


class PartFailedError(RuntimeError):
    """A part has run and failed; the message is the part's text."""


def warm_up(device: torch.device) -> str:
    """Compile what later parts need: kernels of three widths, and code of torch.compile."""
    rows = []
    for head_dim in (16,) if device.type == "cpu" else (64, 128, 256):
        config = ModelArgs(num_attention_heads=4, kv_channels=head_dim, compute_dtype="bf16")
        hstu = config.hstu_config(4096)
        started = time.monotonic()
        chosen = choose_execution(hstu, device)
        seconds = f"{time.monotonic() - started:.0f}"
        chosen_by = {"by Triton": chosen.uses_triton, "compiled": chosen.compiles}
        rows.append({"channels of a head": head_dim, "seconds": seconds} | chosen_by)
    return table(rows)


def cases_on_device(device: torch.device) -> str:
    """Run all of tests/gpu except the layers, by ci/test_gpu.sh."""
    if device.type == "cpu":
        return _run_cases(["ci/test_gpu.sh", "--cpu", "2", "-k", "transports"])
    return _run_cases(["ci/test_gpu.sh", "--share", "-k", f"not {LAYER_CASES}"])


def cases_of_layers(device: torch.device) -> str:
    """Run the cases of HSTU's layers, which compile most kernels."""
    arguments = [f"tests/gpu/{LAYER_CASES}.py", "--device", device.type, "-p", "no:cacheprovider"]
    chosen = ["-k", "a_model and fp32"] if device.type == "cpu" else []
    return _run_cases([*_launch(device), "-m", "pytest", *arguments, *chosen])


def cases_under_sanitizer(device: torch.device) -> str:
    """Run the pipelines under torch's CUDA sanitizer, which detects races between streams."""
    arguments = ["tests/gpu/test_pipelines_on_device.py", "--device", device.type, "-p", "no:cacheprovider"]
    cases = "lite" if device.type == "cpu" else "unshuffled and device_id"  # on the groups that the trainer makes
    command = [*_launch(device), "-m", "pytest", *arguments, "-k", cases]
    # Without CUDA, torch cannot be imported under the sanitizer.
    return _run_cases(command, {"TORCH_CUDA_SANITIZER": "1"} if device.type == "cuda" else None)


def _launch(device: torch.device) -> list[str]:
    """The torchrun command: a rank on every GPU, two ranks on a single GPU, or two ranks on the CPU."""
    gpus = torch.cuda.device_count() if device.type == "cuda" else 0
    launch = [*TORCHRUN, f"--nproc_per_node={max(gpus, 2)}"]
    return [*launch, "--no-python", "ci/share_gpu.sh", sys.executable] if gpus == 1 else launch


def _run_cases(command: Sequence[str], environment: dict[str, str] | None = None) -> str:
    """Run cases of pytest; the part's text is pytest's summary."""
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
    """Run a program, and copy its output to standard error while it runs; returns its status and output."""
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
    """Time of one rank of many to finish a shuffle, on the host and on the device, without network time."""
    rehearses = device.type == "cpu"
    sizes = {"ranks": (8, 64), "rows": (32, 128), "longest": (1024, 4096)}  # rows per rank, and the longest row
    cases = every(ranks=(4,), rows=(8,), longest=(64,)) if rehearses else every(**sizes)
    return (
        "Pack, call the collective, unpack; the other ranks' rows are generated and the collective sends nothing, so "
        "network time is excluded. On CUDA a wait of the host for the device would be an error. Medians.\n\n"
        + table(measured(measure_finish, cases, device=device, repeats=3 if rehearses else 40))
    )


def measure_finish(ranks: int, rows: int, longest: int, device: torch.device, repeats: int) -> dict[str, Any]:
    rank, on_cuda = min(3, ranks - 1), device.type == "cuda"
    lengths = np.minimum(draw("zipf", ranks * rows, 0), longest)
    batch = make_batch(lengths[rank * rows : (rank + 1) * rows])
    (plan, layout), host_ms = plan_batch(lengths, ranks, ranks_per_node=None), []
    on_device = (batch.pin_memory() if on_cuda else batch).to(device, non_blocking=True)
    made = partial(planned_exchange, plan.gathered, plan.destination, layout, rank, pin_memory=on_cuda)
    waiting = [made() for _ in range(repeats + 5)]
    sent = waiting[0].bytes_sent

    def finish() -> None:
        made = waiting.pop()
        if on_cuda and len(waiting) < repeats:  # the allocator and the kernels are warm
            torch.cuda.set_sync_debug_mode("error")
        started = time.perf_counter()
        buffer, sent_rows, indices = made.pack([on_device])
        made.send_rows(buffer, sent_rows, dist.group.WORLD, async_op=False)  # type: ignore[arg-type]
        made.unpack(on_device, buffer, indices)
        host_ms.append((time.perf_counter() - started) * 1e3)
        if on_cuda:
            torch.cuda.set_sync_debug_mode("default")

    with fake_ranks(ranks, rank):
        device_ms = device_milliseconds(finish, device, repeats, warmup=5)
    host = statistics.median(host_ms[5:])
    return {"sent kB": sent / 1e3, "host ms": host, "device ms": device_ms if on_cuda else None}


def attention(device: torch.device) -> str:
    """HSTU's attention: time compared with the arithmetic floor, and with the blocks of dense products."""
    if device.type == "cpu":
        return "\n\n".join(device_sections(device, head_dims=(64,), rows=2, longest=16, repeats=1))
    return "\n\n".join(device_sections(device))


def traced_step(device: torch.device) -> str:
    """Steps of `hstu.train` on random data, balanced, under torch's profiler."""
    small = device.type == "cpu"
    first, traced, rows = (2, 2, 2) if small else (10, 6, 32)
    model = (
        "--model.hidden-size 8 --model.num-layers 1 --model.num-attention-heads 1 --model.kv-channels 8"
        if small
        else "--model.hidden-size 512 --model.num-layers 8 --model.num-attention-heads 4 --model.kv-channels 128"
    )
    with tempfile.TemporaryDirectory() as folder:
        flags = (
            f"{model} --model.compute-dtype bf16 --optimizer.sharding row_wise --trainer.device {device.type} "
            "--dataset.dataset-name random --dataset.num-batches 20 "
            f"--dataset.max-history-seqlen {16 if small else 1024} "
            f"--trainer.train-batch-size {rows} --trainer.eval-batch-size 2 --trainer.eval-interval 1000 "
            f"--trainer.max-train-iters {first + traced + 1} --trainer.enable-balanced-shuffler --trainer.sinks "
            f"--trainer.profile --trainer.profile-step-start {first} --trainer.profile-step-end {first + traced} "
        ).split()
        status, output = _streamed([*_launch(device), "-m", "hstu.train", *flags, "--trainer.run-dir", folder])
        if status:
            raise PartFailedError("\n".join(["```", *output.splitlines()[-20:], "```"]))
        trace = json.loads(Path(folder, "trace-rank0.json").read_text())
    ranks = max(torch.cuda.device_count(), 2) if device.type == "cuda" else 2
    shared = ", two ranks on one GPU" if device.type == "cuda" and torch.cuda.device_count() == 1 else ""
    found = [{"": key, "median of the steps": value} for key, value in describe_trace(trace["traceEvents"]).items()]
    return f"{ranks} ranks{shared}; rank 0, {traced} steps.\n\n" + table(found)


def describe_trace(events: Iterable[dict[str, Any]]) -> dict[str, str]:
    """The device's work in the forward passes of a torch.profiler trace: milliseconds or a share, by name."""
    spans = [event for event in events if event.get("ph") == "X" and "dur" in event]
    forwards = [each for each in spans if each["cat"] == "user_annotation" and each["name"].startswith("## forward")]
    begins, ends = (
        np.array(sorted((each["ts"], each["ts"] + each["dur"]) for each in spans if each["cat"] == "kernel"))
        .reshape(-1, 2)
        .T
    )
    found = {"forward pass on the host": f"{_median(each['dur'] for each in forwards):.2f} ms"}
    if not len(begins):
        return found | {"gap before the first layer": "– (no kernels in the trace)"}
    last = np.concatenate([[-np.inf], np.maximum.accumulate(ends)])  # when the device has finished all earlier spans
    gaps, busy = [], []
    for begin, length in ((each["ts"], each["dur"]) for each in forwards):
        following = int(np.searchsorted(begins, begin))
        if following < len(begins):
            gaps.append(max(0.0, begins[following] - max(begin, last[following])))
            alone = np.minimum(ends, begin + length) - np.maximum(np.maximum(begins, last[:-1]), begin)
            busy.append(alone.clip(min=0).sum() / length)
    return found | {
        "gap before the first layer, the device idle": f"{_median(gaps):.3f} ms",
        "device busy during it": f"{statistics.median(busy):.0%}" if busy else "–",
        "kernels in a step": f"{len(begins) / max(len(forwards), 1):.0f}",
    }


def _median(microseconds: Iterable[float]) -> float:
    values = list(microseconds)
    return statistics.median(values) / 1e3 if values else float("nan")


def balance(device: torch.device) -> str:
    """The gain of balancing in time: the batches of all ranks, one after another on this device."""
    target, longest = load_target("HSTU", device)
    sizes = (2, 2, 2, 16) if device.type == "cpu" else (16, 32, 4, longest)
    ranks, rows, steps, longest = sizes
    costs = {"by operations": target.task}
    row = replay(target, costs, "zipf", ranks=ranks, rows=rows, longest=longest, steps=steps)
    return (
        f"{ranks} ranks × {rows} rows, {steps} batches, lengths to {longest}: forward and backward pass of every "
        "rank's batch, one after another, without sharded tables, exchange and updates; largest ÷ mean time of the "
        f"ranks, and the slowest rank's speed-up. Published for 16 × H100: {PUBLISHED_GAIN}×.\n\n" + table([row])
    )


@dataclass(frozen=True)
class Part:
    """One section of the page."""

    title: str
    seconds: float  # time limit
    measure: Callable[[torch.device], str]  # makes the text; on the CPU a rehearsal with small sizes


PARTS: dict[PartName, Part] = {
    "warm_up": Part("Compilation", 300, warm_up),
    "cases": Part("Cases of tests/gpu", 420, cases_on_device),
    "layers": Part("Cases of HSTU's layers", 300, cases_of_layers),
    "sanitizer": Part("Pipelines under torch's CUDA sanitizer", 180, cases_under_sanitizer),
    "exchange": Part("Finishing a shuffle", 60, exchange),
    "attention": Part("HSTU's attention", 180, attention),
    "step": Part("A traced training step", 120, traced_step),
    "balance": Part("Balance in time", 150, balance),
}


def main(
    only: tuple[PartName, ...] = tuple(PARTS),
    rehearse: bool = False,
    output: Path | None = None,
) -> int:
    """Run the parts and write the page; the exit status is 1 if one of them failed, 2 without a GPU.

    Args:
        only: the parts to run.
        rehearse: run on the CPU, with small sizes; the page is printed, and only written if `output` is given.
        output: path of the page; by default benchmarks/results/on_device.md.
    """
    device = torch.device("cpu" if rehearse else "cuda")
    if not rehearse and not torch.cuda.is_available():
        print_error(
            "no CUDA device is visible; this is what only a GPU can tell: use --rehearse for its code on the CPU"
        )
        return 2
    sections, failed = [], []
    for name in only:
        print(f"== {PARTS[name].title}", file=sys.stderr, flush=True)
        text, fine = _run(name, device.type)
        sections.append(text)
        failed += [] if fine else [name]
    page = "\n\n".join([_head(device, rehearse, failed), *sections]) + "\n"
    print(page)
    if output is None and not rehearse:
        output = RESULTS / "on_device.md"
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(page)
    return 1 if failed else 0


def print_part(name: PartName, kind: str) -> int:
    """Run one part in this process and print its section; the exit status is 1 if it failed."""
    try:
        print(PARTS[name].measure(torch.device(kind)))
    except PartFailedError as error:
        print(error)
        return 1
    return 0


def _run(name: PartName, kind: str) -> tuple[str, bool]:
    """Run a part in its own process; returns its section, and whether it succeeded."""
    program = "import sys; from benchmarks.on_device import print_part; sys.exit(print_part(*sys.argv[1:]))"
    started, limit = time.monotonic(), PARTS[name].seconds * (3 if kind == "cpu" else 1)  # CPU cores may be shared
    output, log = LOGS / f"{name}.md", LOGS / f"{name}.log"
    command = [sys.executable, "-c", program, name, kind]
    status = run_limited(command, limit, output, log)
    text = output.read_text().strip()
    if status is None:
        text += f"\n\nIt was ended after {limit:.0f} s."
    if status is None or not text:
        last = "\n".join(log.read_text().splitlines()[-20:])
        text += f"\n\nThe last lines of `{log}`:\n\n```\n{last}\n```"
    verdict = "" if status == 0 else " · **failed**"
    return f"## {PARTS[name].title}\n\n{time.monotonic() - started:.0f} s{verdict}\n\n{text.strip()}", status == 0


def run_limited(command: Sequence[str], seconds: float, output: Path, complaints: Path) -> int | None:
    """Run a program with its output and errors in files; returns its status, or None if it did not end in time.

    Processes that it has started are ended too, because torchrun gives every rank its own session.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("w") as out, complaints.open("w") as err:
        process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=err)
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            for each in [process.pid, *descendants(process.pid)]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(each, signal.SIGKILL)
            process.wait()
    return None


def descendants(process: int) -> Iterator[int]:
    """The ids of all descendants of a process."""
    for threads in Path(f"/proc/{process}/task").glob("*/children"):
        for child in map(int, threads.read_text().split()):
            yield child
            yield from descendants(child)


def _head(device: torch.device, rehearse: bool, failed: list[PartName]) -> str:
    names = ("torchrec", "fbgemm-gpu", "triton")
    packages = ", ".join(f"{each.name} {each.version}" for each in metadata.distributions() if each.name in names)
    lines = [heading("On a GPU").rstrip()]
    if rehearse:
        lines.append("A rehearsal on the CPU: the code has run, the numbers have no meaning.")
    else:
        gpu = torch.cuda.get_device_properties(device)
        lines.append(
            f"{torch.cuda.device_count()} × {gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, compute capability "
            f"{gpu.major}.{gpu.minor}, CUDA {torch.version.cuda}; {packages}."
        )
    lines.append(f"**Failed: {', '.join(failed)}.**" if failed else "All selected parts have run.")
    return "\n\n".join(lines)


if __name__ == "__main__":
    sys.exit(from_command_line(main, __doc__))
