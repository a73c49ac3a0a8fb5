"""`python -m evenrank.observe script.py …`: runs a training script unchanged, and reports what balancing would gain.

When its script has ended, every rank writes `rank<r>.npz` into a folder; rank 0 waits for all files and reports.
"""

from __future__ import annotations

import itertools
import os
import runpy
import shlex
import sys
import time
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro

from commons.checks import require_at_least
from commons.cli.answer import ON_TERMINAL, AnswerOutputs, command_line
from commons.cli.simulate.answer import answer_of
from commons.cli.simulate.command import RowCost
from commons.cli.simulate.simulation import Simulation, Source, compare, describe_task
from commons.console import print_error
from commons.parser import parse_arguments
from commons.perf_model.gain import LoadedRows, StepCost
from commons.run_log.step_time import fit_times
from commons.trainer.ranks.rank_info import rank_of_process
from commons.whole_folder import whole_file

# Seconds that rank 0 waits for the files of the other ranks.
_PATIENCE = 60.0
# Most steps that are recorded, the first ones, so that a long run needs no more memory.
_MOST_STEPS = 10_000
_OF_BALANCED = (
    "evenrank has balanced {} of these steps already: rows are as they were loaded, gains are those over a run without "
    "balancing, and step times are not used."
)
_OF_SAME_ROWS = (
    "Some ranks have rows of the same lengths in every step. Unless they are model-parallel peers, their rows are "
    "trained several times: give each rank its own rows, such as by torch's DistributedSampler."
)


@dataclass
class Observe:
    """Run a training script unchanged, and report the time lost to uneven ranks and what balancing would gain.

    Rows, lengths and times of the first 10,000 steps are recorded in TorchRec's pipelines, without communication or
    changes to batches.

    For example:
      torchrun --nproc-per-node 8 -m evenrank.observe train.py --epochs 1
      torchrun --nproc-per-node 8 -m evenrank.observe --task hstu --hidden-size 512 -m my.train --config a.toml
      python -m evenrank.observe --report --html observed.html
    """

    folder: Path = Path("observed")  # the folder for the ranks' records, shared by all ranks
    report: bool = False  # report on the records in the folder, without running a script
    window: tuple[int, ...] = (2, 4, 8)  # windows to simulate, as numbers of batches
    # The cost of a row.
    of_cost: Annotated[RowCost, tyro.conf.arg(name="cost"), tyro.conf.OmitArgPrefixes] = field(
        default_factory=lambda: RowCost(task="tokens")
    )
    # Where rank 0 prints or writes the report.
    of_output: Annotated[AnswerOutputs, tyro.conf.arg(name="output"), tyro.conf.OmitArgPrefixes] = ON_TERMINAL


