"""Ranks that train on the CPU of a machine with GPUs: nothing of CUDA is touched; and torch's default device.

A GPU is pretended: torch says that CUDA is available, and whoever then uses it, or pins memory, fails.
"""

from __future__ import annotations

import contextlib
from contextlib import closing, nullcontext
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torchrec.distributed.train_pipeline.train_pipelines import EvalPipelineSparseDist

from commons.dispatch import Trim, redistribute_balanced, split_balanced
from commons.distributed import global_mean_loss
from commons.distributed.channel.groups import numbers_device, only_device
from commons.distributed.exchange import row_exchange
from commons.distributed.gather import local_rows
from commons.distributed.options import ShufflerOptions
from commons.micro_batching import MicroBatchSpec, pack_micro_batches
from commons.pipeline import TrainPipelineFactory, balanced
from tests.helpers.models.calibrations import MeasuredShuffler, write_calibration
from tests.helpers.models.torchrec_model import build_sharded, head_of, make_batch, rank_batches
from tests.helpers.pipelines.shuffled_pipelines import CubicShuffler, rows_by_every_call
from tests.helpers.ranks.faults import error_of, my_batch
from tests.helpers.ranks.on_ranks import of_all, on, on_two_ranks

CPU = torch.device("cpu")
USES = ("_lazy_init", "current_device", "set_device", "current_stream", "Stream", "Event", "get_device_name")


@contextlib.contextmanager
def pretended_gpu():
    """torch.cuda.is_available() is true, and everything that would need the GPU fails."""

    def fail(*args, **kwargs):
        raise AssertionError("a rank that trains on the CPU uses CUDA")

    def no_stream(stream):  # TorchRec's pipelines on the CPU enter torch.cuda.stream(None)
        return nullcontext() if stream is None else fail()

    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(torch.cuda, "stream", no_stream))
        patches.enter_context(mock.patch.object(torch.cuda, "is_available", lambda: True))
        for name in USES:
            patches.enter_context(mock.patch.object(torch.cuda, name, fail))
        patches.enter_context(mock.patch.object(torch.Tensor, "pin_memory", fail))
        yield


def _shuffle(group):
    with closing(CubicShuffler(pg_group=group)) as shuffler:
        shuffler.shuffle(my_batch())
        return shuffler.last_stats.moved


def _train(pipeline, calibration):
    """Batches trained, by a shuffler that has been calibrated on the CPU; then an evaluation left half way."""
    model, optimizer = build_sharded()
    with closing(MeasuredShuffler(ShufflerOptions(calibration=calibration))) as shuffler:
        trainer = TrainPipelineFactory.create(
            pipeline, model=model, optimizer=optimizer, device=CPU, batch_shuffler=shuffler
        )
        source = rank_batches(dist.get_rank(), 3, [6])
        for _ in range(3):
            trainer.progress(source)
    trained = len(head_of(model).seen)
    model.eval()
    with closing(CubicShuffler()) as shuffler:
        evaluator = balanced(EvalPipelineSparseDist)(model, optimizer, CPU, batch_shuffler=shuffler)
        evaluator.progress(rank_batches(dist.get_rank(), 4, [6]))
        evaluator.reset()  # gathers numbers on the main thread
    return trained


@pytest.mark.parametrize("world_size", [4])
@on("own_ranks")  # fresh ranks: groups that were connected before would hide a use
def test_gloo_ranks_train_on_the_cpu(tmp_path):
    rank, calibration = dist.get_rank(), write_calibration(tmp_path / "c.toml")
    with pretended_gpu():
        pair = dist.new_group([0, 1], backend="gloo")
        if rank == 0:  # its groups count one more, which the members of a subgroup have to settle
            dist.new_group([0], backend="gloo", use_local_synchronization=True)
        assert _shuffle(None) and (rank > 1 or _shuffle(pair))
        if rank > 0:  # torch's groups of all ranks need equally many calls
            dist.new_group([rank], backend="gloo", use_local_synchronization=True)
        with closing(MeasuredShuffler(ShufflerOptions(calibration=calibration))) as shuffler:
            shuffler.shuffle(my_batch())
        assert [_train(name, calibration) for name in ("none", "native")] == [3, 3]
        rows = rows_by_every_call()
    assert rows == rows_by_every_call()


@on("own_two_ranks")  # fresh ranks, as above
def test_ranks_that_see_a_gpu_and_ranks_that_see_none_connect_alike():
    with pretended_gpu() if dist.get_rank() == 0 else nullcontext():
        assert _shuffle(None)


def test_a_single_process_on_the_cpu(tmp_path):
    """Its batch tells where it trains: a calibration of this CPU is taken, one of another device is refused."""
    batch = make_batch([1, 2, 3], 3)
    with pretended_gpu():
        for options in ({}, {"name": "another processor"}):
            shuffler = MeasuredShuffler(ShufflerOptions(calibration=write_calibration(tmp_path / "c.toml", **options)))
            with closing(shuffler), pytest.raises(ValueError, match="another pr") if options else nullcontext():
                assert shuffler.shuffle(batch) is batch


