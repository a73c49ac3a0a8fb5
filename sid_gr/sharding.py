"""A semantic-ID model on many ranks: the table sharded by TorchRec, the decoder copied by megatron-core.

The table lies on all ranks, tensor-parallel peers included. Peers look up the same ids and each has the whole gradient
of its embeddings, so that every data-parallel rank's gradient arrives once per peer; TorchRec divides by all ranks, the
loss counts data-parallel ranks alone, and the average is that of the global batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn
from torchrec.distributed.model_parallel import DataParallelWrapper, DistributedModelParallel
from torchrec.distributed.types import ShardingEnv

from commons.trainer.sharding import EmbeddingOptimizer, Sharding, dense_parameters, shard_model
from sid_gr.embedding import TABLE
from sid_gr.megatron_core import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from sid_gr.model.gpt import SIDGRModel

__all__ = ["ParallelDecoder", "build_distributed_model", "dense_parameters"]


def build_distributed_model(
    model: SIDGRModel,
    *,
    device: torch.device,
    embedding_optimizer: EmbeddingOptimizer = "rowwise_adagrad",
    embedding_lr: float = 0.01,
    sharding: Sharding | None = None,
    local_world_size: int | None = None,
) -> DistributedModelParallel:
    """Shard the table over all ranks and copy the decoder within every data-parallel group.

    A collective call on all ranks. Copies start from the weights of the first rank of their group.

    Args:
        model: with its table on "meta", or with the same weights on all ranks.
        device: this rank's device.
        embedding_optimizer: see `commons.trainer.sharding.shard_model`.
        embedding_lr: its learning rate.
        sharding: "row_wise", "table_wise", or None for the planner's choice between them.
        local_world_size: ranks per host; what torchrun sets if not given, else all ranks.

    Raises:
        RuntimeError: torch.distributed is not initialised.
        ValueError: as `shard_model`; also for "data_parallel".
    """
    if sharding == "data_parallel":
        raise ValueError(
            "sharding is 'data_parallel'; megatron-core averages the gradients of the decoder alone: choose 'row_wise' "
            "or 'table_wise'"
        )
    return shard_model(
        model,
        [TABLE],
        device=device,
        embedding_optimizer=embedding_optimizer,
        embedding_lr=embedding_lr,
        sharding=sharding,
        local_world_size=local_world_size,
        data_parallel_wrapper=_MegatronDataParallel(),
    )


class _MegatronDataParallel(DataParallelWrapper):
    """Wraps the decoder of a SIDGRModel, in the place of TorchRec's default, torch's DistributedDataParallel."""

    def wrap(self, dmp: DistributedModelParallel, env: ShardingEnv, device: torch.device) -> None:
        """Move what is not sharded to the device, and wrap the decoder."""
        model = dmp.module
        for part in (model.dense, model.trie):
            if isinstance(part, nn.Module):
                part.to(device)
        with cpu_in_place_of_cuda(device):
            model.dense = ParallelDecoder(model.dense.transformer_config, DistributedDataParallelConfig(), model.dense)
        model.dense.broadcast_params()


class ParallelDecoder(DistributedDataParallel):
    """megatron-core's DistributedDataParallel around a SIDDecoder; after a backward pass `grad` holds the averages.

    megatron-core gathers gradients in buffers (`main_grad`), which its own training loop clears before a step and
    reduces, with `finalize_model_grads`, after it. TorchRec's pipelines and torch's optimizers know neither; here both
    are done at the ends of a pass, so that the gradients are those of the last one, averaged over the data-parallel
    group, as with torch's DistributedDataParallel.
    """

    # TorchRec then leaves loading to load_state_dict, in which, as in state_dict, names do not show the wrapper.
    _FORCE_STATE_DICT_LOAD = True

    def forward(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, Any]:
        """As the decoder's."""
        if torch.is_grad_enabled():
            self.zero_grad_buffer()
            for parameter in self.parameters():
                parameter.grad = None
        loss, output = super().forward(*args, **kwargs)
        if loss.requires_grad:
            # The loss is where the backward pass begins; what is queued there runs when it is complete.
            loss.register_hook(lambda _: torch.autograd.Variable._execution_engine.queue_callback(self._reduce))
        return loss, output

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
        """Load the decoder's state; returns what did not fit, as torch's modules do."""
        return self.module.load_state_dict(state_dict, strict=strict)

    def _reduce(self) -> None:
        finalize_model_grads([self])
        for parameter in self.parameters():
            parameter.grad = parameter.main_grad


@contextmanager
def cpu_in_place_of_cuda(device: torch.device) -> Iterator[None]:
    """Let `torch.cuda.current_device()` be the CPU while megatron-core allocates for a rank on the CPU.

    megatron-core 0.16.1 allocates its gradient buffers there (param_and_grad_buffer.py:806), not on the device of the
    parameters. Nothing else that sid_gr uses needs a CUDA device, given `use_cpu_initialization` in TransformerConfig
    and a core attention of its own: DotProductAttention takes the CUDA generator for its dropout.

    Args:
        device: of this rank; on CUDA nothing is changed.
    """
    if device.type == "cuda":
        yield
        return
    with mock.patch.object(torch.cuda, "current_device", lambda: device):
        yield
