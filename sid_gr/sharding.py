"""A semantic-ID model on many ranks: the table sharded by TorchRec, the decoder copied within a data-parallel group.

The table is sharded over all ranks, tensor-parallel peers included. Peers look up the same ids, and each has the whole
gradient of the embeddings, so the table receives every data-parallel rank's gradient once per peer. TorchRec divides by
the number of all ranks and the loss counts only data-parallel ranks, so the average is that of the global batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torchrec.distributed.model_parallel import DistributedModelParallel

from commons.trainer.sharding import shard_model
from sid_gr.megatron_core import parallel_state
from sid_gr.model.gpt import TABLE, SIDGRModel


def build_distributed_model(model: SIDGRModel, *, device: torch.device, **options: Any) -> DistributedModelParallel:
    """Shard the table over all ranks and copy the decoder within every data-parallel group.

    A collective call on all ranks. Every copy gets the weights of the first rank of its group.
    As with torch's DistributedDataParallel, a forward pass is followed by its backward pass before the next one.

    Args:
        model: the model, with its table on "meta", or with equal weights on all ranks.
        device: this rank's device.
        options: further arguments of `commons.trainer.sharding.shard_model`.

    Raises:
        RuntimeError, ValueError: as `shard_model`.
    """
    group = parallel_state.get_data_parallel_group()
    return shard_model(model, [TABLE], device=device, data_parallel_group=group, **options)
