"""Gradients follow redistributed rows and end where rows are scattered, whether a row moves or not."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from commons.dispatch import redistribute_balanced, scatter_balanced


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
def test_what_requires_gradients_does_not_depend_on_whether_rows_move(two_ranks, moves):
    assert two_ranks.run(which_require_gradients, moves) == [(moves, [True] * 3 + [False] * 2)] * 2
