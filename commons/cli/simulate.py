"""`evenrank simulate`: what balancing would gain on the user's data, before anything is trained."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from commons.cli.cost_target import load_cost_target
from commons.cli.simulate_figure import require_picture, write_figure
from commons.distributed.options import ShufflerOptions
from commons.perf_model.calibration import CalibratedTask, load_calibration
from commons.perf_model.measurement import CostTarget
from commons.perf_model.simulation import RowCosts, SimulatedSteps, simulate_steps


@dataclass
class Simulate:
    """Read batches of a training run, deal them to ranks, and say what balancing gains.

    Nothing is trained. With a calibration the gain is that of a whole step; without one it is that of the largest load,
    which fixed costs of a step make smaller.

    For example:
      evenrank simulate --config hstu/configs/demo.toml
      evenrank simulate --config my.toml --ranks 16 64 256 --shuffler.calibration h200.toml --figure gain.png
    """

    config: Path
    """The TOML or YAML file of a training run: model, data set and batch size."""

    model: str = "hstu"
    """Package of the model; its module `cost` has a function cost_target(config, device)."""

    ranks: tuple[int, ...] = (8, 16, 64)
    """Numbers of ranks to look at."""

    steps: int = 50
    """Steps to plan for each of them; the data repeats if it is too short."""

    figure: Path | None = None
    """Where to draw the gain, as .png, .svg or .pdf; None for no picture."""

    shuffler: ShufflerOptions = field(default_factory=ShufflerOptions)
    """How batches are balanced."""

    def run(self) -> None:
        """Read, plan, print, draw."""
        if not self.ranks or min(self.ranks) < 2 or self.steps < 1:
            raise ValueError(
                f"ranks is {self.ranks} and steps is {self.steps}; balancing needs 2 ranks and a step: raise them"
            )
        if self.shuffler.mode != "balance":
            raise ValueError(
                f"shuffler.mode is {self.shuffler.mode!r}; a simulation says what balancing would gain: leave it out"
            )
        if self.figure is not None:
            require_picture(self.figure)
        target = load_cost_target(self.model, self.config, torch.device("cpu"))
        results = [self._simulate(target, num_ranks) for num_ranks in self.ranks]
        _print_results(results, self.config, target.batch_size)
        if self.figure is not None:
            write_figure(results, self.figure)

    def _simulate(self, target: CostTarget, num_ranks: int) -> SimulatedSteps:
        options, calibration = self.shuffler, None
        if options.calibration is not None:
            calibration = load_calibration(options.calibration)
        cost = target.task if calibration is None else CalibratedTask(target.task, calibration)
        wanted = itertools.islice(_repeated(target), num_ranks * self.steps)
        bar = tqdm(wanted, f"{num_ranks} ranks", num_ranks * self.steps, unit="batch", disable=not sys.stderr.isatty())
        batches = []
        for batch in bar:
            rows = target.row_tokens(batch)
            tokens, pairs = target.task.tokens_and_pairs(*rows)
            workloads = cost.get_workloads(*rows)
            batches.append(RowCosts(workloads.numpy(), tokens.numpy(), pairs.numpy()))
        units_per_ms = cost.units_per_ms if isinstance(cost, CalibratedTask) else 0
        return simulate_steps(
            batches,
            num_ranks,
            calibration=calibration,
            method=options.partitioner,
            equal_size=options.equal_size,
            slack=options.slack,
            ranks_per_node=options.ranks_per_node,
            max_tokens=options.max_tokens_per_rank,
            min_gain=options.min_gain,
            min_gain_load=round(options.min_gain_ms * units_per_ms),
        )


def _repeated(target: CostTarget) -> Iterator[object]:
    while True:
        count = 0
        for batch in target.host_batches():
            count += 1
            yield batch
        if count == 0:
            raise ValueError("the data set has no batch; there is nothing to balance: check its path and split")


def _print_results(results: list[SimulatedSteps], config: Path, batch_size: int) -> None:
    in_ms = results[0].in_ms
    table = Table(
        title=f"{config}: {batch_size} rows per rank, {len(results[0].cost_before)} steps", title_justify="left"
    )
    for name in (
        "ranks",
        "imbalance",
        "slowest rank" if in_ms else "",
        "speed-up",
        "possible",
        "tokens moved",
    ):
        if name:
            table.add_column(name, justify="right")
    for result in results:
        before, after = result.cost_before.mean(), result.cost_after.mean()
        cells = [str(result.num_ranks), f"{result.imbalance_before:.1%} → {result.imbalance_after:.2%}"]
        if in_ms:
            cells.append(f"{before:.1f} → {after:.1f} ms")
        cells += [f"{result.speed_up:.2f}×", f"{result.possible_speed_up:.2f}×", f"{result.tokens_moved:.1%}"]
        table.add_row(*cells)
    console = Console()
    console.print(table)
    console.print("imbalance: largest ÷ mean − 1; possible: with an even share on every rank")
    if not in_ms:
        console.print("Of the slowest rank's operations; --shuffler.calibration gives a whole step in milliseconds.")
