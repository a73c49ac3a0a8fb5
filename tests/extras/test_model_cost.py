"""The cost of a Hugging Face model's rows, beside the operations that torch counts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from commons.integrations.model_cost import model_cost
from commons.perf_model.partitioner import as_int64_workloads

pytestmark = [pytest.mark.extra("transformers"), pytest.mark.timeout(400)]
BERT = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 4, "num_attention_heads": 4}
LLAMA = BERT | {"num_key_value_heads": 2}
GPT2 = {"vocab_size": 128, "n_embd": 64, "n_layer": 4, "n_head": 4}
MOE = LLAMA | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
DEEPSEEK = MOE | LATENT | {"num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}
LINEAR = {"linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16}


def make(name, options):
    """A model of random weights whose experts and attention are computed by products that torch counts."""
    import transformers

    if not hasattr(transformers, name):
        pytest.skip(f"this release of transformers has no {name}")
    model = getattr(transformers, name)
    config = model.config_class(pad_token_id=0, **options)
    config._attn_implementation = config._experts_implementation = "eager"
    return model(config).eval()


def counted(model, length):
    """The operations of a row's forward pass."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.ones(1, length, dtype=torch.int64))
    return counter.get_total_flops()


def cost_of(model, *lengths):
    """The workloads of rows."""
    return model_cost(model)(np.array(lengths)).tolist()


def cost_of_pair(model):
    """Of two tokens beyond what each costs."""
    one, two = cost_of(model, 1, 2)
    return two - 2 * one


@pytest.mark.parametrize(
    ("name", "options", "causal"),
    [
        ("LlamaForCausalLM", LLAMA, True),
        ("LlamaForSequenceClassification", LLAMA, True),
        ("Qwen3ForCausalLM", LLAMA | {"head_dim": 32}, True),
        ("Gemma2ForCausalLM", LLAMA | {"head_dim": 32, "sliding_window": 16}, True),
        ("Phi3ForCausalLM", LLAMA, True),
        ("GPT2LMHeadModel", GPT2 | {"n_inner": 80}, True),
        ("FalconForCausalLM", {"multi_query": True, **BERT}, True),
        ("BertForMaskedLM", BERT, False),
        ("ModernBertForMaskedLM", BERT | {"local_attention": 16}, False),
        ("MixtralForCausalLM", LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2}, True),
        ("Qwen2MoeForCausalLM", MOE | {"shared_expert_intermediate_size": 40}, True),
        ("Qwen3MoeForCausalLM", MOE | {"mlp_only_layers": [0]}, True),
        ("DeepseekV3ForCausalLM", DEEPSEEK, True),
    ],
)
def test_a_row_costs_the_operations_that_torch_counts(name, options, causal):
    model = make(name, options)
    of_pair = cost_of_pair(model) // (1 if causal else 2)
    for length in (64, 128):
        # Eager attention computes masked pairs too: L² instead of L(L + 1) / 2.
        masked = of_pair * (length * length - length * (length + 1) // 2) if causal else 0
        # A router is not counted, nor are the rotations of positions.
        assert counted(model, length) - masked == pytest.approx(cost_of(model, length)[0], rel=0.01)


@pytest.mark.parametrize(
    ("name", "options", "layers"),
    [
        ("FalconH1ForCausalLM", LLAMA | {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16}, 4),
        ("Qwen3NextForCausalLM", MOE | LINEAR | {"head_dim": 16, "linear_num_key_heads": 2}, 1),
    ],
)
def test_pairs_are_those_of_the_layers_that_have_attention(name, options, layers):
    """Of four: every one in Falcon H1, one in Qwen3-Next."""
    assert cost_of_pair(make(name, options)) == layers * 4 * 4 * 16


def test_the_wrapper_of_an_adapted_matrix_counts_nothing_itself():
    """As PEFT's layers do: `in_features` and `out_features` of their own, and the matrix as `base_layer`."""

    class Adapted(torch.nn.Module):
        def __init__(self, base_layer):
            super().__init__()
            self.base_layer = base_layer
            self.in_features, self.out_features = base_layer.in_features, base_layer.out_features

    model = make("LlamaForCausalLM", LLAMA)
    expected = cost_of(model, 1, 17)
    for layer in model.model.layers:
        layer.self_attn.q_proj = Adapted(layer.self_attn.q_proj)
    assert cost_of(model, 1, 17) == expected


def test_a_matrix_that_is_trained_as_a_copy_counts_once():
    """As with PEFT's `modules_to_save`: the matrix as `original_module`, and its copy."""

    class Saved(torch.nn.Module):
        def __init__(self, matrix):
            super().__init__()
            self.original_module = matrix
            self.modules_to_save = torch.nn.ModuleDict({"default": torch.nn.Linear(64, 128, bias=False)})

    model = make("LlamaForCausalLM", LLAMA)
    expected = cost_of(model, 1, 17)
    model.lm_head = Saved(model.lm_head)
    assert cost_of(model, 1, 17) == expected


def test_the_text_of_a_multimodal_model_is_counted():
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    vision = CLIPVisionConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2)
    model = LlavaForConditionalGeneration(LlavaConfig(text_config=LlamaConfig(**LLAMA), vision_config=vision))
    assert cost_of(model, 1, 17) == cost_of(make("LlamaForCausalLM", LLAMA), 1, 17)


def test_the_costs_of_a_large_model_can_be_summed():
    sizes = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32}
    with torch.device("meta"):
        cost = model_cost(make("LlamaForCausalLM", {"vocab_size": 32000, **sizes}))
    workloads = as_int64_workloads(cost(np.full(1_000_000, 1000)))
    of_token, of_pair = 2 * (32 * (4 * 4096**2 + 3 * 4096 * 11008) + 4096 * 32000), 32 * 4 * 4096
    exact = (of_token * 2000 + of_pair * 2000 * 2001 // 2) / (of_token * 1000 + of_pair * 1000 * 1001 // 2)
    assert int(cost(np.array([2000]))[0]) / int(workloads[0]) == pytest.approx(exact, rel=1e-6)


def test_a_model_of_unknown_cost_is_refused():
    import transformers

    names = ("PerceiverForMaskedLM", "T5GemmaForConditionalGeneration")
    with torch.device("meta"):
        others = [model(model.config_class()) for name in names if (model := getattr(transformers, name, None))]
    shared = make("AlbertForMaskedLM", BERT)
    seq2seq = make("T5ForConditionalGeneration", {"d_model": 64, "d_ff": 80, "num_layers": 2, "num_heads": 4})
    for model in (torch.nn.Linear(2, 2), shared, seq2seq, *others):
        with pytest.raises(ValueError, match=f"{type(model).__name__} is no decoder-only .*: pass cost=, such as"):
            model_cost(model)
