"""`evenrank simulate --lengths`: every way of dealing rows, and the advice that follows for our trainers' options."""

from __future__ import annotations

import math
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
from commons.datasets.samplers.epoch import ShardedBatchSampler
from commons.perf_model.gain import Budget, Comparison, DealtRows, LoadedRows
from commons.perf_model.partitioner import lower_bound, partition
from commons.perf_model.task_estimator import HSTUAttentionTask
from commons.trainer import TrainerArgs
from commons.trainer.config.load import load_config

WAYS = ["as loaded", "Karmarkar-Karp", "refined", "free counts", "window of 2", "window of 4", "constant cost"]


def ways_of(answer, place=0):
    return {way["way"]: way for way in answer["ranks"][place]["ways"]}


@pytest.fixture
def histories(here):
    """User-like lengths, 4 ranks × 8 rows × 16 steps."""
    lengths = (20 + np.random.default_rng(0).lognormal(np.log(130), 1.2, 512)).astype(np.int64)
    np.save("lengths.npy", lengths)
    return lengths


def as_loaded(values, num_ranks, batch_size):
    """What the batches of the loader hold, `(steps, num_ranks, batch_size)`: of rows that fill all batches."""
    share = {"num_rows": len(values), "batch_size": batch_size, "world_size": num_ranks}
    return np.array(
        [[values[rows] for rows in ShardedBatchSampler(rank=rank, **share)] for rank in range(num_ranks)]
    ).swapaxes(0, 1)


FLAGS = ["--lengths", "lengths.npy", "--batch-size", "8", "--steps", "16", "--window", "1", "2", "4"]


@pytest.mark.parametrize(
    ("flags", "per_item", "more", "dimensions", "described"),
    [
        (["--tokens-per-item", "2", "--extra-tokens", "3"], 2, 3, {}, ""),
        (["--max-attn-len", "50"], 1, 0, {"max_attn_len": 50}, ", attention within 50 tokens"),
        (
            ["--value-dim", "16", "--concat-ux"],
            *(1, 0, {"value_dim": 16, "concat_ux": True}, ", values × 16, output of [u, x, y]"),
        ),
    ],
)
def test_figures_are_those_of_the_rows(histories, asked, flags, per_item, more, dimensions, described):
    answer = asked("simulate", *FLAGS, "--ranks", "4", "--in-order", *flags)
    ways = ways_of(answer)
    assert list(ways) == WAYS and answer["ranks"][0]["steps"] == 16
    assert answer["task"] == f"hstu, hidden 256, 8 layers, 4 heads × 64{described}"
    tokens = as_loaded(histories * per_item + more, 4, 8)
    work = HSTUAttentionTask(256, 4, 64, 8, **dimensions).get_workloads(tokens)
    loads = work.sum(2)
    ratios = loads.max(1) / loads.mean(1)
    assert ways["as loaded"]["largest_to_mean"] == pytest.approx(ratios.mean())
    assert ways["as loaded"]["tokens_to_mean"] == pytest.approx(tokens.sum(2).max() / tokens.sum(2).mean())
    assert answer["ranks"][0]["speed_up_of_equal_ranks"] == pytest.approx(loads.max(1).sum() / loads.mean(1).sum())
    for name, method in (("refined", "refined"), ("Karmarkar-Karp", "karmarkar_karp")):
        largest = sum(partition(step.ravel(), 4, method=method).loads.max() for step in work)
        assert ways[name]["speed_up"] == pytest.approx(loads.max(1).sum() / largest, rel=1e-3)
    bound = sum(lower_bound(step.ravel(), 4) for step in work)
    assert ways["refined"]["possible_speed_up"] == pytest.approx(loads.max(1).sum() / bound)
    assert ways["as loaded"]["largest_to_mean_p99"] == pytest.approx(np.quantile(ratios, 0.99))
    assert ways["as loaded"]["imbalance"] == pytest.approx(ways["as loaded"]["largest_to_mean"] - 1)
    ordered = np.sort(tokens.ravel())  # 512 rows
    quantiles = {"mean": tokens.mean(), "median": ordered[255], "p99": ordered[505], "max": ordered[-1]}
    assert answer["lengths"]["tokens"] == pytest.approx(quantiles)


