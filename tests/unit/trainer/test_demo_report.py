"""The demo's table and picture say what was measured."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from commons.trainer.comparison import (
    ComparisonResults,
    SideResults,
    compute_figures,
    median_interval,
    read_results,
    results_path,
    write_results,
)
from commons.trainer.comparison_options import choose_ranks
from hstu.demo import DemoOptions
from hstu.demo_report import report


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
    assert figures.speedup == pytest.approx(1.25)
    assert figures.speedup_low == pytest.approx(1.25) and figures.speedup_high == pytest.approx(1.25)
    assert figures.speedup_of_medians == pytest.approx(1.25)
    assert figures.possible_speedup == pytest.approx(1.3)
    assert figures.shuffle_ms == pytest.approx(1.5)
    assert figures.largest_loss_difference == pytest.approx(1e-4)


def test_the_interval_contains_the_median_and_narrows():
    few, many = median_interval([1.0, 2.0, 9.0]), median_interval([float(n) for n in range(1001)])
    assert few == (1.0, 9.0)
    assert many[0] < 500 < many[1] and many[1] - many[0] < 70


def test_the_report_goes_through_the_file(tmp_path):
    write_results(make_results(), tmp_path)
    assert json.loads(results_path(tmp_path).read_text())["figures"]["speedup"] == pytest.approx(1.25)
    results = read_results(tmp_path)
    assert results == make_results()
    output = io.StringIO()
    report(results, tmp_path, Console(file=output, width=80))
    shown = output.getvalue()
    for part in ("generated data", "1.25×", "1.30×", "30.0%", "1.00%", "0.7500", "0.7600", "1e-04", "20.0%"):
        assert part in shown, part
    assert (tmp_path / "balance.png").read_bytes().startswith(b"\x89PNG")


def test_options():
    assert DemoOptions(quick=True).steps < DemoOptions().steps
    with pytest.raises(ValueError, match="batch_size is 0"):
        DemoOptions(batch_size=0)
    assert choose_ranks("cpu") == (2, "as asked: two ranks on the CPU (gloo, one thread each)")
