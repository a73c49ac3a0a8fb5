"""Reads a run's folder: log.jsonl as columns, the config and the summary."""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from commons.run_log.files import CONFIG_FILE, LOG_FILE, LOG_SCHEMA, SUMMARY_FILE
from commons.version import __version__

# With at least this many lines, lines that have a warm-up are left out of times.
_LINES_WITH_WARM_UP = 3
# Most runs that an error names.
_MOST_NAMED = 8


class RunLog:
    """The log of the run in a folder.

    Raises:
        FileNotFoundError: the folder does not exist, or has no log.
        ValueError: the log has no line of a step yet, an invalid line, or a line of another release.
        OSError: the log cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        path, notes = folder / LOG_FILE, []
        _require_log(folder)
        config, summary = (_read_beside(folder / name) for name in (CONFIG_FILE, SUMMARY_FILE))
        records, is_cut = _read_lines(path)
        lines = [record for record in records if "loss" in record]
        if not lines:
            raise ValueError(
                f"{path} has no line of a training step; a line is written every "
                f"{setting(config, 'trainer.log_interval') or 'trainer.log_interval'} steps: wait for it, lower "
                "--trainer.log-interval in the next run, or give the folder of a run that has trained"
            )
        if is_cut:
            notes.append(
                "the last line of the log is incomplete and left out: the run is still running, or stopped while it "
                "wrote"
            )
        if not config:
            notes.append(f"no readable {CONFIG_FILE}: the settings of the run are unknown")
        if not summary:
            notes.append(f"no readable {SUMMARY_FILE}: the run is still running, or stopped early")
        lost = [line["step"] for line in lines if math.isnan(line["loss"])]
        if lost:
            notes.append(f"the loss is NaN or infinite in {len(lost)} of {len(lines)} lines, first at step {lost[0]}")
        names = dict.fromkeys(name for line in lines for name in line)
        of_ranks = {name for line in lines for name, value in line.items() if isinstance(value, np.ndarray)}
        self.name = str(folder)  # the folder as the user gave it
        self.config = config  # the saved config of the run; empty if unknown
        self.notes = tuple(notes)  # remarks on the log, one sentence each
        # int64 `(lines,)`, the step after which each line was written; ascending
        self.step = np.array([line["step"] for line in lines], dtype=np.int64)
        # float64 `(lines,)` by name, means over the steps of a line (median for `step_ms`); NaN if a line has no value
        self.columns = {
            name: np.array([line.get(name, math.nan) for line in lines]) for name in names if name not in of_ranks
        }
        # by name, for each line float64 `(ranks,)` with NaN for an unknown rank, or None if the line has no values
        self.of_ranks = {
            name: tuple(value if isinstance(value := line.get(name), np.ndarray) else None for line in lines)
            for name in of_ranks
        }
        # steps with their metrics, whose names are without `eval_`; ascending
        self.evaluations = tuple(
            (int(record["step"]), metrics)
            for record in records
            if (metrics := {name[5:]: float(each) for name, each in record.items() if name.startswith("eval_")})
        )

    def column(self, name: str) -> np.ndarray:
        """A column of the log, float64 `(lines,)`; NaN for lines without a value."""
        return self.columns.get(name, np.full(len(self.step), np.nan))

    @property
    def steps(self) -> np.ndarray:
        """Number of steps of each line, float64 `(lines,)`."""
        return self.column("steps")

    def mean(self, values: str | np.ndarray, lines: np.ndarray | None = None) -> float | None:
        """Mean over steps, of the lines with a value; None if no line has one.

        `values`: a column's name, or float64 `(lines,)` with NaN for unknown; `lines`: bool `(lines,)`, the lines to
        use, None for all.
        """
        values = self.column(values) if isinstance(values, str) else values
        known = np.isfinite(values * self.steps) & (True if lines is None else lines)
        return float(np.average(values[known], weights=self.steps[known])) if known.any() else None

    @property
    def timed(self) -> np.ndarray:
        """Lines whose times count, bool `(lines,)`: without the first and those of resumed runs, which have a warm-up.

        With fewer than three lines, all count; if every line has a warm-up, all but the first.
        """
        begins = np.isfinite(self.column("resumed"))
        begins[1:] &= not begins[1:].all()
        begins[0] = True
        return ~begins | (len(begins) < _LINES_WITH_WARM_UP)

    @property
    def mean_step_ms(self) -> np.ndarray:
        """Mean milliseconds of the steps of each line, float64 `(lines,)`."""
        return self.column("total_ms") / self.steps

    def rate(self, name: str) -> float | None:
        """A rate per second, such as `rows_per_s`, over all steps whose times count; None if unknown."""
        total_ms = self.column("total_ms")
        known = self.timed & np.isfinite(self.column(name)) & (total_ms > 0)
        return float(np.average(self.column(name)[known], weights=total_ms[known])) if known.any() else None

    @property
    def runs(self) -> list[RunLog]:
        """The log's lines by run: the first run's, and those of each run that was resumed."""
        resumed = np.flatnonzero(np.isfinite(self.column("resumed")[1:])) + 1
        return [self.lines(slice(*ends)) for ends in itertools.pairwise([0, *resumed.tolist(), len(self.step)])]

    def lines(self, which: slice) -> RunLog:
        """The log with only some of its lines of steps."""
        found = copy.copy(self)
        found.step = self.step[which]
        found.columns = {name: values[which] for name, values in self.columns.items()}
        found.of_ranks = {name: values[which] for name, values in self.of_ranks.items()}
        return found

    @property
    def num_ranks(self) -> tuple[int, ...]:
        """The first number of data-parallel ranks, and every number to which it changed; empty if unknown."""
        ranks = self.column("ranks")
        return tuple(int(each) for each, _ in itertools.groupby(ranks[np.isfinite(ranks)]))


def setting(config: Mapping[str, Any], name: str) -> Any:
    """A setting by its full name; None if there is none.

    >>> setting({"trainer": {"seed": 3}}, "trainer.seed"), setting({}, "trainer.seed")
    (3, None)
    """
    found: Any = config
    for part in name.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def short_names(names: Sequence[str]) -> list[str]:
    """Names of runs without their common folder.

    >>> short_names(["runs/a", "runs/b"]), short_names(["runs/a", "/b"])
    (['a', 'b'], ['runs/a', '/b'])
    """
    paths = [Path(name) for name in names]
    if len({path.is_absolute() for path in paths}) > 1:
        return list(names)
    shared = os.path.commonpath([path.parent for path in paths])
    return [str(path.relative_to(shared)) for path in paths]


def read_runs(folders: Sequence[Path]) -> list[RunLog]:
    """Read the logs of runs, in the order of their folders; errors as for `RunLog`, and ValueError for duplicates."""
    resolved = [folder.resolve() for folder in folders]
    for number, folder in enumerate(folders):
        if resolved[number] in resolved[:number]:
            raise ValueError(f"{folder} is given twice; a run cannot be compared with itself: leave one out")
    return [RunLog(folder) for folder in folders]


def _require_log(folder: Path) -> None:
    """Raise FileNotFoundError for a folder without a log, with the names of nearby folders with a log."""
    if (folder / LOG_FILE).is_file():
        return
    within = folder if folder.is_dir() else folder.parent
    found = sorted(str(path.parent) for path in within.glob(f"*/{LOG_FILE}"))
    named = f", such as {', '.join(found[:_MOST_NAMED])}" if found else ""
    raise FileNotFoundError(
        f"{folder} has no {LOG_FILE}; report reads the folder of a run (trainer.run_dir), where rank 0 writes it when "
        f"training begins: give a folder with a log{named}"
    )


def _read_lines(path: Path) -> tuple[list[dict[str, Any]], bool]:
    """The records of a log, floats and float64 `(ranks,)`, and whether its last line is incomplete."""
    records: list[dict[str, Any]] = []
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                record = json.loads(line)
                schema = record.pop("schema")
                # One string for all lines: a long log has millions of names.
                values = {sys.intern(name): _known(value) for name, value in record.items()}
                values["step"] = np.int64(record["step"])
            except (ValueError, TypeError, AttributeError, KeyError, OverflowError) as error:
                if not line.endswith(b"\n"):  # the last line is incomplete
                    return records, True
                raise ValueError(
                    f"{path} line {number} is not a line of a log ({type(error).__name__}: {error}); a line is an "
                    "object of numbers with a step and a schema: remove this line, or restore the log from a copy"
                ) from None
            if schema != LOG_SCHEMA:
                raise ValueError(
                    f"{path} line {number} has schema {schema!r}; evenrank {__version__} reads schema {LOG_SCHEMA}: "
                    "use the release that wrote the log"
                )
            records.append(values)
    return records, False


def _known(value: Any) -> Any:
    """A number as a float, or a list of them as float64 `(ranks,)`; NaN for one that is unknown or infinite."""
    if isinstance(value, list):
        numbers = np.array(value, dtype=np.float64)
        return np.where(np.isfinite(numbers), numbers, np.nan)
    number = math.nan if value is None else float(value)
    return number if math.isfinite(number) else math.nan


def _read_beside(path: Path) -> dict[str, Any]:
    """A JSON object in the folder of the log; empty if it is missing or not an object."""
    with contextlib.suppress(OSError, ValueError):
        content = json.loads(path.read_bytes())
        return content if isinstance(content, dict) else {}
    return {}
