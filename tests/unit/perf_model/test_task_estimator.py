"""Workloads: against a count over the mask and the products of a model's matrices, dtypes, and what is refused."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from commons.perf_model.attention_pairs import attention_pairs
from commons.perf_model.task_estimator import HSTUAttentionTask, SelfAttentionTask, training_flops
from tests.helpers.batches.row_parts import rows_of_parts
from tests.helpers.models.reference_attention import sees


def pairs_by_mask(length, targets, causal, group, window=None, context=0):
    """Pairs that the mask keeps, one by one."""
    places = range(length)
    return sum(sees(i, j, length - targets, group, causal, context, window) for i in places for j in places)


@given(
    rows_of_parts(20, 4, least_rows=1),
    st.booleans(),
    st.integers(1, 25) | st.sampled_from([2**31, 10**12, 2**63 - 1]),
    st.integers(1, 21) | st.sampled_from([10**6, 2**62, 2**63 - 1]),
)
def test_pairs_within_a_window_are_those_that_the_mask_keeps(rows, causal, group, window):
    """For integers, arrays and tensors alike; in a window as wide as the row as without one."""
    expected = [pairs_by_mask(*row[:2], causal, group, window, row[2]) for row in zip(*rows)]
    for within in (window, None) if window >= 20 else (window,):
        options = {"causal": causal, "target_group_size": group, "max_attn_len": within}
        assert [attention_pairs(*row, **options) for row in zip(*rows)] == expected
        for make in (np.array, torch.tensor):
            found = attention_pairs(*map(make, rows), **options)
            assert found.dtype in (np.int64, torch.int64) and found.tolist() == expected


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.uint8])
def test_any_integer_dtype_gives_the_same_int64(dtype):
    lengths = torch.tensor([0, 1, 200, 255] if dtype == torch.uint8 else [0, 1, 4096], dtype=dtype)
    task = HSTUAttentionTask(64, 4, 16, 8)
    exact = [task.get_workloads(int(length)) for length in lengths]
    workloads = task.get_workloads(lengths)
    assert workloads.dtype == torch.int64 and workloads.tolist() == exact
    assert task.get_workloads(lengths.numpy()).tolist() == exact
    assert isinstance(task.get_workloads(lengths.tolist()), np.ndarray)
    assert task.get_workloads(lengths[2]).tolist() == exact[2]  # a tensor without dimensions
    assert all(isinstance(value, int) and value >= 0 for value in exact)


@pytest.mark.parametrize("task", [HSTUAttentionTask(64, 4, 16, 8), SelfAttentionTask(64, 4, 16, 8)])
@pytest.mark.parametrize(
    "make",
    [
        lambda lengths: np.array(lengths, np.int32),
        lambda lengths: np.array(lengths, np.uint32),
        lambda lengths: torch.tensor(lengths).int(),
    ],
)
def test_operations_of_a_window_do_not_overflow(task, make):
    """As docs/cost_model.md computes them, from int32 lengths: they were negative or too small."""
    lengths = [0, 70_000, 2**20]
    exact = [task.forward_flops(length, attention_pairs(length, max_attn_len=4096)) for length in lengths]
    found = task.forward_flops(make(lengths), attention_pairs(make(lengths), max_attn_len=4096))
    assert found.dtype in (np.int64, torch.int64) and found.tolist() == exact
    assert attention_pairs(make(lengths)).tolist() == [length * (length + 1) // 2 for length in lengths]
    assert task.forward_flops(np.int32(lengths[2]), np.int32(0)) == task.forward_flops(lengths[2], 0)
    half, whole = (float(task.forward_flops(torch.tensor(tokens), torch.tensor(0.0))) for tokens in (0.5, 1.0))
    assert 0 < half == whole / 2  # sums over rows may be floats


def test_lengths_and_targets_of_any_two_kinds_match():
    """An array or a list with a tensor of targets was numpy's error about operand types."""
    task, counts = HSTUAttentionTask(64, 4, 16), ([9, 5], [2, 1])
    kinds = (list, np.array, torch.tensor)
    made = [task.get_workloads(one(counts[0]), other(counts[1])) for one in kinds for other in kinds]
    assert [each.tolist() for each in made] == [made[0].tolist()] * 9
    assert [type(each) for each in made] == [np.ndarray] * 6 + [torch.Tensor] * 3
    on_device = task.get_workloads(torch.empty(2, dtype=torch.int32, device="meta"), counts[1])
    assert (on_device.device.type, on_device.dtype) == ("meta", torch.int64)  # no check reads its values


