"""The output of a run, on rank 0: a progress bar, one JSON line per interval, and a table at the end.

A line covers the steps since the line before it. Loss, tokens and metrics are over all ranks; times are rank 0's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from tqdm import tqdm

from commons.console import print_summary
from commons.distributed.stats import ShuffleStats
from commons.run_log.files import (
    LOG_FILE,
    LOG_SCHEMA,
    SUMMARY_FILE,
    evaluation_in,
    finite_only,
    keep_lines_until,
    write_summary,
)
from commons.run_log.standard_error import shown_with_error, with_errors
from commons.trainer.config.args import TrainerArgs
from commons.trainer.observe.sinks import BackgroundSink, JsonLines, close_sinks, open_sinks

logger = logging.getLogger(__name__)


@dataclass
class TrainSummary:
    """The result of a run."""

    steps: int = 0  # steps trained
    epochs: int = 0  # epochs begun
    loss: float = 0.0  # mean loss of the last interval
    step_ms: float = 0.0  # median over all steps of this run; 0 without steps, for example if the run was complete
    tokens_per_s: float = 0.0  # over all steps, without evaluations
    metrics: dict[str, float] = field(default_factory=dict)  # of the last evaluation
    # Means of the shuffler's stats over all steps; without a shuffler only the mean imbalance of the FLOPs.
    shuffle: dict[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The fields, JSON-ready; without the fields about steps if no step was trained."""
        content = dataclasses.asdict(self)
        content["metrics"] = finite_only(self.metrics)
        if not self.step_ms:
            for name in ("loss", "step_ms", "tokens_per_s", "shuffle"):
                del content[name]
        return content


