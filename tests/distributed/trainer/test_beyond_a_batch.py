"""Training beyond one batch: windows, rows read by their work, steps of constant cost, schedules in rows; resumed."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from itertools import chain
from unittest import mock

import numpy as np
import pytest
import torch

from commons.distributed.gather import rank_speeds
from commons.distributed.options import ShufflerOptions
from commons.distributed.tokens_shuffler import TokensBalancedBatchShuffler
from commons.perf_model.speed_control import SpeedControl
from commons.run_log.advice import advice_of
from commons.run_log.reading import RunLog
from commons.run_log.report import RunReport
from commons.trainer import TrainerArgs
from commons.trainer.checkpoint.folder import list_checkpoints
from commons.trainer.config.args import OptimizationArgs
from commons.trainer.observe.train_log import TrainLog
from commons.trainer.run import run_training
from tests.helpers.jobs.movielens_runs import Noted, movielens_config, table_of
from tests.helpers.jobs.run_folders import lines, losses
from tests.helpers.pipelines.shuffled_pipelines import before_a_commit
from tests.helpers.ranks.faults import error_of

CPU = torch.device("cpu")
ROWS = 59  # in training, of 70 users
SAMPLER = {"balance_sampler": True, "shuffle_window": 3}
STAGE = {"enable_balanced_shuffler": True, "shuffle_window": 3}
BUDGET = {
    **{"balance_sampler": True, "budget_per_rank": 5.0, "batch_size": 12},
    "shuffler": ShufflerOptions(equal_size=False),
}
DEALT = {"single_rank_load": True, "balance_batch": True}
RESUMED = [STAGE, SAMPLER, BUDGET, DEALT]
MEASURED = {**STAGE, "shuffler": ShufflerOptions(speeds="measured")}


def train(data, run_dir, *, dataset=None, batch_size=4, task="ranking", dropout=0.2, **changes):
    """Steps, this rank's users of each step, learning rates, and what is said of one run."""
    trainer = {"log_interval": 1, "eval_interval": 100, "sinks": [], "num_epochs": 1} | changes
    model = {"num_negatives": 3} if task == "retrieval" else {"dropout": dropout}
    args = TrainerArgs(batch_size, 4, run_dir=run_dir, eval_metrics=("HR@10",), **trainer)
    recipe = Noted(movielens_config(data, args, dataset=dataset, task=task, **model), CPU)

    def begin_with_unequal_speeds(num_ranks, speeds):  # where speeds are measured
        return SpeedControl(num_ranks, speeds or [1024, 600])

    with (
        mock.patch.object(TrainLog, "print_line") as say,
        mock.patch.object(rank_speeds, "SpeedControl", begin_with_unequal_speeds),
    ):
        steps = run_training(recipe).steps
    return steps, recipe.users, recipe.rates, [call.args[0] for call in say.call_args_list]


def users_of(ranks, steps=slice(None)):
    """How often each user was trained, over all ranks."""
    return Counter(user for _, batches, *_ in ranks for batch in batches[steps] for user in batch)


@pytest.mark.parametrize("way", [STAGE, SAMPLER | {"task": "retrieval"}, BUDGET], ids=["stage", "sampler", "budget"])
def test_every_user_is_trained_once_per_epoch(ranks, data, tmp_path, way):
    result = ranks.run(train, data, str(tmp_path / "run"), eval_interval=4, **way)
    users = users_of(result)
    assert len(users) == ROWS and set(users.values()) == {1}
    assert len({steps for steps, *_ in result}) == 1
    sizes = {len(batch) for _, batches, *_ in result for batch in batches}
    assert max(sizes) == 4 if way is not BUDGET else 4 < max(sizes) <= 12
    trained = [line for line in lines(tmp_path / "run") if "loss" in line]
    assert sum(line["imbalance_before"] for line in trained) >= sum(line["imbalance_after"] for line in trained)
    if way is not STAGE:
        assert not any(line["moved"] or line["bytes_sent"] for line in trained)  # observed, and nothing to move
    assert next(line["step"] for line in lines(tmp_path / "run") if "eval_loss" in line) == 4


