"""Jagged attention against a reference that loops over rows and pairs, in float64."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from commons.perf_model.attention_pairs import attention_pairs
from hstu.model.attention import TokenTimes, hstu_attention, time_buckets
from hstu.model.attention_plan import AttentionPlan, DeviceTuning, plan_attention
from hstu.model.triton_attention import triton_attention
from hstu.model.triton_plan import plan_triton_attention
from tests.helpers.batches.row_parts import rows_of_parts
from tests.helpers.models.reference_attention import reference_attention

LONGEST = 12
# From one query at a time to whole blocks.
TUNINGS = [None, DeviceTuning(1, 1), DeviceTuning(64, 8), DeviceTuning(600, 200)]


def random_inputs(num_tokens, sees_ahead, seed, longest=LONGEST):
    """Queries, keys and values of two heads of width 3, and a bias."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(num_tokens, 2, 3)] * 3 + [(2, 2 * longest - 1 if sees_ahead else longest)]
    return [torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_() for shape in shapes]


def make_plan(lengths, targets, num_heads=2, contextual=None, **options) -> AttentionPlan:
    return plan_attention(
        torch.tensor(lengths, dtype=torch.int64),
        torch.tensor(targets, dtype=torch.int64),
        None if contextual is None else torch.tensor(contextual, dtype=torch.int64),
        num_heads=num_heads,
        **options,
    )


def assert_equal_with_gradients(output, expected, leaves):
    weights = torch.randn_like(output)
    gradients, wanted = (
        torch.autograd.grad((each * weights).sum(), leaves, allow_unused=True, materialize_grads=True)
        for each in (output, expected)
    )
    torch.testing.assert_close((output, *gradients), (expected, *wanted), rtol=0, atol=1e-10)


@given(
    rows_of_parts(LONGEST, 7),
    st.booleans(),
    st.sampled_from([1, 2, 3, 100]),
    st.sampled_from(TUNINGS),
    st.booleans(),
    st.booleans(),
    st.sampled_from([None, 1, 2, 5, 11, 10**12]),
    st.integers(0, 99),
)
def test_output_and_gradients_equal_the_reference(
    rows, is_causal, group_size, tuning, with_context, with_times, max_attn_len, seed
):
    lengths, targets, contextual = rows
    contextual = contextual if with_context else None
    inputs = random_inputs(sum(lengths), with_context or not is_causal, seed)
    generator = torch.Generator().manual_seed(seed)
    seconds = torch.randint(-(10**6), 10**6, (sum(lengths),), generator=generator) ** 2 // 10**9
    time_bias = torch.randn(2, 20, dtype=torch.float64, generator=generator).requires_grad_()
    mask = {"contextual": contextual, "is_causal": is_causal, "max_attn_len": max_attn_len}
    plan = make_plan(lengths, targets, target_group_size=group_size, tuning=tuning, **mask)
    times = TokenTimes(seconds, time_bias) if with_times else None
    output = hstu_attention(*inputs, plan, normalizer=LONGEST, times=times)
    of_times = {"times": seconds, "time_bias": time_bias} if with_times else {}
    expected = reference_attention(
        *inputs, lengths, targets, normalizer=LONGEST, group_size=group_size, **mask, **of_times
    )
    assert_equal_with_gradients(output, expected, [*inputs, time_bias])


@pytest.mark.parametrize("max_attn_len", [None, 30, 10])  # in the last, chunks of targets see no history
def test_a_group_of_targets_may_take_several_chunks(max_attn_len):
    lengths, targets, group_size = [70, 45, 3], [50, 20, 3], 40
    inputs = random_inputs(sum(lengths), False, seed=0, longest=max(lengths))
    masks = {"is_causal": True, "max_attn_len": max_attn_len}
    plan = make_plan(lengths, targets, target_group_size=group_size, tuning=DeviceTuning(1, 1), **masks)
    assert max(chunk.queries.shape[1] for block in plan.blocks for chunk in block.chunks) == 16 < group_size
    output = hstu_attention(*inputs, plan, normalizer=LONGEST)
    expected = reference_attention(*inputs, lengths, targets, normalizer=LONGEST, group_size=group_size, **masks)
    assert_equal_with_gradients(output, expected, inputs)


@given(st.lists(st.integers(-(10**10), 10**10), max_size=20), st.integers(1, 80))
def test_buckets_of_times_are_those_of_the_formula(apart, num_buckets):
    found = time_buckets(torch.tensor(apart, dtype=torch.int64), num_buckets).tolist()
    for difference, bucket in zip(apart, found):
        exact = math.log(max(1, abs(difference))) / 0.301
        assert bucket == min(math.floor(exact), num_buckets - 1) or abs(exact - round(exact)) < 1e-4


