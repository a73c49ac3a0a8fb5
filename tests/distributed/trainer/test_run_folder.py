"""A run's folder holds one run: what a command given twice does to it, and what it says of the run."""

from __future__ import annotations

import contextlib
import io
import json
import math
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from commons.run_log.comparison import compare_runs
from commons.run_log.reading import read_runs
from commons.run_log.report import RunReport
from commons.trainer.config.args import DatasetArgs, TrainerArgs
from commons.trainer.config.load import load_config, same_fields
from commons.trainer.folder_lock import lock_folder, unlock_folder
from commons.trainer.ranks import errors
from commons.trainer.run import open_run_folder, run_training, train
from hstu.recipe import HSTURecipe
from hstu.train_config import TrainConfig
from tests.helpers.datasets.stored_users import copy_of_another_day, copy_of_another_split
from tests.helpers.jobs.run_folders import lines
from tests.helpers.jobs.training_configs import TINY
from tests.helpers.ranks.faults import error_of
from tests.helpers.ranks.on_ranks import on_two_ranks

CPU = torch.device("cpu")
RUN = (*TINY, "--trainer.log-interval", "1", "--trainer.eval-interval", "2", "--trainer.max-eval-iters", "1")


def command(*flags):
    """What a run of hstu.train returns on this rank: its summary, or the one line that it ends with."""
    config = load_config(TrainConfig, [*RUN, *flags])
    try:
        open_run_folder(config, CPU, logs_to_file=False)
    except ValueError as error:
        return str(error)
    return run_training(HSTURecipe(config, CPU)).to_dict()