def test_rows_that_one_rank_loads_are_those_that_each_rank_loads_by_itself(ranks, data, tmp_path):
    """In turn the very same batches; balanced the same rows in every step, also in the last, which has few; so that
    every step begins with the same weights.
    """
    ways, users = {"own": {}, "in turn": {"single_rank_load": True}, "balanced": DEALT}, {}
    changes = {"batch_size": 8 // ranks.world_size, "dataset": {"max_history_seqlen": 200}, "dropout": 0.0}
    for name, way in ways.items():
        result = ranks.run(train, data, str(tmp_path / name), **changes, **way)
        users[name] = [batches for _, batches, *_ in result]

    def of_steps(name):
        return [sorted(chain.from_iterable(step)) for step in zip(*users[name], strict=True)]

    own, in_turn = ([list(filter(None, batches)) for batches in users[name]] for name in ("own", "in turn"))
    assert own == in_turn and of_steps("balanced") == of_steps("in turn")
    for name in ("in turn", "balanced"):
        assert losses(tmp_path / name) == pytest.approx(losses(tmp_path / "own"), rel=1e-5)
    imbalance = {name: [line["imbalance_before"] for line in lines(tmp_path / name) if "loss" in line] for name in ways}
    assert len(imbalance["balanced"]) == 8 and sum(imbalance["balanced"]) < 0.5 * sum(imbalance["in turn"])


@pytest.mark.parametrize(("way", "stops"), before_a_commit([(STAGE, (4,))], [(way, (4, 8)) for way in RESUMED]))
def test_a_resumed_run_is_the_run_that_was_never_stopped(two_ranks, data, tmp_path, way, stops):
    """Eight steps (or more) an epoch: stopped within a window, or at the end of the first of two epochs, too."""
    folder = str(tmp_path / "checkpoints")
    changes = {"num_epochs": len(stops), "eval_interval": 5, **way}
    whole = two_ranks.run(train, data, str(tmp_path / "whole"), **changes)
    saving = changes | {"ckpt_save_interval": 100, "ckpt_save_dir": folder, "ckpt_load_dir": folder}
    parts = [
        two_ranks.run(train, data, str(tmp_path / "parts"), **saving | {"max_train_iters": stop})
        for stop in (*stops, None)
    ]
    for rank, (steps, users, *_) in enumerate(whole):
        assert [part[rank][0] for part in parts] == [*stops, steps]
        assert [batch for part in parts for batch in part[rank][1]] == users
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    parts, whole = (
        [line.get("loads_before") for line in lines(tmp_path / name) if "loss" in line] for name in ("parts", "whole")
    )
    assert parts == whole  # of the rows as they were loaded, or dealt in turn


SMALLER = {"batch_size": 3}


@pytest.mark.parametrize(
    ("way", "num_ranks", "changes"),
    before_a_commit(
        [(STAGE, 2, SMALLER), (MEASURED, 2, {})],
        [(STAGE, 4, {}), (SAMPLER, 2, SMALLER), (SAMPLER, 4, {}), (BUDGET, 2, SMALLER), (BUDGET, 4, {})],
    ),
)
def test_others_go_on_with_what_is_left(rank_pools, data, tmp_path, way, num_ranks, changes):
    """An unfinished window is read again: other ranks, other batches or speeds measured anew would plan it otherwise.

    A budget's steps are prefixes of the order, so nothing comes twice.
    """
    saving = {"ckpt_save_interval": 100, "ckpt_save_dir": str(tmp_path / "checkpoints"), **way}
    first = rank_pools[2].run(train, data, str(tmp_path / "run"), max_train_iters=5, **saving)
    trained, again = users_of(first), Counter()
    if way is not BUDGET:
        again = users_of(first, slice(3, 5))
        assert again.total() == 16
    others = str(tmp_path / "others")
    loading = saving | {"ckpt_load_dir": saving["ckpt_save_dir"], "ckpt_save_dir": others, **changes}
    result = rank_pools[num_ranks].run(train, data, others, **loading)
    rest = users_of(result)
    assert trained - again + rest == Counter(dict.fromkeys(rest | trained, 1)) and len(rest | trained) == ROWS
    line = "saved 2 steps into a window .* by another release, .* is read again, and 16 rows are trained a second time"
    assert bool(re.search(line, " ".join(result[0][3]))) == bool(again)


def test_a_schedule_in_rows(two_ranks, data, tmp_path):
    """Steps of 8 rows: what is due comes after the step that reaches it."""
    schedule = {"schedule_in": "rows", "num_epochs": None, "max_train_iters": 50, "eval_interval": 20}
    saving = {"ckpt_save_interval": 30, "ckpt_save_dir": str(tmp_path / "checkpoints")}
    two_ranks.run(train, data, str(tmp_path / "rows"), **SAMPLER, **schedule, **saving)
    assert [line["step"] for line in lines(tmp_path / "rows") if "eval_loss" in line] == [3, 5, 7]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step_00000004", "step_00000007"]
    progress = json.loads((tmp_path / "checkpoints" / "step_00000007" / "state.json").read_text())["progress"]
    assert (progress["rows_in_epoch"], progress["window_steps"], progress["window_of"]["window"]) == (48, 1, 3)
    assert progress["rows"] - 48 == progress["window_rows"] in (5, 6)  # of 11 rows in its two steps


def test_rows_of_exchanged_windows_are_counted_as_they_are_trained(two_ranks, data, tmp_path):
    """A checkpoint within a window resumes after these rows."""
    free = STAGE | {"shuffler": ShufflerOptions(equal_size=False), "schedule_in": "rows"}
    saving = {"ckpt_save_interval": 10, "ckpt_save_dir": str(tmp_path / "checkpoints"), "ckpt_keep": 99}
    two_ranks.run(train, data, str(tmp_path / "run"), dataset={"max_history_seqlen": 200}, **free, **saving)
    trained = [line["num_rows"] for line in lines(tmp_path / "run") if "loss" in line]
    saved = [json.loads((path / "state.json").read_text()) for path in list_checkpoints(tmp_path / "checkpoints")]
    assert len(set(trained)) > 2 and sum(trained) == ROWS and len(saved) > 3
    for progress in (state["progress"] for state in saved):
        assert progress["rows"] == sum(trained[: progress["step"]])


@pytest.mark.slow
def test_a_schedule_in_rows_of_steps_that_differ(two_ranks, data, tmp_path):
    """Stopped and resumed with smaller steps, rates follow the rows; saved where accumulations end."""
    schedule = OptimizationArgs(accumulation_steps=2, lr_schedule="cosine")
    changes = {"schedule_in": "rows", "num_epochs": 2, "optimization": schedule, **BUDGET}
    saving = {"ckpt_save_interval": 12, "ckpt_save_dir": str(tmp_path / "checkpoints"), "ckpt_keep": 99}
    steps, _, rates, _ = two_ranks.run(train, data, str(tmp_path / "whole"), **changes, **saving)[0]
    rows = {0: 0}
    for path in list_checkpoints(tmp_path / "checkpoints"):
        progress = json.loads((path / "state.json").read_text())["progress"]
        rows[progress["step"]] = progress["rows"]
        trained = progress["epoch"] * ROWS + progress["rows_in_epoch"]
        assert progress["rows"] == trained and not progress["window_steps"]
    assert all(step % 2 == 0 for step in rows if step < steps) and len(rows) > steps // 2 - 2
    assert rows[steps] == 2 * ROWS and len({rows[4] - rows[2], rows[6] - rows[4], rows[2]}) > 1
    expected = {step: 0.001 * (1 + math.cos(math.pi * done / (2 * ROWS))) / 2 for step, done in rows.items()}
    assert {step: rates[step // 2] for step in rows if step < steps} == {
        step: pytest.approx(rate) for step, rate in expected.items() if step < steps
    }
    loading = changes | {"ckpt_load_dir": str(tmp_path / "checkpoints" / "step_00000002"), "budget_per_rank": 4.0}
    rest = two_ranks.run(train, data, str(tmp_path / "rest"), **loading)
    assert users_of(rest).total() == 2 * ROWS - rows[2]
    assert rest[0][2][0] == pytest.approx(expected[2])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "steps", "left_out"),
    [
        # Epochs of 28 and 29 steps.
        ({"budget_per_rank": 2.0, "seed": 2, "num_epochs": 2}, 57, 0),
        # Of 59 rows, two ranks leave out one in the second of three epochs.
        (
            {"budget_per_rank": 4.0, "seed": 5, "num_epochs": 3, "schedule_in": "rows"}
            | {"dataset": {"drop_last": True, "max_history_seqlen": 200}},
            None,
            1,
        ),
    ],
    ids=["steps", "rows"],
)
def test_a_cosine_over_epochs_of_a_budget_ends_with_the_run(two_ranks, data, tmp_path, changes, steps, left_out):
    """And a resumed run goes on alike."""
    changes = {**BUDGET, "optimization": OptimizationArgs(lr_schedule="cosine"), **changes}
    saving = {"ckpt_save_interval": 30, "ckpt_save_dir": str(tmp_path / "checkpoints")}
    whole = two_ranks.run(train, data, str(tmp_path / "whole"), **changes, **saving)
    rows = [sum(map(len, step)) for step in zip(*(batches for _, batches, *_ in whole))]
    assert sum(rows) == changes["num_epochs"] * ROWS - left_out and len(rows) == (steps or len(rows))
    part = [1 / steps] * steps if steps else [each / sum(rows) for each in rows]
    rates = [0.001 * (1 + math.cos(math.pi * sum(part[:step]))) / 2 for step in range(len(rows))]
    assert whole[0][2] == pytest.approx(rates, abs=1e-9)
    loading = {"ckpt_load_dir": str(list_checkpoints(tmp_path / "checkpoints")[0])}
    rest = two_ranks.run(train, data, str(tmp_path / "rest"), **changes, **loading)[0][2]
    assert 0 < len(rest) < len(rates) and rest == whole[0][2][-len(rest) :]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"dataset": {"dataset_name": "random"}},
            "^ValueError: .*random data are drawn while they are read, so the lengths of their rows are not known",
        ),
        ({"shuffler": ShufflerOptions(max_tokens_per_rank=40)}, "^ValueError: .*alone has .*max_tokens is 40"),
    ],
)
def test_data_that_cannot_be_read_by_their_work(two_ranks, data, tmp_path, options, said):
    first, second = two_ranks.run(error_of, train, data, str(tmp_path), **SAMPLER, **options)
    assert first == second and re.search(said, first), first


