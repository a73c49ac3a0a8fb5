"""sid_gr's imports from megatron-core, in one place.

At import megatron-core warns about every missing accelerator package and falls back to torch. These warnings are
suppressed here, because on a CPU the fallback is intended.
"""

from __future__ import annotations

import warnings

try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core import parallel_state
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
        f"megatron-core cannot be imported ({error}); the decoder of sid_gr uses its layers: install evenrank[megatron]"
    ) from error

__all__ = [
    "HAVE_TE",
    "ModuleSpec",
    "PackedSeqParams",
    "TransformerBlock",
    "TransformerConfig",
    "get_gpt_layer_local_spec",
    "get_gpt_layer_with_transformer_engine_spec",
    "parallel_state",
]
