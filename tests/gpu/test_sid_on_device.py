"""The semantic-ID decoder on the job's devices: equal training on and off, tensor parallelism, cached decoding."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from benchmarks.models.beam_search import generate_without_cache
from sid_gr.metrics import GenerationMetrics
from tests.helpers.models.sid_models import (
    build_sharded,
    heavy_tailed_batches,
    make_batch,
    make_pipeline,
    model_parallel,
)
from tests.helpers.models.torchrec_model import rank_device, weights_of

STEPS = 6


def train(device, balances, tensor_parallel_size):
    with model_parallel(tensor_parallel_size):
        model = build_sharded("row_wise", rank_device(device), tensor_model_parallel_size=tensor_parallel_size)
        pipeline, shuffler = make_pipeline("native", model, balances, rank_device(device))
        batches = heavy_tailed_batches(STEPS)
        source = (batch.pin_memory() if device == "cuda" else batch for batch in batches)
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
        model = build_sharded("row_wise", rank_device(device), beam_width=7).eval()
        batch = make_batch(dist.get_rank(), batch_size=5, num_real=4).to(rank_device(device))
        cached, uncached = model.module.generate(batch), generate_without_cache(model.module, batch)
        torch.testing.assert_close(cached.log_probs, uncached.log_probs, rtol=1e-4, atol=1e-4)
        metrics = GenerationMetrics(["HitRate@7", "NDCG@2"], 7, device=rank_device(device))
        with torch.no_grad():
            metrics.update(model(batch)[1])
        assert all(0 <= value <= 1 for value in metrics.compute().values())
