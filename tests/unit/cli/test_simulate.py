"""`evenrank simulate --lengths`: every way of dealing rows, and the advice that follows."""

from __future__ import annotations

import numpy as np
import pytest

from commons.datasets.samplers.epoch import ShardedBatchSampler
from commons.perf_model.partitioner import partition
from commons.perf_model.task_estimator import HSTUAttentionTask

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
    ("flags", "per_item", "more", "window"),
    [(["--tokens-per-item", "2", "--extra-tokens", "3"], 2, 3, None), (["--max-attn-len", "50"], 1, 0, 50)],
)
def test_figures_are_those_of_the_rows(histories, asked, flags, per_item, more, window):
    answer = asked("simulate", *FLAGS, "--ranks", "4", "--in-order", *flags)
    ways = ways_of(answer)
    assert list(ways) == WAYS and answer["ranks"][0]["steps"] == 16
    assert ("4 heads × 64, attention within 50 tokens" in answer["task"]) == (window is not None)
    tokens = as_loaded(histories * per_item + more, 4, 8)
    work = HSTUAttentionTask(256, 4, 64, 8, max_attn_len=window).get_workloads(tokens)
    loads = work.sum(2)
    assert ways["as loaded"]["largest_to_mean"] == pytest.approx((loads.max(1) / loads.mean(1)).mean())
    assert ways["as loaded"]["tokens_to_mean"] == pytest.approx(tokens.sum(2).max() / tokens.sum(2).mean())
    assert answer["ranks"][0]["speed_up_of_equal_ranks"] == pytest.approx(loads.max(1).sum() / loads.mean(1).sum())
    for name, method in (("refined", "refined"), ("Karmarkar-Karp", "karmarkar_karp")):
        largest = sum(partition(step.ravel(), 4, method=method).loads.max() for step in work)
        assert ways[name]["speed_up"] == pytest.approx(loads.max(1).sum() / largest, rel=1e-3)
    assert answer["lengths"]["tokens"]["max"] == tokens.max()


def test_more_freedom_is_never_worse_and_slack_keeps_rows_at_home(histories, asked, told):
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


def test_bytes_and_milliseconds_follow_the_stated_model(histories, asked, told):
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


def test_the_table_says_it_all(histories, asked, told):
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
    assert "even as" not in advice["text"] and "1.80×" in advice["text"] and advice["options"] == ""


def test_a_package_that_is_not_installed_is_one_line(monkeypatch, mistake):
    def missing(name):
        raise ModuleNotFoundError("No module named 'torchrec'", name="torchrec")

    monkeypatch.setattr("importlib.import_module", missing)
    assert "evenrank doctor" in mistake("simulate", "--lengths", "zipf:1.2:4096")
