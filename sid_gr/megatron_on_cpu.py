"""megatron-core on a machine without CUDA: the one call that asks for a CUDA device is answered with the CPU.

Reported in the words of an issue for megatron-core 0.16.1: *"DistributedDataParallel cannot be used with gloo on a
machine without CUDA, although parallel_state, TransformerBlock, its local layer spec and finalize_model_grads can."*

    megatron/core/distributed/param_and_grad_buffer.py:806, _ParamAndGradBuffer.__init__
        self.grad_data = torch.zeros(self.numel, dtype=self.grad_dtype, device=torch.cuda.current_device(), …)

The parameters' own device would serve there. Nothing else that sid_gr uses asks for a CUDA device, given

- `TransformerConfig(use_cpu_initialization=True)`, without which ColumnParallelLinear and RowParallelLinear allocate
  their weights on `torch.cuda.current_device()` (tensor_parallel/layers.py:873, 899, 1197, 1218) and draw them from the
  CUDA generator (`get_cuda_rng_tracker().fork()`, lines 142 and 145), and
- a core attention of sid_gr's own: DotProductAttention enters `get_cuda_rng_tracker().fork()` for its dropout.

megatron-core's own optimizers, its distributed optimizer, sequence parallelism and pipeline parallelism ask for one in
further places; sid_gr does not use them on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch


@contextmanager
def cpu_in_place_of_cuda(device: torch.device) -> Iterator[None]:
    """Let `torch.cuda.current_device()` answer the CPU while megatron-core allocates for a rank on the CPU.

    Args:
        device: of this rank; on CUDA nothing is changed.

    """
    if device.type == "cuda":
        yield
        return
    with mock.patch.object(torch.cuda, "current_device", lambda: device):
        yield
