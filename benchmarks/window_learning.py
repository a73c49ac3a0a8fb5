"""Does a model learn as well from windows? HSTU on generated ml-1m, several seeds, batch by batch and in windows.

    python -m benchmarks.window_learning            # two ranks, three seeds, windows of 1 and 8: half an hour
    python -m benchmarks.window_learning --quick    # one seed, 20 steps: shows that it runs

Which rows share a step changes with a window, so the losses differ; what is compared is what the trained model can do.
"""

from __future__ import annotations

import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from benchmarks.command_line import from_command_line
from benchmarks.report import heading, table, write_page
from commons.trainer.demo import DemoOptions, prepare_data

# What an evaluation says of each task, and how that is called.
_METRICS = {"ranking": ("auc_task_0", "AUC"), "retrieval": ("HR@10", "HR@10")}


@dataclass
class WindowLearning:
    """Train HSTU with and without windows, and compare what it has learnt."""

    seeds: tuple[int, ...] = (1, 2, 3)
    """Of weights, dropout and the order of the data."""

    windows: tuple[int, ...] = (1, 8)
    """Batches that are balanced together."""

    ranks: int = 2
    """Ranks on this machine."""

    quick: bool = False
    """One seed and 20 steps, and no page."""

    def run(self) -> None:
        """Train, print, and write benchmarks/results/window_learning.md."""
        seeds = self.seeds[:1] if self.quick else self.seeds
        with tempfile.TemporaryDirectory() as folder:
            options = DemoOptions(run_dir=Path(folder))
            prepare_data(options)
            runs = list(itertools.product(_METRICS, seeds, self.windows))  # interleaved: the machine may drift
            found = {run: self._train(Path(folder), options.data_dir, *run) for run in tqdm(runs, "runs", disable=None)}
        rows = [self._row(task, window, seeds, found) for task in _METRICS for window in self.windows]
        head = ("task", "window", "metric", *(f"seed {seed}" for seed in seeds), "mean", "spread", "load above mean")
        text = table(head, rows)
        print(text)
        if not self.quick:
            write_page("window_learning", "\n".join((self._head(), text, "", _READING)))

    def _train(self, folder: Path, data: Path, task: str, seed: int, window: int) -> tuple[float, float]:
        """The task's metric on held-out users, and the imbalance that was trained."""
        run_dir = folder / f"{task}-{seed}-{window}"
        options = {
            "dataset.dataset-path": data,
            "trainer.run-dir": run_dir,
            "trainer.seed": seed,
            "trainer.shuffle-window": window,
            "trainer.eval-interval": 1_000_000,
            **({"trainer.max-train-iters": 20} if self.quick else {}),
        }
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={self.ranks}"]
        command += ["-m", "hstu.train", "--config", f"hstu/configs/{task}.toml", "--trainer.enable-balanced-shuffler"]
        command += [text for name, value in options.items() for text in (f"--{name}", str(value))]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-2000:]}")
        summary = json.loads((run_dir / "summary.json").read_text())
        return summary["metrics"][f"eval_{_METRICS[task][0]}"], summary["shuffle"]["imbalance_after"]

    def _row(
        self, task: str, window: int, seeds: Sequence[int], found: dict[tuple[str, int, int], tuple[float, float]]
    ) -> list[str]:
        values, imbalances = zip(*(found[task, seed, window] for seed in seeds))
        spread = f"{max(values) - min(values):.4f}"
        means = [f"{statistics.fmean(values):.4f}", spread, f"{statistics.fmean(imbalances):.2%}"]
        return [task, str(window), _METRICS[task][1], *(f"{value:.4f}" for value in values), *means]

    def _head(self) -> str:
        return heading("Learning from windows", "python -m benchmarks.window_learning") + (
            f"\nHSTU on generated ml-1m (hstu/configs/ranking.toml and retrieval.toml), {self.ranks} gloo ranks × 16 "
            "users, the shuffler on, evaluated once on all held-out users.\n"
        )


_READING = (
    "A window changes which rows share a step, so that runs of one seed differ from the first step on. *Spread* is "
    "the largest minus the smallest of the seeds; where the means of two windows differ by less, nothing tells them "
    "apart."
)


if __name__ == "__main__":
    from_command_line(WindowLearning, __doc__).run()
