"""Updates of the training loop: accumulated over several global batches, clipped, scheduled, and never from a NaN."""

from __future__ import annotations

import math
import os
import signal
from contextlib import closing

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from commons.datasets.samplers.epoch import BatchOrderSampler
from commons.distributed.batch_shuffler import IdentityBalancedBatchShuffler
from commons.trainer import TrainerArgs
from commons.trainer.config.args import OptimizationArgs
from commons.trainer.loop import TrainingLoop
from commons.trainer.optimize.updates import FiniteLossGuard, StepUpdate
from tests.helpers.jobs.run_folders import lines
from tests.helpers.models.torchrec_model import (
    LEARNING_RATE,
    build_plain,
    build_sharded,
    head_of,
    rank_batches,
    weights_of,
)
from tests.helpers.pipelines.shuffled_pipelines import largest_difference, one_process
from tests.helpers.pipelines.trainer_loops import CubicShuffler, Parts, StatedHead
from tests.helpers.ranks.faults import error_of
from tests.helpers.ranks.on_ranks import on_ranks, on_two_ranks

CPU = torch.device("cpu")
SIZES = [6, 1, 3, 2, 5]  # steps differ in their number of terms


class NoisyHead(StatedHead):
    """From one step on, one rank's loss is not finite. Scales its loss if asked to."""

    broken_from = 10**9
    scaler = None

    def forward(self, embeddings, batch):
        loss, output = super().forward(embeddings, batch)
        if len(self.trained) > self.broken_from and dist.get_rank() == 1:
            output.loss_sum = output.loss_sum * float("nan")
        return loss if self.scaler is None else self.scaler.scale(loss), output