def printed(*flags):
    """What a run prints on this rank."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        command(*flags)
    return said.getvalue()


def steps_of(folder, name):
    """Steps of a number in log.jsonl, which are those that TensorBoard shows."""
    logged = [line["step"] for line in lines(folder) if name in line]
    tag = name.replace("eval_", "eval/") if name.startswith("eval_") else f"train/{name}"
    assert [event.step for event in EventAccumulator(str(folder / "tensorboard")).Reload().Scalars(tag)] == logged
    return logged


@pytest.mark.slow
def test_a_command_given_twice(two_ranks, tmp_path):
    folder, other = tmp_path / "run", tmp_path / "other"
    first = two_ranks.run(command, "--trainer.run-dir", str(folder))
    written = json.loads((folder / "summary.json").read_text())
    assert written == first[0] and written["steps"] == 6 and written["metrics"]["eval_rows"] == 8
    before = files_of(folder)
    said = two_ranks.run(command, "--trainer.run-dir", str(folder), "--trainer.seed", "5")
    assert said[0] == said[1] and "\n" not in said[0]
    for remedy in ("--trainer.run-dir", "--trainer.overwrite", "--trainer.ckpt-load-dir"):
        assert f"run_dir {folder} already contains a run; " in said[0] and remedy in said[0]
    assert files_of(folder) == before

    # What an unbalanced run says of its imbalance is what the shuffler finds in the same rows, which it then moves.
    balanced = two_ranks.run(command, "--trainer.run-dir", str(other), "--trainer.enable-balanced-shuffler")[0]
    pairs = [each for each in zip(lines(folder), lines(other)) if "loss" in each[0]]
    assert len(pairs) == 6 and written["shuffle"].keys() == {"imbalance_before"}
    for unbalanced_line, balanced_line in pairs:
        assert unbalanced_line["imbalance_before"] == pytest.approx(balanced_line["imbalance_before"])
        assert unbalanced_line["loss"] == pytest.approx(balanced_line["loss"], rel=1e-4)
        assert unbalanced_line["imbalance_before"] > 0 and unbalanced_line.keys().isdisjoint(
            {"moved", "imbalance_after"}
        )
    assert written["shuffle"]["imbalance_before"] == pytest.approx(balanced["shuffle"]["imbalance_before"])
    assert json.loads((other / "summary.json").read_text())["shuffle"]["moved"] > 0

    require_snapshots(other)

    # What a report says of the two is what their summaries say.
    (beside,) = compare_runs([RunReport(log) for log in read_runs([folder, other])])
    shuffle = balanced["shuffle"]
    gained = shuffle["largest_load_before"] / shuffle["largest_load_after"]
    assert gained > 1 and beside.work == pytest.approx(gained)
    assert beside.differences == () and beside.loss.lines == 6 and beside.loss.largest < 1e-4

    (folder / "mine.txt").write_text("not of the run")
    for name in ("rank3.log", "trace-rank1.json", "rank_of_mine.log"):
        (folder / name).touch()
    anew = "--trainer.overwrite --trainer.sinks --trainer.seed 5"
    two_ranks.run(command, "--trainer.run-dir", str(folder), *anew.split())
    assert sorted(path.name for path in folder.rglob("*") if path.is_file()) == [
        ".lock",
        "config.json",
        "log.jsonl",
        "mine.txt",
        "rank_of_mine.log",
        "summary.json",
    ]
    assert [line["step"] for line in lines(folder) if "loss" in line] == list(range(1, 7))
    assert json.loads((folder / "config.json").read_text())["trainer"]["seed"] == 5


def files_of(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_run_that_does_not_start_leaves_the_old_run(two_ranks, tmp_path):
    folder, file = tmp_path / "run", tmp_path / "file"
    file.touch()
    flags = ["--trainer.run-dir", str(folder), "--trainer.max-train-iters", "2", "--trainer.seed", "5"]
    flags += ["--trainer.ckpt-save-dir", str(tmp_path / "saved"), "--trainer.ckpt-save-interval", "2"]
    two_ranks.run(command, *flags, "--trainer.global-batch-size", "4")
    before = files_of(folder)
    # As given, not this rank's part of the global batch.
    given = load_config(TrainConfig, RUN).trainer.train_batch_size
    assert json.loads(before[Path("config.json")])["trainer"]["train_batch_size"] == given != 2
    mistakes = ["--trainer.overwrite --trainer.pipeline-type prefetch", f"--trainer.overwrite {flags[6]} {file}"]
    mistakes += [f"--trainer.ckpt-load-dir {flags[7]} --optimizer.dense-optimizer sgd"]
    for mistake in mistakes:
        said = two_ranks.run(error_of, command, *flags, *mistake.split())
        assert said[0] == said[1] and said[0].startswith("ValueError: ") and files_of(folder) == before


def test_a_run_that_saves_no_checkpoints_is_not_replaced(two_ranks, tmp_path):
    """By a command that saves to its ckpt_save_dir, which has a default, and loads from there.

    Nor is its log cut by one that continues from the checkpoints of another run.
    """
    folder, checkpoints = tmp_path / "run", str(tmp_path / "checkpoints")
    flags = ["--trainer.run-dir", str(folder), "--trainer.ckpt-save-dir", checkpoints, "--trainer.max-train-iters", "1"]
    two_ranks.run(command, *flags)
    before = files_of(folder)
    said = two_ranks.run(command, *flags, "--trainer.ckpt-save-interval", "2", "--trainer.ckpt-load-dir", checkpoints)
    assert said[0] == said[1] and f"already contains a run, and ckpt_load_dir {checkpoints} has no checkpo" in said[0]
    (tmp_path / "checkpoints" / "step_00000001").mkdir(parents=True)
    said = two_ranks.run(command, *flags, "--trainer.ckpt-load-dir", checkpoints)
    assert said[0] == said[1] and f"ckpt_load_dir {checkpoints} is neither the ckpt_save_dir nor " in said[0]
    assert files_of(folder) == before


def test_a_run_that_was_moved_continues(two_ranks, tmp_path):
    """Also from a checkpoint with another name, and without the config that names its checkpoints."""

    def flags(place, steps, load=None):
        given = ["--trainer.run-dir", str(place / "run"), "--trainer.ckpt-save-dir", str(place / "saved")]
        given += ["--trainer.ckpt-save-interval", "2", "--trainer.max-train-iters", str(steps)]
        return given if load is None else [*given, "--trainer.ckpt-load-dir", str(load)]

    first, second = tmp_path / "first", tmp_path / "second"
    two_ranks.run(command, *flags(first, 2))
    first.rename(second)
    (second / "saved" / "step_00000002").rename(second / "saved" / "best")
    assert two_ranks.run(command, *flags(second, 4, second / "saved" / "best"))[0]["steps"] == 4
    (second / "run" / "config.json").unlink()
    assert two_ranks.run(command, *flags(second, 6, second / "saved"))[0]["steps"] == 6
    assert [line["step"] for line in lines(second / "run") if "loss" in line] == list(range(1, 7))


def test_a_folder_of_a_run_in_progress_is_refused(two_ranks, tmp_path):
    lock_folder(tmp_path / "run")  # this process is another run
    said = two_ranks.run(command, "--trainer.run-dir", str(tmp_path / "run"), "--trainer.overwrite")
    assert said[0] == said[1] and f"another run is writing to run_dir {tmp_path / 'run'}; " in said[0]
    unlock_folder(tmp_path / "run")
    assert two_ranks.run(command, "--trainer.run-dir", str(tmp_path / "run"))[0]["steps"] == 6


def train_with(run_dir, flags):
    """A run in which each rank has flags of its own."""
    config = load_config(TrainConfig, [*RUN, "--trainer.run-dir", run_dir, *flags[dist.get_rank()]])
    return train(HSTURecipe, config).steps


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ((["--trainer.seed", "1"], ["--trainer.seed", "2"]), "trainer.seed is 1 on rank 0 and 2 on rank 1 in training"),
        (([], ["--model.num-layers", "3"]), "model.num_layers is 1 on rank 0 and 3 on rank 1 in training"),
        ((["--dataset.shuffle"], []), "dataset.shuffle is True on rank 0 and False on rank 1 in training"),
        (([], ["--shuffler-type", "tokens"]), "shuffler_type is 'hstu' on rank 0 and 'tokens' on rank 1 in training"),
    ],
)
def test_settings_that_differ_are_an_error_on_every_rank(two_ranks, tmp_path, flags, said):
    first, second = two_ranks.run(error_of, train_with, str(tmp_path), flags)
    assert first == second and first.startswith(f"ValueError: {said}; ") and not any(tmp_path.iterdir())


def test_a_mistake_on_one_rank_is_raised_on_every_rank(two_ranks, data, tmp_path):
    may_differ = ["--trainer.profile", "--trainer.ckpt-keep", "9", "--trainer.peak-tflops", "2"]
    movielens = ["--dataset.dataset-name", "ml-1m", "--dataset.dataset-path"]
    missing = ([*movielens, data], [*may_differ, *movielens, str(tmp_path / "none")])
    said = two_ranks.run(error_of, train_with, str(tmp_path), missing)
    assert said[1].startswith(f"FileNotFoundError: {tmp_path / 'none'}")
    assert said[0] == f"ValueError: rank 1: {said[1]}"


NEGATIVES = ("--task", "retrieval", "--dataset.max-num-candidates", "0", "--model.num-negatives", "3")


@pytest.mark.parametrize("own", [(), (*NEGATIVES, "--trainer.eval-metrics", "HR@10")], ids=["ranking", "negatives"])
def test_hosts_with_copies_of_other_data_are_an_error_on_every_rank(two_ranks, data, tmp_path, own):
    """Rows of one split would be trained twice and others not at all, and no setting differs."""
    paths = (data, str(copy_of_another_split(data, tmp_path / "other.parquet")))
    flags = [["--dataset.dataset-name", "ml-1m", *own, "--dataset.dataset-path", path] for path in paths]
    first, second = two_ranks.run(error_of, train_with, str(tmp_path / "run"), flags)
    assert first == second and first.startswith("ValueError: the data of rank 0 have the row_order {'users': ")
    assert "'split_seed': 0}, those of rank 1 " in first and "'split_seed': 7}; ranks share the rows" in first


def test_a_host_with_the_events_of_another_day_is_an_error_on_every_rank(two_ranks, data, tmp_path):
    """Users, items and split are the same, so that only the number of events differs."""
    paths = (data, str(copy_of_another_day(data, tmp_path / "other.parquet")))
    flags = [["--dataset.dataset-name", "ml-1m", "--dataset.dataset-path", path] for path in paths]
    first, second = two_ranks.run(error_of, train_with, str(tmp_path / "run"), flags)
    assert first == second and first.startswith("ValueError: the data of rank 0 have the row_contents {'num_users': ")
    assert ", those of rank 1 {'num_users': " in first and "'num_interactions': 7}; ranks share the rows" in first


@dataclass
class OwnArgs(TrainerArgs):
    """A user's settings, of which one differs between ranks."""

    rank: int = 0


