"""How well does the cost model know what a step costs, and how even are ranks that are balanced by it, in time?

Fit: 200 random batch mixes are measured, forward and backward, in turn; three quarters are fitted, a quarter is held
out. Operations alone (time = c0 + c · FLOPs) stand beside the calibrated model.

Balance: the batches of W ranks are planned by operations and by the calibration, and every rank's batch is replayed,
one rank after another, on this one device. What counts is the largest ÷ mean time of the ranks, as loaded and under
both plans; the three take turns.

Examples:
    python -m benchmarks.cost_model
    python -m benchmarks.cost_model --device cuda --ranks 16 --rows 32
    python -m benchmarks.cost_model --quick
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import matplotlib
import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, ScalarFormatter
from torch import nn
from torch.nn import functional
from tqdm import tqdm

from benchmarks.command_line import from_command_line
from benchmarks.report import RESULTS, Page, draw_lengths, rows_table
from commons.cli.recipes import choose_device
from commons.perf_model.calibration import CalibratedTask, Calibration, describe_device
from commons.perf_model.calibration_fit import StepMeasurement, fit_calibration
from commons.perf_model.measurement import CostTarget, RowTokens, draw_mixes, measure_steps, time_step
from commons.perf_model.shuffle_plan import GatheredRows, plan_shuffle
from commons.perf_model.task_estimator import SelfAttentionTask
from commons.trainer import DatasetArgs, TrainerArgs
from hstu.recipe import HSTURecipe
from hstu.train_config import ModelArgs, TrainConfig

PLANS = ("as loaded", "by operations", "calibrated")
LENGTHS = ("zipf", "lognormal", "user-like")


@dataclass
class Sizes:
    """What is measured."""

    longest: int
    rows: int
    ranks: int
    mixes: int
    repeats: int
    steps: int


class _Block(nn.Module):
    def __init__(self, task: SelfAttentionTask) -> None:
        super().__init__()
        hidden, self.heads, self.dim = task.hidden_size, task.num_heads, task.head_dim
        width, ffn = self.heads * self.dim, task.ffn_hidden_size or 4 * hidden
        self.norms = nn.ModuleList([nn.LayerNorm(hidden), nn.LayerNorm(hidden)])
        self.qkv, self.out = nn.Linear(hidden, 3 * width), nn.Linear(width, hidden)
        self.up, self.down = nn.Linear(hidden, ffn), nn.Linear(ffn, hidden)

    def forward(self, x: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        qkv = self.qkv(self.norms[0](x)).view(-1, 3, self.heads, self.dim)
        rows = []
        for row in qkv.split(lengths):
            q, k, v = row.permute(1, 2, 0, 3).unsqueeze(1)  # each (1, heads, length, dim)
            attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            rows.append(attended[0].transpose(0, 1).flatten(1))
        x = x + self.out(torch.cat(rows))
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))


class GPTCostTarget:
    """A plain GPT decoder with a vocabulary head, as a `commons.perf_model.measurement.CostTarget`; nothing is tuned.

    Linear layers see all tokens of a batch at once; attention runs row by row through torch's fused causal kernel, so
    that a row costs its own pairs and no padding.
    """

    def __init__(self, task: SelfAttentionTask, batch_size: int, max_length: int, device: torch.device) -> None:
        self.task, self.batch_size, self.max_length, self.device = task, batch_size, max_length, device
        torch.manual_seed(0)
        self.vocab_size = task.vocab_size or 1
        self._embedding = nn.Embedding(self.vocab_size, task.hidden_size, sparse=True)
        self._blocks = nn.ModuleList(_Block(task) for _ in range(task.num_layers))
        self._head = nn.Linear(task.hidden_size, self.vocab_size)
        self._model = nn.ModuleList([self._embedding, self._blocks, self._head]).to(device)

    def make_batch(self, lengths: Sequence[int]) -> tuple[torch.Tensor, list[int]]:
        tokens = torch.randint(self.vocab_size, (sum(lengths),))
        return tokens.to(self.device), list(lengths)

    def train_step(self, batch: tuple[torch.Tensor, list[int]]) -> None:
        tokens, lengths = batch
        x = self._embedding(tokens)
        for block in self._blocks:
            x = block(x, lengths)
        functional.cross_entropy(self._head(x), tokens, reduction="sum").backward()
        self._model.zero_grad(set_to_none=True)

    def row_tokens(self, batch: tuple[torch.Tensor, list[int]]) -> RowTokens:
        return RowTokens(torch.tensor(batch[1]))

    def host_batches(self) -> Iterator[Any]:
        return iter(())


def hstu_target(sizes: Sizes, device: torch.device) -> CostTarget:
    large = device.type == "cuda"
    model = ModelArgs(
        hidden_size=256 if large else 64,
        num_layers=8 if large else 2,
        num_attention_heads=4,
        kv_channels=64 if large else 16,
    )
    dataset = DatasetArgs("random", max_history_seqlen=sizes.longest, num_batches=2)
    return HSTURecipe(TrainConfig(TrainerArgs(sizes.rows, sizes.rows), dataset, model), device)


def gpt_target(sizes: Sizes, device: torch.device) -> CostTarget:
    if device.type == "cuda":
        task = SelfAttentionTask(512, 8, 64, 8, vocab_size=2048)
    else:
        task = SelfAttentionTask(64, 4, 16, 2, vocab_size=500)
    return GPTCostTarget(task, sizes.rows, sizes.longest, device)


TARGETS: dict[str, Callable[[Sizes, torch.device], CostTarget]] = {"HSTU": hstu_target, "GPT": gpt_target}


def fit(target: CostTarget, sizes: Sizes) -> tuple[Calibration, list[StepMeasurement]]:
    mixes = draw_mixes(sizes.mixes, sizes.rows, sizes.longest, seed=0)
    measured = measure_steps(
        target, mixes, repeats=sizes.repeats, progress=lambda steps: tqdm(steps, desc="fit", unit="step")
    )
    return fit_calibration(measured, target.task, describe_device(target.device)), measured


def plans(target: CostTarget, calibration: Calibration, lengths: np.ndarray, ranks: int) -> dict[str, np.ndarray]:
    """The rank of every row, for each way to plan."""
    home = np.repeat(np.arange(ranks), len(lengths) // ranks)
    rows = np.full(ranks, len(lengths) // ranks, dtype=np.int64)
    tokens = target.row_tokens(target.make_batch(lengths.tolist())).cpu()
    costs = {"by operations": target.task, "calibrated": CalibratedTask(target.task, calibration)}
    found = {"as loaded": home}
    for name, cost in costs.items():
        workloads = np.asarray(cost.get_workloads(*tokens))
        found[name] = plan_shuffle(GatheredRows(rows, rows, workloads, lengths), slack=0.01).destination
    return found


def replay(
    target: CostTarget, calibration: Calibration, name: str, sizes: Sizes
) -> dict[str, list[tuple[float, float]]]:
    """(largest, mean) milliseconds of the ranks, per plan and step; every rank's batch is the median of three."""
    found: dict[str, list[tuple[float, float]]] = {plan: [] for plan in PLANS}
    for step in tqdm(range(sizes.steps), desc=f"replay {name}", unit="step"):
        lengths = np.clip(draw_lengths(name, sizes.ranks * sizes.rows, step), 1, sizes.longest)
        ways = plans(target, calibration, lengths, sizes.ranks)
        times: dict[str, list[list[float]]] = {plan: [[] for _ in range(sizes.ranks)] for plan in PLANS}
        for _ in range(3):
            for rank in range(sizes.ranks):
                for plan in PLANS:
                    batch = target.make_batch(lengths[ways[plan] == rank].tolist())
                    times[plan][rank].append(time_step(target, batch))
        for plan in PLANS:
            of_ranks = [statistics.median(each) for each in times[plan]]
            found[plan].append((max(of_ranks), statistics.mean(of_ranks)))
    return found


