"""How a script is observed: its status, its pipelines and batches; mistakes in one line."""

import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torchrec.datasets.utils import Batch
from torchrec.distributed.train_pipeline import train_pipelines
from torchrec.distributed.train_pipeline.train_pipelines import PipelineStage, StagedTrainPipeline
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from commons.cli import observe
from commons.cli.observe import main
from commons.pipeline import recording
from commons.pipeline.look_ahead import ShufflingBatch
from commons.pipeline.recording import Recorder, _lengths_of
from tests.helpers.cuda.pretended_streams import DEFAULT_STREAM, PretendedStream, on_stream, pretended_streams
from tests.helpers.models.torchrec_model import rank_batches

INSTALL = Recorder.install


@pytest.fixture(autouse=True)
def unchanged(monkeypatch):
    """A script gets arguments and a path of its own; TorchRec's classes are as they were afterwards."""
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(Recorder, "install", lambda self: None)


@pytest.fixture
def unwrapped(monkeypatch):
    """TorchRec's pipelines are as they were afterwards."""
    for pipeline in recording._subclasses(train_pipelines.TrainPipeline):
        for name in {"progress", "_next_batch", "reset"} & vars(pipeline).keys():
            monkeypatch.setattr(pipeline, name, vars(pipeline)[name])
    monkeypatch.setattr(train_pipelines.TrainPipeline, "__init_subclass__", lambda: None)


@pytest.fixture
def recorder(unwrapped):
    """Installed."""
    recorder = Recorder()
    INSTALL(recorder)
    return recorder


