"""What a run counts and averages, and how a process ends."""

import re
import signal
import sys
from unittest import mock

import pytest
import torch

from commons.distributed.stats import ShuffleStats
from commons.trainer import TrainerArgs
from commons.trainer.observe import meter as meters
from commons.trainer.observe import profiling, times
from commons.trainer.observe.meter import SNAPSHOTS, StatsMean, StepMeter, StepSums
from commons.trainer.observe.profiling import StepProfiler
from commons.trainer.observe.times import ForwardTimer
from commons.trainer.ranks import errors
from commons.trainer.ranks.launch import initialize_ranks
from tests.helpers.jobs.programs import run_program
from tests.helpers.pipelines.trainer_loops import Output, Parts


def make_stats(**changes):
    numbers = dict.fromkeys(ShuffleStats.__dataclass_fields__, 0)
    return ShuffleStats(**(numbers | {"loads_before": (1, 2), "loads_after": (1, 2)} | changes))


def test_stats_are_averaged_over_steps():
    mean = StatsMean()
    assert mean.means() == {}
    mean.add(make_stats(imbalance_before=0.5, rows_moved=2))
    mean.add(make_stats(imbalance_before=0.1, rows_moved=1))
    assert mean.means()["imbalance_before"] == pytest.approx(0.3)
    assert mean.means()["rows_moved"] == 1.5
    mean.add(make_stats(measured_saving_ms=4.0, gated=True))
    mean.add(make_stats(measured_saving_ms=None, gated=False))
    assert mean.means()["measured_saving_ms"] == pytest.approx(4 / 3)  # 0, 0 and 4: one step does not know
    assert mean.means()["gated"] == 0.25


def test_numbers_are_of_the_steps_of_their_line_and_of_the_run(monkeypatch):
    """Two ranks, one of which has no batches in the first line, and the same as the other one in the second."""
    moments = iter([0.0, 0.1, 0.5, 0.7, 5.0, 5.4])  # steps of 100, 400 and 200 ms; of 400 ms, after an evaluation
    monkeypatch.setattr(times, "_now", lambda device: next(moments))
    monkeypatch.setattr(meters, "resolve_process_group", lambda: None)
    share = [0]
    monkeypatch.setattr(meters, "gather_numbers", lambda own, what, group: torch.stack([own, own * share[0]]))
    monkeypatch.setattr(meters, "real_rows", lambda batch: 3)
    monkeypatch.setattr(meters.dist, "get_world_size", lambda group=None: 2)
    monkeypatch.setattr(meters.dist, "get_rank", lambda: 0)
    recipe = Parts(TrainerArgs(1, 1, peak_tflops=2.0), None, None, (), None, flops=lambda batch: batch * 10**11)
    recipe.num_tokens = lambda batch: 50
    meter, taken = StepMeter(recipe), []
    assert meter.take() == ({}, {}) and meters.of_all_ranks(5.0, torch.device("cpu")) == [5.0, None]
    for share[0], flops in ((0, [1, 0, 2]), (1, [4])):
        meter.begin()
        for each in flops:
            meter.loaded(each)
            meter.step(Output(torch.tensor(6.0 * each), 3 * each, []), None)
        taken.append(meter.take())
    first, second = taken
    assert first[0] == pytest.approx(
        {"loss": 2.0, "tokens_per_s": 150 / 0.7, "rows_per_s": 9 / 0.7, "step_ms": 200.0, "imbalance_before": 1.0}
        | {"tflops_per_rank": 0.15 / 0.7, "mfu": 0.075 / 0.7}
    )
    assert first[1] == pytest.approx({"ranks": 2, "steps": 3, "total_ms": 700.0})
    assert (second[0]["step_ms"], second[0]["tflops_per_rank"]) == pytest.approx((400.0, 1.0))
    totals = meter.totals()
    assert totals.pop("shuffle") == pytest.approx({"imbalance_before": 2 / 3})  # of three steps with any work
    assert totals == pytest.approx({"loss": 2.0, "step_ms": 300.0, "tokens_per_s": 250 / 1.1})


