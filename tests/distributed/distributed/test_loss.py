"""global_mean_loss: averaged gradients are those of one process over the global batch; it survives symbolic tracing.

In every pipeline that traces: tests/distributed/pipeline/test_torchrec_batch.py.
"""

from __future__ import annotations

import copy
import itertools
import re
from fractions import Fraction

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import fx, nn

from commons.distributed import global_mean_loss, mean_over_ranks
from tests.helpers.ranks.faults import error_of
from tests.helpers.ranks.on_ranks import of_all, on_ranks, on_two_ranks

# How the count of all ranks may be stated where it is known.
KNOWN = {"known": int, "known to numpy": np.int64}


@pytest.mark.parametrize("counts", [[3, 4, 1, 2], [0, 5, 0, 1], [0, 0, 0, 0]])
@pytest.mark.parametrize("written", ["int", "tensor", *KNOWN])
@on_ranks
def test_gradients_equal_one_process(counts, written):
    rank, counts = dist.get_rank(), counts[: dist.get_world_size()]
    torch.manual_seed(0)
    weight = torch.randn(5, dtype=torch.float64, requires_grad=True)
    rows = torch.randn(sum(counts), 5, dtype=torch.float64)
    mine = rows[sum(counts[:rank]) : sum(counts[: rank + 1])]
    count, known = (torch.tensor if written == "tensor" else int)(counts[rank]), KNOWN.get(written)
    loss = global_mean_loss(((mine @ weight) ** 2).sum(), count, global_count=known and known(sum(counts)))
    loss.backward()
    dist.all_reduce(weight.grad)
    whole = weight.detach().clone().requires_grad_()
    expected = ((rows @ whole) ** 2).sum() / max(1, len(rows))
    expected.backward()
    mean = mean_over_ranks(loss)
    assert torch.isfinite(loss) and loss.requires_grad and not mean.requires_grad
    assert float((weight.grad / dist.get_world_size() - whole.grad).abs().max()) < 1e-12
    assert abs(float(mean - expected)) < 1e-12


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
COUNTS = [
    *(write(3) for write in WRITTEN.values()),
    0.5,
    Fraction(1, 4),
    2**24 + 1,
    torch.tensor(2**24 + 1),
    np.int64(0),
]


@on_two_ranks
def test_counts_of_any_types_add_up_exactly():
    one = torch.tensor(1.0, dtype=torch.float64)
    for pair in itertools.product(COUNTS, COUNTS):
        total = sum(map(float, pair))
        loss = float(global_mean_loss(one, pair[dist.get_rank()]))
        assert loss == pytest.approx(2 / total if total else 0.0, rel=1e-15), pair


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@on_two_ranks
def test_half_precision_sums_are_scaled_in_float32(dtype):
    for count in (3, 299_999):  # a mean of about 1e-5 has two digits in float16
        terms = torch.tensor([1.0, 2.0], requires_grad=True)
        known = global_mean_loss(terms.to(dtype).sum(), count, global_count=2 * count)
        loss = global_mean_loss(terms.to(dtype).sum(), count)
        loss.backward()
        assert torch.equal(loss, known) and loss.dtype == known.dtype == torch.float32
        assert loss.item() == pytest.approx(3 / count, rel=1e-7)
        assert terms.grad.tolist() == pytest.approx([1 / count] * 2, rel=0.02)
    assert global_mean_loss(torch.tensor(3.0), 2).dtype == torch.float32
    assert global_mean_loss(torch.tensor(3.0, dtype=torch.float64), 2).dtype == torch.float64


ONE = torch.tensor(1.0)
NO_NUMBERS = [True, np.True_, np.array(True), "3", None, 1j, np.complex64(1), *map(torch.tensor, (False, 1j)), [3]]
NEGATIVE = [-1, float("nan"), float("inf"), torch.tensor(-2.0), np.float32(-0.5)]


def of_sum(local_sum):
    return global_mean_loss(local_sum, 1)


def of_count(count):
    return global_mean_loss(ONE, count)


def of_value(value):
    return mean_over_ranks(value)


def of_known(count):
    return global_mean_loss(ONE, 2, global_count=count)