def draw_fit(fitted: dict[str, tuple[Calibration, list[StepMeasurement]]], name: str) -> None:
    figure = Figure(figsize=(9, 4), layout="constrained")
    for axes, (model, (calibration, measured)) in zip(
        figure.subplots(1, len(fitted), squeeze=False)[0], fitted.items()
    ):
        times = np.array([m.ms for m in measured])
        predicted = np.array([calibration.predict_ms(m.rows, m.tokens, m.pairs) for m in measured])
        axes.loglog(times, predicted, ".", color="#2e6fb5", markersize=5)
        ends = [times.min(), times.max()]
        axes.loglog(ends, ends, color="grey", linewidth=0.8)
        axes.set(xlabel="measured, ms", ylabel="calibrated, ms", title=f"{model}: {len(times)} batch mixes")
        axes.spines[["top", "right"]].set_visible(False)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(ScalarFormatter())
            axis.set_minor_formatter(NullFormatter())
    with matplotlib.rc_context({"svg.hashsalt": "evenrank"}):
        figure.savefig(RESULTS / f"{name}.png", dpi=120)


def fit_row(model: str, calibration: Calibration) -> dict[str, Any]:
    """How well a calibration predicts."""
    quality = calibration.quality
    return {
        "model": model,
        "R²": quality.r2,
        "R² held out": quality.held_out_r2,
        "mean error held out": f"{quality.held_out_mean_error:.1%}",
        "worst": f"{quality.held_out_worst_error:.1%}",
        "mean error by operations alone": f"{quality.flops_mean_error:.1%}",
    }


