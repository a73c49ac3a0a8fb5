"""An all-gather of rows that is differentiable: gradients go back to the rank that each row is from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from commons.distributed.process_group import resolve_process_group


def gather_rows(
    values: torch.Tensor, pg_group: dist.ProcessGroup | None = None, counts: Sequence[int] | None = None
) -> torch.Tensor:
    """Gather the rows `(n, …)` of all ranks, rank after rank: a collective call, in the backward pass too.

    n may differ between ranks and may be 0. `counts` are the n of every rank, given on all ranks or on none; without
    them the ranks exchange n, and the host waits. The gradient of a row is the sum of its gradients on all ranks.
    """
    group = resolve_process_group(pg_group)
    if group is None or dist.get_world_size(group) == 1:
        return values
    if counts is None:
        gathered = torch.zeros(dist.get_world_size(group), dtype=torch.int64, device=values.device)
        gathered[dist.get_rank(group)] = values.shape[0]
        dist.all_reduce(gathered, group=group)
        counts = gathered.tolist()
    return _GatherRows.apply(values, list(counts), group)


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, counts: list[int], group: dist.ProcessGroup) -> torch.Tensor:
        ctx.counts, ctx.group = counts, group
        # all_gather needs equal shapes on all ranks.
        padded = values.new_zeros(max(counts), *values.shape[1:])
        padded[: values.shape[0]] = values
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([part[:count] for part, count in zip(parts, counts)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        total = grad.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total.split(ctx.counts)[dist.get_rank(ctx.group)], None, None