@on_two_ranks
def test_the_default_device_of_a_script_does_not_matter():
    """As after torch.set_default_device, of a device that no data is on."""
    rank, rows = dist.get_rank(), {"ids": torch.arange(4), "names": np.array(["a", "b", "c", "d"])}
    rows["mask"] = torch.ones(4, 2)
    batches = [my_batch(), make_batch([7], 1)] if rank == 0 else [make_batch([9], 1)]
    loss, work = torch.ones(()), [9, 1, 1, 1]
    checked, off = (CubicShuffler(ShufflerOptions(**each)) for each in ({"verify": True}, {"mode": "off"}))
    with closing(checked), closing(off), torch.device("meta"):
        _, indices, own = off.shuffle(batches[0], return_indices=True, return_workloads=True)
        trained = []
        for batch in [*batches, None][:2]:
            handle = checked.start_shuffle(batch)
            result = checked.finish_shuffle(handle.empty_batch() if batch is None else batch, handle)
            trained += result.sample_id[: result.actual_batch_size].tolist()
        split, moved = split_balanced(rows, 2, work, pad=True), redistribute_balanced(rows, work, trim=Trim("mask"))
        packed = pack_micro_batches(rows, MicroBatchSpec(max_tokens_per_mb=9), work)
        error = error_of(global_mean_loss, loss, -rank)
        restored = split.restore([each["ids"] for each in split.chunks]).tolist()
        home = moved.send_home(moved.batch)["ids"].tolist()
    assert sorted(of_all(trained)) == [1, 2, 3, 4, 5, 6, 7, 9]
    assert indices.tolist() == [[0, 1, 2, 3, 4, 5], [6]][rank] and len(own) == len(indices)
    assert "rank 1: local_count is -1.0" in error
    assert restored == home == sorted(row for each in packed for row in each["ids"].tolist()) == [0, 1, 2, 3]


@on_two_ranks
def test_a_host_batch_in_a_group_of_gpus_is_a_mistake():
    """It was a rank that is missing: "the exchange of step 0 failed although all took part"."""
    with (
        closing(CubicShuffler()) as shuffler,
        mock.patch.object(row_exchange, "serves", lambda group, kind: kind == "cuda"),  # as NCCL
    ):
        error = error_of(shuffler.shuffle, my_batch())
    assert error.startswith(
        "ValueError: the batch is on the host, and the group's backend moves rows between GPUs only"
    )


def _group(*kinds):
    return SimpleNamespace(_device_types=[torch.device(kind) for kind in kinds])


@pytest.mark.parametrize("available", [False, True])
def test_the_device_of_a_group_is_known_where_it_serves_one(monkeypatch, available):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    gloo, nccl, both = _group("cuda", "cpu"), _group("cuda"), _group("cpu", "cuda")
    assert only_device(_group("cpu")) == CPU and only_device(nccl) == torch.device("cuda", 3)
    for either in (gloo, both, None):
        assert only_device(either) == (None if available else CPU)
    assert numbers_device(nccl) == torch.device("cuda", 3)
    assert numbers_device(gloo) == numbers_device(both) == numbers_device(_group("cpu")) == CPU


def test_a_device_that_the_group_is_bound_to_comes_before_the_current_one(monkeypatch):
    """A script may bind its ranks by init_process_group(device_id=...) and never set a current device."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    bound, nccl = torch.device("cuda", 3), _group("cuda")
    nccl.bound_device_id = bound
    assert only_device(nccl) == numbers_device(nccl) == bound
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=nccl))
    assert only_device(_group("cuda")) == numbers_device(_group("cuda")) == bound  # a subgroup has the world's device


@pytest.mark.parametrize(
    ("device", "pinned", "devices"),
    [(CPU, 0, []), (torch.device("cuda", 1), 2, [1])],  # one array of each shuffle, by a thread on the batch's GPU
)
@on_two_ranks
def test_index_arrays_are_pinned_for_cuda_alone(device, pinned, devices):
    count, current, empty = [], [], torch.empty

    def counted(*sizes, pin_memory=False, **options):
        count.extend([1] * pin_memory)
        return empty(*sizes, **options)

    with (
        mock.patch.object(torch, "empty", counted),
        mock.patch.object(torch.cuda, "set_device", current.append),
        closing(CubicShuffler()) as shuffler,
    ):
        shuffler.engine.connect(device=device)
        for _ in range(2):
            handle = shuffler.start_shuffle(make_batch([1 + dist.get_rank(), 9], 2))
            handle.prepared()
            handle.drain()
    assert len(count) == pinned and current == devices


def test_the_event_of_a_copy_is_on_its_own_device(monkeypatch):
    """Wherever the current device is: the stream of another would have nothing to wait for."""
    recorded = []
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=recorded.append))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: SimpleNamespace(copy_=lambda *args, **kwargs: "copy"))
    value = mock.Mock(spec=torch.Tensor, is_cuda=True, device=torch.device("cuda", 3), shape=(4,), dtype=torch.int64)
    host, copied = local_rows._on_host([[1, 2], value])
    assert host == [[1, 2], "copy"] and copied is not None
    assert recorded == ["stream of cuda:3"]