class TrainLog:
    """The progress bar, `<run_dir>/log.jsonl` and all other sinks; does nothing on ranks other than 0.

    An earlier log in `run_dir` is replaced. A run that resumes after `first_step` steps continues the log, and removes
    lines of later steps that an interrupted run may have written.
    """

    def __init__(self, args: TrainerArgs, total_steps: int, *, first_step: int = 0) -> None:
        self.run_dir = Path(args.run_dir)
        self._window = args.shuffle_window
        self._reads_by_work = args.balancing in ("sampler", "budget")
        self._balances_at_loading = args.balances_at_loading
        self._enabled = dist.get_rank() == 0
        self._bar = tqdm(
            total=total_steps,
            initial=first_step,
            desc="train",
            unit="step",
            disable=not self._enabled,
            dynamic_ncols=True,
            mininterval=0.2 if sys.stderr.isatty() else 10.0,  # in a file every refresh adds a line
        )
        self._shown: dict[str, str] = {}
        # On rank 0 of a resumed run: results of the evaluation after `first_step` steps, from its log.
        self.evaluated: dict[str, float] = {}
        self._lines: JsonLines | None = None
        self._sinks: list[BackgroundSink] = []
        if self._enabled:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            path = self.run_dir / LOG_FILE
            if first_step and path.exists():
                records, num_removed = keep_lines_until(path, first_step)
                self.evaluated = evaluation_in(records, first_step)
                if num_removed:
                    self.print_line(f"lines of {path} after step {first_step} are removed ({num_removed})")
            self._lines = JsonLines(path, append=first_step > 0)
            self._sinks = open_sinks(args, first_step)
        self._has_failed = False

    def step(self, stats: ShuffleStats | None) -> None:
        """Advance the bar by one step."""
        if stats is not None:
            self._show(imbalance=f"{stats.imbalance_before:.2f}→{stats.imbalance_after:.2f}")
        self._bar.update()

    def line(self, record: Mapping[str, Any], details: Mapping[str, Any] | None = None) -> None:
        """Write a line, and show its loss and rate; `details`, such as a number per rank, are for log.jsonl only."""
        if self._lines is None:
            return
        with self._unless_disk_full():
            self._lines.write({"schema": LOG_SCHEMA, **record, **(details or {})})
        for sink in self._sinks:
            sink.write(record)
        if "loss" in record:
            if "imbalance_before" in record and "moved" not in record:
                self._show(imbalance=f"{record['imbalance_before']:.2f}")
            self._show(loss=f"{record['loss']:.4f}", tokens=f"{tqdm.format_sizeof(record['tokens_per_s'])}/s")

    def _show(self, **values: str) -> None:
        self._shown.update(values)
        self._bar.set_postfix(self._shown, refresh=False)

    def print_line(self, text: str) -> None:
        """Print a line above the bar."""
        if self._enabled:
            tqdm.write(text)

    def close(self, *, failed: bool = False) -> None:
        """End the bar and all sinks, with the status of a failed run if the run has `failed`."""
        self._bar.close()
        if self._lines is not None:
            with self._unless_disk_full():
                self._lines.close()
        close_sinks(self._sinks, failed=failed)

    @contextlib.contextmanager
    def _unless_disk_full(self) -> Iterator[None]:
        """Log the first failed write as a warning: training continues, and later lines are tried again."""
        try:
            yield
        except OSError as error:
            if not self._has_failed:
                logger.warning("the log is incomplete: %s; training continues: make room in %s", error, self.run_dir)
            self._has_failed = True

    def summary(self, title: str, summary: TrainSummary) -> None:
        """Print the table at the end of a run, and write summary.json."""
        if not self._enabled:
            return
        with self._unless_disk_full():
            write_summary(self.run_dir / SUMMARY_FILE, summary.to_dict(), trained=summary.step_ms > 0)
        print_summary(title, {**self._rows(summary), "log": str(self.run_dir / LOG_FILE)})

    def _rows(self, summary: TrainSummary) -> dict[str, str]:
        """The table: texts by the names of its rows."""
        rows = {"steps": f"{summary.steps:,} in {summary.epochs} epoch{'s' if summary.epochs != 1 else ''}"}
        if summary.step_ms:
            rows["loss"] = f"{summary.loss:.4f}"
        for name, value, error in with_errors(summary.metrics):
            rows[name] = shown_with_error(value, error) if isinstance(value, float) else f"{value:,}"
        if summary.step_ms:
            rows["median step"] = f"{summary.step_ms:.1f} ms"
            rows["tokens per second"] = f"{summary.tokens_per_s:,.0f}"
        shuffle, imbalance = summary.shuffle, "imbalance (max ÷ mean − 1)"
        by_rank_0 = self._balances_at_loading and not self._reads_by_work  # the shuffler gets rows that are balanced
        if "moved" not in shuffle or by_rank_0:
            if "imbalance_before" in shuffle:
                done = "balanced when loaded" if self._balances_at_loading else "not balanced"
                rows[imbalance] = f"{shuffle['imbalance_before']:.1%}, {done}"
            return rows
        before, after = shuffle["imbalance_before"], shuffle["imbalance_after"]
        is_trained = shuffle["moved"] or before == after or self._reads_by_work
        rows[imbalance] = f"{before:.1%} → {after:.2%}{'' if is_trained else ' (observed, not carried out)'}"
        if self._window > 1:
            rows["balanced together"] = f"{self._window} batches"
        if not self._reads_by_work:
            rows["tokens moved"] = f"{shuffle['token_fraction_moved']:.1%}"
        rows["largest load saved" if is_trained else "would save"] = _saving(shuffle)
        return rows


def _saving(shuffle: Mapping[str, float]) -> str:
    """By how much the largest loads fall over all steps and, if known, the predicted and measured time per step.

    >>> loads = {"largest_load_before": 100.0, "largest_load_after": 79.0}
    >>> _saving({**loads, "predicted_saving_ms": 80.0, "measured_saving_ms": 76.2})
    '21.0%, predicted 80.0 ms, measured 76.2 ms per step'
    """
    # Means over all steps: in a window, before and after cover different rows, so single steps do not compare.
    before, after = shuffle["largest_load_before"], shuffle["largest_load_after"]
    parts = [f"{100 * (1 - after / before) if before else 0.0:.1f}%"]
    for kind in ("predicted", "measured"):
        if f"{kind}_saving_ms" in shuffle:
            parts.append(f"{kind} {shuffle[f'{kind}_saving_ms']:.1f} ms")
    return ", ".join(parts) + (" per step" if len(parts) > 1 else "")
