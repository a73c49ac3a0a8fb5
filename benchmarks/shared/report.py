"""What all benchmark programs share: ranks, timing, Markdown tables, and results pages."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import duckdb
import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist
import torch.multiprocessing
from tqdm import tqdm

from benchmarks.shared.command_line import program_name

R = TypeVar("R")

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")


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


@contextlib.contextmanager
def one_rank() -> Iterator[None]:
    """This process as the only rank of a gloo group."""
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        yield
        dist.destroy_process_group()


def run_program(command: Sequence[str]) -> str:
    """Run a program in the root of the project; returns its output, and an error quotes the output's end."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout


def interleaved_seconds(
    variants: Mapping[Any, Callable[[], Any]],
    repeats: int,
    *,
    warmup: int = 1,
    clock: Callable[[], float] = time.process_time,
    barrier: Callable[[], Any] = lambda: None,
    show: bool = True,
) -> dict[Any, list[float]]:
    """Seconds of each variant in every round; a round runs all of them, and each round begins with the next one.

    Args:
        variants: by name.
        repeats: rounds that count.
        warmup: rounds before that do not.
        clock: seconds; by default of this process, so that others on the machine do not count.
        barrier: called before a variant starts, and before it counts as ended.
        show: a progress bar.
    """
    names = list(variants)
    seconds: dict[Any, list[float]] = {name: [] for name in names}
    for turn in tqdm(range(warmup + repeats), desc="rounds", leave=False, disable=not show):
        for place in range(len(names)):
            name = names[(turn + place) % len(names)]
            barrier()
            started = clock()
            variants[name]()
            barrier()
            if turn >= warmup:
                seconds[name].append(clock() - started)
    return seconds


def interleaved_on_ranks(
    variants: Mapping[Any, Callable[[], Any]], steps: int, *, warmup: int = 1
) -> dict[Any, np.ndarray]:
    """Milliseconds of each variant in every round, float64 `(steps,)`, from a barrier of all ranks to a barrier."""
    options: dict[str, Any] = {"clock": time.perf_counter, "barrier": dist.barrier, "show": dist.get_rank() == 0}
    seconds = interleaved_seconds(variants, steps, warmup=warmup, **options)
    return {name: np.multiply(of_variant, 1e3) for name, of_variant in seconds.items()}


def slowest_ms(measured: Sequence[Mapping[str, Any]]) -> dict[Any, np.ndarray]:
    """The largest milliseconds over the ranks, whose "ms" are those of `interleaved_on_ranks`."""
    return {name: np.max([each["ms"][name] for each in measured], axis=0) for name in measured[0]["ms"]}


def interleaved_medians(variants: Mapping[Any, Callable[[], Any]], repeats: int, **options: Any) -> dict[Any, float]:
    """Median seconds of each variant, see `interleaved_seconds`."""
    seconds = interleaved_seconds(variants, repeats, **options)
    return {name: statistics.median(values) for name, values in seconds.items()}


def milliseconds(
    call: Callable[[], Any],
    repeats: int,
    *,
    clock: Callable[[], float] = time.perf_counter,
    of: Callable[[list[float]], float] = statistics.median,
) -> float:
    """Median time of a call after one call to warm up; `of` may be `min`."""
    return of(interleaved_seconds({"": call}, repeats, clock=clock, show=False)[""]) * 1e3


def timed(call: Callable[..., R], seconds: list[float]) -> Callable[..., R]:
    """Wrap `call` so that it appends its thread's processor seconds to a list."""

    def timed_call(*arguments: Any, **keywords: Any) -> R:
        started = time.thread_time()
        try:
            return call(*arguments, **keywords)
        finally:
            seconds.append(time.thread_time() - started)

    return timed_call


def with_interval(statistic: Callable[[np.ndarray], Any], count: int) -> tuple[float, str]:
    """A statistic of `count` observations, and its text with the 95 % bootstrap interval.

    `statistic` takes the numbers of observations, int64 `(…, count)`, and returns `(…)`.
    """
    low, high = np.percentile(statistic(np.random.default_rng(0).integers(0, count, (2000, count))), [2.5, 97.5])
    value = float(statistic(np.arange(count)))
    return value, f"{value:.3f} ({low:.3f}–{high:.3f})"


