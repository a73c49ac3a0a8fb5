"""What all benchmark programs share: lengths, ranks, timing, Markdown tables, and the head of a results page."""

from __future__ import annotations

import datetime
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing
from tqdm import tqdm

RESULTS = Path(__file__).parent / "results"


def draw_lengths(name: str, count: int, seed: int) -> np.ndarray:
    """int64 `(count,)`: "uniform" 512, "zipf" 1.2 to 4096, "lognormal" of mean 512, "user-like" of mean about 165."""
    rng = np.random.default_rng(seed)
    if name == "uniform":
        return np.full(count, 512, dtype=np.int64)
    if name == "zipf":
        return np.clip(rng.zipf(1.2, count), 1, 4096).astype(np.int64)
    if name == "lognormal":
        spread = np.log(2.0)
        return np.clip(rng.lognormal(np.log(512) - spread / 2, np.sqrt(spread), count), 1, 4096).astype(np.int64)
    if name == "user-like":
        return np.clip(20 + 125 * rng.weibull(0.76, count), 20, 2314).astype(np.int64)
    raise ValueError(f"lengths {name!r} are unknown; choose uniform, zipf, lognormal or user-like")


def run_ranks(
    function: Callable[..., Any], world_size: int, *arguments: Any, timeout: float = 600.0, device: str = "cpu"
) -> list[Any]:
    """Call `function(rank, *arguments)` on ranks of one thread each; returns what each returned.

    Ranks on the CPU use gloo; on "cuda" every rank has a GPU of its own, and NCCL.
    """
    with tempfile.TemporaryDirectory() as folder:
        context = torch.multiprocessing.start_processes(
            _rank_main,
            args=(function, world_size, folder, arguments, device),
            nprocs=world_size,
            join=False,
            start_method="spawn",
        )
        deadline = datetime.datetime.now() + datetime.timedelta(seconds=timeout)
        while not context.join(timeout=1):
            if datetime.datetime.now() > deadline:
                for process in context.processes:
                    process.kill()
                raise TimeoutError(f"ranks did not finish within {timeout:.0f} s")
        return [torch.load(Path(folder, f"{rank}.pt"), weights_only=False) for rank in range(world_size)]


def _rank_main(
    rank: int, function: Callable[..., Any], world_size: int, folder: str, arguments: tuple[Any, ...], device: str
) -> None:
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    result = function(rank, *arguments)
    torch.save(result, Path(folder, f"{rank}.pt"))
    dist.barrier()
    dist.destroy_process_group()


def interleaved_medians(
    variants: Mapping[str, Callable[[], Any]],
    repeats: int,
    *,
    clock: Callable[[], float] = time.process_time,
    show: bool = True,
) -> dict[str, float]:
    """Median seconds of each variant; every round runs all of them, after one round that is not counted.

    Args:
        variants: by name.
        repeats: rounds that count.
        clock: seconds; by default of this process, so that others on the machine do not count.
        show: a progress bar.
    """
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for turn in tqdm(range(repeats + 1), desc="rounds", leave=False, disable=not show):
        for name, variant in variants.items():
            started = clock()
            variant()
            if turn:
                seconds[name].append(clock() - started)
    return {name: statistics.median(values) for name, values in seconds.items()}


def milliseconds(call: Callable[[], Any], repeats: int, *, clock: Callable[[], float] = time.perf_counter) -> float:
    """Median time of a call after one call to warm up."""
    return interleaved_medians({"": call}, repeats, clock=clock, show=False)[""] * 1e3


@dataclass(frozen=True)
class Fit:
    """A least-squares line of time on a measure of work."""

    slope: float
    intercept: float
    r_squared: float


def fit_line(work: list[float], seconds: list[float]) -> Fit:
    """Least squares of `seconds` on `work`."""
    slope, intercept = np.polyfit(work, seconds, 1)
    residual = np.asarray(seconds) - (slope * np.asarray(work) + intercept)
    return Fit(float(slope), float(intercept), 1.0 - float(residual.var() / np.var(seconds)))


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def heading(title: str, command: str) -> str:
    """The head of a results page: title, date, command, machine and versions."""
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, numpy {np.__version__}"
    machine = f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()}; one thread per rank"
    return f"# {title}\n\n{datetime.date.today().isoformat()} · `{command}` · {machine} · {versions}\n"


def write_page(name: str, text: str) -> Path:
    """Write a results page and return its path."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.md"
    path.write_text(text.rstrip() + "\n")
    return path


def share(values: Iterable[bool]) -> str:
    """How many of `values` hold, as "k of n"."""
    values = list(values)
    return f"{sum(values)} of {len(values)}"


class Page:
    """A results page: sections, and a table of targets on top."""

    def __init__(self, name: str, title: str, command: str, about: str) -> None:
        self._name, self._head = name, f"{heading(title, command)}\n{about}"
        self._targets: list[list[str]] = []
        self._sections: list[str] = []

    def target(self, what: str, target: str, reached: str, met: bool) -> None:
        """Note a target and whether it is met."""
        self._targets.append([what, target, reached, "yes" if met else "**no**"])

    def section(self, title: str, *paragraphs: str) -> None:
        """Add a section."""
        self._sections.append("\n\n".join([f"## {title}", *paragraphs]))

    def finish(self, *, quick: bool) -> None:
        """Print the page and, unless it is a quick look, write it."""
        summary = table(["", "target", "reached", "met"], self._targets)
        finish_page(self._name, "\n\n".join([self._head, "## Targets", summary, *self._sections]), quick=quick)


def finish_page(name: str, text: str, *, quick: bool) -> None:
    """Print a results page and, unless it is a quick look, write it."""
    print(text)
    if not quick:
        print(f"\nwritten to {write_page(name, text)}", file=sys.stderr)
