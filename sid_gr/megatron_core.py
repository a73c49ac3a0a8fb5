"""What sid_gr takes from megatron-core, imported in one place.

megatron-core warns at import of every accelerator package that is missing, and falls back to torch; these warnings are
left out here, since that is what runs on a CPU.
"""

from __future__ import annotations

import warnings

try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core import parallel_state, tensor_parallel
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.models.gpt.gpt_layer_specs import (
            HAVE_TE,
            get_gpt_layer_local_spec,
            get_gpt_layer_with_transformer_engine_spec,
        )
        from megatron.core.packed_seq_params import PackedSeqParams
        from megatron.core.transformer.spec_utils import ModuleSpec
        from megatron.core.transformer.transformer_block import TransformerBlock
        from megatron.core.transformer.transformer_config import TransformerConfig
except ImportError as error:
    raise ImportError(
        f"megatron-core cannot be imported ({error}); the decoder of sid_gr is made of its layers: install "
        "evenrank[megatron]"
    ) from error

__all__ = [
    "HAVE_TE",
    "DistributedDataParallel",
    "DistributedDataParallelConfig",
    "ModuleSpec",
    "PackedSeqParams",
    "TransformerBlock",
    "TransformerConfig",
    "finalize_model_grads",
    "get_gpt_layer_local_spec",
    "get_gpt_layer_with_transformer_engine_spec",
    "parallel_state",
    "tensor_parallel",
]
