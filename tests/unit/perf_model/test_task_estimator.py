"""Workloads: the formulas against a count over the mask and against torch's counter, dtypes, and what is refused.

References compute exactly what the mask keeps, so that what torch counts is exact.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from commons.perf_model.attention_pairs import attention_pairs
from commons.perf_model.task_estimator import HSTUAttentionTask, SelfAttentionTask, training_flops


def kept_keys(query, length, targets, causal, group, window=10**9, context=0):
    """Keys that one query sees, found one by one."""
    history = length - targets

    def is_kept(key):
        places = [each if each < history or not causal else history + (each - history) % group for each in (query, key)]
        is_near = abs(places[0] - places[1]) <= window
        if not causal:
            return is_near
        if query < history or key < history:
            return key < history if query < context else key <= query and is_near
        return (query - history) // group == (key - history) // group and key <= query and is_near

    return [key for key in range(length) if is_kept(key)]


def pairs_by_mask(length, *mask):
    return sum(len(kept_keys(query, length, *mask)) for query in range(length))


@st.composite
def rows_of_parts(draw):
    """Tokens, targets and contextual tokens of some rows."""
    lengths = draw(st.lists(st.integers(0, 20), min_size=1, max_size=4))
    targets = [draw(st.integers(0, length)) for length in lengths]
    return lengths, targets, [draw(st.integers(0, length - count)) for length, count in zip(lengths, targets)]


@given(rows_of_parts(), st.booleans(), st.integers(1, 25), st.sampled_from([*range(1, 22), 10**6, 2**62, 2**63 - 1]))
def test_pairs_within_a_window_are_those_that_the_mask_keeps(rows, causal, group, window):
    """For integers, arrays and tensors alike; in a window as wide as the row as without one."""
    options = {"causal": causal, "target_group_size": group}
    expected = [pairs_by_mask(*row[:2], causal, group, window, row[2]) for row in zip(*rows)]
    assert [attention_pairs(*row, **options, max_attn_len=window) for row in zip(*rows)] == expected
    for make in (np.array, torch.tensor):
        found = attention_pairs(*map(make, rows), **options, max_attn_len=window)
        assert found.dtype in (np.int64, torch.int64) and found.tolist() == expected
    if window >= 20:
        assert [attention_pairs(*row, **options) for row in zip(*rows)] == expected


def test_a_window_makes_rows_cost_less_and_no_window_is_the_default():
    lengths, targets = torch.tensor([4096, 100, 9, 0], dtype=torch.int32), torch.tensor([8, 8, 0, 0])
    whole, narrow = HSTUAttentionTask(64, 4, 16, 8), HSTUAttentionTask(64, 4, 16, 8, max_attn_len=50)
    assert whole == HSTUAttentionTask(64, 4, 16, 8, max_attn_len=None) != narrow
    costs = [task.get_workloads(lengths, targets).tolist() for task in (whole, narrow)]
    assert costs[1] == [narrow.get_workloads(*row) for row in zip(lengths.tolist(), targets.tolist())]
    assert costs[1][:2] < costs[0][:2] and costs[1][2:] == costs[0][2:]
    assert HSTUAttentionTask(64, 4, 16, 8, max_attn_len=2**40).get_workloads(lengths, targets).tolist() == costs[0]
    for wrong in (0, -1, 2.5, "x", True):
        with pytest.raises(ValueError, match=f"max_attn_len is {wrong!r}; it must be an integer of at least 1: .* out"):
            HSTUAttentionTask(64, 4, 16, max_attn_len=wrong)


def test_the_contract_s_formulas():
    h, heads, d, layers, length, targets = 48, 3, 20, 5, 100, 12
    p = heads * d
    pairs = (length - targets) * (length - targets + 1) // 2 + targets * (length - targets) + targets * (4 + 1) // 2
    task = HSTUAttentionTask(h, heads, d, layers, target_group_size=4)
    assert task.get_workloads(length, targets) == layers * (2 * length * h * 4 * p + 4 * p * pairs + 2 * length * p * h)
    full = HSTUAttentionTask(h, heads, d, layers, causal=False)
    assert full.get_workloads(length) == layers * (10 * length * h * p + 4 * p * length**2)
    for gated, factor in ((False, 4), (True, 6)):
        task = SelfAttentionTask(h, 6, d, layers, ffn_hidden_size=96, num_query_groups=2, gated_ffn=gated)
        p = 6 * d
        layer = 2 * length * h * (6 + 4) * d + 4 * p * length * (length + 1) // 2 + 2 * length * p * h
        assert task.get_workloads(length) == layers * (layer + factor * length * h * 96)
    default = SelfAttentionTask(h, heads, d)
    assert default.get_workloads(7) == SelfAttentionTask(h, heads, d, ffn_hidden_size=4 * h).get_workloads(7)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.uint8])
def test_any_integer_dtype_gives_the_same_int64(dtype):
    lengths = (
        torch.tensor([0, 1, 200, 255], dtype=dtype) if dtype == torch.uint8 else torch.tensor([0, 1, 4096], dtype=dtype)
    )
    task = HSTUAttentionTask(64, 4, 16, 8)
    exact = [task.get_workloads(int(length)) for length in lengths]
    workloads = task.get_workloads(lengths)
    assert workloads.dtype == torch.int64 and workloads.tolist() == exact
    assert task.get_workloads(lengths.numpy()).tolist() == exact
    assert isinstance(task.get_workloads(lengths.tolist()), np.ndarray)
    assert all(isinstance(value, int) and value >= 0 for value in exact)


def test_lengths_that_are_wrong_are_refused():
    task = HSTUAttentionTask(64, 4, 16)
    with pytest.raises(ValueError, match="holds -1"):
        task.get_workloads([3, -1])
    with pytest.raises(ValueError, match="row 1 has 5 targets in 4 tokens"):
        task.get_workloads(torch.tensor([9, 4]), torch.tensor([1, 5]))
    for wrong in ((5, [1, 9]), ([1, 2, 3], [1, 2]), (torch.tensor([5, 5]), torch.tensor([1]))):
        with pytest.raises(ValueError, match="num_targets has shape"):
            task.get_workloads(*wrong)
    with pytest.raises(ValueError, match="num_targets holds -2"):
        task.get_workloads([3], [-2])
    with pytest.raises(TypeError, match="float32"):
        task.get_workloads(torch.tensor([1.0]))
    with pytest.raises(ValueError, match="2\\*\\*63"):
        task.get_workloads([2**31])
    with pytest.raises(ValueError, match="hidden_size is 0"):
        HSTUAttentionTask(0, 1, 1)
    with pytest.raises(ValueError, match="num_query_groups is 2, num_heads is 3"):
        SelfAttentionTask(8, 3, 4, num_query_groups=2)
    assert task.get_workloads([]).tolist() == []


def attend(q, k, v, masks, activation):
    """Attention of one row, one query at a time over its own keys; q `(heads, length, dim)`."""
    out = []
    for query, keys in enumerate(masks):
        scores = activation(torch.bmm(q[:, query : query + 1], k[:, keys].transpose(1, 2)))
        out.append(torch.bmm(scores, v[:, keys]))
    return torch.cat(out, dim=1)


def heads_first(x, heads, dim):
    return x.view(-1, heads, dim).transpose(0, 1)


def hstu_layers(lengths, masks, h, heads, d, value_dim, layers, concat):
    """Layers of generative-recommenders' shapes: values of another width than queries, [u, x, y] projected back."""
    widths = [heads * each for each in (value_dim, value_dim, d, d)]
    x = torch.randn(sum(lengths), h, requires_grad=True)
    for _ in range(layers):
        first = torch.randn(h, sum(widths), requires_grad=True)
        last = torch.randn(heads * value_dim * (3 if concat else 1), h, requires_grad=True)
        rows = []
        for part, mask in zip(torch.mm(x, first).split(lengths), masks):
            u, v, q, k = part.split(widths, dim=1)
            q, k, v = (heads_first(each, heads, dim) for each, dim in ((q, d), (k, d), (v, value_dim)))
            attended = attend(q, k, v, mask, torch.nn.functional.silu).transpose(0, 1).reshape(-1, heads * value_dim)
            rows.append(torch.cat([u, attended, u * attended], dim=1) if concat else u * attended)
        x = torch.mm(torch.cat(rows), last)
    return x


