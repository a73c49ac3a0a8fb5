"""How well does the cost model predict the time of a step, and how even are the times of ranks that it balances?

Fit: random batch mixes are measured, forward and backward, in turn; three quarters are fitted, a quarter is held out.
The calibrated model is compared with operations only (time = c0 + c · FLOPs).

Balance: the batches of W ranks are planned by operations and by the calibration, and every rank's batch is replayed,
one rank after another, on this one device. The result is the largest ÷ mean time of the ranks, as loaded and under
both plans; the three alternate.

Examples:
    python -m benchmarks.models.cost_model
    python -m benchmarks.models.cost_model --device cuda --ranks 16
    python -m benchmarks.models.cost_model --quick
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from tqdm import tqdm

from benchmarks.models.attention import r_squared
from benchmarks.shared.command_line import Quick, from_command_line
from benchmarks.shared.lengths import described, draw
from benchmarks.shared.report import Page, interleaved_medians
from commons.cli.recipes import choose_device, load_recipe
from commons.perf_model.calibration import CalibratedTask, Calibration, describe_device
from commons.perf_model.calibration_fit import fit_calibration
from commons.perf_model.measurement import CostTarget, draw_mixes, measure_steps, time_step
from commons.perf_model.shuffle_plan import GatheredRows, plan_shuffle

# By model: its package, its configs on the CPU and on a GPU, and the items of its longest row there.
MODELS = {
    "HSTU": ("hstu", ("random.toml", 256), ("benchmark.toml", 4096)),
    "SID-GR": ("sid_gr", ("random.toml", 64), ("random.toml", 256)),
}
LENGTHS = ("zipf", "lognormal", "user-like, mean 165")


def load_target(model: str, device: torch.device) -> tuple[CostTarget, int]:
    """A model, and the items of the longest row to measure."""
    package, *configs = MODELS[model]
    config, longest = configs[device.type == "cuda"]
    return load_recipe(package, Path(package, "configs", config), device), longest


def fit(target: CostTarget, longest: int, mixes: int, repeats: int) -> tuple[Calibration, dict[str, Any]]:
    """The calibration of a model, and how well it predicts."""
    drawn = draw_mixes(mixes, target.batch_size, longest, seed=0)
    measured = measure_steps(target, drawn, repeats=repeats, progress=partial(tqdm, desc="fit", unit="step"))
    calibration = fit_calibration(measured, target.task, describe_device(target.device))
    of_fit = calibration.quality
    operations = [target.task.forward_flops(step.tokens, step.pairs) for step in measured]
    return calibration, {
        "R²": of_fit.r2,
        "R² held out": of_fit.held_out_r2,
        "R² of a line in operations": r_squared(operations, [step.ms for step in measured]),
        "mean error held out": f"{of_fit.held_out_mean_error:.1%}",
        "worst": f"{of_fit.held_out_worst_error:.1%}",
        "mean error by operations alone": f"{of_fit.flops_mean_error:.1%}",
    }


def plans(target: CostTarget, costs: Mapping[str, Any], lengths: np.ndarray, ranks: int) -> dict[str, np.ndarray]:
    """The rank of every row, as loaded and by each cost."""
    rows = np.full(ranks, len(lengths) // ranks, dtype=np.int64)
    tokens = target.row_tokens(target.make_batch(lengths.tolist())).cpu()
    found = {"as loaded": np.repeat(np.arange(ranks), len(lengths) // ranks)}
    for name, cost in costs.items():
        workloads = np.asarray(cost.get_workloads(*tokens))
        found[name] = plan_shuffle(GatheredRows(rows, rows, workloads, lengths), slack=0.01).destination
    return found


def replay(
    target: CostTarget, costs: Mapping[str, Any], name: str, *, ranks: int, rows: int, longest: int, steps: int
) -> dict[str, Any]:
    """Time imbalance of the ranks and the slowest rank's speed-up, by plan; a batch's time is the median of three."""
    times: dict[str, list[list[float]]] = {}  # milliseconds of every rank in every step, by plan
    for step in tqdm(range(steps), desc=f"replay {name}", unit="step"):
        lengths = np.clip(draw(name, ranks * rows, step), 1, longest)
        batches = {
            (plan, rank): target.make_batch(lengths[rank_of_row == rank].tolist())
            for plan, rank_of_row in plans(target, costs, lengths, ranks).items()
            for rank in range(ranks)
        }
        calls = {of: partial(time_step, target, batch) for of, batch in batches.items()}
        medians = interleaved_medians(calls, 3, warmup=0, clock=time.perf_counter, show=False)
        for (plan, _), seconds in medians.items():
            times.setdefault(plan, [[] for _ in range(steps)])[step].append(seconds)
    of_ranks = {plan: np.array(each) for plan, each in times.items()}  # float64 (steps, ranks)
    slowest = {plan: each.max(axis=1) for plan, each in of_ranks.items()}
    before = of_ranks["as loaded"]
    return {
        "lengths": name,
        **{plan: float((slowest[plan] / each.mean(axis=1)).mean()) for plan, each in of_ranks.items()},
        **{f"speed-up {plan}": slowest["as loaded"].sum() / slowest[plan].sum() for plan in costs},
        "possible": slowest["as loaded"].sum() / before.mean(axis=1).sum(),
    }


def main(device: Literal["auto", "cpu", "cuda"] = "auto", ranks: int = 8, quick: Quick = False) -> None:
    """Measure and write the page.

    Args:
        device: device to run on; auto uses a GPU if there is one.
        ranks: ranks whose batches are replayed.
    """
    where = choose_device(device, threads=1)
    mixes, repeats, steps = (40, 2, 2) if quick else (200, 5, 12)
    quality, balance, cuts = [], [], []
    for model in MODELS:
        target, longest = load_target(model, where)
        cuts.append(f"{longest} items of {model}")
        calibration, of_fit = fit(target, longest, mixes, repeats)
        quality.append({"model": model} | of_fit)
        costs = {"by operations": target.task, "calibrated": CalibratedTask(target.task, calibration)}
        sizes = {"ranks": ranks, "rows": target.batch_size, "longest": longest, "steps": steps}
        balance += [
            {"model": model} | replay(target, costs, name, **sizes) for name in (LENGTHS[:1] if quick else LENGTHS)
        ]
    page = Page(
        "Cost model",
        f"Device: {describe_device(where).name}. {mixes} batch mixes, each the median of {repeats}; every fourth is "
        f"held out of the fit. {described(LENGTHS)} They are cut to {' and '.join(cuts)}.",
        suffix="_cuda" if where.type == "cuda" else "",
    )
    page.section(
        "",
        quality,
        "Target: R² of at least 0.98 and a mean error of at most 5 % on held-out mixes. Short steps count as much as "
        "long steps, and have the largest errors: attention runs in blocks of similar rows, and no term of the model "
        "counts the blocks.",
        f"Balance in time: {ranks} ranks, {steps} steps, every rank's batch replayed on this device one after another "
        "(median of three). Largest ÷ mean time of the ranks, and the resulting speed-up of the slowest rank; the "
        "published gain on 16 H100 is 1.53×.",
        balance,
    )
    page.finish(quick=quick)


if __name__ == "__main__":
    from_command_line(main, __doc__)
