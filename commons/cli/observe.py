"""`python -m evenrank.observe script.py …`: runs a training script as it is, and says what balancing would gain it.

Every rank leaves `rank<r>.npz` in a folder when its script has ended; rank 0 waits for those of the others and reports.
"""

from __future__ import annotations

import runpy
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import tyro

from commons.checks import require_at_least
from commons.cli.outputs import AnswerOutputs, command_line
from commons.cli.simulate.answer import answer_of
from commons.cli.simulate.row_cost import RowCost
from commons.cli.simulate.simulation import Source, describe, simulate
from commons.console import print_error
from commons.perf_model.gain import LoadedRows, StepCost
from commons.run_log.step_time import fit_times
from commons.trainer.ranks.rank_info import RankInfo
from commons.whole_folder import whole_file

if TYPE_CHECKING:
    from commons.pipeline.recording import Recorder

# Seconds that rank 0 waits for the files of the other ranks.
_PATIENCE = 60.0


@dataclass
class Observe:
    """Run a training script unchanged, and say what its steps lost to uneven ranks and what balancing would gain.

    Rows, lengths and step times are recorded at TorchRec's pipelines; nothing is sent and no batch is changed.

    For example:
      torchrun --nproc-per-node 8 -m evenrank.observe train.py --epochs 1
      torchrun --nproc-per-node 8 -m evenrank.observe --task hstu --hidden-size 512 -m my.train --config a.toml
      python -m evenrank.observe --report --html observed.html
    """

    folder: Path = Path("observed")
    """Where ranks leave what they recorded; a folder that all of them share."""

    report: bool = False
    """Report on what a run has left in the folder; no script is run."""

    window: tuple[int, ...] = (2, 4, 8)
    """Windows of batches to look at."""

    cost: Annotated[RowCost, tyro.conf.OmitArgPrefixes] = field(default_factory=lambda: RowCost(task="tokens"))
    """What a row costs."""

    of_output: Annotated[AnswerOutputs, tyro.conf.arg(name="output"), tyro.conf.OmitArgPrefixes] = field(
        default_factory=AnswerOutputs
    )
    """Where the answer goes, on rank 0."""

    def check(self) -> None:
        """Raise ValueError for a value out of its range, or an output that cannot be written."""
        self.cost.check()
        self.of_output.require({})
        for window in self.window:
            require_at_least("window", window, 2)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a script and record it, or report on a record; returns the script's status, or 2 for a mistake."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    own, script = _split(arguments)
    command_line.set(shlex.join(["python", "-m", "evenrank.observe", *arguments]))
    try:
        options = tyro.cli(Observe, args=own, prog="python -m evenrank.observe")
        options.check()
        if options.report:
            return _report(options, None)
        if not script or script == ["-m"]:
            raise ValueError("no script is named; give one with its arguments: python -m evenrank.observe train.py")
        if script[0] != "-m" and not Path(script[0]).is_file():
            raise ValueError(f"{script[0]} is no file; name the training script, or a module with -m")
        options.folder.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:
        print_error(str(error))
        return 2
    return _observe(options, script)


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Our options, and the script or `-m module` with its own."""
    for at, argument in enumerate(arguments):
        if argument == "-m" or argument.endswith(".py"):
            return arguments[:at], arguments[at:]
    return arguments, []


def _observe(options: Observe, script: list[str]) -> int:
    ranks = RankInfo.if_launched()
    rank, world_size = (0, 1) if ranks is None else (ranks.rank, ranks.world_size)
    own = options.folder / f"rank{rank}.npz"
    own.unlink(missing_ok=True)  # of an earlier run

    from commons.pipeline.recording import Recorder

    recorder = Recorder()
    recorder.install()
    status: Any = 0
    try:
        _run(script)
    except SystemExit as stop:
        status = stop.code
    finally:
        _write(own, recorder, world_size)
    if rank == 0:
        reported = _report(options, world_size)
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


def _write(path: Path, recorder: Recorder, world_size: int) -> None:
    sizes = np.array([len(lengths) for lengths in recorder.lengths], np.int64)
    lengths = np.concatenate([np.empty(0, np.int64), *recorder.lengths])
    with whole_file(path) as file:
        np.savez_compressed(
            file,
            world_size=np.int64(world_size),
            unknown=np.int64(recorder.unknown),
            rows=sizes,
            lengths=lengths,
            seconds=np.array(recorder.seconds, np.float64),
        )


def _report(options: Observe, world_size: int | None) -> int:
    try:
        ranks = _read(options.folder, world_size)
        rows, seconds = _as_loaded(ranks, options.cost)
        if rows.num_ranks == 1:
            raise ValueError("one rank was observed, which waits for no other; start the script with torchrun")
        cost, note = step_cost(rows, seconds)
        source = Source(
            name=f"{rows.num_steps} steps of {rows.num_ranks} ranks",
            load=lambda num_ranks, steps: rows.first_steps(steps),
            num_rows=len(rows.tokens),
            batch_size=max(1, len(rows.tokens) // (rows.num_steps * rows.num_ranks)),
            tokens=rows.tokens,
            costs=rows.workloads,
            task=describe(options.cost.model()),
            remedy="observe more steps",
            of_what="in the rows' cost" if cost is None else "of a whole step, by its time",
            cost=cost,
        )
        windows = [window for window in options.window if window <= rows.num_steps]
        simulation = simulate(source, [rows.num_ranks], windows, rows.num_steps)
        lost = [] if cost is None else [_lost(rows, seconds, cost)]
        options.of_output.give(answer_of(replace(simulation, notes=(note, *lost))))
    except (ValueError, OSError) as error:
        print_error(str(error))
        return 2
    return 0


def _read(folder: Path, world_size: int | None) -> list[dict[str, np.ndarray]]:
    """What each rank recorded, once all have left it."""
    give_up = time.monotonic() + (_PATIENCE if world_size is not None else 0.0)
    while True:
        found = {int(path.stem[4:]): path for path in folder.glob("rank*.npz") if path.stem[4:].isdigit()}
        if not found and world_size is None:
            raise ValueError(f"{folder} holds no record of a rank; run a script with --folder {folder} first")
        if world_size is None:
            with np.load(found[min(found)], allow_pickle=False) as file:
                world_size = int(file["world_size"])
        missing = [rank for rank in range(world_size) if rank not in found]
        if not missing:
            break
        if time.monotonic() > give_up:
            raise ValueError(
                f"ranks {missing[:8]} of {world_size} have left no record in {folder}; where hosts share no folder, "
                "copy their files there, and call python -m evenrank.observe --report"
            )
        time.sleep(0.1)
    ranks = []
    for rank in range(world_size):
        with np.load(found[rank], allow_pickle=False) as file:
            ranks.append({name: file[name] for name in file.files})
    if not any(len(rank["rows"]) for rank in ranks):
        unknown = sum(int(rank["unknown"]) for rank in ranks)
        raise ValueError(
            f"{unknown} steps were trained, and no row lengths are known of them; the pipeline's batches have "
            "KeyedJaggedTensors on the host: let the pipeline copy them to the device"
            if unknown
            else "the script trained no step with one of TorchRec's pipelines; where it has a loop of its own, give "
            "the rows' lengths to evenrank simulate"
        )
    return ranks


def _as_loaded(ranks: list[dict[str, np.ndarray]], cost: RowCost) -> tuple[LoadedRows, np.ndarray]:
    """The rows by step, and the seconds of each step, the median of its ranks; NaN where no rank knows them."""
    steps = max(len(rank["rows"]) for rank in ranks)
    step = np.concatenate([np.repeat(np.arange(len(rank["rows"])), rank["rows"]) for rank in ranks])
    of_rank = np.concatenate([np.full(int(rank["rows"].sum()), number) for number, rank in enumerate(ranks)])
    tokens = cost.tokens(np.concatenate([rank["lengths"] for rank in ranks]))
    order = np.argsort(step, kind="stable")
    seconds = np.full((len(ranks), steps), np.nan)
    for number, rank in enumerate(ranks):
        seconds[number, : len(rank["seconds"])] = rank["seconds"]
    known = np.isfinite(seconds).any(axis=0)
    median = np.full(steps, np.nan)
    median[known] = np.nanmedian(seconds[:, known], axis=0)
    workloads = cost.costs(tokens)
    return LoadedRows(workloads[order], tokens[order], step[order], of_rank[order], len(ranks)), median


def step_cost(rows: LoadedRows, seconds: np.ndarray) -> tuple[StepCost | None, str]:
    """Milliseconds of a step by its largest load, where the recorded seconds follow it; and a note on the fit."""
    fit = fit_times("steps", rows.as_loaded.loads.max(axis=1).astype(np.float64), seconds * 1e3)
    if fit is None:
        known = np.count_nonzero(np.isfinite(seconds))
        return None, f"{known} steps have times; 20 of them, of different loads, say what a load costs."
    if not fit.follows:
        return None, (
            f"Step times do not follow the largest loads (they explain {fit.r_squared:.0%} of their variance): ratios "
            "are those of loads, and --task may say better what a row costs."
        )
    note = f"The largest loads explain {fit.r_squared:.0%} of the step times' variance."
    return StepCost(fit.ms_per_load, max(0.0, fit.fixed_ms)), note


def _lost(rows: LoadedRows, seconds: np.ndarray, cost: StepCost) -> str:
    """What steps lost to uneven ranks, and the worst of them."""
    loads = rows.as_loaded.loads
    lost = cost.per_load * (loads.max(axis=1) - loads.mean(axis=1))
    worst = np.argsort(-lost)[:3].tolist()
    steps = ", ".join(f"step {step} {lost[step]:.1f} ms (rank {int(loads[step].argmax())})" for step in worst)
    return (
        f"Uneven ranks cost {lost.mean():.1f} ms of a step of {np.nanmedian(seconds) * 1e3:.1f} ms; 99th percentile "
        f"{np.quantile(lost, 0.99):.1f} ms; most: {steps}."
    )
