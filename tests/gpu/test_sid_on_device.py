"""The semantic-ID decoder on the job's devices: equal training on and off, tensor parallelism, cached decoding."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from commons.datasets.random.distribution import RandomDistribution
from commons.datasets.sids.random import RandomSIDDataset
from commons.distributed.batch_shuffler import IdentityBalancedBatchShuffler
from commons.distributed.process_group import resolve_process_group
from commons.pipeline import TrainPipelineFactory
from sid_gr import SIDGRBalancedBatchShuffler
from sid_gr.metrics import GenerationMetrics
from sid_gr.sharding import build_distributed_model, dense_parameters
from tests.helpers.models import rank_device, weights_of
from tests.helpers.sid_models import MAX_CANDIDATES, MAX_HISTORY, SID_MAP, make_batch, make_model, model_parallel

STEPS = 6


def batches(device):
    group = resolve_process_group()
    rank = dist.get_rank(group)
    dataset = RandomSIDDataset(
        SID_MAP,
        batch_size=6,
        num_batches=STEPS,
        max_history_length=MAX_HISTORY,
        max_candidate_length=MAX_CANDIDATES,
        history_dist=RandomDistribution("zipf", low=1, high=MAX_HISTORY, alpha=1.2),
        last_batch_size=1 + rank % 4,
        seed=5,
        rank=rank,
        world_size=dist.get_world_size(group),
    )
    for batch in dataset:
        yield batch.pin_memory() if device == "cuda" else batch


def build(device, **changes):
    return build_distributed_model(
        make_model(**changes),
        device=rank_device(device),
        embedding_optimizer="sgd",
        embedding_lr=0.5,
        sharding="row_wise",
        local_world_size=dist.get_world_size(),
    )


def train(device, balances, tensor_parallel_size):
    with model_parallel(tensor_parallel_size):
        model = build(device, tensor_model_parallel_size=tensor_parallel_size)
        shuffler = SIDGRBalancedBatchShuffler(16, 4, 3, 2, ffn_hidden_size=24)
        if not balances:
            shuffler.close()
            shuffler = IdentityBalancedBatchShuffler()
        pipeline = TrainPipelineFactory.create(
            "native",
            model=model,
            optimizer=torch.optim.SGD(dense_parameters(model).values(), lr=0.2),
            device=rank_device(device),
            batch_shuffler=shuffler,
        )
        source = batches(device)
        for _ in range(STEPS):
            pipeline.progress(source)
        shuffler.close()
        return weights_of(model)


@pytest.mark.parametrize("tensor_parallel_size", [1, 2])
def test_training_on_and_off(device, tensor_parallel_size):
    if dist.get_world_size() % tensor_parallel_size:
        pytest.skip(f"{dist.get_world_size()} ranks cannot share decoders by {tensor_parallel_size}")
    on, off = (train(device, balances, tensor_parallel_size) for balances in (True, False))
    assert on.keys() == off.keys()
    for name, value in off.items():
        torch.testing.assert_close(on[name], value, rtol=1e-3, atol=1e-4)


def test_cached_decoding_and_metrics(device):
    with model_parallel():
        model = build(device, beam_width=7).eval()
        batch = make_batch(dist.get_rank(), batch_size=5, num_real=4).to(rank_device(device))
        cached, uncached = (model.module.generate(batch, use_cache=use_cache) for use_cache in (True, False))
        torch.testing.assert_close(cached.log_probs, uncached.log_probs, rtol=1e-4, atol=1e-4)
        metrics = GenerationMetrics(["HitRate@7", "NDCG@2"], 7, device=rank_device(device))
        with torch.no_grad():
            metrics.update(model(batch)[1])
        assert all(0 <= value <= 1 for value in metrics.compute().values())