@pytest.mark.parametrize("number", [np.int64(4), np.uint8(4), np.int32(4)])
def test_dimensions_may_be_numpys(number):
    """The message was that np.int64(4) must be an integer."""
    task = HSTUAttentionTask(number, number, number, num_layers=number, max_attn_len=number, causal=np.bool_(True))
    assert task == HSTUAttentionTask(4, 4, 4, num_layers=4, max_attn_len=4)
    assert HSTUAttentionTask(4, 4, 4, value_dim=number) == HSTUAttentionTask(4, 4, 4)  # a default, written out
    assert type(task.hidden_size) is int and task.causal is True and type(task.get_workloads(200)) is int


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([3, -1],), "holds -1"),
        ((torch.tensor([9, 4]), torch.tensor([1, 5])), "row 1 has 5 targets in 4 tokens"),
        ((5, [1, 9]), "num_targets has shape"),
        (([1, 2, 3], [1, 2]), "num_targets has shape"),
        ((torch.tensor([5, 5]), torch.tensor([1])), "num_targets has shape"),
        (([3], [-2]), "num_targets holds -2"),
        (([4], [2], [3]), "row 0 has 5 targets and contextual tokens in 4 tokens"),
        (([4], [2], [-1]), "num_contextual holds -1"),
        ((torch.tensor([1.0]),), "seqlen has dtype torch.float32"),
        ((torch.tensor([1.0], dtype=torch.bfloat16),), "seqlen has dtype torch.bfloat16"),
        ((torch.tensor([True]),), "seqlen has dtype torch.bool"),
        ((True,), "seqlen has dtype bool"),
        ((np.ma.array([5, 4], mask=[False, True]),), r"seqlen\[1\] is masked; every row needs a value"),
        ((torch.nested.nested_tensor([torch.arange(3)], layout=torch.jagged),), "seqlen is a nested tensor"),
        (([2**31],), r"2\*\*63"),
    ],
)
def test_lengths_that_are_wrong_are_refused(arguments, message):
    task = HSTUAttentionTask(64, 4, 16)
    with pytest.raises(TypeError if "has dtype" in message or "nested" in message else ValueError, match=message):
        task.get_workloads(*arguments)
    assert task.get_workloads([]).tolist() == []


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: HSTUAttentionTask(0, 1, 1), "hidden_size is 0"),
        (lambda: HSTUAttentionTask(None, 1, 1), "hidden_size is None; it must be an integer of at least 1: correct"),
        (lambda: HSTUAttentionTask(8, 2, 4, num_layers=None), "num_layers is None; it must be an integer"),
        (lambda: HSTUAttentionTask(8, 2, 4, max_attn_len=0), "max_attn_len is 0; it must be an .*, or leave it out"),
        (lambda: HSTUAttentionTask(8, 2, 4, value_dim=0), "value_dim is 0"),
        (lambda: HSTUAttentionTask(8, 2, 4, value_dim=-1), "value_dim is -1"),
        (lambda: SelfAttentionTask(8, 3, 4, num_query_groups=2), "num_query_groups is 2, num_heads is 3"),
        (
            lambda: SelfAttentionTask(8, 2, 4, num_experts=2, num_active_experts=3),
            "num_active_experts is 3, num_experts is 2",
        ),
        (lambda: SelfAttentionTask(8, 2, 4, vocab_size=0), "vocab_size is 0"),
    ],
)
def test_what_no_model_has_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def operations(products):
    """Multiplications and additions of products of matrices `(m, k)` and `(k, n)`."""
    return sum(2 * m * k * n for m, k, n in products)


@pytest.mark.parametrize(("d", "value_dim", "concat"), [(5, 5, False), (5, 7, True), (16, 4, False), (4, 12, True)])
@pytest.mark.parametrize(
    ("causal", "group", "targets", "contextual", "window"),
    [
        (True, 1, [0, 3, 5, 1], [0, 0, 0, 0], None),
        (True, 3, [0, 7, 5, 0], [0, 0, 0, 0], None),
        (True, 2, [1, 4, 0, 0], [2, 3, 6, 1], None),
        (True, 2, [1, 4, 0, 0], [2, 3, 6, 1], 2),
        (False, 1, [0, 2, 5, 0], [0, 0, 0, 0], None),
    ],
)
def test_hstu_operations_are_those_of_its_products(causal, group, targets, contextual, window, d, value_dim, concat):
    """Of generative-recommenders' layers: values of another width than queries, [u, x, y] projected back."""
    h, heads, layers, expected = 12, 3, 2, []  # heads · d is not the hidden size
    rows = [4, 9, 6, 1], targets, contextual
    for length, count, context in zip(*rows):
        pairs = pairs_by_mask(length, count, causal, group, window, context)
        products = [(length, h, 2 * heads * (d + value_dim)), (pairs, heads * d, 1), (pairs, heads * value_dim, 1)]
        products.append((length, heads * value_dim * (3 if concat else 1), h))
        expected.append(layers * operations(products))
    options = {"causal": causal, "target_group_size": group, "value_dim": value_dim, "concat_ux": concat}
    options["max_attn_len"] = window
    assert HSTUAttentionTask(h, heads, d, layers, **options).get_workloads(*rows).tolist() == expected
    assert training_flops(expected[0]) == 3 * expected[0]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_query_groups": 2, "gated_ffn": True, "vocab_size": 11, "ffn_hidden_size": 18},
        {"num_query_groups": 1, "gated_ffn": True, "num_experts": 5, "num_active_experts": 2},
        {"num_experts": 3, "num_active_experts": 3, "vocab_size": 7},
    ],
)
@pytest.mark.parametrize("causal", [True, False])
def test_transformer_operations_are_those_of_its_products(options, causal):
    h, heads, d, layers, expected = 12, 4, 5, 2, []
    groups, ffn = options.get("num_query_groups", heads), options.get("ffn_hidden_size", 4 * h)
    for length in (1, 8, 5):
        pairs = pairs_by_mask(length, 0, causal, 1)
        products = [(length, h, (heads + 2 * groups) * d), (pairs, heads * d, 1), (pairs, heads * d, 1)]
        products.append((length, heads * d, h))
        products += [(length, h, ffn)] * (3 if options.get("gated_ffn") else 2) * options.get("num_active_experts", 1)
        products += [(length, h, options["num_experts"])] if "num_experts" in options else []
        expected.append(layers * operations(products) + operations([(length, h, options.get("vocab_size", 0))]))
    task = SelfAttentionTask(h, heads, d, layers, causal=causal, **options)
    assert task.get_workloads([1, 8, 5]).tolist() == expected
