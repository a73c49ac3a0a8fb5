"""The files of a run's folder: how they are called, written and read again."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from commons.whole_folder import whole_file

CONFIG_FILE, LOG_FILE, SUMMARY_FILE, TENSORBOARD_FOLDER = "config.json", "log.jsonl", "summary.json", "tensorboard"
# How trackers call the run, by their names.
TRACKERS_FILE = "trackers.json"
# What a line of the log means; it stands in every line, because another release may continue a log.
LOG_SCHEMA = 1


def write_summary(path: Path, summary: Mapping[str, Any], *, trained: bool) -> None:
    """Write what came out of a run, JSON-ready; a part that trained no step keeps the numbers of the parts before."""
    content: dict[str, Any] = {}
    if not trained and path.is_file():
        with contextlib.suppress(ValueError):
            content = json.loads(path.read_text(encoding="utf-8"))
    write_whole(path, json.dumps({**content, **summary}, indent=2) + "\n")


def keep_lines_until(path: Path, last_step: int) -> list[dict[str, Any]]:
    """Leave out the lines of later steps, and one that was not finished; returns what is kept."""
    kept, records = [], []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            record = json.loads(line)
            if record["step"] <= last_step:
                kept.append(line + "\n")
                records.append(record)
    write_whole(path, "".join(kept))
    return records


def evaluation_in(records: list[dict[str, Any]], step: int) -> dict[str, float]:
    """The last evaluation of a step, its numbers as they were before they became JSON."""
    found = [
        {name: math.nan if value is None else value for name, value in record.items() if name.startswith("eval_")}
        for record in records
        if record["step"] == step
    ]
    return next((each for each in reversed(found) if each), {})


def write_whole(path: Path, text: str) -> None:
    """Write a file aside and give it its name, so that it is never half there."""
    with whole_file(path) as file:
        file.write(text.encode())


def flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Full names and values of nested settings.

    >>> list(flat({"seed": 3, "shuffler": {"mode": "off"}}))
    [('seed', 3), ('shuffler.mode', 'off')]
    """
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def without_nan(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers with None for NaN, which JSON does not have; the AUC of a single class is one."""
    return {name: None if value != value else value for name, value in numbers.items()}