def test_the_measured_saving_is_that_of_the_largest_loads(monkeypatch):
    meter = StepMeter(Parts(TrainerArgs(1, 1), None, None, (), None))
    meter._saving = mock.Mock(**{"ms_per_load.return_value": 0.5})
    moved = {"loads_before": (30, 0), "loads_after": (10, 20)}
    meter._stats = [make_stats(largest_load_before=30, largest_load_after=20, measured_saving_ms=None, **moved)]
    for rank, saved in ((0, 5.0), (1, None)):  # rank 0 writes the log
        monkeypatch.setattr(meters.dist, "get_rank", lambda rank=rank: rank)
        assert meter._shuffle([1.0]).get("measured_saving_ms") == saved
        meter._saving.add.assert_called_with(20, 1.0)  # the largest load as trained


class Event:
    """A time on a GPU, which the host knows when the GPU has come to it."""

    now, reached = 0.0, 0.0

    def __init__(self):
        self.at = Event.now

    def query(self):
        return self.at <= Event.reached

    def elapsed_time(self, end):
        return end.at - self.at


def test_forward_passes_are_timed_in_training(monkeypatch):
    monkeypatch.setattr(times, "_now", lambda device: Event())

    class Layers(torch.nn.Module):
        def forward(self, milliseconds):
            Event.now = Event.now + milliseconds
            return milliseconds

    layers = Layers()
    timer = ForwardTimer(layers, torch.device("cuda"))

    def step(*passes, stats):
        for milliseconds in passes:
            layers(milliseconds)
        timer.step(stats)

    step(1.0, 2.0, stats="a")
    step(4.0, stats=None)  # without shuffle
    step(8.0, stats="b")
    assert timer.take() == [] and timer.last_ms is None
    Event.reached = 7.0
    assert timer.take() == [(3.0, "a")] and timer.last_ms is None  # the GPU has not finished the last step
    step(16.0, stats="c")
    step(0.0, stats="too short")
    Event.reached = Event.now
    assert timer.take() == [(8.0, "b"), (16.0, "c")] and timer.last_ms == 0.0
    step(32.0, stats="d")
    layers.eval()
    step(64.0, stats="evaluated")
    assert timer.take() == [] and timer.last_ms is None
    Event.reached = Event.now
    assert timer.take() == [(32.0, "d")] and timer.last_ms is None  # the last step was not timed
    torch.fx.symbolic_trace(torch.nn.Sequential(layers.train()))
    timer.close()
    step(128.0, stats="closed")
    assert timer.take() == []


@pytest.mark.parametrize(("ranks", "lines"), [(256, list(range(12))), (257, [0, 10])])
def test_of_many_ranks_every_tenth_line_has_each(monkeypatch, ranks, lines):
    monkeypatch.setattr(meters, "resolve_process_group", lambda: None)
    monkeypatch.setattr(meters.dist, "get_world_size", lambda group=None: ranks)
    meter = StepMeter(Parts(TrainerArgs(1, 1), None, None, (), None))
    meter._stats = [make_stats(lookups_before=(3, 4), lookups_after=(3, 4))]
    told = [meter._describe([1.0]) for _ in range(12)]
    assert [line for line, details in enumerate(told) if set(SNAPSHOTS) <= details.keys()] == lines
    assert all(details["ranks"] == ranks and details["steps"] == 1 for details in told)


def test_the_mean_loss_weighs_every_term_alike():
    sums = StepSums()
    assert sums.mean_loss == 0.0
    sums.add(torch.tensor(0.0), 0)
    assert sums.mean_loss == 0.0
    sums.add(torch.tensor(6.0), 3)
    sums.add(torch.tensor(1.0), 1)
    assert sums.mean_loss == 7.0 / 4


def test_ranks_on_no_device_and_without_torchrun_do_not_start():
    with pytest.raises(ValueError, match="device_type is 4; it must be one of 'auto', 'cpu', 'cuda': choose one"):
        initialize_ranks(4)
    with pytest.raises(ValueError, match="torchrun; .*: run `torchrun .*, in a notebook, pass ranks=RankInfo"):
        initialize_ranks()


