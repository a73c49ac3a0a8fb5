"""global_mean_loss: averaged gradients are those of one process over the global batch."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

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