class GroupShuffler(TokensBalancedBatchShuffler):
    """Keeps the rows of a user together."""

    def get_groups(self, batch):
        return batch.features["user_id"].values()


def _error_with_groups(*args, **changes):
    with mock.patch.object(Noted, "build_shuffler", lambda recipe, **_: GroupShuffler()):
        return error_of(train, *args, **changes)


@pytest.mark.parametrize(("way", "name"), [(SAMPLER, "balance_sampler"), (DEALT, "balance_batch")])
def test_rows_that_stay_together_are_not_balanced_one_by_one(two_ranks, data, tmp_path, way, name):
    for error in two_ranks.run(_error_with_groups, data, str(tmp_path), **way):
        assert error.startswith(f"ValueError: {name} is True and GroupShuffler has get_groups; ")


@pytest.mark.parametrize("way", [{}, STAGE, SAMPLER, DEALT], ids=["plain", "stage", "sampler", "dealt"])
def test_an_epoch_without_a_whole_step_ends_the_run(two_ranks, data, tmp_path, way):
    few = {"dataset": {"drop_last": True}, "batch_size": ROWS}
    for error in two_ranks.run(error_of, train, data, str(tmp_path), **few, **way):
        assert error.startswith("ValueError: epoch 0 has no batch on any rank; ")