def median_with_interval(values: np.ndarray) -> tuple[float, str]:
    """The median of observations `(n,)`, and its text with the 95 % bootstrap interval."""
    return with_interval(lambda chosen: np.median(values[chosen], axis=-1), len(values))


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table of rows that name their columns; trailing dots distinguish columns with the same heading."""
    lines = [[name.rstrip(".") for name in rows[0]], *([_cell(value) for value in row.values()] for row in rows)]
    head, *body = ("| " + " | ".join(line) + " |" for line in lines)
    return "\n".join([head, "|" + "---|" * len(rows[0]), *body])


def _cell(value: Any) -> str:
    """A value of a table; numbers near 1, most of them ratios, have more decimals than others."""
    if not isinstance(value, float):
        return "–" if value is None else str(value)
    size = abs(value)
    return f"{value:,.{4 if size < 2 else 2 if size < 10 else 1 if size < 100 else 0}f}"


def every(**axes: Iterable[Any]) -> list[dict[str, Any]]:
    """All combinations of the axes' values, by name of the axis."""
    return [dict(zip(axes, values)) for values in itertools.product(*axes.values())]


def measured(
    measure: Callable[..., Mapping[str, Any] | list[dict[str, Any]]], cases: Iterable[Mapping[str, Any]], **options: Any
) -> list[dict[str, Any]]:
    """The rows of a table: every case, and what `measure(**case, **options)` returns, a row or several."""
    found: list[dict[str, Any]] = []
    for case in tqdm(list(cases), desc=measure.__name__.removeprefix("measure_")):
        rows = measure(**case, **options)
        found += [{**case, **row} for row in ([rows] if isinstance(rows, Mapping) else rows)]
    return found


def query(rows: Sequence[Mapping[str, Any]], sql: str) -> list[dict[str, Any]]:
    """The rows of a query of DuckDB to the table `found`: these rows, and their `number`; what a row lacks is NULL."""
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: [row.get(name) for row in rows] for name in names}
    with duckdb.connect() as database:
        database.register("found", pa.table(columns | {"number": list(range(len(rows)))}))
        result = database.execute(sql)
        headings = [column[0] for column in result.description]
        return [dict(zip(headings, row)) for row in result.fetchall()]


def values(rows: Sequence[Mapping[str, Any]], expression: str, where: str = "true") -> list[Any]:
    """An SQL expression of rows that meet a condition, without NULL; a single value if it is an aggregate."""
    found = query(rows, f"SELECT {expression} AS value FROM found WHERE {where}")
    return [row["value"] for row in found if row["value"] is not None]


def share(values: Iterable[bool]) -> str:
    """How many of `values` are true, as "k of n"."""
    values = list(values)
    return f"{sum(values)} of {len(values)}"


def heading(title: str, threads: str = "; one thread per rank") -> str:
    """The head of a results page: title, date, command, machine and versions."""
    command = " ".join([f"python -m {program_name()}", *sys.argv[1:]])
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, numpy {np.__version__}"
    machine = f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()}{threads}"
    return f"# {title}\n\n{datetime.date.today().isoformat()} · `{command}` · {machine} · {versions}\n"


class Page:
    """The results page of the running program: its measurements, targets if there are any, and sections.

    A program with several pages distinguishes them by `suffix`.
    """

    def __init__(self, title: str, about: str, *, suffix: str = "", threads: str = "; one thread per rank") -> None:
        self._path = RESULTS / f"{program_name().rpartition('.')[2]}{suffix}.md"
        self._head = f"{heading(title, threads)}\n{about}"
        self._targets: list[dict[str, str]] = []
        self._sections: list[str] = []

    def target(self, what: str, target: str, reached: str, met: bool | None) -> None:
        """Add a target, and whether it is met; None for one that was not measured."""
        verdict = "–" if met is None else "yes" if met else "**no**"
        self._targets.append({"": what, "target": target, "reached": reached, "met": verdict})

    def at_most(self, what: str, limit: float, cases: Sequence[float], unit: str = "") -> None:
        """Add the target that the value of every case is at most `limit`."""
        met = [value <= limit for value in cases]
        reached = f"{cases[0]:.5g}{unit}" if met else "not measured"
        if cases[1:]:
            reached = f"mean {np.mean(cases):.5f}, worst {max(cases):.5f}, {share(met)} cases"
        self.target(what, f"≤ {limit:g}{unit}", reached, all(met) if met else None)

    def section(self, title: str, *parts: str | Sequence[Mapping[str, Any]]) -> None:
        """Add a section of paragraphs and of tables, which are given as rows; one without a title has these alone."""
        texts = [part if isinstance(part, str) else table(part) for part in parts]
        self._sections.append("\n\n".join([f"## {title}", *texts] if title else texts))

    def finish(self, *, quick: bool) -> None:
        """Print the page and, unless it is a quick look, write it to benchmarks/results."""
        summary = ["## Targets", table(self._targets)] if self._targets else []
        text = "\n\n".join([self._head, *summary, *self._sections])
        print(text)
        if not quick:
            self._path.write_text(text.rstrip() + "\n")
            print(f"\nwritten to {self._path}", file=sys.stderr)
