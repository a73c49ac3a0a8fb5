"""What observation reports of the ranks' records, with times and without."""

import json

import numpy as np
import pytest

from commons.cli import observe
from commons.cli.observe import main, step_cost
from commons.perf_model.gain import LoadedRows
from tests.helpers.documents.pages import read_page


def loaded(seed=0, steps=40):
    rng = np.random.default_rng(seed)
    return LoadedRows.in_turn(work := rng.lognormal(5, 1, 2 * 4 * steps).astype(np.int64), work, 2, 4)


def test_what_a_load_costs_is_found_beside_a_fixed_cost_and_stalls():
    rows = loaded()
    largest = rows.as_loaded.loads.max(axis=1)
    seconds = (12 + 0.02 * largest) / 1e3
    seconds[[0, 20]], seconds[7] = np.nan, 5.0
    cost, said = step_cost(rows, seconds)
    assert cost.per_load == pytest.approx(0.02) and cost.per_step == pytest.approx(12)
    assert said == "The largest loads explain 100% of the step times' variance."
    cost, _ = step_cost(rows, (0.02 * largest - 5) / 1e3)  # no step has a fixed cost below 0
    assert (cost.per_load * largest.mean(), cost.per_step) == (pytest.approx(0.02 * largest.mean() - 5), 0)
    cost, said = step_cost(rows, np.random.default_rng(1).uniform(1, 1.2, 40))
    assert cost is None and "do not follow the largest loads" in said
    assert step_cost(rows, np.full(40, np.nan))[1].startswith(
        "0 steps have times, and their largest loads vary by 0.00%"
    )
    spread = f"{largest[:6].std() / largest[:6].mean():.2%}"
    said = step_cost(rows, np.where(np.arange(40) < 6, 1.0, np.nan))[1]
    assert said.startswith(f"6 steps have times, and their largest loads vary by {spread}") and "20 steps" in said
    # On many ranks most steps have a row near the longest: more steps would change nothing.
    alike = LoadedRows.in_turn(work := np.full(2 * 4 * 40, 9) + (np.arange(320) == 0), work, 2, 4)
    cost, said = step_cost(alike, 0.02 * alike.as_loaded.loads.max(axis=1) / 1e3)
    assert cost is None and said.startswith("40 steps have times, and their largest loads vary by 0.4")


def record_ranks(folder, of_ranks):
    """Records of ranks without times: for each rank, the rows' lengths of each step."""
    for rank, steps in enumerate(of_ranks):
        rows, lengths = [len(step) for step in steps], [length for step in steps for length in step]
        seconds = np.full(len(steps), np.nan)
        record = {"rows": np.array(rows, np.int64), "lengths": np.array(lengths, np.int64), "seconds": seconds}
        np.savez(folder / f"rank{rank}.npz", world_size=len(of_ranks), unknown=0, **record)


def test_a_record_that_was_copied_here_after_an_earlier_run_is_not_reported(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(observe, "_PATIENCE", 0.0)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").touch()
    record_ranks(tmp_path, [[[9]], [[1]]])
    assert main(["--folder", ".", "script.py"]) == 2
    assert "ranks [1] of 2 have written no record to ." in capsys.readouterr().err


def test_a_step_counts_in_which_a_rank_has_no_row_beside_one_row_per_rank(tmp_path, capsys, monkeypatch):
    record_ranks(tmp_path, [[[9], [8], [7]], [[1], [2], []]])
    monkeypatch.setattr(observe, "_MOST_STEPS", 3)
    assert main(["--report", "--folder", str(tmp_path), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["lengths"]["rows"], answer["ranks"][0]["steps"]) == (5, 3)
    expected = (9 / 5 + 8 / 5 + 7 / 3.5) / 3  # largest ÷ mean
    assert answer["ranks"][0]["ways"][0]["largest_to_mean"] == pytest.approx(expected)
    assert "Only the first 3 steps of a run are recorded." in answer["notes"]


def test_ranks_with_other_rows_and_steps_are_reported_without_a_last_step_that_has_no_rows(tmp_path, capsys):
    """Three ranks; the second has fewer rows in a step, and steps less; the third has no step."""
    record_ranks(tmp_path, [[[90, 1, 1], [5, 5, 5], [7, 7, 7], []], [[1, 1], [5, 5, 4, 1]], []])
    assert main(["--report", "--folder", str(tmp_path), "--window", "2"]) == 0
    shown = capsys.readouterr().out
    assert "3 steps of 3 ranks: 15 rows, 2 rows per rank" in shown and "no row is used twice" not in shown
    ratios = [92 / (94 / 3), 15 / 10, 21 / 7]  # largest ÷ mean
    assert f"{sum(ratios) / 3:.3f}" in next(line for line in shown.splitlines() if line.startswith("as loaded"))
    assert "0 steps have times, " in shown
    assert main(["--report", "--folder", str(tmp_path), "--json", "--html", str(tmp_path / "o.html")]) == 0
    note = json.loads(capsys.readouterr().out)["notes"][0]
    assert note.startswith("0 steps have times") and note in read_page(tmp_path / "o.html")[1]


@pytest.mark.parametrize(
    ("seeds", "is_noted"), [((0, 1), False), ((1, 0, 0), True), ((0, None, None), False), ((0, 99, 99), False)]
)
def test_ranks_that_read_the_same_rows_are_noted(tmp_path, capsys, seeds, is_noted):
    """Equal lengths have even loads, which hide it. Rows that were all cut to one length are not noted."""
    known = {None: [], 99: [[99] * 5] * 4}
    steps = [
        known[seed] if seed in known else np.random.default_rng(seed).integers(1, 99, (4, 5)).tolist() for seed in seeds
    ]
    record_ranks(tmp_path, steps)
    assert main(["--report", "--folder", str(tmp_path), "--window", "2", "--json"]) == 0
    notes = json.loads(capsys.readouterr().out)["notes"]
    assert any("rows of the same lengths in every step" in note for note in notes) == is_noted


def test_the_time_that_uneven_ranks_cost_is_found_in_the_recorded_times(tmp_path, capsys):
    """A step takes 5 ms and 0.02 ms per token of the fullest rank; one rank measures more than the other."""
    tokens = np.random.default_rng(0).integers(50, 1000, (2, 30))
    for rank in (0, 1):
        seconds = (5 + 0.02 * tokens.max(axis=0)) * (0.9, 1.1)[rank] / 1e3
        record = {"rows": np.full(30, 1), "lengths": tokens[rank], "seconds": seconds}
        np.savez(tmp_path / f"rank{rank}.npz", world_size=2, unknown=0, **record)
    assert main(["--report", "--folder", str(tmp_path), "--window", "2", "40", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    ways = {way["way"]: way for way in answer["ranks"][0]["ways"]}
    assert ways["as loaded"]["step_ms"] == pytest.approx((5 + 0.02 * tokens.max(axis=0)).mean())
    assert "window of 2" in ways and "window of 40" not in ways  # there are 30 steps
    assert "of a whole step, by its time" in answer["advice"]["text"]
    lost = 0.02 * (tokens.max(axis=0) - tokens.mean(axis=0))
    worst = [f"step {step} {lost[step]:.1f} ms (rank {tokens[:, step].argmax()})" for step in np.argsort(-lost)[:3]]
    assert answer["notes"][:2] == [
        "The largest loads explain 100% of the step times' variance.",
        f"Uneven ranks cost {lost.mean():.1f} ms of a mean step of {5 + 0.02 * tokens.max(axis=0).mean():.1f} ms; 99th "
        f"percentile {np.quantile(lost, 0.99):.1f} ms; most: {', '.join(worst)}.",
    ]
