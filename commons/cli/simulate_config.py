"""`evenrank simulate --config`: what balancing would gain on the batches of a training run."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from tqdm import tqdm

from commons.cli.recipes import load_recipe
from commons.cli.simulate_page import cells_of_steps
from commons.console import make_console
from commons.distributed.options import ShufflerOptions
from commons.perf_model.calibration import CalibratedTask, load_calibration
from commons.perf_model.measurement import CostTarget
from commons.perf_model.simulation import RowCosts, SimulatedSteps, deal_in_turn, simulate_steps
from commons.perf_model.task_estimator import AttentionTask


@dataclass(frozen=True)
class ConfigAnswer:
    """What was simulated, and what came of it.

    Attributes:
        config: the training config.
        title: what was looked at, in words.
        results: by number of ranks and window; at least one.
        notes: what else to say, a line each.
    """

    config: Path
    title: str
    results: tuple[SimulatedSteps, ...]
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return {
            "config": str(self.config),
            "ranks": [each.to_dict() for each in self.results],
            "notes": list(self.notes),
        }


def simulate_config(
    config: Path,
    model: str | None,
    shuffler: ShufflerOptions,
    ranks: Sequence[int],
    windows: Sequence[int],
    steps: int,
) -> ConfigAnswer:
    """Read the batches of a training run, and balance them for every number of ranks and window.

    Args:
        config: the training config.
        model: package of the model; None for that of ours which trains on the config's data.
        shuffler: how batches are balanced.
        ranks: numbers of ranks, at least 2 each.
        windows: batches of every rank that are planned together, at least 1 each.
        steps: to look at; fewer where the data end.

    Raises:
        FileNotFoundError: no config, or no calibration.
        ValueError: what the recipe or the calibration says of them, or too few rows for a step.
    """
    calibration = None if shuffler.calibration is None else load_calibration(shuffler.calibration)
    target = load_recipe(model, config, torch.device("cpu"))
    cost = target.task if calibration is None else CalibratedTask(target.task, calibration)
    batches, num_rows = _read(target, cost, max(ranks) * steps)
    # A target that is no Recipe may not say; its rows are dealt as those of files are.
    draws_per_rank = getattr(target, "draws_per_rank", False)
    dealt = {
        num_ranks: batches[: num_ranks * steps]
        if draws_per_rank
        else deal_in_turn(batches[: num_ranks * steps], num_ranks)
        for num_ranks in ranks
    }
    results = tuple(
        _simulate(dealt[num_ranks], num_ranks, window, cost, shuffler)
        for num_ranks in ranks
        for window in windows
        if num_ranks * window <= len(batches)
    )
    if not results:
        fewest = min(ranks) * target.batch_size
        of_window = "" if min(windows) == 1 else f", a window of {min(windows)} {fewest * min(windows):,}"
        raise ValueError(
            f"the data set has {num_rows:,} rows, a step of {min(ranks)} ranks trains {fewest:,}{of_window}: "
            "lower --ranks, or train_batch_size in the config"
        )
    shortage = [
        f"{num_ranks} ranks: {len(batches) // num_ranks} of {steps} steps. The data set has {num_rows:,} rows, "
        f"{steps} steps train {steps * num_ranks * target.batch_size:,}; no row counts twice."
        for num_ranks in ranks
        if len(batches) < num_ranks * steps
    ]
    title = f"{config}: {target.batch_size} rows per rank, {steps} steps"
    return ConfigAnswer(config, title, results, (*shortage, *_dominant_rows(results)))


def _simulate(
    batches: Sequence[RowCosts],
    num_ranks: int,
    window: int,
    cost: AttentionTask | CalibratedTask,
    shuffler: ShufflerOptions,
) -> SimulatedSteps:
    calibrated = cost if isinstance(cost, CalibratedTask) else None
    return simulate_steps(
        batches,
        num_ranks,
        window=window,
        calibration=None if calibrated is None else calibrated.calibration,
        **shuffler.plan_arguments(None if calibrated is None else calibrated.units_per_ms),
    )


def _read(target: CostTarget, cost: AttentionTask | CalibratedTask, num_batches: int) -> tuple[list[RowCosts], int]:
    """The first batches of the data, fewer where the data end, and their rows.

    An incomplete batch at the end is left out, its rows are counted: in training every rank ends with as few rows, here
    one rank alone would.
    """
    wanted = itertools.islice(target.host_batches(), num_batches)
    batches = []
    for batch in tqdm(wanted, "read", num_batches, unit="batch", leave=False, disable=not sys.stderr.isatty()):
        rows = target.row_tokens(batch)
        tokens, pairs = target.task.tokens_and_pairs(*rows)
        batches.append(RowCosts(cost.get_workloads(*rows).numpy(), tokens.numpy(), pairs.numpy()))
    num_rows = sum(len(batch.workloads) for batch in batches)
    if batches and len(batches) < num_batches and len(batches[-1].workloads) < target.batch_size:
        del batches[-1]
    return batches, num_rows


def _dominant_rows(results: Sequence[SimulatedSteps]) -> list[str]:
    """What to say of steps in which one row is more than an even share, so that no plan can be even."""
    lines = []
    for result in results:
        dominated = result.largest_share > 1
        if result.window == 1 and dominated.any():
            lines.append(
                f"{result.num_ranks} ranks: in {dominated.sum()} of {len(dominated)} steps one sample alone is more "
                f"than an even share of the work, up to {result.largest_share.max():.2f}×. It cannot be split: a "
                "window of several batches (--window 2 4), a larger train_batch_size or a shorter max_history_seqlen "
                "makes more possible."
            )
    return lines


def print_config_answer(answer: ConfigAnswer) -> None:
    """A table, and what to know of it."""
    results = answer.results
    in_ms, has_windows = results[0].in_ms, any(result.window > 1 for result in results)
    table = Table(title=answer.title, title_justify="left")
    cells = [cells_of_steps(result, has_windows=has_windows) for result in results]
    for name in cells[0]:
        table.add_column(name, justify="right")
    for row in cells:
        table.add_row(*row.values())
    console = make_console()
    console.print(table)
    of_steps = "of the sums over all steps, " if has_windows else ""
    console.print(f"imbalance: {of_steps}largest ÷ mean − 1; possible: no plan gains more; moved: of all tokens")
    if has_windows:
        console.print("window: batches of every rank that are planned together; which rows share a step changes")
    if not in_ms:
        console.print("Of the slowest rank's operations; --shuffler.calibration gives a whole step in milliseconds.")
    for line in answer.notes:
        console.print(line)
