"""Once everything is warm, nothing of the shuffler waits for the device: steps pass with waiting forbidden."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torchrec.distributed.train_pipeline.train_pipelines import TrainPipelineBase

from commons.datasets.hstu_batch import FeatureConfig, HSTUBatch
from commons.distributed.options import ShufflerOptions
from commons.pipeline import balanced
from hstu import HSTUBalancedBatchShuffler
from hstu.model import HSTURankingModel
from tests.helpers.batches.random_batches import rows_as_values
from tests.helpers.models import hstu_models
from tests.helpers.models import torchrec_model as models
from tests.helpers.models.torchrec_model import rank_batches, rank_device
from tests.helpers.pipelines.shuffled_pipelines import CubicShuffler


@contextmanager
def waiting_forbidden() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture(autouse=True)
def cuda(device):
    if device != "cuda":
        pytest.skip("needs CUDA: the host has nothing to synchronise with")


def test_finish_shuffle(device):
    """Copy, exchange and what TorchRec asks of the result."""
    shuffler = CubicShuffler()
    target = rank_device(device)
    batches = [batch.pin_memory() for batch in rank_batches(dist.get_rank(), 12, [6])]
    for batch in batches[:4]:  # connections, allocator and kernels are warm
        shuffler.finish_shuffle(batch.to(target, non_blocking=True), shuffler.start_shuffle(batch))
    torch.cuda.synchronize()
    for batch in batches[4:]:
        handle = shuffler.start_shuffle(batch)
        handle.prepared()
        with waiting_forbidden():
            result = shuffler.finish_shuffle(batch.to(target, non_blocking=True), handle)
            result.features.length_per_key()  # TorchRec's input distribution asks for it
    shuffler.close()


def train_without_waiting(pipeline, source):
    for _ in range(6):
        pipeline.progress(source)
    torch.cuda.synchronize()
    for _ in range(6):
        with waiting_forbidden():
            pipeline.progress(source)


def test_a_whole_step(device):
    """A pipeline's step: copy, shuffle, forward, backward, update. TorchRec's own input distribution would wait."""
    model, _ = models.build_plain()
    model.to(rank_device(device))
    optimizer = models.AveragedSGD(model.parameters(), lr=0.1)
    shuffler = CubicShuffler()
    pipeline = balanced(TrainPipelineBase)(model, optimizer, rank_device(device), batch_shuffler=shuffler)
    source = (batch.pin_memory() for batch in rank_batches(dist.get_rank(), 16, [6]))
    train_without_waiting(pipeline, source)
    assert pipeline.last_stats is not None
    shuffler.close()


@pytest.mark.parametrize("mode", ["balance", "off"])
def test_a_whole_step_of_hstu(device, mode):
    """Attention is planned by lengths that the host knows; the loss has its count with the batch, or on the device."""
    torch.manual_seed(0)
    hstu = dataclasses.replace(hstu_models.HSTU, max_sequence_length=80)
    config = dataclasses.replace(hstu_models.CONFIG, hstu=hstu)
    model = HSTURankingModel(config, plain_embeddings=True).to(rank_device(device))
    optimizer = models.AveragedSGD(model.parameters(), lr=0.1)
    shuffler = HSTUBalancedBatchShuffler(8, 2, 3, 2, options=ShufflerOptions(mode=mode))
    pipeline = balanced(TrainPipelineBase)(model, optimizer, rank_device(device), batch_shuffler=shuffler)
    seeds = range(dist.get_rank(), 1000, dist.get_world_size())
    source = (hstu_models.random_batch(6, max_num_candidates=3, longest=30, seed=seed).pin_memory() for seed in seeds)
    train_without_waiting(pipeline, source)
    shuffler.close()


def test_a_shuffle_that_starts_from_the_device(device):
    """Workloads and lengths of a device batch go to pinned memory, and only the worker waits for them."""
    shuffler = HSTUBalancedBatchShuffler(16, 2, 8, 1)
    batches = [
        HSTUBatch.random(
            4,
            [FeatureConfig(["item"], [50], 20, True)],
            "item",
            device=rank_device(device),
            generator=torch.Generator().manual_seed(dist.get_rank() + 10 * step),
        )
        for step in range(6)
    ]
    for batch in batches[:3]:
        shuffler.finish_shuffle(batch, shuffler.start_shuffle(batch))
    torch.cuda.synchronize()
    for batch in batches[3:]:
        with waiting_forbidden():
            handle = shuffler.start_shuffle(batch)
        handle.prepared()
        with waiting_forbidden():
            shuffler.finish_shuffle(batch, handle)
    shuffler.close()


def test_the_exchange_waits_for_the_copy_and_the_forward_pass_for_the_exchange(device):
    """Work of another stream, however slow, is not overtaken: rows are those of the host batch."""
    shuffler, on_the_host = CubicShuffler(), CubicShuffler(pg_group=dist.new_group(backend="gloo"))
    target = rank_device(device)
    memcpy = torch.cuda.Stream()
    ballast = torch.zeros(2**27, device=target)
    for batch in rank_batches(dist.get_rank(), 6, [6]):
        on_host = on_the_host.shuffle(batch)
        pinned = batch.pin_memory()
        handle = shuffler.start_shuffle(pinned)
        with torch.cuda.stream(memcpy):
            for _ in range(20):
                ballast.add_(1.0)  # keeps the stream busy before the copy
            on_device = pinned.to(target, non_blocking=True)
            result = shuffler.finish_shuffle(on_device, handle)
        del on_device
        torch.cuda.current_stream().wait_stream(memcpy)
        result.record_stream(torch.cuda.current_stream())
        taken = torch.empty(2**20, device=target).fill_(7.0)  # what the allocator might hand out again too early
        assert rows_as_values(result) == rows_as_values(on_host)
        del taken
    shuffler.close()
    on_the_host.close()
