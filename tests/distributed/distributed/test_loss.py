"""global_mean_loss: averaged gradients are those of one process over the global batch; it survives symbolic tracing.

In every pipeline that traces: tests/distributed/pipeline/test_torchrec_batch.py.
"""

from __future__ import annotations

import copy
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from commons.distributed import global_mean_loss, mean_over_ranks

# How the count of all ranks may be stated where it is known.
KNOWN = {"known": int, "known to numpy": np.int64}


def _gradient(counts, written):
    rank = dist.get_rank()
    torch.manual_seed(0)
    weight = torch.randn(5, dtype=torch.float64, requires_grad=True)
    rows = torch.randn(sum(counts), 5, dtype=torch.float64)
    mine = rows[sum(counts[:rank]) : sum(counts[: rank + 1])]
    count, known = (torch.tensor if written == "tensor" else int)(counts[rank]), KNOWN.get(written)
    loss = global_mean_loss(((mine @ weight) ** 2).sum(), count, global_count=known and known(sum(counts)))
    loss.backward()
    dist.all_reduce(weight.grad)
    average = weight.grad / dist.get_world_size()
    whole = weight.detach().clone().requires_grad_()
    expected = ((rows @ whole) ** 2).sum() / max(1, len(rows))
    expected.backward()
    mean = mean_over_ranks(loss)
    assert torch.isfinite(loss) and loss.requires_grad and not mean.requires_grad
    return float((average - whole.grad).abs().max()), abs(float(mean - expected))


@pytest.mark.parametrize("counts", [[3, 4, 1, 2], [0, 5, 0, 1], [0, 0, 0, 0]])
@pytest.mark.parametrize("written", ["int", "tensor", *KNOWN])
def test_gradients_equal_one_process(ranks, counts, written):
    for differences in ranks.run(_gradient, counts[: ranks.world_size], written):
        assert max(differences) < 1e-12


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
    known = global_mean_loss(terms.to(dtype).sum(), count, global_count=count * dist.get_world_size())
    loss = global_mean_loss(terms.to(dtype).sum(), count)
    loss.backward()
    assert torch.equal(loss, known) and loss.dtype == known.dtype
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


@pytest.mark.parametrize("count", [-1, float("nan"), float("inf"), torch.tensor(-2.0), np.float32(-0.5)])
def test_a_count_is_finite_and_not_negative(count):
    with pytest.raises(ValueError, match=r"local_count is \S+; it must be finite and at least 0: count the loss terms"):
        global_mean_loss(torch.tensor(3.0), count)
    with pytest.raises(ValueError, match=r"global_count is \S+; it must be finite and at least 0"):
        global_mean_loss(torch.tensor(3.0), 1, global_count=count)


# What one rank alone may get wrong, with what all ranks raise.
MISTAKES = {
    "no sum": (lambda: global_mean_loss(torch.ones(2), 1), ValueError, "local_sum has shape (2,)"),
    "no tensor": (lambda: global_mean_loss(0.0, 0), TypeError, "local_sum is a float"),
    "no number": (lambda: global_mean_loss(torch.tensor(1.0), "x"), TypeError, "local_count is of type str"),
    "no count": (lambda: global_mean_loss(torch.tensor(1.0), None), TypeError, "local_count is of type NoneType"),
    "negative": (lambda: global_mean_loss(torch.tensor(1.0), -1), ValueError, "local_count is -1.0"),
    "not finite": (lambda: global_mean_loss(torch.tensor(1.0), float("nan")), ValueError, "local_count is nan"),
    "no mean": (lambda: mean_over_ranks(torch.ones(3)), ValueError, "value has shape (3,)"),
    "no value": (lambda: mean_over_ranks(None), TypeError, "value is of type NoneType"),
}


def _one_is_wrong(wrong: set[int]) -> list[tuple[str, str]]:
    """Type and text of what each mistake of some ranks raises here; the calls after it work."""
    raised = []
    for name, (mistake, _, _) in MISTAKES.items():
        right = mean_over_ranks if "mean" in name or "value" in name else partial(global_mean_loss, torch.tensor(1.0))
        try:
            mistake() if dist.get_rank() in wrong else right(1)
            raised.append(("nothing", ""))
        except Exception as error:
            raised.append((type(error).__name__, str(error)))
        assert global_mean_loss(torch.tensor(1.0), 1).item() == 1
    return raised


def test_a_mistake_of_one_rank_is_raised_on_all(ranks):
    last = ranks.world_size - 1
    for wrong, named in (({last}, f"rank {last}: "), (set(range(last + 1)), "rank 0: ")):
        results = ranks.run(_one_is_wrong, wrong)
        assert all(result == results[0] for result in results)
        for (kind, text), (_, error, beginning) in zip(results[0], MISTAKES.values(), strict=True):
            assert kind == error.__name__ and text.startswith(named + beginning) and "\n" not in text


