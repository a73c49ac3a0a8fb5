"""Which runs a user means by some folders."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from commons.run_log.demo import DEMO_FILE, read_demo
from commons.run_log.files import CONFIG_FILE, LOG_FILE
from commons.run_log.reading import RunLog, read_log

# Runs that an error names.
_MOST_NAMED = 8


def read_runs(folders: Sequence[Path]) -> list[RunLog]:
    """The logs of the runs in some folders, in that order; a folder of a demo has two, of the same batches.

    Raises:
        ValueError: a folder that has no log, or is given twice; a log that is none of this release.
        FileNotFoundError: no such folder.
        OSError: a log cannot be read.
    """
    seen: dict[str, Path] = {}
    for folder in folders:
        place = os.path.realpath(folder)  # unlike Path.resolve, it raises nothing for links that lead to themselves
        if place in seen:
            again = f"{folder}, which is {seen[place]}," if str(seen[place]) != str(folder) else folder
            raise ValueError(f"{again} is given twice; a run beside itself says nothing: leave one out")
        seen[place] = folder
    return [run for folder in folders for run in _read_folder(folder)]


def _read_folder(folder: Path) -> list[RunLog]:
    if not folder.exists():
        others = _runs_in(folder.parent) if folder.parent.is_dir() else []
        raise FileNotFoundError(
            f"{folder} does not exist; report reads the folder of a run (trainer.run_dir): {_remedy(others)}"
        )
    if not folder.is_dir():
        is_log = folder.name in (LOG_FILE, DEMO_FILE)
        raise ValueError(
            f"{folder} is a file; report reads the folder of a run: give "
            f"{folder.parent if is_log else 'the one that trainer.run_dir named'}"
        )
    if (folder / LOG_FILE).exists():
        return [read_log(folder)]
    if (folder / DEMO_FILE).exists():
        return read_demo(folder)
    if (folder / CONFIG_FILE).exists():
        raise ValueError(
            f"{folder} has a {CONFIG_FILE} and no {LOG_FILE}; rank 0 of a run writes it when training begins: wait, or "
            "look in the logs of the ranks why it did not begin"
        )
    raise ValueError(
        f"{folder} has no {LOG_FILE}; a run writes it to its run_dir, on rank 0: {_remedy(_runs_in(folder))}"
    )


def _runs_in(folder: Path) -> list[Path]:
    """The folders of runs in a folder, by name."""
    try:
        return sorted(each for each in folder.iterdir() if (each / LOG_FILE).exists() or (each / DEMO_FILE).exists())
    except OSError:
        return []


def _remedy(others: list[Path]) -> str:
    """What to give instead."""
    if not others:
        return "correct the path"
    more = f" and {len(others) - _MOST_NAMED} more" if len(others) > _MOST_NAMED else ""
    return f"there {'is' if len(others) == 1 else 'are'} {', '.join(map(str, others[:_MOST_NAMED]))}{more}"
