"""The two runs of a demo, which trains every batch both ways and leaves demo.json instead of a log."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from commons.run_log.reading import RunLog

DEMO_FILE = "demo.json"

# What the shuffler's stats say of a batch, whoever trains it.
_AS_LOADED = ("num_rows", "num_tokens", "imbalance_before", "largest_load_before", "lookup_imbalance_before")
_MEASURED = "a demo: a step is measured from barrier to barrier, the shuffler's background work included"


def read_demo(folder: Path) -> list[RunLog]:
    """Both sides, as loaded and balanced, with a line for every measured step.

    Raises:
        ValueError: demo.json is damaged.
        OSError: it cannot be read.
    """
    path = folder / DEMO_FILE
    try:
        content = json.loads(path.read_bytes())
        return _sides(str(folder), content)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise ValueError(
            f"{path} is no result of a demo ({type(error).__name__}: {error}); `make demo` writes it: run it again"
        ) from None


def _sides(folder: str, content: Mapping[str, Any]) -> list[RunLog]:
    stats, first = content["stats"], int(content["warmup_steps"]) + 1
    step = np.arange(first, first + len(stats), dtype=np.int64)
    times = {side: np.array(content[side]["step_ms"], dtype=np.float64) for side in ("unbalanced", "balanced")}
    if not stats or any(len(each) != len(stats) for each in times.values()):
        raise ValueError(f"{len(stats)} steps have stats and {[len(each) for each in times.values()]} have times")
    slope = _ms_per_load(stats, times["unbalanced"], times["balanced"])
    config = {
        "trainer": {"train_batch_size": content["batch_size"], "enable_balanced_shuffler": None},
        "dataset": {"max_history_seqlen": content["max_history_seqlen"]},
        "model": {"num_layers": content["num_layers"]},
    }
    runs = []
    for side, name in (("unbalanced", "as loaded"), ("balanced", "balanced")):
        names = _AS_LOADED if side == "unbalanced" else [*stats[0]]
        columns = {name: _column(stats, name) for name in names if not isinstance(stats[0][name], list)}
        step_ms = times[side]
        columns |= {
            "loss": np.array(content[side]["losses"][-len(stats) :], dtype=np.float64),
            "step_ms": step_ms,
            "total_ms": step_ms,
            "rows_per_s": columns["num_rows"] / step_ms * 1e3,
            "tokens_per_s": columns["num_tokens"] / step_ms * 1e3,
            "ranks": np.full(len(stats), float(content["num_ranks"])),
        }
        if slope is not None:
            columns["ms_per_load"] = np.full(len(stats), slope)
        after = "before" if side == "unbalanced" else "after"
        of_ranks = {
            f"{what}_{when}": tuple(np.array(each[f"{what}_{of}"], dtype=np.float64) for each in stats)
            for what in ("loads", "lookups")
            for when, of in (("before", "before"), ("after", after))
        }
        evaluation = {name: float(value) for name, value in content[side]["evaluation"].items()}
        runs.append(
            RunLog(
                name=f"{folder}, {name}",
                config=config,
                step=step,
                steps=np.ones(len(stats), dtype=np.int64),
                columns=columns,
                of_ranks=of_ranks,
                evaluations=((int(step[-1]), evaluation),) if evaluation else (),
                notes=(_MEASURED,) if side == "balanced" else (),
                is_warm=True,
            )
        )
    return runs


def _column(stats: list[dict[str, Any]], name: str) -> np.ndarray:
    return np.array([np.nan if each[name] is None else float(each[name]) for each in stats])


def _ms_per_load(stats: list[dict[str, Any]], unbalanced: np.ndarray, balanced: np.ndarray) -> float | None:
    """Milliseconds per load, of both ways together: their loads differ the most."""
    # Imported here: scipy takes longer than all the rest.
    from commons.perf_model.measured_saving import MeasuredSaving

    saving = MeasuredSaving()
    for each, slow, fast in zip(stats, unbalanced.tolist(), balanced.tolist()):
        saving.add(max(each["loads_before"]), slow)
        saving.add(max(each["loads_after"]), fast)
    return saving.ms_per_load()