# Every case in a process of its own, forked so that torch is imported once.
PROGRAM = """
import os, signal, sys
from commons.trainer.ranks.errors import log_to_file, run_main
def main():
    if case == "mistake":
        raise KeyError("x is 3, the rule is\\nanother: correct it")
    if case == "closed":
        sys.stdout = sys.stderr = None  # as Python does for streams that are closed when it starts
    log_to_file(folder)
    if case == "bug":
        raise RuntimeError("out of order")
    if case == "travelled":
        raise RuntimeError("rank 1: OSError: out of order")
    if case == "full disk":
        for stream in (sys.stdout, sys.stderr):
            os.dup2(os.open("/dev/full", os.O_WRONLY), stream.fileno())
            print("lost", file=stream, flush=True)
        return
    if case == "closed":
        return print("lost", flush=True)
    os.kill(os.getpid(), signal.SIGINT)
    print("goes on")
for case in sys.argv[2:]:
    folder = os.path.join(sys.argv[1], case)
    os.mkdir(folder)
    child = os.fork()
    if child == 0:
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(os.path.join(folder, name), os.O_WRONLY | os.O_CREAT), number)
        signal.signal(signal.SIGINT, signal.SIG_IGN if case == "ignored" else signal.default_int_handler)
        run_main(main)
        sys.exit()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.slow
def test_how_programs_end(tmp_path):
    cases = {
        "mistake": (2, "", "error: x is 3, the rule is another: correct it\n"),
        "bug": (1, "", f"error: RuntimeError: out of order (traceback in {tmp_path}/bug/rank0.log)\n"),
        "travelled": (1, "", f"error: rank 1: OSError: out of order (traceback in {tmp_path}/travelled/rank0.log)\n"),
        "full disk": (0, "", ""),
        "closed": (0, "", ""),
        "interrupted": (-signal.SIGINT, "", ""),  # a shell says 130
        "ignored": (0, "goes on\n", ""),
    }
    done = run_program(sys.executable, "-c", PROGRAM, tmp_path, *cases)
    assert done.stderr == ""
    found = [(tmp_path / name / "out", tmp_path / name / "err") for name in cases]
    ends = [(int(status), *(file.read_text() for file in own)) for status, own in zip(done.stdout.split(), found)]
    assert ends == list(cases.values())
    assert "Traceback" in (tmp_path / "bug" / "rank0.log").read_text()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("seed is -1", "rank 1: seed is -1"),
        ("rank 0: seed is -1 (and on rank 1)", "rank 0: seed is -1 (and on rank 1)"),
    ],
)
def test_a_mistake_that_has_travelled_names_its_rank_alone(monkeypatch, capsys, text, shown):
    monkeypatch.setattr(errors, "_claim_report", lambda: True)
    monkeypatch.setattr(errors.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(errors.dist, "get_rank", lambda: 1)
    before = signal.getsignal(signal.SIGTERM)
    assert errors._report(ValueError(text)) == 2
    signal.signal(signal.SIGTERM, before)
    assert capsys.readouterr().err == f"error: {shown}\n"


def test_a_run_dir_that_cannot_be_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"run_dir is '.*/file/run', which cannot be written \(Not a directory\)"):
        errors.log_to_file(tmp_path / "file" / "run")


def test_a_run_resumed_after_its_trace_does_not_miss_it(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(profiling.dist, "get_rank", lambda: 0)
    unprofiled = StepProfiler(TrainerArgs(1, 1), torch.device("cpu"))
    unprofiled.close()
    assert unprofiled._profile is None and not caplog.text
    args = TrainerArgs(1, 1, run_dir=str(tmp_path), profile=True, profile_step_start=4, profile_step_end=8)
    for has_trace in (False, True):
        if has_trace:
            (tmp_path / "trace-rank0.json").touch()
        caplog.clear()
        StepProfiler(args, torch.device("cpu"), first_step=8).close()
        assert ("no trace was recorded" in caplog.text) is not has_trace


@pytest.mark.filterwarnings("ignore:Profiler won't be using warmup")
def test_a_run_resumed_within_its_trace_keeps_the_first_part(tmp_path, monkeypatch):
    monkeypatch.setattr(profiling.dist, "get_rank", lambda: 1)
    args = TrainerArgs(1, 1, run_dir=str(tmp_path), profile=True, profile_step_start=2, profile_step_end=6)
    for first_step, end in ((1, 5), (5, 7), (6, 8)):
        profiler = StepProfiler(args, torch.device("cpu"), first_step)
        for _ in range(first_step, end):
            profiler.step(None)
        profiler.close()
    steps = {
        path.name: set(re.findall(r"ProfilerStep#\d+", path.read_text())) for path in tmp_path.glob("trace-rank1*.json")
    }
    assert {name: len(each) for name, each in steps.items()} == {"trace-rank1.json": 4, "trace-rank1-from5.json": 1}