def main(argv: Sequence[str] | None = None) -> int:
    """Run a script and record it, or report on a record; returns the script's status, or 2 for a mistake."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    # Our options, then the script or `-m module` with its arguments.
    at = next((at for at, each in enumerate(arguments) if each == "-m" or each.endswith(".py")), len(arguments))
    own, script = arguments[:at], arguments[at:]
    command_line.set(shlex.join(["python", "-m", "evenrank.observe", *arguments]))
    try:
        options = parse_arguments(Observe, own, prog="python -m evenrank.observe")
        if options is None:  # it printed the help
            return 0
        options.of_cost.check()
        options.of_output.require({})
        for window in options.window:
            require_at_least("window", window, 2)
        if options.report:
            return _report(options, 0.0)
        if not script or script == ["-m"]:
            raise ValueError("no script is named; give one with its arguments: python -m evenrank.observe train.py")
        if script[0] != "-m" and not Path(script[0]).is_file():
            raise ValueError(f"{script[0]} is not a file; name the training script, or a module with -m")
        if script[0] == "-m" and find_spec(script[1].split(".")[0]) is None:
            raise ValueError(f"there is no module {script[1]}, neither installed nor in {Path.cwd()}: correct the name")
        try:
            options.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"folder {options.folder} cannot be made ({error.strerror}); records are written there: give a path "
                "where you may write"
            ) from None
    except (ValueError, OSError) as error:
        print_error(str(error))
        return 2
    return _observe(options, script)


def _observe(options: Observe, script: list[str]) -> int:
    from commons.pipeline.recording import Recorder

    here, rank, world_size = Path.cwd(), 0, 1

    def find_rank() -> None:
        """Find this rank, which the script may know only later, and remove the record of an earlier run."""
        nonlocal rank, world_size
        rank, world_size = rank_of_process()
        (here / options.folder / f"rank{rank}.npz").unlink(missing_ok=True)

    find_rank()
    for record in options.folder.glob("rank*.npz") if rank == 0 else ():  # copied here from hosts after an earlier run
        record.unlink(missing_ok=True)
    recorder = Recorder(find_rank, _MOST_STEPS)
    recorder.install()
    status: Any = 0
    try:
        _run(script)
    except SystemExit as stop:
        status = stop.code
    finally:
        if not recorder.has_begun:
            find_rank()
        os.chdir(here)  # our paths are relative to it, and scripts may leave it, as Hydra does
        with whole_file(options.folder / f"rank{rank}.npz") as file:
            np.savez_compressed(
                file,
                world_size=np.int64(world_size),
                unknown=np.int64(recorder.unknown),
                balanced=np.int64(recorder.balanced),
                rows=np.array([len(lengths) for lengths in recorder.lengths], np.int64),
                lengths=np.concatenate([np.empty(0, np.int64), *recorder.lengths]),
                seconds=np.array(recorder.seconds, np.float64),
            )
    if rank == 0:
        reported = _report(options, _PATIENCE)
        status = status or reported
    if status is None or isinstance(status, int):
        return status or 0
    print_error(str(status))
    return 1


def _run(script: list[str]) -> None:
    if script[0] == "-m":
        sys.argv = script[1:]
        runpy.run_module(script[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = script
    sys.path.insert(0, str(Path(script[0]).resolve().parent))
    runpy.run_path(script[0], run_name="__main__")


def _report(options: Observe, patience: float) -> int:
    """Report on the ranks' records, waiting for them for `patience` seconds; returns the exit status."""
    try:
        ranks = _read(options.folder, patience)
        rows, seconds = _as_loaded(ranks, options.of_cost)
        if rows.num_ranks == 1:
            raise ValueError("one rank was observed; balancing needs several ranks: start the script with torchrun")
        balanced = max(int(rank["balanced"]) for rank in ranks)
        cost, note = (None, _OF_BALANCED.format(balanced)) if balanced else step_cost(rows, seconds)
        source = Source(
            name=f"{rows.num_steps} steps of {rows.num_ranks} ranks",
            load=lambda num_ranks, steps: rows.first_steps(steps),
            num_rows=len(rows.tokens),
            batch_size=max(1, round(len(rows.tokens) / (rows.num_steps * rows.num_ranks))),
            tokens=rows.tokens,
            costs=rows.workloads,
            task=describe_task(options.of_cost.model()),
            remedy="observe more steps",
            of_what="in the rows' cost" if cost is None else "of a whole step, by its time",
            cost=cost,
        )
        # All steps, though batches may be smaller than the mean, and a rank have no row in some.
        comparison = compare(source, rows.num_ranks, rows.num_steps, options.window)
        notes = [note] if cost is None else [note, _lost(rows, cost)]
        if rows.num_steps >= _MOST_STEPS:
            notes.append(f"Only the first {_MOST_STEPS:,} steps of a run are recorded.")
        varied = [rank for rank in ranks if len(np.unique(rank["lengths"])) >= 8]  # others may be equal by chance
        if len({(rank["rows"].tobytes(), rank["lengths"].tobytes()) for rank in varied}) < len(varied):
            notes.append(_OF_SAME_ROWS)
        options.of_output.give(answer_of(Simulation(source, (comparison,), tuple(notes))))
    except (ValueError, OSError) as error:
        print_error(str(error))
        return 2
    return 0


