"""Fields that travel arrive whole, or are refused on every rank; gradients end whether a row moves or not."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist

from commons.dispatch import redistribute_balanced, scatter_balanced


class Celsius(torch.Tensor):
    """A tensor whose type says what its values are."""


def error_of(field, call):
    rank = dist.get_rank()
    batch = {"x": torch.arange(4)}
    if field == "masked":
        batch["deep"] = [np.ma.array([1.0, 2.0, 3.0, 4.0], mask=[0, 1, 0, 1])]
        batch["deep"].append(torch.ones(4))
    else:
        batch["heat"] = torch.ones(4).as_subclass(Celsius)
    try:
        if call == "scatter_balanced":
            scatter_balanced(*((batch, [1] * 4) if rank == 0 else (None, None)))
        else:
            redistribute_balanced(batch, [1 + 20 * rank] * 4)
    except TypeError as error:
        return str(error)
    return None


@pytest.mark.parametrize("call", ["scatter_balanced", "redistribute_balanced"])
@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("masked", "field 'deep.0' is a MaskedArray; rows are taken from plain arrays"),
        ("subclass", "'heat' is a Celsius; it would arrive as a plain tensor: pass one"),
    ],
)
def test_what_would_be_lost_is_refused_on_every_rank(two_ranks, call, field, message):
    errors = two_ranks.run(error_of, field, call, timeout=60)
    assert all(error is not None and message in error for error in errors), errors


def which_require_gradients(moves):
    rank = dist.get_rank()
    batch = {"x": torch.arange(4.0).requires_grad_() * 2, "leaf": torch.ones(4, requires_grad=True)}
    moved = redistribute_balanced(batch, [1 + (20 * rank if moves else 0)] * 4)
    home = moved.send_home({"score": moved.batch["x"].clone().requires_grad_() * 3})
    share = scatter_balanced(*((batch, [1] * 4) if rank == 0 else (None, None)))
    results = share.gather_back(share.batch["x"].requires_grad_() * 2, to_all=True)
    assert home["score"].tolist() == [0, 6, 12, 18] and results.tolist() == [0, 4, 8, 12]
    held = [*moved.batch.values(), home["score"], results, share.batch["leaf"]]
    return moved.num_moved > 0, [each.requires_grad for each in held]


@pytest.mark.parametrize("moves", [False, True])
def test_gradients_end_whether_rows_move_or_not(two_ranks, moves):
    assert two_ranks.run(which_require_gradients, moves) == [(moves, [False] * 5)] * 2