# What one rank alone may get wrong, and what all ranks raise.
MISTAKES = [
    (of_sum, ValueError, r"local_sum has shape \(2,\) .* sum the loss terms", [torch.ones(2)]),
    (of_sum, TypeError, "local_sum is a float", [0.0]),
    (of_count, ValueError, r"local_count has shape \(2,\)", [torch.ones(2)]),
    (of_count, TypeError, r"local_count is of type \w+; it must be a number of loss terms", NO_NUMBERS),
    (of_count, ValueError, r"local_count is \S+; it must be finite and at least 0: count the loss terms", NEGATIVE),
    (of_value, ValueError, r"value has shape \(2,\); it must be a scalar: take its mean or sum", [torch.ones(2)]),
    (of_value, TypeError, r"value is of type \w+; it must be a number for each rank: pass float", NO_NUMBERS),
]
# What a rank finds by itself.
OF_KNOWN_COUNTS = [
    (of_known, ValueError, r"global_count is \S+; it must be finite and at least 0", NEGATIVE[:3]),
    (of_known, ValueError, r"global_count has shape \(1,\)", [torch.ones(1)]),
    (of_known, TypeError, r"global_count is of type (bool|str); it must be a number of loss terms", [True, "3"]),
    (of_known, TypeError, "global_count is a tensor on meta; it must be a number on the host", [ONE.to("meta")]),
    (lambda group: global_mean_loss(ONE, 2, group), TypeError, r"the group is of type \w+; it must", ["dp", 3, [0]]),
]


def test_mistakes_are_told_in_a_traced_model_too():
    for table, is_traced in ((MISTAKES, True), (OF_KNOWN_COUNTS, False)):
        for function, error, said, values in table:
            calls = [function, fx.symbolic_trace(function)] if is_traced else [function]
            for value, call in itertools.product(values, calls):
                with pytest.raises(error, match=f"^{said}"):
                    call(value)


@on_ranks
def test_a_mistake_of_one_rank_is_raised_on_all():
    """In the same words, and the calls after it work."""
    last = dist.get_world_size() - 1
    for wrong, named in (({last}, last), (set(range(last + 1)), 0)):
        for function, error, said, values in MISTAKES:
            for value in values:
                text = error_of(function, value if dist.get_rank() in wrong else ONE)
                assert re.match(f"{error.__name__}: rank {named}: {said}", text) and "\n" not in text, text
                assert len(set(of_all([text]))) == 1 and global_mean_loss(ONE, 1).item() == 1


@on_ranks
def test_means_of_any_numbers_and_of_a_group():
    group = dist.new_group([0, 1])  # all ranks make it, some are no members
    mine = 0.0 if dist.get_rank() else 1.0
    assert mean_over_ranks(float("nan") if dist.get_rank() == 1 else 1.0).isnan()  # of a loss that has diverged
    means = [mean_over_ranks(written) for written in (mine, torch.tensor(mine), np.float64(mine), torch.tensor(mine))]
    means.append(fx.symbolic_trace(of_value)(torch.tensor(mine)))
    assert means == [1 / dist.get_world_size()] * 5
    assert dist.get_rank() > 1 or mean_over_ranks(mine, group) == 0.5


class Reduction(nn.Module):
    def __init__(self, group=None):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))
        self.groups = [group]

    def forward(self, terms, count):
        return global_mean_loss((terms * self.weight).sum(), count, self.groups[0])


@on_two_ranks
def test_a_graph_runs_by_itself_and_torch_compile_finds_no_break_in_the_loss():
    """A traced graph that was copied, one over a group of one rank, and a compiled one."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    rank, losses = dist.get_rank(), []
    graphs = [copy.deepcopy(fx.symbolic_trace(Reduction(group))) for group in (None, groups[rank])]
    for graph in (*graphs, torch.compile(Reduction(), backend="eager", fullgraph=True)):
        loss = graph(torch.tensor([1.0, 2.0 + rank]), torch.tensor(2 + rank))
        loss.backward()
        losses.append((loss.item(), graph.weight.grad.item()))
    of_all, own, compiled = losses
    total, terms = 6 + 2 * rank, 2 + rank
    assert of_all == pytest.approx((2 * total / 5, total / 5)) and compiled == of_all
    assert own == pytest.approx((total / terms, total / terms / 2))