@dataclass
class OwnData(DatasetArgs):
    """The same of the data."""

    rank: int = 0


def train_with_own_settings(run_dir, section, own_class):
    config = load_config(TrainConfig, [*RUN, "--trainer.run-dir", run_dir])
    own = own_class(**same_fields(type(getattr(config, section)), getattr(config, section)), rank=dist.get_rank())
    return train(HSTURecipe, replace(config, **{section: own})).steps


def test_own_settings_of_a_trainer_may_differ_between_ranks_and_those_of_data_may_not(two_ranks, tmp_path):
    assert two_ranks.run(train_with_own_settings, str(tmp_path), "trainer", OwnArgs) == [6, 6]
    said = two_ranks.run(error_of, train_with_own_settings, str(tmp_path), "dataset", OwnData)
    assert said[0] == said[1] and said[0].startswith(
        "ValueError: dataset.rank is 0 on rank 0 and 1 on rank 1 in training; "
    )


@dataclass(frozen=True)
class OwnConfig:
    """The config of a user's recipe."""

    trainer: TrainerArgs
    items: Path


@on_two_ranks
def test_a_config_may_hold_a_path(tmp_path):
    flags = ["--trainer.train-batch-size", "2", "--trainer.eval-batch-size", "2", "--trainer.run-dir", str(tmp_path)]
    open_run_folder(load_config(OwnConfig, [*flags, "--items", "data/items"]), CPU, logs_to_file=False)
    assert json.loads((tmp_path / "config.json").read_text())["items"] == "data/items"


