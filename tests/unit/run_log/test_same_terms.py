"""The same term has the same number everywhere: through `simulate`, through `report`, and by hand."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from commons.cli.main import main
from commons.cli.simulate.command import LengthOptions
from commons.cli.simulate.simulation import simulate
from commons.distributed.stats import stats_of_plan
from commons.perf_model.gain import StepCost
from commons.perf_model.partitioner import lower_bound
from commons.perf_model.shuffle_plan import plan_shuffle
from commons.perf_model.task_estimator import HSTUAttentionTask
from tests.helpers.jobs.run_logs import config_of, write_run

RANKS, ROWS, STEPS = 4, 8, 40
PER_STEP, PER_LOAD = 30.0, 2e-6
COST = StepCost(PER_LOAD, PER_STEP)
TASK = HSTUAttentionTask(64, 4, 16, 2)


def loaded(values):
    """`(steps, ranks, rows)`, as our loaders deal rows: row i of a step to rank i modulo the ranks."""
    return values.reshape(STEPS, ROWS, RANKS).swapaxes(1, 2)


def write_training(folder, rows, window):
    """The log of a run that trains these rows: times follow from the loads as they are trained."""
    lines = []
    for gathered in rows.windows(window):
        for stats in stats_of_plan(
            plan_shuffle(gathered), len(lines), gather_ms=0.0, plan_ms=0.0, bytes_sent=0, units_per_ms=None
        ):
            step_ms = PER_STEP + PER_LOAD * stats.largest_load_after
            known = {name: value for name, value in stats.to_dict().items() if value is not None}
            line = {"schema": 1, **known, "step": len(lines) + 1, "loss": 0.0, "step_ms": step_ms, "total_ms": step_ms}
            lines.append(line | {"steps": 1, "ranks": RANKS, "rows_per_s": 1.0, "ms_per_load": PER_LOAD})
    return write_run(folder, lines, config_of())


@pytest.mark.parametrize(("window", "cost"), [(1, COST), (4, COST), (1, None)])
def test_imbalance_possible_gain_and_step_ratio(tmp_path, capsys, window, cost):
    lengths = (5 + np.random.default_rng(0).lognormal(4, 1.3, RANKS * ROWS * STEPS)).astype(np.int64)
    options = LengthOptions(hidden_size=64, num_heads=4, head_dim=16, num_layers=2, batch_size=ROWS, in_order=True)
    source = replace(options.deal(options.of("here", lengths)), cost=cost)
    answer = simulate(source, [RANKS], [window], STEPS).to_dict()["ranks"][0]
    name = "refined" if window == 1 else f"window of {window}"
    ways = {way["way"]: way for way in answer["ways"]}

    rows = source.load(RANKS, STEPS)
    folder = write_training(tmp_path / "run", rows, window)
    assert main(["report", str(folder), "--json"]) == 0
    gain = json.loads(capsys.readouterr().out)["runs"][0]["gain"]

    loads = loaded(TASK.get_workloads(lengths)).sum(axis=2)
    imbalance = (loads.max(axis=1) / loads.mean(axis=1) - 1).mean()
    assert ways["as loaded"]["imbalance"] == pytest.approx(imbalance)
    assert gain["imbalance_before"] == pytest.approx(imbalance)
    assert gain["imbalance_after"] == pytest.approx(ways[name]["imbalance"])

    bounds = [plan_shuffle(gathered).lower_bound for gathered in rows.windows(window)]
    if window == 1:
        by_hand = [lower_bound(step.ravel(), RANKS, equal_size=True) for step in loaded(TASK.get_workloads(lengths))]
        assert bounds == by_hand
    before, bound = loads.max(axis=1).sum(), sum(bounds)
    assert gain["possible"] == pytest.approx(before / bound)
    fixed = STEPS * PER_STEP / PER_LOAD if cost else 0.0  # without a cost ratios are those of the loads
    assert ways[name]["possible_speed_up"] == pytest.approx((fixed + before) / (fixed + bound))

    plans = [plan_shuffle(gathered) for gathered in rows.windows(window)]
    after = sum(plan.loads_after.reshape(RANKS, -1).max(axis=0).sum() for plan in plans)
    assert gain["work"] == pytest.approx(before / after)
    step_ratio = (fixed + before) / (fixed + after)
    assert ways[name]["speed_up"] == pytest.approx(step_ratio)
    # The first line, which has the warm-up, is left out of times; here it is a step like all others.
    assert gain["step" if cost else "work"] == pytest.approx(step_ratio, rel=0.02)