FORKED_PIPELINE = """
import sys
from pathlib import Path

import torch
from torch import distributed as dist
from torchrec.distributed.train_pipeline.train_pipelines import TrainPipelineBase
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor


class Forked(TrainPipelineBase):
    def __init__(self):
        self._batch_count, self._model = 0, torch.nn.Linear(1, 1)

    def progress(self, batches):
        return self._next_batch(batches)

    def _next_batch(self, batches):
        super()._next_batch(batches)  # is left out
        return super()._next_batch(batches)


class Accumulating(Forked):
    def progress(self, batches):
        return super().progress(batches), super().progress(batches)


def batches(*lengths):
    return iter([KeyedJaggedTensor(["item"], torch.arange(each), lengths=torch.tensor([each])) for each in lengths])


dist.init_process_group("fake", store=dist.HashStore(), rank=1, world_size=2)
if "trains" in sys.argv:
    Forked().progress(batches(9, 3))
    assert not Path("observed/rank1.npz").exists()
    pipeline, source = Accumulating(), batches(9, 5, 9, 6, 9, 7, 9, 8)
    pipeline.progress(source), pipeline.progress(source)
    dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "no script is named; give one with its arguments: python -m evenrank.observe train.py"),
        (["-m"], "no script is named"),
        (["--folder", "script.py/below", "script.py"], "below cannot be made (Not a directory); records"),
        (["nothing.py"], "nothing.py is not a file; name the training script, or a module with -m"),
        (["-m", "no_such_package.train"], "there is no module no_such_package.train, neither installed nor in"),
        (["--folder", "taken", "script.py"], "folder taken cannot be made (File exists); records are written there"),
        (["--tasks", "hstu", "script.py"], "Unrecognized options: --tasks"),
        (["--task", "sid", "script.py"], "Invalid choice: 'sid'"),
        (["--report"], "has no record of a rank; run a script with --folder"),
        (["--hidden-size", "0", "--task", "hstu", "script.py"], "hidden_size"),
        (["--window", "1", "script.py"], "window is 1"),
        (["--html", "page.txt", "script.py"], "a page is an .html file"),
        (
            ["script.py"],
            "trained no step with one of TorchRec's pipelines in this process; if it starts its ranks itself, let "
            "torchrun start them; if it has its own training loop, pass the rows' lengths to evenrank simulate",
        ),
    ],
)
def test_a_mistake_is_one_line(arguments, said, tmp_path, monkeypatch, capsys):
    (tmp_path / "script.py").write_text("print('trained')\n")
    (tmp_path / "taken").touch()
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


@pytest.mark.parametrize(("leaves", "status"), [("raise SystemExit(7)", 7), ("import sys; sys.exit('too few')", 1)])
def test_the_status_of_the_script_is_ours(leaves, status, tmp_path, monkeypatch):
    (tmp_path / "script.py").write_text(leaves)
    monkeypatch.chdir(tmp_path)
    assert main(["script.py"]) == status


def test_a_script_may_import_its_neighbours_and_leave_its_folder(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "beside_the_script.py").touch()
    (tmp_path / "script.py").write_text("import os, beside_the_script; os.chdir('elsewhere')")
    monkeypatch.chdir(tmp_path)
    assert main(["script.py"]) == 2  # it trained nothing
    assert (tmp_path / "observed" / "rank0.npz").is_file() and not [*(tmp_path / "elsewhere").iterdir()]


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("started", [{"RANK": "1", "WORLD_SIZE": "2"}, {}])
def test_pipelines_of_the_script_are_recorded_under_any_launcher(started, trains, tmp_path, monkeypatch, unwrapped):
    """The launcher sets the variables that torch needs, or none: then the script knows the rank, not we at its start.

    A `progress` that calls another one twice trains two batches; a `_next_batch` that does so reads one.
    """
    monkeypatch.setattr(Recorder, "install", INSTALL)
    monkeypatch.setattr(observe, "_MOST_STEPS", 4)  # of 5
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in started.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "observed").mkdir()
    (tmp_path / "observed" / "rank1.npz").write_text("the record of an earlier run")
    (tmp_path / "script.py").write_text(FORKED_PIPELINE)
    try:
        assert main(["script.py", *(["trains"] if trains else [])]) == 0
    finally:
        if dist.is_initialized():  # as in a script that ends without a step
            dist.destroy_process_group()
    with np.load(tmp_path / "observed" / "rank1.npz") as record:
        assert record["rows"].tolist() == [1] * 4 * trains and record["world_size"] == 2
        assert record["lengths"].tolist() == [3, 5, 6, 7][: 4 * trains]
    assert len([*(tmp_path / "observed").iterdir()]) == 1


def test_what_is_no_record_or_a_damaged_one_is_named(tmp_path, capsys):
    record, lengths = tmp_path / "rank0.npz", np.random.default_rng(0).integers(1, 99, 10_000)
    np.savez(record, weights=np.ones(3))
    contents = [b"", b"PK\x03\x04", record.read_bytes()]
    np.savez_compressed(record, world_size=1, unknown=0, rows=[10_000], lengths=lengths, seconds=[1.0])
    whole = record.read_bytes()
    for place in range(len(whole) // 3, 2 * len(whole) // 3, 500):  # of the lengths
        contents.append(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
    for content in contents:
        record.write_bytes(content)
        assert main(["--report", "--folder", str(tmp_path)]) == 2
        error = capsys.readouterr().err
        assert f"{record} is no record of a rank, or damaged (" in error and error.count("\n") == 1
    record.write_bytes(whole)
    assert main(["--report", "--folder", str(tmp_path)]) == 2
    assert "one rank was observed; balancing needs several ranks" in capsys.readouterr().err


@dataclass(slots=True)
class Slots:
    features: Any
    labels: Any = None
    made_by: Any = Batch  # a class, which has fields too


def test_lengths_of_any_batch():
    kjt = KeyedJaggedTensor(["a", "b"], torch.arange(9), lengths=torch.tensor([1, 2, 0, 3, 1, 2]))
    batch = Batch(dense_features=torch.ones(3, 2), sparse_features=kjt, labels=torch.ones(3))
    # The handle of a batch in an evenrank pipeline has the batch again.
    shuffling = ShufflingBatch(batch, SimpleNamespace(host_batch=batch))
    for held in (batch, kjt, (kjt, torch.ones(3)), shuffling, Slots({"x": kjt}, kjt)):
        assert _lengths_of(held).tolist() == [4, 3, 2]
    jagged = JaggedTensor(torch.arange(3), lengths=torch.tensor([1, 2]))
    found = _lengths_of({"x": jagged, "labels": kjt})
    jagged.lengths().zero_()  # the script's own memory, which it may use again
    assert found.tolist() == [1, 2]
    assert _lengths_of([kjt, jagged]) is None
    assert _lengths_of([kjt, JaggedTensor(torch.arange(2), lengths=torch.tensor([2]))]) is None  # nor is it of each row
    nobody = KeyedJaggedTensor(["a"], torch.zeros(0), lengths=torch.zeros(0, dtype=torch.int32), stride=0)
    assert _lengths_of(nobody).tolist() == []
    assert _lengths_of(SimpleNamespace(features=kjt, actual_batch_size=2)).tolist() == [4, 3]  # the third is padding
    assert _lengths_of(torch.ones(3)) is None and _lengths_of(kjt.to("meta")) is None
    inverse = (["a", "b"], torch.tensor([[0, 1, 0], [0, 1, 2]]))  # two rows of "a" and four of "b", for three samples
    lengths, strides = torch.tensor([1, 2, 3, 1, 2, 1]), [[2], [4]]
    kjt = KeyedJaggedTensor(
        ["a", "b"], torch.arange(10), lengths=lengths, stride_per_key_per_rank=strides, inverse_indices=inverse
    )
    assert _lengths_of(kjt) is None


def test_a_batch_may_contain_an_object_that_refers_to_it():
    kjt = KeyedJaggedTensor(["a"], torch.arange(3), lengths=torch.tensor([1, 2]))
    batch = SimpleNamespace(features=kjt)
    batch.source = SimpleNamespace(batches=[batch], name="train")
    assert _lengths_of(batch).tolist() == [1, 2]


def test_a_staged_pipeline_returns_a_batch_whose_training_takes_the_time_until_the_next_call(monkeypatch):
    recorder, clock, tokens = Recorder(), [0.0], []
    monkeypatch.setattr(recording, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    for name, around in (("_next_batch", recorder._reading), ("progress", recorder._staging)):
        monkeypatch.setattr(StagedTrainPipeline, name, getattr(StagedTrainPipeline, name))  # restored afterwards
        recorder._wrap(StagedTrainPipeline, name, around)
    with pretended_streams():
        stages = [PipelineStage(f"stage {number}", lambda batch: batch, PretendedStream()) for number in (0, 1)]
        pipeline = StagedTrainPipeline(stages, compute_stream=DEFAULT_STREAM)
        pipeline._stream_context = on_stream
        for epoch in (0, 1):
            source = rank_batches(epoch, 5, [3, 6])
            while (batch := pipeline.progress(source)) is not None:
                tokens.append(int(batch.features.lengths().sum()))
                clock[0] += tokens[-1]  # this batch is trained
            pipeline.flush_end()  # fills it again
            clock[0] += 1000.0  # an evaluation
    assert [int(lengths.sum()) for lengths in recorder.lengths] == tokens
    expected = [np.nan, *tokens[1:5], np.nan, *tokens[6:]]
    np.testing.assert_array_equal(recorder.seconds, expected)


def test_nothing_is_kept_of_an_evaluation(recorder):
    class EvalPipeline(train_pipelines.TrainPipelineBase):
        def progress(self, dataloader_iter):
            return self._next_batch(dataloader_iter)

    model = torch.nn.Linear(1, 1)  # in training mode, which its user may have left on
    pipeline = EvalPipeline(model, torch.optim.SGD(model.parameters()), torch.device("cpu"))
    source = rank_batches(0, 3, [6])
    for _ in range(3):
        pipeline.progress(source)
    assert not recorder._flights[pipeline].batches and not recorder.lengths and not recorder.has_begun


class Model(torch.nn.Linear):
    def forward(self, batch):
        loss = super().forward(batch.values().float()[:1]).sum()
        return loss, loss


def batches_of(*lengths):
    """A batch for each list of lengths of rows."""
    return iter([KeyedJaggedTensor(["item"], torch.arange(sum(each)), lengths=torch.tensor(each)) for each in lengths])


def test_a_compiled_pipeline_reads_its_batches_itself(recorder):
    class Twice(train_pipelines.TrainPipelinePT2):
        def progress(self, dataloader_iter):
            return super().progress(dataloader_iter), super().progress(dataloader_iter=dataloader_iter)

    expected = []
    for pipeline_class, calls in ((train_pipelines.TrainPipelinePT2, 4), (Twice, 2)):
        model = Model(1, 1)
        never = train_pipelines.TorchCompileConfig(compile_on_iter=-1)
        pipeline = pipeline_class(model, torch.optim.SGD(model.parameters(), 0.1), torch.device("cpu"), never)
        lengths = [[3, 1], [2], [5, 5], [4]]
        batches = batches_of(*lengths)
        for _ in range(calls):
            pipeline.progress(batches)
        with pytest.raises(StopIteration):
            pipeline.progress(batches)
        with pytest.raises(TypeError, match="is not an iterator"):  # a loader would begin anew in every step
            pipeline.progress(lengths)
        expected += lengths
    assert [each.tolist() for each in recorder.lengths] == expected and recorder.unknown == 0


def test_steps_whose_batches_have_no_lengths_are_counted(recorder):
    class Dense(torch.nn.Linear):
        def forward(self, batch):
            loss = super().forward(batch).sum()
            return loss, loss

    model = Dense(1, 1)
    pipeline = train_pipelines.TrainPipelineBase(model, torch.optim.SGD(model.parameters(), 0.1), torch.device("cpu"))
    batches = iter(torch.ones(4, 2, 1))
    for _ in range(4):
        pipeline.progress(batches)
    assert (recorder.unknown, recorder.lengths, recorder.has_begun) == (4, [], True)


@pytest.mark.parametrize("name", ["TrainPipelineBase", "TrainPipelineSparseDist"])
def test_batches_that_a_reset_drops_are_in_no_later_step(name, recorder):
    """The script ends its first epoch early; what the pipeline has read ahead is dropped."""

    class Own(getattr(train_pipelines, name)):
        def progress(self, dataloader_iter):
            return super().progress(dataloader_iter)  # a step, although both methods are recorded

    model = Model(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    pipeline = Own(model, optimizer, torch.device("cpu"))
    first, second, trained = batches_of([1], [2], [3], [4], [5], [6]), batches_of([7], [8], [9]), []
    model.register_forward_pre_hook(lambda _, inputs: trained.append(inputs[0].lengths().tolist()))
    for source, steps in ((first, 2), (second, 3)):
        for _ in range(steps):
            pipeline.progress(source)
        pipeline.reset()
    assert [each.tolist() for each in recorder.lengths] == trained == [[1], [2], [7], [8], [9]]
    assert np.isnan(recorder.seconds).tolist() == [True, False, True, False, False]


def test_the_help_fits_a_terminal_and_boolean_options_may_have_a_value(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["--help"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 80 for line in printed if not line.startswith("  torchrun")) and len(printed) > 20
    flags = ["--report", "True", "--concat-ux", "False", "--json", "False", "--folder", str(tmp_path)]
    assert main(flags) == 2
    assert "has no record of a rank" in capsys.readouterr().err