@given(st.lists(st.integers(0, 3000), max_size=40), st.booleans())
def test_padding_costs_no_more_than_opening_another_block(lengths, is_causal):
    tuning = DeviceTuning(max_scores=2**30, dispatch_scores=1000)
    plan = make_plan(lengths, [0] * len(lengths), num_heads=2, is_causal=is_causal, tuning=tuning)
    remaining = sorted((length for length in lengths if length), reverse=True)
    for block in plan.blocks:
        num_rows, longest = block.keys.shape
        rows, remaining = remaining[:num_rows], remaining[num_rows:]
        assert longest == rows[0]
        # About half of a causal square is computed.
        wasted = sum(longest**2 - n**2 for n in rows) / (2 if is_causal else 1)
        assert 2 * wasted <= 2 * tuning.dispatch_scores
    assert not remaining


@given(
    st.lists(st.integers(1, 900), min_size=1, max_size=9),
    st.booleans(),
    st.integers(1, 8),
    st.sampled_from([None, 1, 20, 300]),
    st.sampled_from([1, 7, 200, 10**9]),
)
def test_chunks_hold_no_more_scores_than_allowed(lengths, is_causal, num_heads, max_attn_len, group_size):
    tuning = DeviceTuning(max_scores=2**16, dispatch_scores=2**12)
    options = {"is_causal": is_causal, "max_attn_len": max_attn_len, "tuning": tuning, "target_group_size": group_size}
    targets = [length // (1 + row % 3) for row, length in enumerate(lengths)]
    for block in make_plan(lengths, targets, num_heads, **options).blocks:
        for chunk in block.chunks:
            matrices = num_heads * chunk.queries.shape[0]
            smallest = 16 * matrices * chunk.keys.shape[1]  # sixteen queries at least, however long the row
            assert matrices * chunk.queries.shape[1] * chunk.keys.shape[1] <= max(tuning.max_scores, smallest)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("max_attn_len", [8, 64, 256])
def test_work_follows_the_pairs_within_the_window(is_causal, max_attn_len):
    """Scores that are computed, padding included, of rows that are much longer than the window."""
    lengths, targets = [4096, 3000, 1000, 700, 90, 5], [20, 20, 20, 20, 20, 2]
    mask = {"max_attn_len": max_attn_len}
    plan = make_plan(lengths, targets, num_heads=4, is_causal=is_causal, **mask)
    computed = sum(chunk.queries.numel() * chunk.keys.shape[1] for block in plan.blocks for chunk in block.chunks)
    kept = sum(attention_pairs(n, count, causal=is_causal, **mask) for n, count in zip(lengths, targets))
    per_query = computed / sum(lengths)
    # A chunk of 16 queries computes 16 scores more per query.
    assert per_query <= 1.12 * kept / sum(lengths) + 18


@pytest.mark.slow
@pytest.mark.parametrize("is_causal", [True, False])
def test_sums_over_many_chunks_keep_their_last_terms_in_bfloat16(is_causal):
    """Equal scores, values and gradients: sums of equal terms, which a bfloat16 sum would leave at 256 of them."""
    length = 6000
    query, key = (torch.zeros(length, 1, 2, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    value = torch.ones(length, 1, 2, dtype=torch.bfloat16, requires_grad=True)
    bias = torch.ones(1, length if is_causal else 2 * length - 1, requires_grad=True)
    plan = make_plan([length], [0], 1, is_causal=is_causal, tuning=DeviceTuning(1, 1))  # chunks of 16 queries
    hstu_attention(query, key, value, bias, plan, normalizer=1.0).sum().backward()
    asked = torch.arange(length, 0, -1.0) if is_causal else torch.full((length,), float(length))
    weight = torch.nn.functional.silu(torch.ones(()))
    torch.testing.assert_close(value.grad[:, 0, 0].float(), weight * asked, rtol=0.01, atol=0)
    slope = torch.autograd.functional.jacobian(torch.nn.functional.silu, torch.ones(()))
    distances = torch.arange(0 if is_causal else 1 - length, length)
    torch.testing.assert_close(bias.grad[0], 2 * slope * (length - distances.abs()), rtol=0.02, atol=0)


def test_sums_over_long_rows_do_not_overflow_in_float16():
    length = 6000
    query, key = (torch.zeros(length, 1, 2, dtype=torch.float16) for _ in range(2))
    value = torch.full((length, 1, 2), 4.0, dtype=torch.float16)
    bias, plan = torch.full((1, length), 8.0), make_plan([length], [0], 1)
    output = hstu_attention(query, key, value, bias, plan, normalizer=length)
    weight = torch.nn.functional.silu(torch.tensor(8.0))
    expected = weight * 4 * torch.arange(1, length + 1) / length  # their sum, up to 192,000, is beyond float16
    torch.testing.assert_close(output[:, 0, 0].float(), expected, rtol=0.01, atol=0)


def test_gradients_of_biases_do_not_overflow_in_float16():
    """10,000 pairs of distance 0 have a gradient of 8 times the slope each, beyond the largest float16."""
    rows, length = 100, 100
    tokens = torch.zeros(rows * length, 1, 2, dtype=torch.float16)
    bias, by_time = torch.ones(1, length, requires_grad=True), torch.zeros(1, 1, requires_grad=True)
    times = TokenTimes(torch.zeros(rows * length, dtype=torch.int64), by_time)
    plan = make_plan([length] * rows, [0] * rows, 1)
    hstu_attention(tokens, tokens, tokens + 4, bias, plan, normalizer=1.0, times=times).sum().backward()
    slope = torch.autograd.functional.jacobian(torch.nn.functional.silu, torch.ones(()))
    expected = 8 * slope * rows * torch.arange(length, 0, -1.0)
    torch.testing.assert_close(bias.grad[0], expected, rtol=0.01, atol=0)
    torch.testing.assert_close(by_time.grad[0, 0], expected.sum(), rtol=0.01, atol=0)


def test_a_bias_of_fewer_digits_than_the_queries():
    query, key, value, bias = random_inputs(9, False, seed=7)
    plan, narrow = make_plan([9], [2]), bias.detach().float().requires_grad_()
    wide = narrow.detach().double().requires_grad_()
    results = [hstu_attention(query, key, value, each, plan, normalizer=LONGEST) for each in (narrow, wide)]
    assert query.dtype == torch.float64 and torch.equal(*results)
    for result in results:
        result.square().sum().backward()
    assert narrow.grad.dtype == torch.float32 and torch.equal(narrow.grad, wide.grad.float())


def test_inference_then_training_on_one_plan_and_no_second_derivative():
    inputs = random_inputs(9, False, seed=5)
    plan = make_plan([9], [0])
    with torch.inference_mode():
        inferred = hstu_attention(*inputs, plan, normalizer=LONGEST).clone()
    trained = hstu_attention(*inputs, plan, normalizer=LONGEST)
    assert torch.equal(inferred, trained.detach())
    (gradient,) = torch.autograd.grad(trained.square().sum(), inputs[0], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_autocast_leaves_the_attention_in_the_dtype_it_is_given():
    inputs = [tensor.detach().float().requires_grad_() for tensor in random_inputs(9, False, seed=6)]
    plan = make_plan([9], [2])
    outputs, gradients = [], []
    for enabled in (True, False):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            outputs.append(hstu_attention(*inputs, plan, normalizer=LONGEST))
            gradients.append(torch.autograd.grad(outputs[-1].sum(), inputs))
    assert torch.equal(*outputs) and all(map(torch.equal, *gradients))


@pytest.mark.parametrize(
    ("lengths", "targets", "contextual", "reach", "message"),
    [
        ([6], [0], None, 12, "query has 5 tokens, the plan was made for 6"),
        ([5], [0], [1], 5, "longest row has 5 tokens, the position bias reaches 3"),
        ([4, 2], [0, 3], None, 12, "row 1 has 2 tokens and 3 targets"),
        ([-1], [0], None, 12, "row 0 has -1 tokens"),
        ([4, 4], [0, 3], [4, 2], 12, "row 1 has 4 tokens and 3 targets and 2 contextual tokens"),
    ],
)
def test_mistakes_are_named(lengths, targets, contextual, reach, message):
    *inputs, bias = random_inputs(5, False, seed=7)
    with pytest.raises(ValueError, match=message):
        hstu_attention(*inputs, bias[:, :reach], make_plan(lengths, targets, contextual=contextual), normalizer=1.0)


@pytest.mark.parametrize("attention", [hstu_attention, triton_attention])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key": (8, 2, 16)}, r"key \(8, 2, 16\) and value \(4, 2, 16\); all three"),
        ({"value": (4, 2, 8)}, r"key \(4, 2, 16\) and value \(4, 2, 8\); all three"),
        ({"bias": (4, 9)}, r"bias has shape \(4, 9\), query has 2 heads"),  # was spread over rows and heads
        ({"bias": (2, 1)}, "longest row has 2 tokens, the position bias reaches 1"),
        ({"time_bias": (1, 9)}, r"times.bias has shape \(1, 9\), query has 2 heads"),
        ({"times": (8,)}, "times has 8 values, the plan was made for 4 tokens"),
    ],
)
def test_inputs_of_other_tokens_or_heads_are_named(attention, change, message):
    lengths = torch.tensor([2, 2])
    plan = plan_attention(lengths, num_heads=2) if attention is hstu_attention else plan_triton_attention(lengths)
    shapes = dict.fromkeys(("query", "key", "value"), (4, 2, 16)) | {"bias": (2, 9), "time_bias": (2, 9)}
    given = {name: torch.zeros(shape) for name, shape in (shapes | {"times": (4,)} | change).items()}
    times = TokenTimes(given.pop("times").long(), given.pop("time_bias"))
    with pytest.raises(ValueError, match=message):
        attention(**given, plan=plan, normalizer=1.0, times=times)


def test_rows_are_compared_with_few_others(monkeypatch):
    """Not every block with all rows that are left: the work would be their product."""
    compared = []
    cumprod = np.cumprod
    monkeypatch.setattr(np, "cumprod", lambda fits: compared.append(fits.size) or cumprod(fits))
    lengths, targets = torch.arange(400, 600), torch.full((200,), 50)
    plan_attention(lengths, targets, num_heads=4)
    sequences = 200 * (1 + 50)  # a row's history and each of its targets
    assert len(compared) > 50 and sum(compared) < 2 * sequences
