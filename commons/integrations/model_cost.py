"""A cost model of rows, from the layers and the config of a Hugging Face model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from torch import nn

from commons.perf_model.attention_pairs import attention_pairs

Cost = Callable[[np.ndarray], Any]  # int64 lengths `(m,)` to workloads `(m,)`

# Most bits of a token's cost: workloads are scaled down, because their sum over all rows must be below 2^62.
_BITS_PER_TOKEN = 20


def model_cost(model: Any) -> Cost:
    """A function from lengths to workloads, which are proportional to forward FLOPs.

    The matrices of a token are counted, of experts only the active ones, and all pairs of each layer with attention,
    also where the attention has a window. Of a multimodal model, only the text part is counted.

    Raises:
        ValueError: the config lacks the dimensions of attention, the model is an encoder-decoder, or its layers share
            their weights.
    """
    whole: Any = getattr(model, "config", None)
    config = whole.get_text_config() if hasattr(whole, "get_text_config") else whole
    number = getattr(config, "num_hidden_layers", 0)
    layers = number and (getattr(config, "per_layer_config", None) or [config] * number)
    own_weights = getattr(config, "num_hidden_groups", number) == number
    seq2seq = getattr(whole, "is_encoder_decoder", False)
    if not layers or not all(map(_has_attention, layers)) or not own_weights or seq2seq:
        raise ValueError(
            f"{type(model).__name__} is no decoder-only or encoder-only transformer whose config has hidden_size and "
            "num_attention_heads, and whose layers share no weights; its cost is unknown: pass cost=, such as "
            "SelfAttentionTask(...).get_workloads"
        )
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)  # in older releases
    kinds = kinds or ["full_attention"] * len(layers)
    per_pair = sum(
        _flops_of_pair(layer)
        for layer, kind in zip(layers, kinds)
        if kind == "hybrid" or (kind.endswith("attention") and kind != "linear_attention")
    )
    modules = dict(_text_modules(model, config))
    per_token = 2 * sum(_active_weights(name, module, config) for name, module in modules.items())
    flags = {module.is_causal for module in modules.values() if hasattr(module, "is_causal")}
    causal = all(flags) if flags else model.can_generate()
    shift = max(0, per_token.bit_length() - _BITS_PER_TOKEN)
    return lambda lengths: (per_token * lengths + per_pair * attention_pairs(lengths, causal=causal)) >> shift


def _has_attention(config: Any) -> bool:
    return bool(getattr(config, "num_attention_heads", None) and getattr(config, "hidden_size", None))


def _flops_of_pair(config: Any) -> int:
    """Operations of a pair of query and key in all heads of a layer: the products with the key and the value."""
    keys = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if hasattr(config, "qk_nope_head_dim"):  # latent attention, as in DeepSeek
        keys = config.qk_nope_head_dim + config.qk_rope_head_dim
    return 2 * config.num_attention_heads * (keys + (getattr(config, "v_head_dim", None) or keys))


def _text_modules(model: Any, config: Any) -> Iterator[tuple[str, nn.Module]]:
    """The modules of the part of a model that has this config, and the language model's head."""
    text = next((part for part in model.modules() if getattr(part, "config", None) is config), model)
    yield from text.named_modules()
    head = None if text is model else model.get_output_embeddings()
    if head is not None:
        yield "head", head


def _active_weights(name: str, module: Any, config: Any) -> int:
    """The entries of a module's own matrices, without those of its children, that a token is multiplied by."""
    # PEFT's wrapper, whose child has the matrix; and a matrix that PEFT trains a copy of (modules_to_save).
    if hasattr(module, "base_layer") or "original_module" in name.split("."):
        return 0
    sizes = [getattr(config, each, None) for each in ("num_local_experts", "num_experts", "n_routed_experts")]
    experts = next(filter(None, sizes), 1)
    active = min(getattr(config, "num_experts_per_tok", None) or 1, experts)
    # DeepSpeed's ZeRO-3 empties parameters and keeps their shape.
    shapes = [getattr(each, "ds_shape", each.shape) for each in module.parameters(recurse=False)]
    stacked = [shape for shape in shapes if len(shape) == 3 and shape[0] == experts > 1]
    if stacked:
        weights = sum(map(math.prod, stacked))
    elif hasattr(module, "in_features"):  # nn.Linear, also quantised
        weights = module.in_features * module.out_features
    elif hasattr(module, "nf"):  # Conv1D, as in GPT-2
        weights = module.nf * module.nx
    else:
        return 0
    is_expert = bool(stacked) or "experts" in name.split(".")
    return weights * active // experts if is_expert else weights