def keeps_log(folder, *flags):
    """Whether this rank's log, with the traceback of an earlier failure, is still there when a run begins."""
    log = folder / f"rank{dist.get_rank()}.log"
    log.write_text("Traceback")
    with mock.patch.object(errors, "logging"):
        open_run_folder(
            load_config(TrainConfig, [*RUN, "--trainer.run-dir", str(folder), *flags]), CPU, logs_to_file=True
        )
    return log.exists()


def test_a_run_that_is_started_again_keeps_the_traceback_of_its_failure(two_ranks, tmp_path):
    assert two_ranks.run(keeps_log, tmp_path) == [False, False]
    assert two_ranks.run(keeps_log, tmp_path, "--trainer.ckpt-load-dir", str(tmp_path / "saved")) == [True, True]


def require_snapshots(folder):
    """Of lines of one step each: every rank's load and lookups, which log.jsonl alone has."""
    trained = [line for line in lines(folder) if "loss" in line]
    for line in trained:
        assert (line["schema"], line["ranks"], line["steps"]) == (1, 2, 1) and line["total_ms"] == line["step_ms"]
        for what in ("loads", "lookups"):
            before, after = line[f"{what}_before"], line[f"{what}_after"]
            assert len(before) == 2 and sum(before) == sum(after) > 0
        assert max(line["loads_before"]) == line["largest_load_before"]
        assert max(line["loads_after"]) == line["largest_load_after"]
    assert any(line["loads_before"] != line["loads_after"] for line in trained)
    tags = EventAccumulator(str(folder / "tensorboard")).Reload().Tags()["scalars"]
    assert "shuffle/imbalance_before" in tags and "train/loss" in tags
    details = ("schema", "ranks", "steps", "total_ms", "loads_before", "lookups_after")
    assert not [tag for tag in tags for name in details if tag.split("/")[1] == name]


def test_a_folder_that_cannot_be_written_is_an_error_on_every_rank(two_ranks, tmp_path):
    (tmp_path / "file").touch()
    said = two_ranks.run(command, "--trainer.run-dir", str(tmp_path / "file" / "run"))
    assert said[0] == said[1] and f"folder {tmp_path / 'file' / 'run'} cannot be made (Not a directory); " in said[0]
    (tmp_path / "run" / "log.jsonl").mkdir(parents=True)
    said = two_ranks.run(error_of, command, "--trainer.run-dir", str(tmp_path / "run"))
    assert said[0] == said[1] and said[0].startswith("ValueError: ") and "log.jsonl" in said[0]
    for flag in ("run-dir", "ckpt-save-dir", "ckpt-load-dir"):
        said = two_ranks.run(command, f"--trainer.{flag}", "s3://bucket/run")
        assert said[0] == said[1] and f"{flag.replace('-', '_')} is 's3://bucket/run'; files are written to " in said[0]


