"""Reading what a run has left: log.jsonl as columns, and the config and summary beside it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from commons.run_log.files import CONFIG_FILE, LOG_FILE, LOG_SCHEMA, SUMMARY_FILE
from commons.version import __version__

# Lines of a log, from which on the first is left out of times: it has the warm-up.
_LINES_WITH_WARM_UP = 3
# Infinity, and what sums would make of numbers near it.
_BEYOND = 1e100
# Fields of a line with a number of every rank.
_OF_RANKS = ("loads_before", "loads_after", "lookups_before", "lookups_after", "rank_speeds", "own_ms")


@dataclass(frozen=True, eq=False)
class RunLog:
    """The log of a run.

    Attributes:
        name: of the run: its folder, as the user gave it.
        config: of the run, as it was saved; empty where it is not known.
        step: int64 `(lines,)`, the step after which each line was written; ascending.
        steps: int64 `(lines,)`, the steps that a line is of.
        columns: float64 `(lines,)` by name, means over the steps of a line, or their median for `step_ms`; NaN where a
            line does not know.
        of_ranks: by name float64 `(ranks,)` of each line, NaN for a rank that is not known; None where a line has none.
        evaluations: of a step its metrics, without `eval_`; ascending.
        notes: what to know of the log, a sentence each.
        is_warm: whether the first line has no warm-up in it.
    """

    name: str
    config: Mapping[str, Any]
    step: np.ndarray
    steps: np.ndarray
    columns: Mapping[str, np.ndarray]
    of_ranks: Mapping[str, tuple[np.ndarray | None, ...]] = field(default_factory=dict)
    evaluations: tuple[tuple[int, Mapping[str, float]], ...] = ()
    notes: tuple[str, ...] = ()
    is_warm: bool = False

    def column(self, name: str) -> np.ndarray:
        """float64 `(lines,)`; NaN where a line does not know, or none does."""
        return self.columns.get(name, np.full(len(self.step), np.nan))

    def mean(self, name: str, lines: np.ndarray | None = None) -> float | None:
        """Mean over the steps of those lines that know; None where none does.

        Args:
            name: of a column.
            lines: bool `(lines,)`, which to look at; None for all.
        """
        return self.mean_of(self.column(name), lines)

    def mean_of(self, values: np.ndarray, lines: np.ndarray | None = None) -> float | None:
        """The same of float64 `(lines,)` values, NaN for a line that does not know."""
        known = np.isfinite(values) if lines is None else np.isfinite(values) & lines
        return float(np.average(values[known], weights=self.steps[known])) if known.any() else None

    @property
    def timed(self) -> np.ndarray:
        """Lines whose times count: all but the first, which has the warm-up, where there are three: bool `(lines,)`."""
        leaves_out = len(self.step) >= _LINES_WITH_WARM_UP and not self.is_warm
        return np.arange(len(self.step)) >= leaves_out

    @property
    def total_ms(self) -> np.ndarray:
        """float64 `(lines,)`, milliseconds of the steps of a line."""
        told, rate = self.column("total_ms"), self.column("rows_per_s")
        # The first releases did not write it: by rows and their rate, or else by the median.
        rows = self.column("num_rows") * self.steps
        by_rate = np.divide(rows * 1e3, rate, out=np.full(len(rows), np.nan), where=rate > 0)
        guessed = np.where(np.isnan(by_rate), self.column("step_ms") * self.steps, by_rate)
        return np.where(np.isnan(told), guessed, told)

    def mean_step_ms(self, lines: np.ndarray) -> float | None:
        """Mean milliseconds of a step of those lines."""
        known = lines & np.isfinite(self.total_ms)
        return float(self.total_ms[known].sum() / self.steps[known].sum()) if known.any() else None

    def rate(self, name: str) -> float | None:
        """A number per second, such as `rows_per_s`, over all steps whose times count; None where it is not known."""
        known = self.timed & np.isfinite(self.column(name)) & (self.total_ms > 0)
        return float(np.average(self.column(name)[known], weights=self.total_ms[known])) if known.any() else None

    @property
    def num_ranks(self) -> tuple[int, ...]:
        """Numbers of ranks that share the data, in the order of the lines, each once; empty where it is not known."""
        told = self.column("ranks").copy()
        for line, loads in enumerate(self.of_ranks.get("loads_before", ())):
            if loads is not None:
                told[line] = len(loads)
        found = dict.fromkeys(int(each) for each in told[np.isfinite(told)])
        configured = setting(self.config, "trainer.world_size")
        return tuple(found) or ((configured,) if isinstance(configured, int) else ())


def setting(config: Mapping[str, Any], name: str) -> Any:
    """A setting by its full name, None where there is none.

    >>> setting({"trainer": {"seed": 3}}, "trainer.seed"), setting({}, "trainer.seed")
    (3, None)
    """
    found: Any = config
    for part in name.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def read_log(folder: Path) -> RunLog:
    """The log of the run in a folder that has one.

    Raises:
        ValueError: no line yet, a line that is none of a log, or one of another release.
        OSError: the log cannot be read.
    """
    path, notes = folder / LOG_FILE, []
    records, is_cut = _read_lines(path)
    if is_cut:
        notes.append("the last line of the log is not whole: the run goes on, or was ended while it wrote; left out")
    lines = [record for record in records if "loss" in record]
    summary = _read_beside(folder, SUMMARY_FILE)
    if not lines and summary:
        raise ValueError(
            f"{path} has no line of a training step, and the run has ended; a report is of training steps: give the "
            "folder of a run that has trained"
        )
    if not lines:
        every = setting(_read_beside(folder, CONFIG_FILE), "trainer.log_interval")
        raise ValueError(
            f"{path} has no line of a training step yet; a line is written every "
            f"{every if isinstance(every, int) else 'trainer.log_interval'} steps: wait for it, or lower "
            "--trainer.log-interval in the next run"
        )
    config = _read_beside(folder, CONFIG_FILE)
    if not config:
        notes.append(f"no readable {CONFIG_FILE}: the settings of the run are not known")
    if not summary:
        notes.append(f"no readable {SUMMARY_FILE}: the run goes on, or ended before its end")
    step = np.array([record["step"] for record in lines], dtype=np.int64)
    numbers, of_ranks = _columns_of(lines)
    steps = numbers.pop("steps", np.full(len(step), np.nan))
    steps = np.where(np.isnan(steps), np.diff(step, prepend=0), steps)
    return RunLog(
        name=str(folder),
        config=config,
        step=step,
        steps=np.clip(steps, 1, 2**53).astype(np.int64),
        columns=numbers,
        of_ranks=of_ranks,
        evaluations=tuple(_evaluations_in(records)),
        notes=tuple(notes),
    )


def _read_lines(path: Path) -> tuple[list[dict[str, Any]], bool]:
    """The records of a log, and whether it ends in the middle of one."""
    records: list[dict[str, Any]] = []
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line.decode("utf-8", errors="replace"))
            except (ValueError, RecursionError) as error:
                if not line.endswith(b"\n"):  # nothing follows, not even the end of the line
                    return records, True
                raise ValueError(
                    f"{path} line {number} is no JSON ({error}); every line of a log is one object: remove that line, "
                    "or take the log from a copy"
                ) from None
            _require_record(record, f"{path} line {number}", last_step=records[-1]["step"] if records else 0)
            # As arrays: of thousands of ranks, objects of Python would take gigabytes.
            for name in _OF_RANKS:
                if isinstance(record.get(name), list):
                    record[name] = _as_array(record[name])
            records.append(record)
    return records, False


def _require_record(record: Any, where: str, last_step: int) -> None:
    """Raise ValueError for what no run of this release has written, or of an earlier one."""
    step = record.get("step") if isinstance(record, dict) else None
    if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 2**63:
        raise ValueError(f"{where} has no step; a log of a run has one in every line: give the folder of a run")
    schema = record.get("schema", LOG_SCHEMA)  # the first releases wrote none
    if schema != LOG_SCHEMA or isinstance(schema, bool):
        raise ValueError(
            f"{where} has schema {schema!r}; evenrank {__version__} reads schema {LOG_SCHEMA}: use the release that "
            "wrote the log"
        )
    if step < last_step:
        raise ValueError(
            f"{where} is of step {step}, and the line before of step {last_step}; a log is of one run, whose steps "
            "ascend: keep the lines of one run"
        )
    for name, value in record.items():
        if name == "schema":
            continue
        for each in value if name in _OF_RANKS and isinstance(value, list) else [value]:
            if not _is_number(each):
                raise ValueError(f"{where} has {name} {_short(each)}; it is a number: correct the line, or remove it")


def _is_number(value: Any) -> bool:
    """Whether it is one, or null; not an integer that no float64 comes near."""
    if value is None or isinstance(value, float):
        return True
    return isinstance(value, int) and not isinstance(value, bool) and value.bit_length() < 1024


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _columns_of(lines: list[dict[str, Any]]) -> tuple[dict[str, np.ndarray], dict[str, tuple[np.ndarray | None, ...]]]:
    """Numbers as columns, and what is of every rank."""
    names = dict.fromkeys(name for line in lines for name in line if name not in ("step", "schema"))
    of_ranks = {
        name: tuple(of if isinstance(of := line.get(name), np.ndarray) else None for line in lines)
        for name in names
        if name in _OF_RANKS
    }
    columns = {name: _as_array([line.get(name) for line in lines]) for name in names if name not in _OF_RANKS}
    return columns, of_ranks


def _as_array(values: Any) -> np.ndarray:
    """float64, NaN for null and for what no run measures."""
    array = np.array([math.nan if each is None else float(each) for each in values], dtype=np.float64)
    array[~(np.abs(array) < _BEYOND)] = np.nan
    return array


def _evaluations_in(records: list[dict[str, Any]]) -> Iterator[tuple[int, dict[str, float]]]:
    """Step and metrics of every evaluation."""
    for record in records:
        named = [(name.removeprefix("eval_"), value) for name, value in record.items() if name.startswith("eval_")]
        if named:
            values = _as_array([value for _, value in named]).tolist()
            yield record["step"], {name: value for (name, _), value in zip(named, values)}


def _read_beside(folder: Path, name: str) -> dict[str, Any]:
    """A JSON object beside the log; empty where it is missing, or none."""
    try:
        content = json.loads((folder / name).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
