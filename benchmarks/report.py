"""What all benchmark programs share: lengths, ranks, timing, Markdown tables, and the head of a results page."""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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


def run_program(command: Sequence[str]) -> None:
    """Run a program; an error has the end of what it printed there."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-2000:]}")


@contextlib.contextmanager
def one_rank() -> Iterator[None]:
    """This process as the only rank of a gloo group."""
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        yield
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


def with_interval(statistic: Callable[[np.ndarray], Any], count: int) -> tuple[float, str]:
    """A statistic of `count` observations, and its text with the 95 % bootstrap interval.

    Args:
        statistic: takes the numbers of observations, int64 `(…, count)`, and returns `(…)`.
        count: observations.
    """
    low, high = np.percentile(statistic(np.random.default_rng(0).integers(0, count, (2000, count))), [2.5, 97.5])
    value = float(statistic(np.arange(count)))
    return value, f"{value:.3f} ({low:.3f}–{high:.3f})"


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


def rows_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table of rows that name their columns; a dot behind a name tells columns of one heading apart."""
    return table([name.rstrip(".") for name in rows[0]], [[_cell(value) for value in row.values()] for row in rows])


def _cell(value: Any) -> str:
    """A value of a table; numbers near 1, most of them ratios, have more decimals than others."""
    if not isinstance(value, float):
        return str(value)
    size = abs(value)
    return f"{value:,.{4 if size < 2 else 2 if size < 10 else 1 if size < 100 else 0}f}"


def mean_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Mean of every column."""
    return {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}


def heading(title: str, command: str, threads: str = "; one thread per rank") -> str:
    """The head of a results page: title, date, command, machine and versions."""
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, numpy {np.__version__}"
    machine = f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()}{threads}"
    return f"# {title}\n\n{datetime.date.today().isoformat()} · `{command}` · {machine} · {versions}\n"


def share(values: Iterable[bool]) -> str:
    """How many of `values` hold, as "k of n"."""
    values = list(values)
    return f"{sum(values)} of {len(values)}"


class Page:
    """A results page: what was measured, targets if there are any, and sections."""

    def __init__(
        self, name: str, title: str, command: str, about: str, *, threads: str = "; one thread per rank"
    ) -> None:
        self._name, self._head = name, f"{heading(title, command, threads)}\n{about}"
        self._targets: list[list[str]] = []
        self._sections: list[str] = []

    def target(self, what: str, target: str, reached: str, met: bool) -> None:
        """Note a target and whether it is met."""
        self._targets.append([what, target, reached, "yes" if met else "**no**"])

    def section(self, title: str, *paragraphs: str) -> None:
        """Add a section; one without a title has its paragraphs alone."""
        self._sections.append("\n\n".join([f"## {title}", *paragraphs] if title else paragraphs))

    def finish(self, *, quick: bool) -> None:
        """Print the page and, unless it is a quick look, write it to benchmarks/results."""
        summary = ["## Targets", table(["", "target", "reached", "met"], self._targets)] if self._targets else []
        text = "\n\n".join([self._head, *summary, *self._sections])
        print(text)
        if not quick:
            path = RESULTS / f"{self._name}.md"
            path.write_text(text.rstrip() + "\n")
            print(f"\nwritten to {path}", file=sys.stderr)
