"""Reading what a run has left: log.jsonl as columns, and the config and summary beside it."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from commons.run_log.files import CONFIG_FILE, LOG_FILE, LOG_SCHEMA, SUMMARY_FILE
from commons.version import __version__

# Lines of a log, from which on the first is left out of times: it has the warm-up.
_LINES_WITH_WARM_UP = 3
# Runs that an error names.
_MOST_NAMED = 8


class RunLog:
    """The log of the run in a folder.

    Raises:
        FileNotFoundError: no such folder.
        ValueError: no log there, no line yet, a line that is none of a log, or one of another release.
        OSError: the log cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        path, notes = folder / LOG_FILE, []
        _require_log(folder)
        config, summary = (_read_beside(folder / name) for name in (CONFIG_FILE, SUMMARY_FILE))
        records, is_cut = _read_lines(path)
        lines = [record for record in records if "loss" in record]
        if not lines and summary:
            raise ValueError(
                f"{path} has no line of a training step, and the run has ended; a report is of training steps: give "
                "the folder of a run that has trained"
            )
        if not lines:
            raise ValueError(
                f"{path} has no line of a training step yet; a line is written every "
                f"{setting(config, 'trainer.log_interval') or 'trainer.log_interval'} steps: wait for it, or lower "
                "--trainer.log-interval in the next run"
            )
        if is_cut:
            notes.append(
                "the last line of the log is not whole: the run goes on, or was ended while it wrote; left out"
            )
        if not config:
            notes.append(f"no readable {CONFIG_FILE}: the settings of the run are not known")
        if not summary:
            notes.append(f"no readable {SUMMARY_FILE}: the run goes on, or ended before its end")
        names = dict.fromkeys(name for line in lines for name in line)
        of_ranks = {name for line in lines for name, value in line.items() if value.ndim}
        unknown = np.array(np.nan)
        self.name = str(folder)  # of the run, as the user gave it
        self.config = config  # of the run, as it was saved; empty where it is not known
        self.notes = tuple(notes)  # what to know of the log, a sentence each
        # int64 `(lines,)`, the step after which each line was written; ascending
        self.step = np.array([line["step"] for line in lines], dtype=np.int64)
        # float64 `(lines,)` by name, means over the steps of a line, or their median for `step_ms`; NaN where a line
        # does not know
        self.columns = {
            name: np.array([line.get(name, unknown) for line in lines]) for name in names if name not in of_ranks
        }
        # by name float64 `(ranks,)` of each line, NaN for a rank that is not known; None where a line has none
        self.of_ranks = {
            name: tuple(value if (value := line.get(name, unknown)).ndim else None for line in lines)
            for name in of_ranks
        }
        # of a step its metrics, without `eval_`; ascending
        self.evaluations = tuple(
            (int(record["step"]), metrics)
            for record in records
            if (metrics := {name[5:]: float(each) for name, each in record.items() if name.startswith("eval_")})
        )

    def column(self, name: str) -> np.ndarray:
        """float64 `(lines,)`; NaN where a line does not know, or none does."""
        return self.columns.get(name, np.full(len(self.step), np.nan))

    @property
    def steps(self) -> np.ndarray:
        """float64 `(lines,)`, the steps that a line is of."""
        return self.column("steps")

    def mean(self, values: str | np.ndarray, lines: np.ndarray | None = None) -> float | None:
        """Mean over the steps of those lines that know; None where none does.

        `values` are a column's name, or float64 `(lines,)`, NaN where not known; `lines` are those to look at, bool.
        """
        values = self.column(values) if isinstance(values, str) else values
        known = np.isfinite(values * self.steps) & (True if lines is None else lines)
        return float(np.average(values[known], weights=self.steps[known])) if known.any() else None

    @property
    def timed(self) -> np.ndarray:
        """Lines whose times count: all but the first, which has the warm-up, where there are three: bool `(lines,)`."""
        return np.arange(len(self.step)) >= (len(self.step) >= _LINES_WITH_WARM_UP)

    @property
    def mean_step_ms(self) -> np.ndarray:
        """float64 `(lines,)`, mean milliseconds of the steps of a line."""
        return self.column("total_ms") / self.steps

    def rate(self, name: str) -> float | None:
        """A number per second, such as `rows_per_s`, over all steps whose times count; None where it is not known."""
        total_ms = self.column("total_ms")
        known = self.timed & np.isfinite(self.column(name)) & (total_ms > 0)
        return float(np.average(self.column(name)[known], weights=total_ms[known])) if known.any() else None

    @property
    def num_ranks(self) -> tuple[int, ...]:
        """Numbers of ranks that share the data, in the order of the lines, each once; empty where it is not known."""
        ranks = self.column("ranks")
        return tuple(dict.fromkeys(int(each) for each in ranks[np.isfinite(ranks)]))


