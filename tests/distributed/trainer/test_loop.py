"""The loop on real ranks: every sample once per epoch with evaluations in between, and steps that end together."""

from __future__ import annotations

import json
import os
import signal
import statistics
from collections import Counter
from contextlib import closing, suppress
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from commons.distributed.batch_shuffler import BaseTaskBalancedBatchShuffler, IdentityBalancedBatchShuffler
from commons.distributed.gather import rank_speeds
from commons.distributed.options import ShufflerOptions
from commons.trainer import TrainerArgs, loop
from commons.trainer.checkpoint import checkpoints
from commons.trainer.loop import TrainingLoop
from commons.trainer.observe import times, train_log
from tests.helpers.jobs.run_folders import lines
from tests.helpers.models import torchrec_model as models
from tests.helpers.models.torchrec_model import PlainModel, head_of, rank_batches
from tests.helpers.pipelines.shuffled_pipelines import expected_ids
from tests.helpers.pipelines.trainer_loops import CubicShuffler, Parts, StatedHead
from tests.helpers.ranks.faults import error_of, logged
from tests.helpers.ranks.on_ranks import of_all, on_two_ranks

SIZES = [6, 3, 1, 2]


class SeenRows:
    """A metric: how often each row was evaluated, over all ranks."""

    def __init__(self):
        self.ids = []
        self.evaluations = []

    def update(self, output):
        self.ids += output.ids

    def compute(self):
        self.evaluations.append(of_all(self.ids))
        return {"rows_seen": float(len(self.evaluations[-1]))}

    def reset(self):
        self.ids = []


class RowsShuffler(BaseTaskBalancedBatchShuffler):
    def get_workloads(self, batch):
        return torch.ones(batch.batch_size, dtype=torch.int64)


def loader(count, first, sizes=SIZES):
    batches = list(rank_batches(dist.get_rank() + first, count, sizes))
    return DataLoader(batches, batch_size=None)


class SlowLinear(torch.nn.Linear):
    """Takes 10 ms of a clock of its own; on rank 1 half as long again."""

    seconds = 0.0

    def forward(self, pooled):
        SlowLinear.seconds += 0.01 * (1.5 if dist.get_rank() else 1.0)
        return super().forward(pooled)


def run_loop(run_dir, pipeline, counts, balance, linear=torch.nn.Linear, by=CubicShuffler, sizes=SIZES, **changes):
    args = {"run_dir": run_dir, "pipeline_type": pipeline, "log_interval": 2, "eval_interval": 2} | changes
    model, optimizer = models.build_sharded()
    head, metrics = head_of(model), SeenRows()
    head.__class__, head.linear.__class__ = StatedHead, linear
    loaders = loader(counts[0][dist.get_rank()], 0, sizes), loader(counts[1][dist.get_rank()], 10)
    told = {"metrics": metrics, "flops": lambda batch: 10**15 * batch.actual_batch_size, "layers": head.linear}
    with closing(by() if balance else IdentityBalancedBatchShuffler()) as shuffler:
        summary = TrainingLoop(Parts(TrainerArgs(6, 6, **args), model, optimizer, [shuffler], loaders, **told)).run()
    trained = [row for step in head.seen for row in step]
    return {"steps": summary.steps, "epochs": summary.epochs, "trained": trained, "evaluations": metrics.evaluations}


def expected_rows(counts, first=0):
    return expected_ids(counts, len(counts), first, SIZES)


@pytest.mark.parametrize("pipeline, balance", [("native", True), pytest.param("none", False, marks=pytest.mark.slow)])
def test_every_sample_is_trained_once_per_epoch_and_evaluated_once(ranks, tmp_path, pipeline, balance):
    counts = ([5, 3, 0, 4][: ranks.world_size], [1, 3, 2, 0][: ranks.world_size])
    results = ranks.run(run_loop, str(tmp_path), pipeline, counts, balance, num_epochs=2)
    assert {(result["steps"], result["epochs"]) for result in results} == {(10, 2)}
    trained = sorted(row for result in results for row in result["trained"])
    assert trained == sorted(2 * expected_rows(counts[0]))
    evaluated = results[0]["evaluations"]
    assert len(evaluated) == 5 and all(sorted(rows) == expected_rows(counts[1], 10) for rows in evaluated)

    written = lines(tmp_path)
    assert [line["step"] for line in written if "loss" in line] == [2, 4, 6, 8, 10]
    evaluations = [line for line in written if "eval_loss" in line]
    assert [line["step"] for line in evaluations] == [2, 4, 6, 8, 10]
    num_rows = len(expected_rows(counts[1], 10))
    assert {(line["eval_rows"], line["eval_rows_seen"]) for line in evaluations} == {(num_rows, num_rows)}
    assert all(("imbalance_after" in line) == balance for line in written if "loss" in line)
    assert written[-2]["loss"] < written[0]["loss"]
    assert "mfu" not in written[0]  # a CPU has no peak rate in the table


