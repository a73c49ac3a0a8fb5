"""`evenrank calibrate`: measures the time that a row of the user's model takes on the user's device."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from tqdm import tqdm

from commons.checks import Count, Natural, require_field_types
from commons.cli.answer import require_output
from commons.cli.recipes import choose_device, load_recipe, share_global_batch
from commons.console import make_console, print_summary
from commons.perf_model.calibration import describe_device, is_calibration
from commons.perf_model.calibration_fit import MIN_MEASUREMENTS, Verdict, fit_calibration, judge_calibration
from commons.perf_model.measurement import draw_mixes, measure_steps


@dataclass
class Calibrate:
    """Measure forward and backward passes of a model over many batch mixes, and fit the cost of a row.

    Pass the file to training by --trainer.shuffler.calibration, or to ShufflerOptions(calibration=…). Measure on the
    machine that will train, while nothing else runs there.

    For example:
      evenrank calibrate --config hstu/configs/random.toml --output calibration.toml
      evenrank calibrate --config my.toml --model my_package --device cuda --output h200.toml
    """

    config: Path  # the TOML or YAML file of a training run: model, data set and batch size
    output: Path  # the calibration to write, a small TOML file
    # Package whose module `recipe` defines RECIPE, a Recipe. None: hstu, or sid_gr for semantic IDs.
    model: str | None = None
    # Number of ranks of the training run, if the config has a global_batch_size, which they share.
    ranks: Count | None = None
    num_mixes: int = 80  # number of batches, of different sizes and lengths; every fourth is held out of the fit
    repeats: int = 5  # how often each batch is measured
    device: Literal["auto", "cpu", "cuda"] = "auto"  # device to measure on; auto: a GPU if there is one, else the CPU
    threads: int = 1  # number of threads on the CPU; in training, a rank on the CPU has one
    seed: Natural = 0  # seed of the random batches

    def run(self) -> None:
        """Measure, fit, save, and print the quality of the fit."""
        if self.output.suffix != ".toml":
            raise ValueError(f"output is {str(self.output)!r}; a calibration is a TOML file: let it end in .toml")
        if self.num_mixes < MIN_MEASUREMENTS:
            raise ValueError(
                f"num_mixes is {self.num_mixes}; a fit needs at least {MIN_MEASUREMENTS}: raise --num-mixes"
            )
        require_field_types(self)
        # Check the output before the measurements, which would be lost.
        require_output(self.output, inputs={"--config": self.config}, may_replace=is_calibration, what="calibration")
        try:
            target = load_recipe(self.model, self.config, choose_device(self.device, self.threads))
            share_global_batch(target, () if self.ranks is None else (self.ranks,))
            mixes = draw_mixes(self.num_mixes, target.batch_size, target.max_length, self.seed)
            measurements = measure_steps(
                target,
                mixes,
                repeats=self.repeats,
                progress=lambda steps: tqdm(steps, desc="measure", unit="step", disable=None),
            )
        except torch.OutOfMemoryError:
            raise ValueError(
                "the device has too little memory for the largest batch mix; a mix has up to twice train_batch_size "
                "rows, and up to half the tokens of a batch of longest rows: lower train_batch_size or "
                "max_history_seqlen in the config"
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
                "error of operations": f"mean {quality.flops_mean_error:.1%}",
                "file": str(self.output),
            },
        )
        make_console().print(_advice(judge_calibration(made, measurements, target.task), len(mixes)))


def _advice(verdict: Verdict, num_mixes: int) -> str:
    """Whether to use the calibration, in a sentence."""
    errors = f"{verdict.error:.1%} instead of {verdict.operations_error:.1%} on held-out batches"
    if verdict.better:
        factor = verdict.operations_error / max(verdict.error, 1e-12)
        times = f"{factor:.1f} times" if factor < 100 else "more than 100 times"
        return f"Use it: its error is {times} smaller than that of predictions from operations, {errors}."
    if verdict.measurements > num_mixes:
        return (
            f"It may not be better than predictions from operations: {errors}. Measure with --num-mixes "
            f"{verdict.measurements} to decide ({verdict.measurements - num_mixes} more); an idle machine needs fewer."
        )
    return (
        f"It is not better than predictions from operations: {errors}. More mixes would not change this: do not use "
        "the calibration, unless you need loads in milliseconds."
    )
