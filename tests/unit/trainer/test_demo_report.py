"""The demo's table and picture say what was measured."""

from __future__ import annotations

import dataclasses
import io
import json

import pytest
from rich.console import Console

from commons.datasets.movielens import preprocess_movielens
from commons.trainer.comparison import ComparisonResults, SideResults
from commons.trainer.comparison_report import compute_figures, median_interval, report
from commons.trainer.demo import DemoOptions, choose_ranks, prepare_data
from hstu.demo import WORDING
from tests.helpers.movielens import write_zip


def make_results():
    steps = 21
    stats = [
        {
            "imbalance_before": 0.3,
            "imbalance_after": 0.01,
            "token_fraction_moved": 0.2,
            "rows_moved": 4,
            "wait_ms": 0.5,
            "exchange_ms": 1.0,
            "loads_before": [130, 70],
            "loads_after": [101, 99],
        }
        for _ in range(steps)
    ]
    # a machine that becomes slower and slower: each step still tells 1.25
    balanced_ms = [100.0 + 10 * step for step in range(steps)]
    losses = [0.7 - 0.01 * step for step in range(steps + 2)]
    return ComparisonResults(
        machine={"device": "cpu", "cpu_count": 2, "torch": "2.13.0", "processor": "one"},
        num_ranks=2,
        batch_size=16,
        max_history_seqlen=512,
        num_layers=2,
        warmup_steps=2,
        quick=False,
        unbalanced=SideResults([1.25 * ms for ms in balanced_ms], losses, {"rows": 500, "auc_task_0": 0.75}),
        balanced=SideResults(balanced_ms, [loss + 1e-4 for loss in losses], {"rows": 500, "auc_task_0": 0.76}),
        stats=stats,
    )


def test_figures():
    figures = compute_figures(make_results())
    expected = {"speedup": 1.25, "speedup_low": 1.25, "speedup_high": 1.25, "speedup_of_medians": 1.25}
    expected |= {"possible_speedup": 1.3, "shuffle_ms": 1.5, "largest_loss_difference": 1e-4}
    assert {name: figures[name] for name in expected} == pytest.approx(expected)


def test_the_interval_contains_the_median_and_narrows():
    few, many = median_interval([1.0, 2.0, 9.0]), median_interval([float(n) for n in range(1001)])
    assert few == (1.0, 9.0)
    assert many[0] < 500 < many[1] and many[1] - many[0] < 70


def test_the_report(tmp_path):
    results, output = make_results(), io.StringIO()
    report(results, tmp_path, Console(file=output, width=80), WORDING)
    written = json.loads((tmp_path / "demo.json").read_text())
    assert written.pop("figures") == compute_figures(results) and written == dataclasses.asdict(results)
    shown = output.getvalue()
    for part in ("generated data", "1.25×", "1.30×", "30.0%", "1.00%", "0.7500", "0.7600", "1e-04", "20.0%"):
        assert part in shown, part
    assert (tmp_path / "balance.png").read_bytes().startswith(b"\x89PNG")


def test_options():
    assert DemoOptions(quick=True).steps < DemoOptions().steps
    with pytest.raises(ValueError, match="batch_size is 0"):
        DemoOptions(batch_size=0)
    assert choose_ranks("cpu") == (2, "as asked: two ranks on the CPU (gloo, one thread each)")


def test_the_demo_replaces_no_data_of_ones_own(tmp_path):
    options = DemoOptions(run_dir=tmp_path)
    options.data_dir.mkdir()
    preprocess_movielens(write_zip(tmp_path / "ml-1m.zip"), options.data_dir)
    before = {path: path.stat().st_mtime_ns for path in options.data_dir.rglob("*")}
    with pytest.raises(FileExistsError, match="holds data that were not generated; .*: choose another --run-dir"):
        prepare_data(options)
    assert {path: path.stat().st_mtime_ns for path in options.data_dir.rglob("*")} == before