def setting(config: Mapping[str, Any], name: str) -> Any:
    """A setting by its full name, None where there is none.

    >>> setting({"trainer": {"seed": 3}}, "trainer.seed"), setting({}, "trainer.seed")
    (3, None)
    """
    found: Any = config
    for part in name.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def short_names(names: Sequence[str]) -> list[str]:
    """Names of runs without the folder that they share.

    >>> short_names(["runs/a", "runs/b"])
    ['a', 'b']
    """
    paths = [Path(name) for name in names]
    if len({path.is_absolute() for path in paths}) > 1:
        return list(names)
    shared = os.path.commonpath([path.parent for path in paths])
    return [str(path.relative_to(shared)) for path in paths]


def read_runs(folders: Sequence[Path]) -> list[RunLog]:
    """The logs of the runs in some folders, in that order; errors as `RunLog`, and ValueError for one given twice."""
    places = [folder.resolve() for folder in folders]
    for number, folder in enumerate(folders):
        if places[number] in places[:number]:
            raise ValueError(f"{folder} is given twice; a run beside itself says nothing: leave one out")
    return [RunLog(folder) for folder in folders]


def _require_log(folder: Path) -> None:
    """Raise FileNotFoundError or ValueError for a folder without a log, with those that have one beside or within."""
    if (folder / LOG_FILE).is_file():
        return
    within = folder if folder.is_dir() else folder.parent
    found = sorted(str(path.parent) for path in within.glob(f"*/{LOG_FILE}"))
    remedy = "correct the path"
    if found:
        more = f" and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
        remedy = f"there {'is' if len(found) == 1 else 'are'} {', '.join(found[:_MOST_NAMED])}{more}"
    if not folder.is_dir():
        what = f"{folder} is {'a file' if folder.exists() else 'not there'}"
        raise FileNotFoundError(f"{what}; report reads the folder of a run (trainer.run_dir): {remedy}")
    if (folder / CONFIG_FILE).exists():
        raise ValueError(
            f"{folder} has a {CONFIG_FILE} and no {LOG_FILE}; rank 0 of a run writes it when training begins: wait, or "
            "look in the logs of the ranks why it did not begin"
        )
    raise ValueError(f"{folder} has no {LOG_FILE}; a run writes it to its run_dir, on rank 0: {remedy}")


def _read_lines(path: Path) -> tuple[list[dict[str, np.ndarray]], bool]:
    """The records of a log as float64 arrays, `()` or `(ranks,)`, and whether it ends in the middle of one."""
    records: list[dict[str, np.ndarray]] = []
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                record = json.loads(line)
                schema = record.pop("schema")
                values = {name: np.array(value, dtype=np.float64) for name, value in record.items()}
                values["step"] = np.array(record["step"], dtype=np.int64)
            except (ValueError, TypeError, AttributeError, KeyError, OverflowError) as error:
                if not line.endswith(b"\n"):  # nothing follows, not even the end of the line
                    return records, True
                raise ValueError(
                    f"{path} line {number} is no line of a log ({type(error).__name__}: {error}); a line is an object "
                    "of numbers with a step and a schema: remove that line, or take the log from a copy"
                ) from None
            if schema != LOG_SCHEMA:
                raise ValueError(
                    f"{path} line {number} has schema {schema!r}; evenrank {__version__} reads schema {LOG_SCHEMA}: "
                    "use the release that wrote the log"
                )
            for value in values.values():
                if value.dtype == np.float64:
                    value[~np.isfinite(value)] = np.nan
            records.append(values)
    return records, False


def _read_beside(path: Path) -> dict[str, Any]:
    """A JSON object beside the log; empty where it is missing, or none."""
    with contextlib.suppress(OSError, ValueError):
        content = json.loads(path.read_bytes())
        return content if isinstance(content, dict) else {}
    return {}
