"""Does a model learn as well from balanced batches? HSTU on MovieLens-100K, five seeds, as loaded and in every mode.

    python -m benchmarks.window_learning            # two ranks, 50 trainings: an hour
    python -m benchmarks.window_learning --quick    # one seed, 20 steps: shows that it runs

A window or a budget changes which rows share a step, so the losses differ; the metrics of the trained models are
compared. Every seed has different weights, a different order and different held-out users, a fifth of all. The ratings
come from the wheel of recbole on the package index; their license (GroupLens) permits research.
"""

from __future__ import annotations

import json
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import duckdb

from benchmarks.shared.command_line import Quick, from_command_line
from benchmarks.shared.report import TORCHRUN, Page, every, measured, query, run_program

_WHEEL, _RATINGS = "recbole==1.2.1", "recbole/dataset_example/ml-100k/ml-100k.inter"
_COLUMNS = {"user": "user", "item": "movie", "time": "time", "actions": "rating >= 4"}
# What an evaluation calls the metric of each task, how pages do, and how many epochs are trained.
_TASKS = {"ranking": ("auc_task_0", "AUC", 8), "retrieval": ("HR@10", "HR@10", 16)}
_SHUFFLED = ["--trainer.enable-balanced-shuffler"]
_MODES = {
    "as loaded": [*_SHUFFLED, "--trainer.shuffler.mode", "observe"],
    "each batch": _SHUFFLED,
    "window of 4": [*_SHUFFLED, "--trainer.shuffle-window", "4"],
    "window of 8": [*_SHUFFLED, "--trainer.shuffle-window", "8"],
    "budget": [
        *("--trainer.balance-sampler", "--trainer.budget-per-rank", "8", "--trainer.train-batch-size", "32"),
        "--trainer.shuffler.no-equal-size",
    ],
}


def main(seeds: tuple[int, ...] = (1, 2, 3, 4, 5), ranks: int = 2, quick: Quick = False) -> None:
    """Train HSTU in every mode of balancing, and compare the metrics; write results/window_learning.md.

    Args:
        seeds: of weights, dropout, the order of the data and the held-out users.
        ranks: ranks on this machine.
    """
    page = Page(
        "Learning from balanced batches",
        "HSTU (hstu/configs/ranking.toml and retrieval.toml) on MovieLens-100K: 943 users, 100,000 ratings, at most "
        f"the last 256 of each user. {ranks} gloo ranks × 8 users, {len(seeds)} seeds. Each seed holds out a fifth of "
        "the users, who are evaluated at the end.",
    )
    seeds = seeds[:1] if quick else seeds
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = {seed: _prepare(folder, seed) for seed in seeds}
        # Interleaved: the machine may drift.
        runs = every(task=_TASKS, seed=seeds, mode=_MODES)
        found = measured(measure_training, runs, folder=folder, data=data, ranks=ranks, quick=quick)
    page.section("", query(found, _TABLE), _READING)
    page.finish(quick=quick)


def measure_training(
    task: str, seed: int, mode: str, *, folder: Path, data: Mapping[int, Path], ranks: int, quick: bool
) -> dict[str, Any]:
    """Train a model; the metric of held-out users, the imbalance of the trained loads, and the number of steps."""
    name, metric, epochs = _TASKS[task]
    run_dir = folder / f"{task}-{seed}-{mode}"
    options = {
        "dataset.dataset-name": "parquet",
        "dataset.dataset-path": data[seed],
        "trainer.run-dir": run_dir,
        "trainer.seed": seed,
        "trainer.train-batch-size": 8,
        "trainer.num-epochs": epochs,
        "trainer.eval-interval": 1_000_000,
        **({"dataset.num-tasks": 1, "model.prediction-head-arch": [64, 1]} if task == "ranking" else {}),
        **({"trainer.max-train-iters": 20} if quick else {}),
    }
    command = [*TORCHRUN, f"--nproc_per_node={ranks}", "-m", "hstu.train"]
    command += ["--config", f"hstu/configs/{task}.toml", *_columns()]
    for option, value in options.items():
        command += [f"--{option}", *(map(str, value) if isinstance(value, list) else [str(value)])]
    run_program(command + _MODES[mode])
    loads = "imbalance_before" if mode == "as loaded" else "imbalance_after"
    summary = json.loads((run_dir / "summary.json").read_text())
    return {
        "metric": metric,
        "value": summary["metrics"][f"eval_{name}"],
        "imbalance": summary["shuffle"][loads],
        "steps": summary["steps"],
    }


def _prepare(folder: Path, seed: int) -> Path:
    """The ratings as a data set; `seed` selects the fifth of the users that is held out."""
    events = folder / "ratings.parquet"
    if not events.exists():
        run_program([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), _WHEEL])
        with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
            wheel.extract(_RATINGS, folder)
        names = ["user", "movie", "rating", "time"]
        ratings = duckdb.read_csv(str(folder / _RATINGS), delimiter="\t", header=False, skiprows=1, names=names)
        ratings.write_parquet(str(events))
    output = folder / f"data-{seed}"
    program = [sys.executable, "-c", "from commons.cli.main import main; main()", "preprocess", "parquet"]
    split = ["--test-fraction", "0.2", "--seed", str(seed)]
    run_program([*program, "--source", str(events), "--output", str(output), *split, *_columns("")])
    return output


def _columns(section: str = "dataset.") -> list[str]:
    return [text for name, column in _COLUMNS.items() for text in (f"--{section}columns.{name}", column)]


_TABLE = """
    SELECT task, mode, metric, avg(value) AS mean, stddev_samp(value) / sqrt(count(*)) AS "±",
        avg(value - loaded) AS "difference to as loaded", stddev_samp(value - loaded) / sqrt(count(*)) AS "±.",
        avg(imbalance) AS "load above mean", avg(steps) AS steps
    FROM (
        SELECT *, max(value) FILTER (mode = 'as loaded') OVER (PARTITION BY task, seed) AS loaded FROM found
    ) GROUP BY ALL ORDER BY min(number)
"""
_READING = (
    "± is the standard error over the seeds. *Difference* compares runs with the same seed and held-out users; a "
    "difference below twice its error does not distinguish the modes. The sampler with a budget has steps of other "
    "sizes, so their number differs."
)


if __name__ == "__main__":
    from_command_line(main, __doc__)
