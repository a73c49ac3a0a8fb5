"""A semantic-ID model on many ranks: the table sharded by TorchRec, the decoder copied by megatron-core.

The table is sharded over all ranks, tensor-parallel peers included. Peers look up the same ids, and each has the whole
gradient of the embeddings, so the table receives every data-parallel rank's gradient once per peer. TorchRec divides by
the number of all ranks and the loss counts only data-parallel ranks, so the average is that of the global batch.
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

from commons.trainer.sharding import shard_model
from sid_gr.megatron_core import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from sid_gr.model.gpt import TABLE, SIDGRModel


def build_distributed_model(model: SIDGRModel, *, device: torch.device, **options: Any) -> DistributedModelParallel:
    """Shard the table over all ranks and copy the decoder within every data-parallel group.

    A collective call on all ranks. Every copy gets the weights of the first rank of its group.

    Args:
        model: the model, with its table on "meta", or with equal weights on all ranks.
        device: this rank's device.
        options: further arguments of `commons.trainer.sharding.shard_model`.

    Raises:
        RuntimeError: torch.distributed is not initialised.
        ValueError: as `shard_model`; also for "data_parallel".
    """
    if options.get("sharding") in ("data_parallel", {TABLE: "data_parallel"}):
        raise ValueError(
            "sharding is 'data_parallel'; megatron-core averages only the gradients of the decoder: choose 'row_wise' "
            "or 'table_wise'"
        )
    return shard_model(model, [TABLE], device=device, data_parallel_wrapper=_MegatronDataParallel(), **options)


class _MegatronDataParallel(DataParallelWrapper):
    """Wraps the decoder of a SIDGRModel; replaces TorchRec's default, torch's DistributedDataParallel."""

    def wrap(self, dmp: DistributedModelParallel, env: ShardingEnv, device: torch.device) -> None:
        """Move the decoder and the trie to the device, and wrap the decoder."""
        model = dmp.module
        for part in (model.dense, model.trie):
            if isinstance(part, nn.Module):
                part.to(device)
        with cpu_in_place_of_cuda(device):
            model.dense = ParallelDecoder(model.dense.transformer_config, DistributedDataParallelConfig(), model.dense)
        model.dense.broadcast_params()


class ParallelDecoder(DistributedDataParallel):
    """megatron-core's DistributedDataParallel around a SIDDecoder; after the backward pass `grad` is the average.

    megatron-core accumulates gradients in buffers (`main_grad`); its own training loop clears them before a step and
    reduces them with `finalize_model_grads` after it. TorchRec's pipelines do neither, so this class sets the buffers
    to `grad` when a backward pass begins and reduces them when it is complete. A pass then adds its gradients, averaged
    over the data-parallel group, to those that the optimizer has not cleared, as with torch's DistributedDataParallel.
    """

    _pass = -1  # torch's number of the latest backward pass

    # Makes TorchRec call load_state_dict, whose names, like those of state_dict, omit the wrapper.
    _FORCE_STATE_DICT_LOAD = True

    def forward(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, Any]:
        """Run the decoder's forward, and prepare the reduction of gradients."""
        loss, output = super().forward(*args, **kwargs)
        if loss.requires_grad:
            loss.register_hook(self._begin)  # the decoder's backward pass begins at the loss
        return loss, output

    def _begin(self, _: torch.Tensor) -> None:
        number = torch._C._current_graph_task_id()
        if number == self._pass:  # of a sum of several losses, the first
            return
        self._pass = number
        cleared = [each.main_grad for each in self.parameters() if each.grad is None]
        if cleared:
            torch._foreach_zero_(cleared)  # one kernel for all of them
        for parameter in self.parameters():
            if parameter.grad is not None:  # equal on all ranks, so averaging it again changes nothing
                parameter.main_grad.copy_(parameter.grad)  # nothing to do if it is the buffer itself
                parameter.grad = None
        torch.autograd.Variable._execution_engine.queue_callback(self._reduce)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
        """Load the decoder's state; returns missing and unexpected keys, as torch's modules do."""
        return self.module.load_state_dict(state_dict, strict=strict)

    def _reduce(self) -> None:
        finalize_model_grads([self])
        for parameter in self.parameters():
            parameter.grad = parameter.main_grad


@contextmanager
def cpu_in_place_of_cuda(device: torch.device) -> Iterator[None]:
    """Make `torch.cuda.current_device()` return the CPU while megatron-core allocates for a rank on the CPU.

    megatron-core 0.16.1 allocates its gradient buffers on that device (param_and_grad_buffer.py:806), not on the device
    of the parameters. Nothing else in sid_gr needs CUDA: TransformerConfig sets `use_cpu_initialization`, and sid_gr's
    core attention replaces DotProductAttention, whose dropout uses the CUDA generator.

    Args:
        device: device of this rank; on CUDA nothing is changed.
    """
    if device.type == "cuda":
        yield
        return
    with mock.patch.object(torch.cuda, "current_device", lambda: device):
        yield