def transformer_layers(lengths, masks, h, heads, d, layers, ffn, options):
    groups, gated, vocab = options.get("num_query_groups", heads), options.get("gated_ffn"), options.get("vocab_size")
    experts, active = options.get("num_experts", 1), options.get("num_active_experts", 1)
    p, kv = heads * d, groups * d
    x = torch.randn(sum(lengths), h, requires_grad=True)

    def weight(*shape):
        return torch.randn(*shape, requires_grad=True)

    for _ in range(layers):
        qkv, out = weight(h, p + 2 * kv), weight(p, h)
        rows = []
        for part, mask in zip(torch.mm(x, qkv).split(lengths), masks):
            q, k, v = part.split([p, kv, kv], dim=1)
            q, k, v = heads_first(q, heads, d), heads_first(k, groups, d), heads_first(v, groups, d)
            k, v = (each.repeat_interleave(heads // groups, dim=0) for each in (k, v))
            rows.append(attend(q, k, v, mask, lambda s: s.softmax(-1)).transpose(0, 1).reshape(-1, p))
        x = torch.mm(torch.cat(rows), out)
        blocks = []
        for _ in range(active):  # every token passes `active` blocks
            up = torch.mm(x, weight(h, ffn))
            if gated:
                up = up * torch.mm(x, weight(h, ffn))
            blocks.append(torch.mm(up, weight(ffn, h)))
        if experts > 1:
            blocks.append(torch.mm(x, weight(h, experts)).sum(dim=1, keepdim=True))
        x = sum(blocks)
    return x if vocab is None else torch.mm(x, weight(h, vocab))


def count(function, *args):
    """Operations of the forward pass, and of forward and backward together."""
    with FlopCounterMode(display=False) as forward:
        out = function(*args)
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    return forward.get_total_flops(), forward.get_total_flops() + backward.get_total_flops()


@pytest.mark.parametrize(
    ("heads", "d", "value_dim", "concat"), [(3, 5, 5, False), (3, 5, 7, True), (1, 16, 4, False), (4, 4, 12, True)]
)
@pytest.mark.parametrize(
    ("causal", "group", "targets", "contextual"),
    [
        (True, 1, [0, 3, 5, 1], [0, 0, 0, 0]),
        (True, 3, [0, 7, 5, 0], [0, 0, 0, 0]),
        (True, 2, [1, 4, 0, 0], [2, 3, 6, 1]),
        (False, 1, [0, 2, 5, 0], [0, 0, 0, 0]),
    ],
)
def test_hstu_operations_are_those_that_are_counted(causal, group, targets, contextual, heads, d, value_dim, concat):
    h, layers, lengths = 12, 2, [4, 9, 6, 1]  # heads · d is not the hidden size
    masks = [
        [kept_keys(query, length, count, causal, group, context=context) for query in range(length)]
        for length, count, context in zip(lengths, targets, contextual)
    ]
    options = {"causal": causal, "target_group_size": group, "value_dim": value_dim, "concat_ux": concat}
    workload = int(HSTUAttentionTask(h, heads, d, layers, **options).get_workloads(lengths, targets, contextual).sum())
    forward, both = count(hstu_layers, lengths, masks, h, heads, d, value_dim, layers, concat)
    assert workload == forward and training_flops(workload) == both


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_query_groups": 2, "gated_ffn": True, "vocab_size": 11},
        {"num_query_groups": 1, "gated_ffn": True, "num_experts": 5, "num_active_experts": 2},
        {"num_experts": 3, "num_active_experts": 3, "vocab_size": 7},
    ],
)
@pytest.mark.parametrize("causal", [True, False])
def test_transformer_operations_are_those_that_are_counted(options, causal):
    h, heads, d, layers, ffn = 12, 4, 5, 2, 18
    lengths = [1, 8, 5]
    masks = [[kept_keys(query, length, 0, causal, 1) for query in range(length)] for length in lengths]
    task = SelfAttentionTask(h, heads, d, layers, ffn_hidden_size=ffn, causal=causal, **options)
    forward, both = count(transformer_layers, lengths, masks, h, heads, d, layers, ffn, options)
    workload = int(task.get_workloads(lengths).sum())
    assert workload == forward and training_flops(workload) == both


def test_a_value_dim_that_is_that_of_the_queries_is_none():
    assert HSTUAttentionTask(8, 2, 4, value_dim=4) == HSTUAttentionTask(8, 2, 4)
    assert HSTUAttentionTask(8, 2, 4, value_dim=4).get_workloads(9) == HSTUAttentionTask(8, 2, 4).get_workloads(9)
    for wrong in (0, -1):
        with pytest.raises(ValueError, match=f"value_dim is {wrong}"):
            HSTUAttentionTask(8, 2, 4, value_dim=wrong)


def test_what_no_model_has_is_refused():
    with pytest.raises(ValueError, match="num_active_experts is 3, num_experts is 2"):
        SelfAttentionTask(8, 2, 4, num_experts=2, num_active_experts=3)
    with pytest.raises(ValueError, match="vocab_size is 0"):
        SelfAttentionTask(8, 2, 4, vocab_size=0)
    with pytest.raises(ValueError, match="row 0 has 5 targets and contextual tokens in 4 tokens"):
        HSTUAttentionTask(8, 2, 4).get_workloads([4], [2], [3])
    with pytest.raises(ValueError, match="num_contextual holds -1"):
        HSTUAttentionTask(8, 2, 4).get_workloads([4], [2], [-1])