def test_an_evaluation_without_rows_has_no_loss(two_ranks, tmp_path):
    """Nor has one of a ranking model whose rows have no candidates; 0 would be that of a perfect model."""
    two_ranks.run(run_loop, str(tmp_path), "none", ([2, 1], [0, 0]), False)
    found = [(line["eval_loss"], line["eval_rows"]) for line in lines(tmp_path) if "eval_loss" in line]
    assert found == [(None, 0)]


def test_a_log_on_a_full_disk_ends_no_training(two_ranks, tmp_path):
    (tmp_path / "log.jsonl").symlink_to("/dev/full")
    results = two_ranks.run(run_loop, str(tmp_path), "none", ([3, 2], [1, 1]), True, sinks=())
    assert {(result["steps"], len(result["evaluations"])) for result in results} == {(3, 2)}


def test_a_trace_that_cannot_be_written_ends_no_training(two_ranks, tmp_path):
    (tmp_path / "trace-rank0.json" / "in_the_way").mkdir(parents=True)
    window = {"profile": True, "profile_step_start": 0, "profile_step_end": 1}
    results = two_ranks.run(run_loop, str(tmp_path), "none", ([3, 2], [1, 1]), True, sinks=(), **window)
    assert [result["steps"] for result in results] == [3, 3]
    assert (tmp_path / "trace-rank1.json").is_file()


class BrokenLinear(torch.nn.Linear):
    def forward(self, pooled):
        raise OverflowError("too much")


def status_of(run_dir, linear):
    """Whether a run ends its sinks as failed; torchrun's SIGTERM does not end its workers, whose end would end it."""
    closes, keeps = mock.patch.object(train_log, "close_sinks"), mock.patch.object(loop, "keep_workers")
    with closes as closed, keeps as kept, suppress(OverflowError):
        run_loop(run_dir, "none", ([3, 2], [1, 1]), True, linear, sinks=())
    assert kept.call_count == 2  # the loaders of training and evaluation
    return closed.call_args.kwargs["failed"]


def test_sinks_show_whether_a_run_has_failed(two_ranks, tmp_path):
    assert two_ranks.run(status_of, str(tmp_path), torch.nn.Linear) == [False, False]
    assert two_ranks.run(status_of, str(tmp_path), BrokenLinear) == [True, True]


def test_a_number_of_steps_repeats_the_data(two_ranks, tmp_path):
    counts = ([3, 2], [1, 1])
    results = two_ranks.run(run_loop, str(tmp_path), "native", counts, True, max_train_iters=7, eval_interval=100)
    assert {(result["steps"], result["epochs"]) for result in results} == {(7, 3)}
    trained = Counter(row for result in results for row in result["trained"])
    assert set(trained) == set(expected_rows(counts[0])) and max(trained.values()) == 3
    assert len(results[0]["evaluations"]) == 1  # at the end


def error_and_logged(*arguments, **changes):
    with logged() as messages:
        return error_of(run_loop, *arguments, **changes), messages


def test_a_loader_of_ones_own_goes_on_at_the_end_of_an_epoch(two_ranks, tmp_path):
    folder = str(tmp_path / "checkpoints")
    saving = {"ckpt_save_interval": 3, "ckpt_save_dir": folder, "ckpt_load_dir": folder, "eval_interval": 100}
    for num_epochs in (1, 1, 2):
        results = two_ranks.run(
            run_loop, str(tmp_path), "none", ([3, 2], [1, 1]), True, num_epochs=num_epochs, **saving
        )
        assert {(result["steps"], result["epochs"]) for result in results} == {(3 * num_epochs, num_epochs)}
    assert sorted(row for result in results for row in result["trained"]) == expected_rows([3, 2])
    found, also = two_ranks.run(error_and_logged, str(tmp_path), "none", ([5, 5], [1, 1]), True, num_epochs=2, **saving)
    assert found == also and "ends within epoch 1, and SequentialSampler cannot begin there; " in found[0]
    assert "SequentialSampler has no start_at(row); " in found[1][0]