@pytest.mark.slow
def test_one_command_starts_a_run_and_goes_on_with_it(two_ranks, tmp_path):
    folder, checkpoints = tmp_path / "run", tmp_path / "checkpoints"
    flags = ["--trainer.run-dir", str(folder), "--trainer.ckpt-save-interval", "2"]
    flags += ["--trainer.ckpt-save-dir", str(checkpoints), "--trainer.ckpt-load-dir", str(checkpoints)]
    two_ranks.run(command, *flags, "--trainer.max-train-iters", "3")
    # Ended before its first checkpoint, it begins anew.
    shutil.rmtree(checkpoints)
    two_ranks.run(command, *flags, "--trainer.max-train-iters", "3")
    assert steps_of(folder, "loss") == [1, 2, 3] and steps_of(folder, "eval_loss") == [2, 3]
    two_ranks.run(command, *flags)
    assert steps_of(folder, "loss") == [1, 2, 3, 4, 5, 6] and steps_of(folder, "eval_loss") == [2, 3, 4, 6]
    (log,) = read_runs([folder])
    assert log.steps.tolist() == [1] * 6 and [step for step, _ in log.evaluations] == [2, 3, 4, 6]
    assert [line["step"] for line in lines(folder) if "resumed" in line] == [4]
    # Once more, though it is complete: nothing is trained and nothing evaluated, and the results stay.
    log, summary = (folder / "log.jsonl").read_bytes(), json.loads((folder / "summary.json").read_text())
    again = two_ranks.run(command, *flags)[0]
    assert (folder / "log.jsonl").read_bytes() == log and steps_of(folder, "eval_loss") == [2, 3, 4, 6]
    assert json.loads((folder / "summary.json").read_text()) == summary
    assert again["metrics"] == summary["metrics"] and "loss" not in again and math.isfinite(summary["loss"])
    # From an earlier checkpoint, by its own path, with a line about what that removes from the log.
    shutil.rmtree(checkpoints / "step_00000006")
    said = two_ranks.run(printed, *flags[:-1], str(checkpoints / "step_00000004"), "--trainer.max-train-iters", "5")[0]
    assert f"lines of {folder / 'log.jsonl'} after step 4 are removed (3)\n" in said
    log = (folder / "log.jsonl").read_bytes()
    assert steps_of(folder, "loss") == [1, 2, 3, 4, 5] and steps_of(folder, "eval_loss") == [2, 3, 4, 5]
    # The folder of another run, and no checkpoint of that to go on from.
    empty = str(tmp_path / "empty")
    said = two_ranks.run(command, *flags[:4], "--trainer.ckpt-save-dir", empty, "--trainer.ckpt-load-dir", empty)
    assert said[0] == said[1] and f"already contains a run, and ckpt_load_dir {empty} has no checkpoint; " in said[0]
    assert (folder / "log.jsonl").read_bytes() == log


def test_every_step_is_in_one_line_of_the_log_after_a_resume(two_ranks, tmp_path):
    """Also those between the last full interval and the checkpoint; a killed run leaves lines of later steps."""
    folder, checkpoints = tmp_path / "run", tmp_path / "checkpoints"
    flags = ["--trainer.run-dir", str(folder), "--trainer.ckpt-save-interval", "4", "--trainer.log-interval", "3"]
    flags += ["--trainer.ckpt-save-dir", str(checkpoints), "--trainer.ckpt-load-dir", str(checkpoints)]
    two_ranks.run(command, *flags, "--trainer.max-train-iters", "5")
    shutil.rmtree(checkpoints / "step_00000005")
    two_ranks.run(command, *flags)
    assert {line["step"]: line["steps"] for line in lines(folder) if "loss" in line} == {3: 3, 4: 1, 6: 2}