def balance_row(model: str, lengths: str, found: dict[str, list[tuple[float, float]]]) -> dict[str, Any]:
    """How even the ranks of every plan are."""
    largest = {plan: sum(step[0] for step in found[plan]) for plan in PLANS}
    return {
        "model": model,
        "lengths": lengths,
        **{plan: statistics.mean(step[0] / step[1] for step in found[plan]) for plan in PLANS},
        **{f"speed-up {plan}": largest["as loaded"] / largest[plan] for plan in PLANS[1:]},
        "possible": largest["as loaded"] / sum(step[1] for step in found["as loaded"]),
    }


def main(
    device: Literal["auto", "cpu", "cuda"] = "auto",
    ranks: int = 8,
    rows: int = 16,
    longest: int | None = None,
    quick: bool = False,
) -> None:
    """Measure and write the page.

    Args:
        device: where; auto takes a GPU if there is one.
        ranks: ranks whose batches are replayed.
        rows: rows per rank.
        longest: items of the longest row; 256 on a CPU, 4096 on a GPU.
        quick: fewer mixes and steps, and no page.
    """
    where = choose_device(device, threads=1)
    longest = longest or (4096 if where.type == "cuda" else 256)
    sizes = Sizes(longest, rows, ranks, *((40, 2, 2) if quick else (200, 5, 12)))
    fitted, replayed = {}, []
    for model, make in TARGETS.items():
        target = make(sizes, where)
        fitted[model] = fit(target, sizes)
        for lengths in LENGTHS[:1] if quick else LENGTHS:
            replayed.append(balance_row(model, lengths, replay(target, fitted[model][0], lengths, sizes)))
    on_cuda = where.type == "cuda"
    name, options = (
        ("cost_model_cuda", f" --device cuda --ranks {ranks} --rows {rows}") if on_cuda else ("cost_model", "")
    )
    page = Page(
        name,
        "Cost model",
        f"python -m benchmarks.cost_model{options}",
        f"Device: {describe_device(where).name}. {sizes.mixes} batch mixes of up to {2 * rows} rows of up to {longest} "
        f"items, each the median of {sizes.repeats}; every fourth is held out of the fit.",
    )
    page.section(
        "",
        rows_table([fit_row(model, calibration) for model, (calibration, _) in fitted.items()]),
        "Target: R² of at least 0.98 and a mean error of at most 5 % on what is held out. Short steps count as much "
        "as long ones, and are where the error is: attention runs in blocks of similar rows, whose number no term "
        "counts.",
        f"![predicted against measured]({name}.png)",
        f"Balance in time: {ranks} ranks of {rows} rows, {sizes.steps} steps, every rank's batch replayed on this "
        "device one after another (median of three). Largest ÷ mean time of the ranks, and the speed-up of the slowest "
        "rank that follows; the published gain on 16 H100 is 1.53×.",
        rows_table(replayed),
    )
    page.finish(quick=quick)
    if not quick:
        draw_fit(fitted, name)


if __name__ == "__main__":
    from_command_line(main, __doc__)
