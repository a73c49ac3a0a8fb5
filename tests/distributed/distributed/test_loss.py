"""global_mean_loss: averaged gradients are those of one process over the global batch."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from commons.distributed import global_mean_loss


def _gradient(counts, as_tensor):
    rank = dist.get_rank()
    torch.manual_seed(0)
    weight = torch.randn(5, dtype=torch.float64, requires_grad=True)
    rows = torch.randn(sum(counts), 5, dtype=torch.float64)
    mine = rows[sum(counts[:rank]) : sum(counts[: rank + 1])]
    count = torch.tensor(counts[rank]) if as_tensor else counts[rank]
    loss = global_mean_loss(((mine @ weight) ** 2).sum(), count)
    loss.backward()
    dist.all_reduce(weight.grad)
    average = weight.grad / dist.get_world_size()
    whole = weight.detach().clone().requires_grad_()
    (((rows @ whole) ** 2).sum() / max(1, len(rows))).backward()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    return float((average - whole.grad).abs().max()), bool(torch.isfinite(loss)), loss.requires_grad


@pytest.mark.parametrize("counts", [[3, 4, 1, 2], [0, 5, 0, 1], [0, 0, 0, 0]])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_gradients_equal_one_process(ranks, counts, as_tensor):
    for difference, finite, has_graph in ranks.run(_gradient, counts[: ranks.world_size], as_tensor):
        assert difference < 1e-12 and finite and has_graph


# Every way to write a number; in most of these not every number can be written.
NUMPY = ("f2", "f4", "f8", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8")
TORCH = ["float64", "float32", "bfloat16", "float16", "int64", "int32", "int16", "int8", "uint8"]
WRITTEN = {
    "int": int,
    "float": float,
    "Fraction": Fraction,
    "numpy 0-d": np.array,
    **{f"numpy {kind}": np.dtype(kind).type for kind in NUMPY},
    **{f"torch.{kind}": lambda value, kind=kind: torch.tensor(value, dtype=getattr(torch, kind)) for kind in TORCH},
}
COUNTS = st.tuples(st.sampled_from(sorted(WRITTEN)), st.integers(0, 2**20), st.sampled_from([1, 2, 4, 1024]))


def _written(kind, numerator, denominator):
    """A count as this kind writes it, wrapped or rounded, and what it then is."""
    value = numerator / denominator
    if "int" in kind or kind[-2] in "iu":
        value = int(value) % 128
    elif "16" in kind or kind == "numpy f2":
        value = min(value, 60000.0)
    count = WRITTEN[kind](value)
    return count, float(count)


def _losses(cases):
    return [
        float(global_mean_loss(torch.tensor(1.0, dtype=torch.float64), _written(*case[dist.get_rank()])[0]))
        for case in cases
    ]


@given(st.lists(st.tuples(COUNTS, COUNTS), min_size=1, max_size=20))
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_counts_of_any_types_add_up_exactly(two_ranks, cases):
    expected = []
    for case in cases:
        total = sum(_written(*count)[1] for count in case)
        expected.append(2 / total if total else 0.0)
    assert two_ranks.run(_losses, cases) == [pytest.approx(expected, rel=1e-15)] * 2


def _half_precision(dtype, count):
    """Of a sum of 3 and W ranks: the loss and its dtype, and the gradient where terms of half precision began."""
    terms = torch.tensor([1.0, 2.0], requires_grad=True)
    loss = global_mean_loss(terms.to(dtype).sum(), count)
    loss.backward()
    return loss.item(), loss.dtype, terms.grad.tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_sums_are_scaled_in_float32(two_ranks, dtype):
    for count in (3, 299_999):  # a mean of about 1e-5 has two digits in float16
        for loss, result, gradient in two_ranks.run(_half_precision, dtype, count):
            assert result == torch.float32 and loss == pytest.approx(3 / count, rel=1e-7)
            assert gradient == pytest.approx([1 / count] * 2, rel=0.02)
    assert global_mean_loss(torch.tensor(3.0), 2).dtype == torch.float32
    assert global_mean_loss(torch.tensor(3.0, dtype=torch.float64), 2).dtype == torch.float64


@pytest.mark.parametrize(
    "count",
    [True, np.True_, np.array(True), torch.tensor(False), "3", None, 1j, np.complex64(1), torch.tensor(1j), [3]],
)
def test_what_is_no_number_is_no_count(count):
    with pytest.raises(TypeError, match="must be a number of loss terms"):
        global_mean_loss(torch.tensor(3.0), count)


def test_a_count_that_is_not_a_number_is_not_hidden():
    assert global_mean_loss(torch.tensor(3.0), float("nan")).isnan()


def test_a_group_must_be_one():
    for group in ("dp", 3, [0, 1]):
        with pytest.raises(TypeError, match=r"pg_group is a \w+; it must be a process group"):
            global_mean_loss(torch.tensor(3.0), 2, group)
