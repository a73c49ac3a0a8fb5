"""A cost model of rows, from the config of a Hugging Face model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from commons.perf_model.task_estimator import SelfAttentionTask

Cost = Callable[[np.ndarray], Any]  # int64 lengths `(m,)` to workloads `(m,)`


def model_cost(model: Any) -> Cost:
    """A function from lengths to forward FLOPs: the transformer's layers, and the head of a language model.

    Raises:
        ValueError: the config lacks the dimensions of a layer, or is of an encoder-decoder.
    """
    config = model.config.get_text_config()
    heads, hidden = getattr(config, "num_attention_heads", None), getattr(config, "hidden_size", None)
    if not heads or not hidden or config.is_encoder_decoder:
        raise ValueError(
            f"{type(model).__name__} is no decoder-only or encoder-only transformer whose config has hidden_size and "
            "num_attention_heads; its cost is unknown: pass cost=, such as SelfAttentionTask(...).get_workloads"
        )
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None) or 1
    width = getattr(config, "moe_intermediate_size", None) if experts > 1 else None
    width = width or getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None)
    is_language_model = model.can_generate()
    return SelfAttentionTask(
        hidden_size=hidden,
        num_heads=heads,
        head_dim=getattr(config, "head_dim", None) or hidden // heads,
        num_layers=config.num_hidden_layers,
        ffn_hidden_size=width,
        num_query_groups=getattr(config, "num_key_value_heads", None),
        gated_ffn=any("gate_proj" in name or "gate_up_proj" in name for name, _ in model.named_parameters()),
        causal=is_language_model,
        num_experts=experts,
        num_active_experts=getattr(config, "num_experts_per_tok", None) or 1 if experts > 1 else 1,
        vocab_size=config.vocab_size if is_language_model else None,
    ).get_workloads
