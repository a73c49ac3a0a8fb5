"""The advice of `evenrank simulate`: what it prints is what gains, and its options are those of our trainers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commons.cli.simulate.command import LengthOptions
from commons.cli.simulate.simulation import Advice, Simulation, simulate
from commons.datasets.samplers.budget import BudgetBatchSampler
from commons.perf_model.gain import Budget, Comparison, DealtRows, LoadedRows
from commons.trainer import TrainerArgs
from commons.trainer.config.load import load_config

WORTH = 1.02
MEAN = 10**6


@dataclass(frozen=True)
class Run:
    """What a config of a trainer has."""

    trainer: TrainerArgs


def way(name, ratio, bound=MEAN, **fields):
    """Two ranks, one step, with this largest ÷ mean load."""
    largest = round(ratio * MEAN)
    loads = np.array([[largest, 2 * MEAN - largest]])
    return DealtRows(name, loads, loads, None if "budget" in fields else bound, **fields)


def answer_of(loaded, refined, free, windows, constant):
    rows = np.full(8, MEAN // 4)
    ways = [way("as loaded", loaded), way("Karmarkar-Karp", refined), way("refined", refined), way("free counts", free)]
    ways += [way(f"window of {2**k}", ratio, window=2**k) for k, ratio in enumerate(windows, start=1)]
    ways.append(way("constant cost", constant, budget=Budget(15, 22)))
    return answer_to(rows, ways)


def answer_to(rows, ways):
    options = LengthOptions(task="tokens", batch_size=4)
    source = options.deal(options.of("x.csv", rows))
    return Simulation(source, (Comparison(LoadedRows.in_turn(rows, rows, 2, 4), tuple(ways)),))


def advise(lengths, batch_size, ranks, windows, steps, **options):
    return simulate(LengthOptions(batch_size=batch_size, **options).read(lengths), ranks, windows, steps)


@cache
def parsed(options):
    given = ["--trainer.train-batch-size", "32", "--trainer.eval-batch-size", "32", *options.split()]
    return load_config(Run, given).trainer


def check(answer):
    """What holds for any advice."""
    advice, result = answer.advice(), answer.comparisons[-1]
    candidates = {way.name: result.speed_up(way) for way in result.ways if way.name != "as loaded"}
    if advice.way is None:
        assert advice == Advice(advice.text) and "leave" in advice.text
        assert all(gain < WORTH for name, gain in candidates.items() if name != "Karmarkar-Karp")
        return advice
    assert advice.speed_up == candidates[advice.way] >= WORTH
    gain = re.search(r": (\d+\.\d\d)× of (\d+\.\d\d)× (possible|with equal ranks), in", advice.text)
    (advised,) = (way for way in result.ways if way.name == advice.way)
    most = result.possible(advised) or result.equal
    assert gain and gain[1] == f"{advice.speed_up:.2f}" and gain[2] == f"{most:.2f}"
    assert advice.text.endswith(".") and "leave" not in advice.text and advice.code
    # What gains more is said, unless it is a larger change for less than 2 %, step by step.
    if candidates["constant cost"] >= WORTH * advice.speed_up:
        assert f"steps of constant cost (BudgetBatchSampler) gain {candidates['constant cost']:.2f}×" in advice.text
    trainer = parsed(advice.options)
    assert trainer.enable_balanced_shuffler == (advice.way != "constant cost") == (not trainer.balance_sampler)
    assert trainer.shuffler.equal_size == (advice.way not in ("free counts", "constant cost"))
    window = re.fullmatch(r"window of (\d+)", advice.way)
    assert trainer.shuffle_window == (int(window[1]) if window else 1)
    assert (trainer.budget_per_rank is None) == (advice.way != "constant cost")
    return advice


# Around the threshold of 2 % and far from it.
RATIOS = st.one_of(st.floats(1, 1.06), st.floats(1, 2))


@settings(max_examples=100, deadline=None)
@given(RATIOS, RATIOS, RATIOS, st.lists(RATIOS, max_size=3), RATIOS)
def test_what_is_advised_gains_what_is_printed(loaded, refined, free, windows, constant):
    check(answer_of(loaded, refined, free, windows, constant))


def test_a_larger_change_has_to_pay_for_itself():
    for ratios, advised in (
        ((1.5, 1.0, 1.0, [1.0], 1.0), "refined"),
        ((1.5, 1.2, 1.19, [1.0], 1.0), "window of 2"),
        ((1.5, 1.2, 1.0, [1.0], 1.0), "free counts"),
        ((1.5, 1.5, 1.5, [1.49, 1.45], 1.4), "window of 4"),
        ((1.5, 1.5, 1.5, [], 1.4), "constant cost"),  # the one that gains is not the one that is called so
        ((1.03, 1.02, 1.02, [1.015], 1.0), "constant cost"),
        ((1.5, 1.5, 1.5, [1.5], 1.5), None),
        ((1.01, 1.0, 1.0, [1.0], 1.0), None),
    ):
        assert check(answer_of(*ratios)).way == advised
    text = answer_of(1.5, 1.5, 1.5, [], 1.4).advice().text
    assert "fill steps to the cost of 15 average rows per rank, if lengths are known beforehand: 1.07×" in text


def test_steps_of_constant_cost_are_advised_with_what_gives_them():
    """One row of many dominates, and no window is looked at: only the number of rows per step helps."""
    lengths = "lognormal:100:1.5:8192"
    answer = advise(lengths, 1, (16,), (), 64, task="tokens")
    advice, result = check(answer), answer.comparisons[0]
    assert advice.way == "constant cost"
    trainer = parsed(advice.options)
    workloads = result.rows.workloads
    budget = round(trainer.budget_per_rank * workloads.mean())
    sampler = BudgetBatchSampler(
        workloads, budget_per_rank=budget, num_ranks=16, rank=0, max_rows=trainer.train_batch_size, shuffle=False
    )
    steps = [workloads[rows] for rows, _ in sampler.plan(epoch=0)][:-1]
    ranks = [of_ranks for _, of_ranks in sampler.plan(epoch=0)][:-1]
    loads = np.stack([np.bincount(of_ranks, work, 16) for of_ranks, work in zip(ranks, steps)])
    gain = result.equal / (loads.max(1).sum() / loads.mean(1).sum())
    assert gain == pytest.approx(advice.speed_up, rel=0.02)


@pytest.mark.parametrize("lengths", ["zipf:1.2:4096", "lognormal:130:1.4:8192", "lognormal:1000:0.05", "zipf:3:9"])
@pytest.mark.parametrize("batch_size", [1, 4, 32])
def test_advice_on_real_plans(lengths, batch_size):
    check(advise(lengths, batch_size, (4, 16), (2, 4), 16))


def test_a_window_that_lifts_nothing_is_not_said_to():
    rows = np.array([6 * MEAN, *[MEAN // 8] * 7])  # the first one alone is more than an even share
    ways = [way(name, ratio, bound=round(1.4 * MEAN)) for name, ratio in (("as loaded", 1.5), ("refined", 1.4))]
    ways.append(way("window of 2", 1.45, window=2))
    (line,) = answer_to(rows, ways).dominated()
    assert "shuffle-window" not in line and "more rows per step" in line