def test_a_trace_of_some_steps(two_ranks, tmp_path):
    window = {"profile": True, "profile_step_start": 1, "profile_step_end": 3, "eval_interval": 100, "log_interval": 1}
    two_ranks.run(run_loop, str(tmp_path), "none", ([4, 4], [1, 1]), True, **window)
    events = json.loads((tmp_path / "trace-rank1.json").read_text())["traceEvents"]
    assert sum(str(event.get("name")).startswith("## forward") for event in events) == 2
    parts = {"workload", "gather", "plan", "wait", "exchange", "select"}
    spans = [event for event in events if str(event.get("name")).startswith("evenrank/") and event["ph"] == "X"]
    assert {event["name"] for event in spans} == {f"evenrank/{part}" for part in parts}
    threads = {part: {event["tid"] for event in spans if event["name"].endswith(part)} for part in parts}
    assert threads["gather"] == threads["plan"] and not threads["gather"] & threads["exchange"]  # the worker's

    steps = sorted(event["ts"] for event in events if str(event.get("name")).startswith("ProfilerStep#"))
    ends = max(event["ts"] + event.get("dur", 0) for event in events if event.get("tid") in threads["exchange"])
    assert all(steps[0] <= span["ts"] < span["ts"] + span["dur"] <= ends for span in spans)  # microseconds
    for when in ("before", "after"):
        loads = [event for event in events if event["ph"] == "C" and event["name"] == f"evenrank/load {when}"]
        assert len(loads) == len(steps) == 2
        for event, began, line in zip(loads, steps, lines(tmp_path)[1:]):
            assert list(event["args"].items()) == list(zip(("rank 0", "rank 1"), line[f"loads_{when}"]))
            assert abs(event["ts"] - began) < 50e3


def _warnings_of(run_dir, pipeline, linear, **changes):
    said = []
    logger = SimpleNamespace(warning=lambda text, *args: said.append(text % args))
    clock = mock.patch.object(times, "_now", lambda device: SlowLinear.seconds)
    with mock.patch.object(rank_speeds, "logger", logger), clock:
        even = {"by": RowsShuffler, "sizes": [6]}
        run_loop(run_dir, pipeline, ([12, 12], [1, 1]), True, linear=linear, eval_interval=40, **even, **changes)
    return said


@pytest.mark.parametrize("pipeline", [pytest.param("none", marks=pytest.mark.slow), "native"])
def test_a_slow_rank_is_named_within_fifty_steps(two_ranks, tmp_path, pipeline):
    said, of_others = two_ranks.run(_warnings_of, str(tmp_path), pipeline, SlowLinear, max_train_iters=50)
    assert len(said) == 1 and said[0].startswith("rank 1 is slow: at step ") and of_others == []
    speeds = [line["rank_speeds"] for line in lines(tmp_path) if "rank_speeds" in line]
    # None where a rank on a busy machine has reported no time since its last shuffle.
    first, second = (statistics.median(speed for speed in each if speed is not None) for each in zip(*speeds))
    assert 0 < second < first


def _logged_with_speeds(run_dir):
    def measured(recipe, **_):
        return RowsShuffler(ShufflerOptions(speeds="measured"))

    with mock.patch.object(Parts, "build_shuffler", measured), logged() as said:
        run_loop(run_dir, "none", ([2, 2], [60, 60]), True)
    return said


def test_an_evaluation_awaits_no_times(two_ranks, tmp_path):
    assert not any("has reported a time" in text for text in two_ranks.run(_logged_with_speeds, str(tmp_path))[0])


@on_two_ranks
def test_a_model_that_a_pipeline_cannot_trace_is_named_before_training(tmp_path):
    """Such as that of CONTRIBUTING, in torch's own wrapper; "native" is the default."""
    args, model = TrainerArgs(6, 6, run_dir=str(tmp_path)), DistributedDataParallel(PlainModel())
    parts = Parts(args, model, torch.optim.SGD(model.parameters()), (), loader(1, 0))
    error = error_of(TrainingLoop(parts).run)
    assert error.startswith("ValueError: pipeline_type is 'native' and the model is a DistributedDataParallel")
    assert "choose 'none'" in error


def test_operations_are_those_of_the_rows_that_were_trained(ranks, tmp_path):
    counts = [2, 5, 0, 3][: ranks.world_size]  # ranks end at different steps
    ranks.run(run_loop, str(tmp_path), "native", (counts, [1, 1, 1, 1]), True, peak_tflops=0.5)
    written = [line for line in lines(tmp_path) if "loss" in line]
    assert len(written) == 3
    for line in written:
        assert line["tflops_per_rank"] * ranks.world_size == pytest.approx(1000 * line["rows_per_s"])
        assert line["mfu"] == pytest.approx(line["tflops_per_rank"] / 0.5)
        assert line["predicted_saving"] >= 0 and "predicted_saving_ms" not in line


def run_killed_in_checkpoint(run_dir):
    def write(*arguments):
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        write_state(*arguments)

    write_state, saving = checkpoints.write_state, {"ckpt_save_interval": 2, "ckpt_save_dir": run_dir + "/checkpoints"}
    with mock.patch.object(checkpoints, "write_state", write):
        return run_loop(run_dir, "none", ([8, 8], [1, 1]), True, **saving)


def test_sigterm_during_a_checkpoint_ends_the_run_after_it(two_ranks, tmp_path):
    """Two more steps were trained, and a second checkpoint was written."""
    for found in two_ranks.run(run_killed_in_checkpoint, str(tmp_path)):
        assert found["steps"] == 2 and not found["evaluations"]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_00000002"]