def _not_a_number() -> tuple[bool, float]:
    diverged = mean_over_ranks(float("nan") if dist.get_rank() == 1 else 1.0)
    return bool(diverged.isnan()), mean_over_ranks(2.0).item()


def test_a_loss_that_is_not_a_number_is_a_mean_too(ranks):
    assert ranks.run(_not_a_number) == [(True, 2.0)] * ranks.world_size


def test_a_group_must_be_one():
    for group in ("dp", 3, [0, 1]):
        with pytest.raises(TypeError, match=r"pg_group is a \w+; it must be a process group"):
            global_mean_loss(torch.tensor(3.0), 2, group)


# ------------------------------------------------------------------------------------------------ the mean, for a log


class _LogsItsMean(torch.nn.Module):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return mean_over_ranks(value)


def _means(numbers: list[float]) -> list[float]:
    group = dist.new_group([0, 1])  # all ranks make it, some are no members
    mine = numbers[dist.get_rank()]
    means = [mean_over_ranks(written) for written in (mine, torch.tensor(mine), np.float64(mine), torch.tensor(mine))]
    traced = torch.fx.symbolic_trace(_LogsItsMean())(torch.tensor(mine))
    if dist.get_rank() < 2:
        means.append(mean_over_ranks(mine, group) * 2 / dist.get_world_size())
    return [float(mean) for mean in (*means, traced)]


def test_means_of_any_numbers_and_of_a_group(ranks):
    numbers = [1.0, 0.0, 0.0, 0.0]
    for means in ranks.run(_means, numbers[: ranks.world_size]):
        assert means == [1 / ranks.world_size] * len(means)


def test_what_has_no_mean_is_refused():
    with pytest.raises(ValueError, match=r"value has shape \(2,\); it must be a scalar: take its mean or sum"):
        mean_over_ranks(torch.ones(2))
    for value in (True, torch.tensor(1j), "3"):
        with pytest.raises(TypeError, match=r"value is of type \w+; it must be a number for each rank: pass float"):
            mean_over_ranks(value)


# --------------------------------------------------------------------------------------------------------------- traced


class Reduction(nn.Module):
    def __init__(self, group=None):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))
        self.groups = [group]

    def forward(self, terms, count):
        return global_mean_loss((terms * self.weight).sum(), count, self.groups[0])


def _graph():
    """A traced graph on its own: what it computes with a group of one, and whether it can be copied."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    rank = dist.get_rank()
    losses = []
    for group in (None, groups[rank]):
        graph = copy.deepcopy(torch.fx.symbolic_trace(Reduction(group)))
        loss = graph(torch.tensor([1.0, 2.0 + rank]), torch.tensor(2 + rank))
        loss.backward()
        losses.append((loss.item(), graph.weight.grad.item()))
    return losses


def test_a_traced_graph_runs_by_itself(two_ranks):
    # sums 6 and 8 of 2 and 3 terms
    (all_0, own_0), (all_1, own_1) = two_ranks.run(_graph)
    assert [all_0, all_1] == [pytest.approx((2 * 6 / 5, 2 * 3 / 5)), pytest.approx((2 * 8 / 5, 2 * 4 / 5))]
    assert [own_0, own_1] == [pytest.approx((6 / 2, 3 / 2)), pytest.approx((8 / 3, 4 / 3))]


def _compiled():
    model = torch.compile(Reduction(), backend="eager", fullgraph=True)
    loss = model(torch.tensor([1.0, 2.0 + dist.get_rank()]), torch.tensor(2 + dist.get_rank()))
    loss.backward()
    return loss.item(), model.weight.grad.item()


def test_torch_compile_finds_no_break_in_the_loss(two_ranks):
    assert two_ranks.run(_compiled) == [pytest.approx((2 * 6 / 5, 2 * 3 / 5)), pytest.approx((2 * 8 / 5, 2 * 4 / 5))]


def test_mistakes_are_told_when_a_traced_model_runs():
    class Unsummed(nn.Module):
        def forward(self, terms, count):
            return global_mean_loss(terms, count)

    graph = torch.fx.symbolic_trace(Unsummed())
    assert graph(torch.tensor(3.0), 2).item() == 1.5
    with pytest.raises(ValueError, match=r"local_sum has shape \(2,\) .* sum the loss terms"):
        graph(torch.ones(2), 2)
    with pytest.raises(ValueError, match=r"local_count has shape \(2,\)"):
        graph(torch.tensor(3.0), torch.ones(2))
    with pytest.raises(TypeError, match="local_count is of type bool"):
        graph(torch.tensor(3.0), torch.tensor(True))