def test_more_freedom_is_never_worse_and_slack_keeps_rows_at_home(histories, asked):
    answer = asked("simulate", *FLAGS, "--ranks", "8", "4")
    assert [of_ranks["ranks"] for of_ranks in answer["ranks"]] == [4, 8]
    for place in range(2):
        ways = ways_of(answer, place)
        gain = {name: way["speed_up"] for name, way in ways.items()}
        assert gain["as loaded"] == 1 and ways["as loaded"]["tokens_moved"] == {}
        assert 1 < gain["Karmarkar-Karp"] <= gain["refined"] * 1.001 and gain["refined"] <= gain["free counts"] * 1.001
        assert gain["refined"] <= gain["window of 2"] * 1.001
        assert gain["free counts"] <= answer["ranks"][place]["possible_speed_up_of_single_batches"] * 1.0001
        for way in ways.values():
            assert way["speed_up"] <= answer["ranks"][place]["speed_up_of_equal_ranks"] * 1.0001
            assert way["largest_to_mean"] <= way["largest_to_mean_p99"] * 1.0001
        moved = ways["refined"]["tokens_moved"]
        assert list(moved) == ["0", "0.01", "0.05"] and 1 > moved["0"] >= moved["0.05"] > 0
        assert ways["Karmarkar-Karp"]["tokens_moved"]["0"] > moved["0.01"]
        assert ways["constant cost"]["bytes_per_rank"] is None
    assert answer["ranks"][0]["steps"] == 16 and answer["ranks"][1]["steps"] == 8
    assert "8 ranks: 8 of 16 steps. There are 512 rows, 16 steps train 1,024" in answer["notes"][0]


def test_bytes_and_milliseconds_follow_the_stated_model(histories, asked):
    rates = ["--peak-tflops", "100", "--mfu", "0.5", "--link-gbps", "8", "--bytes-per-token", "16"]
    ways = ways_of(asked("simulate", *FLAGS, "--ranks", "4", "--in-order", *rates))
    plain = ways_of(asked("simulate", *FLAGS, "--ranks", "4", "--in-order"))
    loads = HSTUAttentionTask(256, 4, 64, 8).get_workloads(as_loaded(histories, 4, 8)).sum(2)
    assert ways["as loaded"]["step_ms"] == pytest.approx(3 * loads.max(1).mean() / 50e12 * 1e3)
    assert ways["refined"]["bytes_per_rank"] == pytest.approx(2 * plain["refined"]["bytes_per_rank"])
    assert ways["refined"]["exchange_ms"] == pytest.approx(ways["refined"]["bytes_per_rank"] / 1e9 * 1e3)
    assert plain["refined"]["step_ms"] is None


def test_one_sample_that_dominates_is_named_with_what_lifts_it(here, asked):
    np.save("lengths.npy", np.where(np.arange(512) % 32 == 0, 4096, 64))
    flags = ["--ranks", "4", "--in-order", "--task", "transformer"]
    answer = asked("simulate", *FLAGS, *flags)
    assert "in 16 of 16 steps one sample alone is more than an even share" in answer["notes"][-1]
    assert "--trainer.shuffle-window 4 gains" in answer["notes"][-1]
    assert answer["advice"]["options"] == "--trainer.enable-balanced-shuffler --trainer.shuffle-window 4"
    assert "window=4" in answer["advice"]["code"]
    np.save("lengths.npy", np.where(np.arange(512) % 32 == 0, 1000, 96))  # 1000 ÷ 994 of an even share
    answer = asked("simulate", *FLAGS, "--ranks", "4", "--in-order", "--task", "tokens")
    assert "up to 1.01×; this reduces the possible speed-up by less than 2 %" in answer["notes"][-1]
    answer = asked("simulate", *FLAGS, *flags, "--max-length", "64")
    assert not answer["notes"] and "leave it off" in answer["advice"]["text"] and answer["advice"]["options"] == ""


