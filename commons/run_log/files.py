"""The files of a run's folder: their names, and functions that write and read them."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from commons.whole_folder import whole_file

CONFIG_FILE, LOG_FILE, SUMMARY_FILE, TENSORBOARD_FOLDER = "config.json", "log.jsonl", "summary.json", "tensorboard"
# The run's id in every tracker, by the tracker's name.
TRACKERS_FILE = "trackers.json"
# Version of the log's format, written in every line, because another release may continue a log.
LOG_SCHEMA = 1


def write_summary(path: Path, summary: Mapping[str, Any], *, trained: bool) -> None:
    """Write the summary of a run; without trained steps, entries of an earlier summary are kept unless replaced."""
    content: dict[str, Any] = {}
    if not trained and path.is_file():
        with contextlib.suppress(ValueError):
            earlier = json.loads(path.read_text(encoding="utf-8"))
            content = earlier if isinstance(earlier, dict) else {}
    write_whole(path, json.dumps({**content, **summary}, indent=2) + "\n")


def keep_lines_until(path: Path, last_step: int) -> tuple[list[dict[str, Any]], int]:
    """Remove lines of later steps and an incomplete last line from a log.

    Returns the records that are kept, and the number of lines that are removed.
    """
    kept, records = [], []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    for line in lines:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            record = json.loads(line)
            if record["step"] <= last_step:
                kept.append(line + "\n")
                records.append(record)
    write_whole(path, "".join(kept))
    return records, len(lines) - len(kept)


def evaluation_in(records: list[dict[str, Any]], step: int) -> dict[str, float]:
    """The last evaluation of a step, with NaN for JSON's null; empty if there is none.

    >>> evaluation_in([{"step": 3, "eval_auc": None}, {"step": 3, "loss": 0.5}], 3)
    {'eval_auc': nan}
    """
    found = [
        {name: math.nan if value is None else value for name, value in record.items() if name.startswith("eval_")}
        for record in records
        if record["step"] == step
    ]
    return next((each for each in reversed(found) if each), {})


def write_whole(path: Path, text: str) -> None:
    """Write a temporary file and rename it, so that the file is never incomplete."""
    with whole_file(path) as file:
        file.write(text.encode())


def flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the full names and values of nested settings.

    >>> list(flat({"seed": 3, "shuffler": {"mode": "off"}}))
    [('seed', 3), ('shuffler.mode', 'off')]
    """
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def finite_only(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Replace NaN and infinity by None, also in lists, because JSON has neither; the AUC of a single class is NaN."""
    return {
        name: [_finite(each) for each in value] if isinstance(value, list) else _finite(value)
        for name, value in numbers.items()
    }


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