def _of_steps(run_dir, name, dtype=np.int64):
    """Of every step a number of each rank, `(steps, ranks)`."""
    return np.array([line[name] for line in lines(run_dir) if "loss" in line], dtype)


@pytest.mark.parametrize("window", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_a_sampler_says_what_its_rows_would_cost_dealt_in_turn(two_ranks, data, tmp_path, window):
    # A run without the sampler reads the same rows in turn, and its shuffler says what they cost.
    plain, own = tmp_path / "plain", tmp_path / "own"
    observe = {"enable_balanced_shuffler": True, "shuffler": ShufflerOptions(mode="observe")}
    two_ranks.run(table_of, data, str(plain), **observe)
    tables = two_ranks.run(table_of, data, str(own), **SAMPLER | {"shuffle_window": window})
    in_turn, read = _of_steps(plain, "loads_before"), _of_steps(own, "loads_after")
    assert in_turn.shape == read.shape == (8, 2)
    if window == 1:  # the same rows in every step
        assert (_of_steps(own, "loads_before") == in_turn).all()
    assert (_of_steps(own, "loads_before")[:6] == in_turn[:6]).all()  # whole windows of as many rows
    assert read[:6].sum() == in_turn[:6].sum()
    # A window that ends the epoch has the rows that are left.
    assert _of_steps(own, "loads_before")[6:].sum() == in_turn[6:].sum() == read[6:].sum()
    for line in (line for line in lines(own) if "loss" in line):
        before, after = max(line["loads_before"]), max(line["loads_after"])
        mean = sum(line["loads_after"]) / 2
        assert line["window"] == window and line["imbalance_after"] == pytest.approx(after / mean - 1)
        saved = line.get("predicted_saving")  # of a step in a window no number: its rows before are not those after
        assert saved == (None if window > 1 else pytest.approx((before - after) / before))
        assert line["optimality_gap"] == pytest.approx(after / line["lower_bound"] - 1)

    took = _of_steps(own, "own_ms", np.float64)  # each rank, for the rows that it read
    assert took.shape == (8, 2) and took.min() > 0
    report = RunReport(RunLog(own))
    assert len(report.log.of_ranks["own_ms"]) == 8
    before, after = (_of_steps(own, name).max(axis=1).sum() for name in ("loads_before", "loads_after"))
    assert report.gain.work == pytest.approx(before / after) and report.gain.work > 1.02
    assert "Reading the rows by their work makes the slowest rank" in advice_of(report)
    shown = dict(tables[0])
    assert shown["largest load saved"].startswith(f"{100 * (1 - after / before):.1f}%")
    assert not shown["imbalance (max ÷ mean − 1)"].startswith("0.0%") and "tokens moved" not in shown


@pytest.mark.parametrize("way", [DEALT, SAMPLER | {"shuffler": ShufflerOptions(mode="off")}], ids=["rank 0", "off"])
def test_rows_that_were_balanced_when_loaded_are_not_called_unbalanced(two_ranks, data, tmp_path, way):
    """Nothing is left for the shuffler to move, and the log does not have the loads of the rows dealt in turn."""
    table, _ = two_ranks.run(table_of, data, str(tmp_path), max_train_iters=3, **way)
    shown, trained = dict(table), [line for line in lines(tmp_path) if "loss" in line]
    uneven = [line["imbalance_before"] for line in trained]
    if way is DEALT:
        loads = [line["loads_after"] for line in trained]
        assert uneven == pytest.approx([2 * max(each) / sum(each) - 1 for each in loads])
    assert shown["imbalance (max ÷ mean − 1)"] == f"{sum(uneven) / 3:.1%}, balanced when loaded"
    assert not {"tokens moved", "largest load saved", "would save"} & shown.keys()
    assert {line["before_in_turn"] for line in trained} == {0}
