"""The pretence itself: waits and mixtures that no other test plants are found, with the line that asks for them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch

from tests.helpers.cuda.pretended_cuda import CUDA, Watch, fake_mode, pretended_pinning
from tests.helpers.ranks.on_ranks import on

MISTAKES: dict[str, Callable[[torch.Tensor], object]] = {
    "item": lambda rows: rows.sum().item(),
    "to the host": lambda rows: rows.cpu(),
    "size from values": lambda rows: rows.nonzero(),
    "repeats of unknown sum": lambda rows: torch.repeat_interleave(rows, rows.long()),
    "indices on the host": lambda rows: rows[torch.arange(2)],
    "truth of a tensor": lambda rows: bool((rows > 0).any()),
    "tensors on two devices": lambda rows: torch.ops.aten.index_select(rows, 0, torch.arange(2)),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@on("pretended")
def test_a_wait_or_a_mixture_is_found(mistake: str) -> None:
    with fake_mode():
        rows = torch.ones(8, device=CUDA)
        with Watch() as watch, contextlib.suppress(RuntimeError):  # of what needs a value, or of both devices
            MISTAKES[mistake](rows)
    if mistake == "tensors on two devices":
        ((name, where),) = watch.mixed
        assert name == "aten::index_select", name
    else:
        ((_, where),) = watch.waits
    assert "test_pretended_cuda.py" in where, where


@on("pretended")
def test_a_copy_that_waits_or_is_not_from_pinned_memory_is_found() -> None:
    with pretended_pinning() as pinned, fake_mode(), Watch(pinned) as watch:
        rows = torch.ones(8)
        for source, non_blocking in ((rows.pin_memory(), True), (rows, True), (rows, False)):
            source.to(CUDA, non_blocking=non_blocking)
    found = [(copy.pinned, copy.non_blocking) for copy in watch.copies]
    assert found == [(True, True), (False, True), (False, False)] and len(watch.waits) == 1, (found, watch.waits)