def test_the_table_says_it_all(histories, told):
    rates = ["--peak-tflops", "100", "--link-gbps", "8"]
    printed = told("simulate", *FLAGS, "--ranks", "4", *rates)
    for text in ("lengths.npy: 512 rows", "4 ranks × 8 rows, 16 steps:", "step ms", "exchange ms", "On 4 ranks", *WAYS):
        assert text in printed
    assert "  --trainer.enable-balanced-shuffler" in printed and all(len(line) <= 120 for line in printed.splitlines())
    # Fewer steps than a window has: the window is left out. A sample may be drawn from again.
    printed = told("simulate", *FLAGS[:4], "--steps", "3", "--ranks", "4")
    assert "window of 2" in printed and "window of 4" not in printed
    assert "32 ranks × 8 rows, 16 steps" in told("simulate", *FLAGS, "--ranks", "32", "--with-replacement")


def test_uneven_lengths_that_nothing_evens_are_not_called_even(here, asked):
    (here / "two.csv").write_text("1\n9\n")
    flags = ["--ranks", "2", "--batch-size", "1", "--task", "tokens"]
    advice = asked("simulate", "--lengths", "two.csv", *flags)["advice"]
    assert "even without" not in advice["text"] and "1.80×" in advice["text"] and advice["options"] == ""


def test_a_package_that_is_not_installed_is_one_line(monkeypatch, mistake):
    def missing(name):
        raise ModuleNotFoundError("No module named 'torchrec'", name="torchrec")

    monkeypatch.setattr("importlib.import_module", missing)
    assert "evenrank doctor" in mistake("simulate", "--lengths", "zipf:1.2:4096")


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
    assert ("batch by batch, with equal counts)" in advice.text) == (advice.way != "refined")
    # What gains more is said, unless it is a larger change for less than 2 %, step by step.
    if candidates.get("constant cost", 0.0) >= WORTH * advice.speed_up:
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


def test_the_last_step_of_constant_cost_is_not_counted_even_if_it_is_the_only_one(here, asked):
    np.save("lengths.npy", [1000] + [1] * 63)
    answer = asked("simulate", *FLAGS[:4], "--ranks", "4", "--window", "2")
    assert "constant cost" not in ways_of(answer) and "BudgetBatchSampler" not in answer["advice"]["text"]


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
    answer = advise(lengths, batch_size, (4, 16), (2, 4), 16)
    check(answer)
    for result in answer.comparisons:  # a budget is a batch of average rows, or the costliest row
        work = result.rows.workloads
        average_rows = max(batch_size, math.ceil(work.max() / work.mean()))
        assert [way.budget.rows for way in result.ways if way.budget] in ([average_rows], [])  # []: only one step


def test_a_window_that_lifts_nothing_is_not_said_to():
    rows = np.array([6 * MEAN, *[MEAN // 8] * 7])  # the first one alone is more than an even share
    ways = [way(name, ratio, bound=round(1.4 * MEAN)) for name, ratio in (("as loaded", 1.5), ("refined", 1.4))]
    ways.append(way("window of 2", 1.45, window=2))
    (line,) = answer_to(rows, ways).dominated()
    assert "shuffle-window" not in line and "more rows per step" in line
    # Within 2 % of the best window, and only 1.8 % better than single batches: the best is 2.9 % better.
    ways[2:] = [way("window of 2", 1.375, window=2), way("window of 4", 1.36, window=4)]
    (line,) = (answer := answer_to(rows, ways)).dominated()
    assert "--trainer.shuffle-window 4 gains 1.10×" in line and answer.advice().way == "window of 4"
