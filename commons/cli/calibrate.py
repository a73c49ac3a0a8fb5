"""`evenrank calibrate`: what a row of the user's model costs on the user's device, in time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from tqdm import tqdm

from commons.cli.answer import require_output
from commons.cli.recipes import choose_device, load_recipe
from commons.console import make_console, print_summary
from commons.perf_model.calibration import describe_device, is_calibration
from commons.perf_model.calibration_fit import Verdict, fit_calibration, judge_calibration
from commons.perf_model.measurement import draw_mixes, measure_steps


@dataclass
class Calibrate:
    """Measure forward and backward pass of a model over many batch mixes, and fit what a row costs.

    The file goes to --trainer.shuffler.calibration of training, or to ShufflerOptions(calibration=…). Measure on the
    machine that trains, with nothing else running there.

    For example:
      evenrank calibrate --config hstu/configs/demo.toml --output calibration.toml
      evenrank calibrate --config my.toml --model my_package --device cuda --output h200.toml
    """

    config: Path
    """The TOML or YAML file of a training run: model, data set and batch size."""

    output: Path
    """The calibration, a small TOML file."""

    model: str | None = None
    """Package of the model, installed or in the working directory; its module `recipe` names its Recipe, RECIPE. None:
    hstu, or sid_gr where the data set of the config has semantic IDs."""

    num_mixes: int = 80
    """Batches of different sizes and lengths; every fourth is held out of the fit."""

    repeats: int = 5
    """Times that each batch is measured."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to measure."""

    threads: int = 1
    """Threads on the CPU; ranks on the CPU have one each."""

    seed: int = 0
    """Seed of the batches."""

    def run(self) -> None:
        """Measure, fit, save, and print how well the fit predicts."""
        if self.output.suffix != ".toml":
            raise ValueError(f"output is {str(self.output)!r}; a calibration is a TOML file: let it end in .toml")
        if self.seed < 0:
            raise ValueError(f"seed is {self.seed}; seeds are not negative: correct it")
        # Before the measurements, which would be lost.
        require_output(self.output, inputs={"--config": self.config}, may_replace=is_calibration, what="calibration")
        try:
            target = load_recipe(self.model, self.config, choose_device(self.device, self.threads))
            mixes = draw_mixes(self.num_mixes, target.batch_size, target.max_length, self.seed)
            measurements = measure_steps(
                target,
                mixes,
                repeats=self.repeats,
                progress=lambda steps: tqdm(steps, desc="measure", unit="step", disable=None),
            )
        except torch.OutOfMemoryError:
            raise ValueError(
                "the device has too little memory for the largest batch mix; mixes have up to twice train_batch_size "
                "rows and half its longest tokens: lower train_batch_size or max_history_seqlen in the config"
            ) from None
        made = fit_calibration(measurements, target.task, describe_device(target.device))
        made.save(self.output)
        quality = made.quality
        print_summary(
            f"{made.model['task']} on {made.device.name}",
            {
                "a step": f"{made.per_step:.3g} ms",
                "a row": f"{made.per_row * 1e3:.3g} µs",
                "a token": f"{made.per_token * 1e3:.3g} µs",
                "a million pairs": f"{made.per_pair * 1e6:.3g} ms",
                "batches": f"{quality.num_measurements}, every fourth held out",
                "R²": f"{quality.r2:.4f}, held out {quality.held_out_r2:.4f}",
                "held-out error": f"mean {quality.held_out_mean_error:.1%}, worst {quality.held_out_worst_error:.1%}",
                "by operations alone": f"mean {quality.flops_mean_error:.1%}",
                "file": str(self.output),
            },
        )
        make_console().print(_say(judge_calibration(made, measurements, target.task), len(mixes)))


def _say(verdict: Verdict, num_mixes: int) -> str:
    """The verdict in a sentence, and what to do."""
    errors = f"{verdict.error:.1%} against {verdict.operations_error:.1%} on batches that no fit has seen"
    if verdict.better:
        factor = verdict.operations_error / max(verdict.error, 1e-12)
        times = f"{factor:.1f} times" if factor < 100 else "more than 100 times"
        return f"Use it: its error is {times} smaller than that of operations alone, {errors}."
    if verdict.measurements > num_mixes:
        return (
            f"Not surely better than operations alone: {errors}. --num-mixes {verdict.measurements} would tell "
            f"({verdict.measurements - num_mixes} more); a machine where nothing else runs needs fewer."
        )
    return (
        f"No better than operations alone: {errors}. More mixes would not change that: leave the calibration out, "
        "unless you need loads in milliseconds."
    )
