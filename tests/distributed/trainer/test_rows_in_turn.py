"""A sampler by work says what its rows would have cost dealt to the ranks in turn: two ranks train HSTU."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
import torch

from commons.distributed.options import ShufflerOptions
from commons.run_log.advice import advice_of
from commons.run_log.reading import RunLog
from commons.run_log.report import RunReport
from commons.trainer import TrainerArgs
from commons.trainer.run import open_run_folder, run_training
from hstu.recipe import HSTURecipe
from tests.helpers.jobs.movielens_runs import movielens_config
from tests.helpers.jobs.run_folders import lines

SAMPLER = {"balance_sampler": True, "shuffle_window": 3}


def _recipe(data, run_dir, batch_size=4, **changes):
    trainer = {"log_interval": 1, "sinks": [], "num_epochs": 1} | changes
    args = TrainerArgs(batch_size, 4, run_dir=run_dir, **trainer)
    return HSTURecipe(movielens_config(data, args, dataset={"max_history_seqlen": 256}), torch.device("cpu"))


def _train(data, run_dir, **changes):
    """The rows of the table at the end, which the first rank prints."""
    with mock.patch("commons.trainer.observe.train_log.print_summary") as print_summary:
        recipe = _recipe(data, run_dir, **changes)
        open_run_folder(recipe.config, recipe.device, logs_to_file=False)
        run_training(recipe)
    return [row for call in print_summary.call_args_list for row in call.args[1].items()]


def _lines(run_dir):
    return [line for line in lines(run_dir) if "loss" in line]


def _loads(run_dir, name):
    """Of every step the loads of the ranks, int64 `(steps, ranks)`."""
    return np.array([line[name] for line in _lines(run_dir)], dtype=np.int64)


@pytest.mark.parametrize("window", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_a_sampler_says_what_its_rows_would_cost_dealt_in_turn(two_ranks, data, tmp_path, window):
    # A run without the sampler reads the same rows in turn, and its shuffler says what they cost.
    plain, own = tmp_path / "plain", tmp_path / "own"
    observe = {"enable_balanced_shuffler": True, "shuffler": ShufflerOptions(mode="observe")}
    two_ranks.run(_train, data, str(plain), **observe)
    tables = two_ranks.run(_train, data, str(own), **SAMPLER | {"shuffle_window": window})
    in_turn, read = _loads(plain, "loads_before"), _loads(own, "loads_after")
    assert in_turn.shape == read.shape == (8, 2)
    if window == 1:  # the same rows in every step
        assert (_loads(own, "loads_before") == in_turn).all()
    assert (_loads(own, "loads_before")[:6] == in_turn[:6]).all()  # whole windows of as many rows
    assert read[:6].sum() == in_turn[:6].sum()
    # A window that ends the epoch has the rows that are left.
    assert _loads(own, "loads_before")[6:].sum() == in_turn[6:].sum() == read[6:].sum()

    for line in _lines(own):  # what each rank took for the rows that it read
        assert len(line["own_ms"]) == 2 and min(line["own_ms"]) > 0
    report = RunReport(RunLog(own))
    assert len(report.log.of_ranks["own_ms"]) == 8
    before, after = (_loads(own, name).max(axis=1).sum() for name in ("loads_before", "loads_after"))
    assert report.gain.work == pytest.approx(before / after) and report.gain.work > 1.02
    assert "Reading the rows by their work makes the slowest rank" in advice_of(report)
    shown = dict(tables[0])
    assert shown["largest load saved"].startswith(f"{100 * (1 - after / before):.1f} %")
    assert not shown["imbalance (max ÷ mean − 1)"].startswith("0.0%") and "tokens moved" not in shown
