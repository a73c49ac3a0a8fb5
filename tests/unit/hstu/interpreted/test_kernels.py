"""The Triton kernels on a CPU, by Triton's interpreter: values and all gradients against the reference.

And the comparison at the first step, of kernels that compute what they should and of others.
"""

import dataclasses

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from hstu.model import ExecutionConfig, HSTUEncoder, layer, triton_launch
from hstu.model import triton_attention as triton_attention_module
from hstu.model.attention import hstu_attention
from hstu.model.attention_plan import plan_attention
from hstu.model.execution import Execution
from hstu.model.triton_agreement import attention_of, disagreement
from hstu.model.triton_attention import triton_attention
from hstu.model.triton_blocks import KERNELS
from hstu.model.triton_launch import LayerKind
from hstu.model.triton_plan import NO_WINDOW, plan_triton_attention
from tests.helpers.batches.row_parts import rows_of_parts
from tests.helpers.models.hstu_models import HSTU

MASKS = {
    "causal": {},
    "groups": {"target_group_size": 3},
    "groups and context": {"target_group_size": 2, "contextual": True},
    "full": {"is_causal": False},
}
# Largest difference, as a part of the largest value: rounding of sums, or of weights and results to 16 bits.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.02, torch.float16: 0.003}


def agree(
    *rows, dtype=torch.float32, bias="none", contextual=False, head_dim=16, is_causal=True, target_group_size=1,
    max_attn_len=NO_WINDOW, **options,
):  # fmt: skip
    """Kernels and reference on the parts of one projection; the reference in float32, from the same numbers."""
    biases = {"has_position": bias in ("position", "both"), "has_time": bias in ("time", "both")}
    masks = {"is_causal": is_causal, "has_context": contextual, "target_group_size": target_group_size}
    kind = LayerKind(dtype, head_dim, **masks, **biases, window=max_attn_len)
    run = attention_of(torch.device("cpu"), kind, *rows, **options)
    expected, found = run(False, torch.float32), run(True, dtype)
    assert found[0].dtype == dtype
    for wanted, value in zip(expected, found):
        assert torch.isfinite(value).all()
        scale = float(wanted.abs().max()) if wanted.numel() else 0.0
        torch.testing.assert_close(value.float(), wanted, rtol=0, atol=TOLERANCE[dtype] * scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", ["none", "position", "time", "both"])
@pytest.mark.parametrize("mask", MASKS)
def test_values_and_gradients_are_those_of_the_reference(mask, bias, dtype):
    """Rows over several blocks, an empty one, one of a token, one of targets alone."""
    agree([22, 0, 1, 3], [5, 0, 0, 3], [2, 0, 1, 0], dtype=dtype, bias=bias, **MASKS[mask])


@pytest.mark.parametrize(
    ("mask", "queries", "keys"), [("groups and context", 64, 32), ("groups and context", 128, 128), ("full", 32, 32)]
)
def test_blocks_of_any_shape_compute_the_same(use_blocks, mask, queries, keys):
    use_blocks(queries, keys)
    agree([135, 0, 40], [30, 0, 3], [70, 0, 1], bias="both", **MASKS[mask])


@pytest.mark.parametrize("bias", ["none", "time"])
def test_blocks_may_have_more_keys_than_queries_where_there_is_no_bias_by_position(use_blocks, bias):
    use_blocks(16, 32)
    agree([40, 3], [11, 0], [5, 0], bias=bias, **MASKS["groups and context"])


@pytest.mark.parametrize(("num_heads", "head_dim"), [(2, 3), (1, 24), (3, 48), (1, 256)])
def test_heads_of_any_width_are_padded_within_the_kernel(num_heads, head_dim):
    agree([19, 4], [3, 0], [0, 0], bias="position", num_heads=num_heads, head_dim=head_dim)


@settings(max_examples=8, phases=[Phase.explicit, Phase.reuse, Phase.generate])  # seconds each: nothing is shrunk
@given(
    rows_of_parts(24, 3),
    st.sampled_from(["none", "position", "both"]),
    st.sampled_from(list(TOLERANCE)),
    st.booleans(),
    st.booleans(),
    st.sampled_from([1, 2, 5, 100]),
    st.sampled_from([3, 16, 24]),
    st.integers(0, 99),
)
def test_any_batch(rows, bias, dtype, contextual, is_causal, group, head_dim, seed):
    agree(
        *rows, bias=bias, dtype=dtype, contextual=contextual, is_causal=is_causal, target_group_size=group,
        head_dim=head_dim, seed=seed,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("bias", ["none", "both"])
@pytest.mark.parametrize("mask", MASKS)
def test_gradients_of_queries_may_be_added_up_in_memory(launched, mask, bias, dtype):
    """The backward pass in one launch; here by pointers, for the interpreter has no reduction by tensor descriptors."""
    agree([22, 0, 1, 3], [5, 0, 0, 3], [2, 0, 1, 0], dtype=dtype, bias=bias, **MASKS[mask])
    assert launched[:2] == ["forward", "backward"] and "backward_query" not in launched


def test_deterministic_algorithms_add_nothing_up_in_memory(launched):
    torch.use_deterministic_algorithms(True)
    try:
        agree([22, 3], [5, 0], [2, 0])
    finally:
        torch.use_deterministic_algorithms(False)
    assert launched == ["forward", "backward_query", "backward_key"]


@pytest.mark.parametrize("mask", MASKS)
def test_blocks_by_tensor_descriptors_compute_the_same(monkeypatch, mask):
    monkeypatch.setattr(triton_launch, "uses_tma", lambda _: True)
    agree([40, 0, 1, 3], [5, 0, 0, 3], [2, 0, 1, 0], bias="position", **MASKS[mask])


@pytest.mark.parametrize("max_attn_len", [1, 7, 20, 1000])
@pytest.mark.parametrize("mask", MASKS)
def test_windows_compute_the_same(request, mask, max_attn_len):
    if max_attn_len == 20:  # gradients of queries, added up in memory
        request.getfixturevalue("launched")
    agree([53, 0, 1, 20], [18, 0, 0, 3], [5, 0, 1, 0], bias="position", max_attn_len=max_attn_len, **MASKS[mask])


@pytest.mark.parametrize("lengths", [[], [0, 0], [1]])
def test_no_tokens_and_one(lengths):
    agree(lengths, [0] * len(lengths), [0] * len(lengths), bias="both")


def test_float16_holds_scores_and_sums_that_it_could_not():
    """Scores up to 80,000, whose SiLU is beyond float16 before the division by N, and sums of a thousand of them."""
    length = 130
    q, k = (torch.full((length, 1, 16), size, dtype=torch.float16) for size in (100.0, 50.0))
    v = torch.full((length, 1, 16), 0.25, dtype=torch.float16)
    rows = torch.tensor([length])
    bias = torch.zeros(1, length)
    output = triton_attention(q, k, v, None, plan_triton_attention(rows), normalizer=4096.0)
    exact = hstu_attention(q.float(), k.float(), v.float(), bias, plan_attention(rows, num_heads=1), normalizer=4096.0)
    torch.testing.assert_close(output.float(), exact, rtol=2e-3, atol=0)


def test_tensors_of_other_strides_are_copied_and_autocast_changes_nothing():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(9, 2, 16, generator=generator) for _ in range(3))
    plan = plan_triton_attention(torch.tensor([9]))
    expected = triton_attention(q, k, v, None, plan, normalizer=4.0)
    turned = q.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(triton_attention(turned, k, v, None, plan, normalizer=4.0), expected)


def test_gradients_cannot_be_differentiated_again():
    q = torch.randn(5, 1, 16, requires_grad=True)
    output = triton_attention(q, q, q, None, plan_triton_attention(torch.tensor([5])), normalizer=4.0)
    (gradient,) = torch.autograd.grad((output**2).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


@pytest.mark.parametrize("saves_memory", [False, True])
@pytest.mark.parametrize(("position_bias", "max_attn_len"), [("direct", 3), ("bucketed", None), ("none", 3)])
def test_layers_compute_the_same_with_both(monkeypatch, position_bias, max_attn_len, saves_memory):
    options = {"position_bias": position_bias, "max_attn_len": max_attn_len, "target_group_size": 2}
    hstu = dataclasses.replace(HSTU, time_bias=True, contextual_mask=True, **options)
    lengths, targets, context = map(torch.tensor, ([9, 0, 3], [4, 0, 1], [2, 0, 1]))
    tokens = torch.randn(12, 8, generator=torch.Generator().manual_seed(0))
    times = torch.arange(12) * 100
    found = []
    for backend in ("pytorch", "triton"):
        execution = Execution(uses_triton=backend == "triton", compiles=False)
        monkeypatch.setattr(layer, "execution_of", lambda *_, execution=execution: execution)
        torch.manual_seed(0)
        encoder = HSTUEncoder(
            dataclasses.replace(hstu, execution=ExecutionConfig(activation_checkpointing=saves_memory))
        )
        output = encoder(tokens, lengths, targets, context, times)
        (output * torch.linspace(-1, 1, output.numel()).view_as(output)).sum().backward()
        found.append([output.detach(), *(weight.grad for weight in encoder.parameters())])
    for expected, value in zip(*found):
        torch.testing.assert_close(value, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    with pytest.raises(ValueError, match="the longest row has 41 tokens, the position bias reaches 40"):
        encoder(torch.zeros(41, 8), torch.tensor([41]), None, None, torch.zeros(41, dtype=torch.int64))


# ---------------------------------------------------------------------------------- the comparison at the first step

KINDS = [
    LayerKind(torch.float32, 16, True, False, 1, has_position=True, has_time=False),
    LayerKind(torch.bfloat16, 16, True, True, 2, has_position=True, has_time=True),
    LayerKind(torch.float16, 24, False, False, 1, has_position=False, has_time=False),
    LayerKind(torch.float32, 16, True, True, 2, has_position=True, has_time=False, window=300),
]


@pytest.mark.parametrize("kind", KINDS)
def test_kernels_that_agree_are_trusted(use_blocks, kind):
    use_blocks(64, 64)
    assert disagreement.__wrapped__(torch.device("cpu"), kind) is None


@pytest.mark.parametrize(
    ("planted", "reason"),
    [
        (lambda scalars: scalars | {"after": scalars["after"] * 1.2}, "it computes outputs that are off by"),
        (lambda scalars: 1 / 0, "its kernels cannot run (ZeroDivisionError: division by zero)"),
        (lambda scalars: scalars | {"window": 300}, "it computes outputs that are off by"),
    ],
)
def test_kernels_that_compute_something_else_are_not(use_blocks, monkeypatch, planted, reason):
    use_blocks(64, 64)
    scalars = triton_launch.scalars
    monkeypatch.setattr(triton_launch, "scalars", lambda inputs: planted(scalars(inputs)))
    assert reason in disagreement.__wrapped__(torch.device("cpu"), KINDS[-1])


def test_all_buckets_of_times_are_compared(use_blocks, monkeypatch):
    use_blocks(64, 64)
    made = triton_attention_module.time_table
    order = [0, *range(22, 0, -1), 23]  # the first and the last one stay
    monkeypatch.setattr(triton_attention_module, "time_table", lambda bias: made(bias[:, order]))
    assert "off by" in str(disagreement.__wrapped__(torch.device("cpu"), KINDS[1]))


@pytest.mark.parametrize("planted", ["backward", None])
def test_every_kernel_that_a_batch_may_take_is_compared(use_blocks, monkeypatch, planted):
    """Also the one that adds up gradients of queries in memory, where a GPU can: long rows take it, short ones not."""
    use_blocks(64, 64)
    kind, launch, launched = KINDS[1], triton_attention_module.launch, set()

    def spoiled(kernel, inputs, outputs, *grad):
        launched.add(kernel)
        launch(kernel, inputs, outputs, *grad)
        if kernel == planted:
            for each in filter(lambda each: each is not None, outputs.values()):
                each.mul_(2)

    monkeypatch.setattr(triton_attention_module, "launch", spoiled)
    monkeypatch.setattr(triton_attention_module, "adds_up", lambda _: True)
    found = disagreement.__wrapped__(torch.device("cpu"), kind)
    if planted is None:
        assert found is None and launched == set(KERNELS) - {"backward_value"}  # which is of wide heads
    else:
        assert found is not None and "off by" in found
