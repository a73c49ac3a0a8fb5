"""Workloads: the formulas against a count over the mask, dtypes, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from commons.perf_model.attention_pairs import attention_pairs
from commons.perf_model.task_estimator import HSTUAttentionTask, SelfAttentionTask


def pairs_by_mask(length, targets, causal, group, window=10**9, context=0):
    """Count the pairs one by one."""
    kept = 0
    history = length - targets
    for query in range(length):
        for key in range(length):
            places = [
                each if each < history or not causal else history + (each - history) % group for each in (query, key)
            ]
            is_near = abs(places[0] - places[1]) <= window
            if not causal:
                kept += is_near
            elif query < history or key < history:
                kept += key < history if query < context else key <= query and is_near
            else:
                same_group = (query - history) // group == (key - history) // group
                kept += same_group and key <= query and is_near
    return kept


@given(st.integers(0, 24), st.integers(0, 24), st.booleans(), st.integers(1, 5))
def test_pairs_are_those_that_the_mask_keeps(length, targets, causal, group):
    targets = min(targets, length)
    assert attention_pairs(length, targets, causal=causal, target_group_size=group) == pairs_by_mask(
        length, targets, causal, group
    )


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


class SequentialTransducer(torch.nn.Module):
    """A layer of generative-recommenders' shapes: values of another width than queries, [u, x, y] projected back.

    Every query is multiplied with the keys that the mask keeps and no others, so that what torch counts is exact.
    """

    def __init__(self, embedding_dim, num_heads, attention_dim, hidden_dim, *, concat):
        super().__init__()
        self.heads, self.widths = num_heads, [hidden_dim, hidden_dim, attention_dim, attention_dim]
        self.uvqk = torch.nn.Linear(embedding_dim, num_heads * sum(self.widths))
        self.concat = concat
        self.output = torch.nn.Linear(num_heads * hidden_dim * (3 if concat else 1), embedding_dim)

    def forward(self, x, mask):
        split = torch.nn.functional.silu(self.uvqk(x)).split([self.heads * width for width in self.widths], dim=-1)
        u, v, q, k = (part.unflatten(-1, (self.heads, -1)).transpose(0, 1) for part in split)  # (heads, tokens, width)
        rows = []
        for query, kept in enumerate(mask):
            scores = torch.nn.functional.silu(torch.bmm(q[:, query : query + 1], k[:, kept].transpose(1, 2)))
            rows.append(torch.bmm(scores, v[:, kept]))
        attended = torch.cat(rows, dim=1)
        parts = [u, attended, u * attended] if self.concat else [u * attended]
        return x + self.output(torch.cat([part.transpose(0, 1).flatten(1) for part in parts], dim=-1))


@pytest.mark.parametrize("concat", [False, True])
@pytest.mark.parametrize(("heads", "head_dim", "value_dim"), [(2, 8, 8), (3, 5, 7), (1, 16, 4), (4, 4, 12)])
@pytest.mark.parametrize(("length", "targets", "causal"), [(9, 0, True), (9, 4, True), (7, 0, False), (1, 1, True)])
def test_metas_hstu_to_the_operation(concat, heads, head_dim, value_dim, length, targets, causal):
    history = length - targets
    mask = torch.ones(length, length).tril().bool() if causal else torch.ones(length, length).bool()
    mask[history:, history:] = torch.eye(targets).bool()
    layers = [SequentialTransducer(24, heads, head_dim, value_dim, concat=concat) for _ in range(2)]
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        x = torch.randn(length, 24)
        for layer in layers:
            x = layer(x, mask)
    task = HSTUAttentionTask(24, heads, head_dim, 2, causal=causal, value_dim=value_dim, concat_ux=concat)
    assert task.get_workloads(length, targets) == counted.get_total_flops() > 0


def test_a_value_dim_that_is_that_of_the_queries_is_none():
    assert HSTUAttentionTask(8, 2, 4, value_dim=4) == HSTUAttentionTask(8, 2, 4)
    assert HSTUAttentionTask(8, 2, 4, value_dim=4).get_workloads(9) == HSTUAttentionTask(8, 2, 4).get_workloads(9)
    for wrong in (0, -1):
        with pytest.raises(ValueError, match=f"value_dim is {wrong}"):
            HSTUAttentionTask(8, 2, 4, value_dim=wrong)