def _read(folder: Path, patience: float) -> list[dict[str, np.ndarray]]:
    """The records of all ranks; waits for missing records."""
    if not any(folder.glob("rank*.npz")):
        raise ValueError(f"{folder} has no record of a rank; run a script with --folder {folder} first")
    # Any record has the number of ranks; rank 0 has written its record before it reports.
    world_size, give_up = int(_load(min(folder.glob("rank*.npz")))["world_size"]), time.monotonic() + patience
    paths = [folder / f"rank{rank}.npz" for rank in range(world_size)]
    while missing := [rank for rank, path in enumerate(paths) if not path.exists()]:
        if time.monotonic() > give_up:
            raise ValueError(
                f"ranks {missing[:8]} of {world_size} have written no record to {folder}; if hosts do not share this "
                "folder, copy their files there, and run python -m evenrank.observe --report"
            )
        time.sleep(0.1)
    ranks = [_load(path) for path in paths]
    if not any(len(rank["rows"]) for rank in ranks):
        unknown = sum(int(rank["unknown"]) for rank in ranks)
        raise ValueError(
            f"{unknown} steps were trained, and the row lengths of none are known; the pipeline must read batches with "
            "KeyedJaggedTensors on the host, a row per sample for every key: let the pipeline copy them to the device, "
            "and use no variable batch per key"
            if unknown
            else "the script trained no step with one of TorchRec's pipelines in this process; if it starts its ranks "
            "itself, let torchrun start them; if it has its own training loop, pass the rows' lengths to evenrank "
            "simulate"
        )
    return ranks


def _load(path: Path) -> dict[str, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as file:
            found = {name: file[name] for name in ("world_size", "unknown", "rows", "lengths", "seconds")}
            return found | {"balanced": file["balanced"] if "balanced" in file else np.int64(0)}  # not in older records
    except (ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{path} is no record of a rank, or damaged ({error}): run the script again") from None


def _as_loaded(ranks: list[dict[str, np.ndarray]], cost: RowCost) -> tuple[LoadedRows, np.ndarray]:
    """The rows by step, and the seconds of each step, the median over ranks; NaN if no rank has a time."""
    step = np.concatenate([np.repeat(np.arange(len(rank["rows"])), rank["rows"]) for rank in ranks])
    of_rank = np.repeat(np.arange(len(ranks)), [rank["rows"].sum() for rank in ranks])
    tokens = cost.tokens(np.concatenate([rank["lengths"] for rank in ranks]))
    order = np.argsort(step, kind="stable")
    rows = LoadedRows(cost.costs(tokens)[order], tokens[order], step[order], of_rank[order], len(ranks))
    seconds = [*itertools.zip_longest(*(rank["seconds"] for rank in ranks), fillvalue=np.nan)]
    seconds = seconds[: rows.num_steps]  # without steps at the end that have no row on any rank
    return rows, np.ma.median(np.ma.masked_invalid(seconds), axis=1).filled(np.nan)


def step_cost(rows: LoadedRows, seconds: np.ndarray) -> tuple[StepCost | None, str]:
    """The time of a step as a function of its largest load, None if the recorded times do not follow it; and a note."""
    largest = rows.as_loaded.loads.max(axis=1).astype(np.float64)
    fit = fit_times("steps", largest, seconds * 1e3)
    if fit is None:
        known = largest[np.isfinite(seconds)]
        spread = known.std() / known.mean() if known.any() else 0.0
        return None, (
            f"{len(known)} steps have times, and their largest loads vary by {spread:.2%} (standard deviation ÷ mean): "
            "speed-ups are ratios of loads, because a fit needs 20 steps whose loads vary by 10 % or more."
        )
    if not fit.follows:
        return None, (
            f"Step times do not follow the largest loads, which explain {fit.r_squared:.0%} of their variance: "
            "speed-ups are ratios of loads, and another --task may predict the cost of a row better."
        )
    note = f"The largest loads explain {fit.r_squared:.0%} of the step times' variance."
    # A step without load takes no negative time: then a lower slope gives the fit's time at the mean load.
    per_load = fit.ms_per_load + min(0.0, fit.fixed_ms) / float(largest.mean())
    return StepCost(per_load, max(0.0, fit.fixed_ms)), note


def _lost(rows: LoadedRows, cost: StepCost) -> str:
    """The time that steps lost to uneven ranks, with the worst steps."""
    loads = rows.as_loaded.loads
    lost = cost.per_load * (loads.max(axis=1) - loads.mean(axis=1))
    worst = np.argsort(-lost)[:3].tolist()
    steps = ", ".join(f"step {step} {lost[step]:.1f} ms (rank {int(loads[step].argmax())})" for step in worst)
    mean = cost.per_step + cost.per_load * float(loads.max(axis=1).mean())  # like the lost time, and that of the table
    return (
        f"Uneven ranks cost {lost.mean():.1f} ms of a mean step of {mean:.1f} ms; 99th percentile "
        f"{np.quantile(lost, 0.99):.1f} ms; most: {steps}."
    )
