"""Gradients through redistributed rows and their way home are those of rows that stay where they are."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nested import nested_tensor

from commons.dispatch import redistribute, redistribute_balanced, scatter_balanced
from commons.micro_batching import MicroBatchSpec, pack_micro_batches
from tests.helpers.models.torchrec_model import make_batch
from tests.helpers.ranks.on_ranks import on_ranks, on_two_ranks

WIDTH = 3
# By rank; the first has most of the work, another one no row.
COUNTS = {2: [7, 1], 4: [9, 0, 2, 1]}


def rows_of(rank):
    """Images of a rank, and what each costs."""
    count = COUNTS[dist.get_world_size()][rank]
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(count, WIDTH, generator=generator, dtype=torch.float64), [1 + rank + row for row in range(count)]


def encoder():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)).double()


def loss_of(features, rank):
    """Depends on the rank and on the order of its rows."""
    weights = torch.arange(1, len(features) + 1, dtype=torch.float64) / (rank + 2)
    return (weights[:, None] * features.sin()).sum()


def _gradients(features_of):
    """Of how this rank's images are scaled and, summed over the ranks, of the encoder."""
    rank, model = dist.get_rank(), encoder()
    images, costs = rows_of(rank)
    scale = torch.linspace(1, 2, len(images), dtype=torch.float64, requires_grad=True)
    loss_of(features_of(model, images * scale[:, None], costs), rank).backward()
    for parameter in (scale, *model.parameters()):
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    for weight in model.parameters():
        dist.all_reduce(weight.grad)
    return [parameter.grad for parameter in (scale, *model.parameters())]


def _stays(model, images, costs):
    return model(images)


def _moves(model, images, costs):
    batch = {"image": images, "id": torch.arange(len(images))} if costs else None
    moved = redistribute_balanced(batch, costs or None, equal_size=False, slack=0.0)
    assert moved.num_moved > 0
    return moved.send_home({"feature": model(moved.batch["image"]), "unused": moved.batch["image"] * 2})["feature"]


def _in_micro_batches(model, images, costs):
    """Results of micro-batches that were planned together."""
    batch, spec = {"image": images.detach()}, MicroBatchSpec(max_tokens_per_mb=20, packing_algorithm="refined")
    packed = pack_micro_batches(batch if costs else None, spec, costs or None, joint=True)
    return packed.send_home([model(each["image"]) for each in packed])


def _require_equal(found, expected):
    """To the order of sums."""
    for each, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(each, wanted, rtol=1e-10, atol=1e-12)


@on_ranks
def test_gradients_equal_those_without_it():
    """Every row and every gradient moves once."""
    with mock.patch.object(redistribute, "exchange", side_effect=redistribute.exchange) as exchanges:
        _require_equal(_gradients(_moves), _gradients(_stays))
    assert exchanges.call_count == 4


@on_ranks
def test_results_of_micro_batches_take_their_gradients_along():
    _require_equal(_gradients(_in_micro_batches)[1:], _gradients(_stays)[1:])


@on_two_ranks
def test_a_batch_of_0_rows_has_gradients_of_0():
    """As in plain PyTorch, where a user's all-reduce of them then works; they were None, and only on that rank."""
    model, rank = encoder(), dist.get_rank()
    features = model(rows_of(0)[0][: 0 if rank else 4])
    moved = redistribute_balanced({"x": features}, [1] * len(features))
    moved.send_home(moved.batch["x"] * 2).sum().backward()
    assert [bool(weight.grad.any()) for weight in model.parameters()] == [rank == 0] * 4


@on_two_ranks
def test_autograd_grad_reaches_a_rank_without_rows_through_a_batch_of_0_rows():
    """With None nothing leads from its loss to its encoder, so that torch skips the backward collective there."""
    model, head, rank = encoder(), torch.full((2,), 3.0, dtype=torch.float64, requires_grad=True), dist.get_rank()
    images = rows_of(0)[0][: 0 if rank else 4]
    moved = redistribute_balanced({"x": model(images)}, [1] * len(images))
    loss = (moved.batch["x"] * head).square().sum()
    *found, of_head = torch.autograd.grad(loss, (*model.parameters(), head), create_graph=True)
    expected = torch.autograd.grad((model(images) * head).square().sum(), tuple(model.parameters()))
    _require_equal(found, expected)
    assert moved.num_moved == 2 and bool(of_head.all())
    with pytest.raises(RuntimeError, match="once_differentiable"):  # a gradient penalty would have no effect
        sum(each.square().sum() for each in found).backward()


@on_two_ranks
def test_dtypes_are_kept():
    batch = {"x": torch.arange(3.0).add(dist.get_rank()).to(torch.bfloat16).requires_grad_()}
    moved = redistribute_balanced(batch, [1, 5 + dist.get_rank(), 9])
    home = moved.send_home(moved.batch["x"] * moved.batch["x"])
    home.sum().backward()
    assert home.dtype == batch["x"].grad.dtype == torch.bfloat16 and torch.equal(batch["x"].grad, 2 * batch["x"])


@on_two_ranks
def test_padding_rows_have_a_gradient_of_zero():
    batch = make_batch([1 + dist.get_rank(), 3], 4)
    batch.target = torch.arange(4.0, dtype=torch.float64).requires_grad_()
    moved = redistribute_balanced(batch, [1, 2, 0, 0])
    (moved.batch.target * moved.indices).sum().backward()
    assert batch.target.grad.tolist() == [2 * dist.get_rank(), 2 * dist.get_rank() + 1, 0, 0]


@pytest.mark.parametrize("moves", [False, True])
@on_two_ranks
def test_what_requires_gradients_does_not_depend_on_whether_rows_move(moves):
    rank = dist.get_rank()
    batch = {"x": torch.arange(4.0).requires_grad_() * 2, "leaf": torch.ones(4, requires_grad=True)}
    moved = redistribute_balanced(batch, [1 + (20 * rank if moves else 0)] * 4)
    home = moved.send_home({"score": moved.batch["x"].clone().requires_grad_() * 3})
    share = scatter_balanced(*((batch, [1] * 4) if rank == 0 else (None, None)))
    results = share.gather_back(share.batch["x"].requires_grad_() * 2, to_all=True)
    assert home["score"].tolist() == [0, 6, 12, 18] and results.tolist() == [0, 4, 8, 12]
    with torch.no_grad():
        unfollowed = redistribute_balanced(batch, [1] * 4)
        unfollowed_home = unfollowed.send_home(unfollowed.batch["x"])
        jagged = nested_tensor([torch.ones(2)] * 4, layout=torch.jagged, requires_grad=True)
        redistribute_balanced({"jagged": jagged}, [1] * 4)  # an error only where gradients are recorded
    assert (moved.num_moved > 0) == moves
    assert all(each.requires_grad for each in (*moved.batch.values(), home["score"]))
    detached = [results, share.batch["leaf"], *unfollowed.batch.values(), unfollowed_home]
    assert not any(each.requires_grad for each in (*detached, moved.send_home(torch.ones(4))))


@on_two_ranks
def test_a_field_may_require_gradients_on_one_rank_only():
    batch, rank = {"id": torch.ones(4), "x": torch.ones(4)}, dist.get_rank()
    x = batch["x"].requires_grad_(rank == 0)
    moved = redistribute_balanced(batch, [1 if rank else 9] * 4, slack=0.0)
    (moved.batch["x"] * moved.indices).sum().backward()
    assert moved.num_moved > 0 and (x.grad is None if rank else x.grad.tolist() == [0, 1, 2, 3])