class RecordingSGD(torch.optim.SGD):
    """Remembers its learning rate and gradient norm at every update."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.seen = []

    def step(self, closure=None):
        gradients = [parameter.grad for parameter in self.param_groups[0]["params"]]
        self.seen.append((self.param_groups[0]["lr"], float(torch.nn.utils.get_total_norm(gradients))))
        return super().step(closure)


def run_loop(
    run_dir, build, steps, broken_from=10**9, balance=True, kill_at=None, scaler=None, evaluates=None, **optimization
):
    model, optimizer = build()
    head_of(model).__class__ = NoisyHead
    head_of(model).broken_from, head_of(model).scaler = broken_from, scaler
    if build is build_sharded:
        optimizer = RecordingSGD(optimizer.param_groups[0]["params"], lr=LEARNING_RATE)

    def read(item):
        if item[0] == kill_at and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return item[1]

    batches = list(enumerate(rank_batches(dist.get_rank(), steps, SIZES)))
    order = BatchOrderSampler(steps, rows_per_step=6 * dist.get_world_size())
    loader = DataLoader(batches, batch_size=None, sampler=order, collate_fn=read)
    evaluation = None if evaluates is None else DataLoader(batches[:2], batch_size=None, collate_fn=read)
    trainer = {"run_dir": run_dir, "log_interval": 2, "sinks": (), "ckpt_save_dir": run_dir + "/checkpoints"}
    trainer["pipeline_type"] = "native" if build is build_sharded else "none"
    if kill_at is not None:
        trainer["ckpt_save_interval"] = 100 * optimization.get("accumulation_steps", 1)
    args = TrainerArgs(6, 6, optimization=OptimizationArgs(**optimization), **trainer | (evaluates or {}))
    with closing(CubicShuffler() if balance else IdentityBalancedBatchShuffler()) as shuffler:
        recipe = Parts(args, model, optimizer, [shuffler], (loader, evaluation), loss_scaler=scaler)
        summary = TrainingLoop(recipe).run()
    fused = [group["lr"] for group in getattr(model, "fused_optimizer", optimizer).param_groups]
    return summary.steps, weights_of(model), getattr(optimizer, "seen", []), fused


@pytest.mark.parametrize("balance, accumulation, steps", [(False, 3, 6), (True, 4, 7)])  # the last update has three
def test_accumulated_gradients_are_those_of_the_whole_batch(ranks, tmp_path, balance, accumulation, steps):
    answers = ranks.run(run_loop, str(tmp_path), build_plain, steps, balance=balance, accumulation_steps=accumulation)
    expected = one_process([steps] * ranks.world_size, ranks.world_size, SIZES, accumulation)
    assert all(largest_difference(weights, expected) < 1e-12 for _, weights, _, _ in answers) and len(expected) == 4


@pytest.mark.parametrize("ends", [{"max_train_iters": 7}, {"num_epochs": 1}])
def test_the_last_evaluation_has_the_last_update(two_ranks, tmp_path, ends):
    losses = []
    for interval in (7, 100):  # due after the last step; or only at the end
        run_dir = tmp_path / str(interval)
        evaluates = {"eval_interval": interval, **ends}
        two_ranks.run(run_loop, str(run_dir), build_plain, 7, accumulation_steps=4, evaluates=evaluates)
        losses.append([line["eval_loss"] for line in lines(run_dir) if "eval_loss" in line])
    assert losses[0][-1] == losses[1][-1]
    assert (len(losses[0]), len(losses[1])) == (1 if "max_train_iters" in ends else 2, 1)


def test_a_run_that_ended_within_its_last_evaluation_makes_it_up(two_ranks, tmp_path):
    """It leaves the evaluation before the last update in the log."""
    evaluates = {"eval_interval": 7, "num_epochs": 1, "ckpt_load_dir": str(tmp_path / "checkpoints")}

    def run():
        two_ranks.run(run_loop, str(tmp_path), build_plain, 7, kill_at=99, accumulation_steps=4, evaluates=evaluates)
        return [line["eval_loss"] for line in lines(tmp_path) if "eval_loss" in line]

    before, after = run()
    log = tmp_path / "log.jsonl"
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:-1]))
    assert run() == [before, after] and before != after


def test_a_complete_run_is_evaluated_once_after_a_short_accumulation(two_ranks, tmp_path):
    evaluates = {"eval_interval": 100, "num_epochs": 1, "ckpt_load_dir": str(tmp_path / "checkpoints")}
    for _ in range(2):
        two_ranks.run(run_loop, str(tmp_path), build_plain, 7, kill_at=99, accumulation_steps=4, evaluates=evaluates)
        assert [line["step"] for line in lines(tmp_path) if "eval_loss" in line] == [7]


@pytest.mark.parametrize(
    "dtype, largest, terms, steps",
    [
        (torch.float16, 8.0, 10_000, 2),
        (torch.float16, 6e4, 300, 256),
        (torch.bfloat16, 6e4, 300, 256),
        (torch.float32, 8.0, 300, 256),
        (torch.float64, 8.0, 10_000, 2),
    ],
    ids=str,
)
@on_ranks
def test_accumulated_gradients_are_exact_in_the_parameters_dtype(dtype, largest, terms, steps):
    torch.manual_seed(0)  # averaged gradients are the same on all ranks
    parameter = torch.nn.Parameter(torch.zeros(50, dtype=dtype))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    update = StepUpdate(OptimizationArgs(accumulation_steps=steps), optimizer, torch.nn.Module(), 10, CPU)
    gradients = [(torch.rand(50, dtype=torch.float64) * largest).to(dtype) for _ in range(steps)]
    counts = [terms + step for step in range(steps)]
    for step, (gradient, count) in enumerate(zip(gradients, counts)):
        parameter.grad = gradient.clone()
        update.after_step(step, count)
    weighed = torch.stack([gradient.double() * count for gradient, count in zip(gradients, counts)])
    # Half a unit in the last place of the parameter's dtype, and the roundings of as many sums in float32.
    precision = max(torch.finfo(dtype).eps / 2, steps * min(2.0**-24, torch.finfo(dtype).eps))
    exact = weighed.sum(0) / sum(counts)
    torch.testing.assert_close(-parameter.detach().double(), exact, rtol=1.01 * precision, atol=0)
    before = parameter.detach().clone()
    for step in range(steps):  # no loss term on any rank: nothing is divided by zero
        parameter.grad = torch.zeros_like(parameter)
        update.after_step(step, 0)
    assert torch.equal(parameter.detach(), before)


def run_scaled(*args, **kwargs):
    return run_loop(*args, scaler=torch.amp.GradScaler("cpu", init_scale=512.0), **kwargs)


def test_scaled_losses_train_the_same(two_ranks, tmp_path):
    options = {"accumulation_steps": 3, "max_grad_norm": 0.05}
    (_, plain, _, _), _ = two_ranks.run(run_loop, str(tmp_path), build_plain, 7, **options)
    for _, scaled, _, _ in two_ranks.run(run_scaled, str(tmp_path), build_plain, 7, **options):
        assert largest_difference(scaled, plain) < 1e-12


def test_gradients_are_clipped(two_ranks, tmp_path):
    _, _, free, _ = two_ranks.run(run_loop, str(tmp_path), build_sharded, 5)[0]
    limit = sorted(norm for _, norm in free)[0] / 2
    for _, _, clipped, _ in two_ranks.run(run_loop, str(tmp_path), build_sharded, 5, max_grad_norm=limit):
        assert [norm for _, norm in clipped] == pytest.approx([limit] * 5, rel=1e-4)


def test_all_learning_rates_follow_the_schedule(two_ranks, tmp_path):
    schedule = {"warmup_steps": 2, "lr_schedule": "cosine", "min_lr_ratio": 0.1}
    for accumulation, steps, next_factor in ((1, 6, 0.1), (2, 11, 0.231802)):  # of 11 steps, the last update has one
        answers = two_ranks.run(
            run_loop, str(tmp_path), build_sharded, steps, accumulation_steps=accumulation, **schedule
        )
        for _, _, seen, fused in answers:
            factors = [rate / LEARNING_RATE for rate, _ in seen]
            assert factors == pytest.approx([1 / 3, 2 / 3, 1.0, 0.868198, 0.55, 0.231802], abs=1e-5)
            assert fused == pytest.approx([LEARNING_RATE * next_factor] * len(fused))  # of the step that would follow
    constant = two_ranks.run(run_loop, str(tmp_path), build_sharded, 3)
    assert all(rate == LEARNING_RATE for _, _, seen, _ in constant for rate, _ in seen)


@on_two_ranks
def test_tables_train_at_the_scheduled_rate(tmp_path):
    """Early in a long warm-up, tables stay as they are."""
    name = "embedding.embeddings.t_item.weight"
    start, trained, stopped = (
        weights[name]
        for weights in (
            weights_of(build_sharded()[0]),
            *(run_loop(str(tmp_path), build_sharded, 1, warmup_steps=steps)[1] for steps in (0, 10**9)),
        )
    )
    assert not torch.equal(trained, start)
    torch.testing.assert_close(stopped, start, rtol=0, atol=1e-8)


def test_a_loss_that_is_not_finite_ends_the_run(two_ranks, tmp_path):
    saves = {"ckpt_save_interval": 3, "eval_interval": 100}
    for error in two_ranks.run(error_of, run_loop, str(tmp_path), build_sharded, 8, broken_from=2, evaluates=saves):
        assert "the loss of rank 1 is not finite at step 3;" in error
    assert [line["step"] for line in lines(tmp_path)] == [2] and not list((tmp_path / "checkpoints").iterdir())
    for error in two_ranks.run(error_of, run_scaled, str(tmp_path), build_plain, 8, broken_from=3):
        assert "continue from an earlier checkpoint with compute_dtype bf16, or with a lower" in error


@on_two_ranks
def test_the_first_loss_that_is_not_finite_is_named():
    guard, of_this_rank = FiniteLossGuard(CPU), (1.0, -math.inf)[dist.get_rank()]
    for step, loss in enumerate((1.0, of_this_rank, math.nan, 1.0), 1):
        guard.record(step, torch.tensor(loss))
    assert "the loss of rank 1 is not finite at step 2; " in error_of(guard.check)


@pytest.mark.parametrize("kill_at", [3, 4])  # without waiting, one of these runs would end within an accumulation
def test_sigterm_waits_for_the_end_of_an_accumulation(two_ranks, tmp_path, kill_at):
    answers = two_ranks.run(run_loop, str(tmp_path), build_sharded, 40, kill_at=kill_at, accumulation_steps=5)
    assert len({steps for steps, *_ in answers}) == 1
    steps = answers[0][0]
    assert steps % 5 == 0 and steps < 40
    assert (tmp_path / "checkpoints" / f"step_{steps:08d}").is_dir()
