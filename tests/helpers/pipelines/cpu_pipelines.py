"""CPU substitutes for the TorchRec pipelines that ask CUDA for streams.

Their scheduling, which is what the shuffle is hooked into, is the stock one; only the calls that need a stream are
replaced. A pass here says nothing about CUDA streams: tests/gpu runs the stock classes.
"""

from __future__ import annotations

import torch
from torchrec.distributed.train_pipeline.pipeline_context import PrefetchTrainPipelineContext
from torchrec.distributed.train_pipeline.runtime_forwards import (
    EmbeddingPipelinedForward,
    InSyncEmbeddingPipelinedForward,
)
from torchrec.distributed.train_pipeline.train_pipelines import (
    EvalPipelineFusedSparseDist,
    PrefetchTrainPipelineSparseDist,
    StagedTrainPipeline,
    TrainPipelineFusedSparseDist,
    TrainPipelineSemiSync,
    _start_embedding_lookup,
)


class _OnCpu:
    """For a pipelined forward: the device it would otherwise take from CUDA."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._device = torch.device("cpu")


class _CpuInSyncForward(_OnCpu, InSyncEmbeddingPipelinedForward):
    pass


class _CpuEmbeddingForward(_OnCpu, EmbeddingPipelinedForward):
    pass


class _LookupWithoutStreams:
    def start_embedding_lookup(self, batch, context):
        if batch is None:
            return
        for module in self._pipelined_modules:
            _start_embedding_lookup(
                module, context, source_stream=None, target_stream=None, stream_context=self._stream_context
            )

    def wait_embedding_lookup(self):
        pass


class CpuFusedSparseDist(_LookupWithoutStreams, TrainPipelineFusedSparseDist):
    _pipelined_forward_type = _CpuInSyncForward


class CpuEvalFusedSparseDist(_LookupWithoutStreams, EvalPipelineFusedSparseDist):
    _pipelined_forward_type = _CpuInSyncForward


class CpuSemiSync(_LookupWithoutStreams, TrainPipelineSemiSync):
    _pipelined_forward_type = _CpuEmbeddingForward


class CpuPrefetch(PrefetchTrainPipelineSparseDist):
    def _prefetch(self, given):
        if given is None:  # the end of the data, for TorchRec 1.6, which gives the batch and has one context for all
            return
        context = given if isinstance(given, PrefetchTrainPipelineContext) else self._context
        for module in self._pipelined_modules:
            name = module.forward._name
            context.module_input_post_prefetch[name] = context.input_dist_tensors_requests.pop(name).wait()
            context.module_contexts_post_prefetch[name] = context.module_contexts.pop(name)


class CpuStaged(StagedTrainPipeline):
    """Runs each stage at once: the host has no events to wait for."""

    def _run_with_event(self, runnable, event, inputs, stream):
        return runnable(inputs), None


class HostStream:
    """Stands in for a stream where TorchRec looks at its device alone."""

    device = torch.device("cpu")
