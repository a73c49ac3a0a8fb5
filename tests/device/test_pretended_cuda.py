"""The pretence itself: what a device does is seen, and every mistake that the other tests look for is found."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.helpers.pretended_cuda import CUDA, Watch, fake_mode, like_on_cuda, pretended_pinning
from tests.helpers.pretended_process import PretendedProcess


def _train_a_layer() -> tuple[int, list[str], int]:
    with fake_mode():
        layer = torch.nn.Linear(4, 4, device=CUDA)
        rows = like_on_cuda(torch.ones(3, 4))
        with Watch() as watch:
            layer(rows).sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.device == CUDA
    return watch.num_launches, [str(wait) for wait in watch.waits], len(watch.mixed)


def test_a_layer_trains_on_a_pretended_device(pretended: PretendedProcess) -> None:
    launches, waits, mixed = pretended.run(_train_a_layer)
    assert launches >= 3  # forward, its sum, and at least one product backward
    assert waits == []
    assert mixed == 0


def _copy_to_the_device() -> tuple[list[bool], list[bool], int]:
    with pretended_pinning() as pinned, fake_mode(), Watch(pinned) as watch:
        torch.arange(4).pin_memory().to(CUDA, non_blocking=True)
        torch.empty(4, pin_memory=True)[1:].to(CUDA, non_blocking=True)
        torch.arange(4).to(CUDA, non_blocking=True)
        torch.arange(4).to(CUDA)
    return [copy.pinned for copy in watch.copies], [copy.non_blocking for copy in watch.copies], len(watch.waits)


def test_copies_are_told_apart(pretended: PretendedProcess) -> None:
    pinned, non_blocking, waits = pretended.run(_copy_to_the_device)
    assert pinned == [True, True, False, False]
    assert non_blocking == [True, True, True, False]
    assert waits == 1


MISTAKES: dict[str, Callable[[torch.Tensor], object]] = {
    "item": lambda rows: rows.sum().item(),
    "to the host": lambda rows: rows.cpu(),
    "size from values": lambda rows: rows.nonzero(),
    "repeats of unknown sum": lambda rows: torch.repeat_interleave(rows, rows.long()),
    "indices on the host": lambda rows: rows[torch.arange(2)],
    "truth of a tensor": lambda rows: bool((rows > 0).any()),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wait_is_found(pretended: PretendedProcess, mistake: str) -> None:
    (where,) = pretended.run(_waits_of, mistake)
    assert "test_pretended_cuda.py" in where


def _waits_of(mistake: str) -> list[str]:
    with fake_mode():
        rows = like_on_cuda(torch.ones(8))
        with Watch() as watch:
            try:
                MISTAKES[mistake](rows)
            except (
                torch._subclasses.fake_tensor.DynamicOutputShapeException,
                torch._subclasses.fake_tensor.DataDependentOutputException,
            ):
                pass
    return [wait.where for wait in watch.waits]


def _mix() -> list[tuple[str, str]]:
    with fake_mode():
        rows = like_on_cuda(torch.ones(8))
        with Watch() as watch:
            try:
                torch.ops.aten.index_select(rows, 0, torch.arange(2))
            except RuntimeError:
                pass  # as a real device does
    return watch.mixed


def test_tensors_on_two_devices_are_found(pretended: PretendedProcess) -> None:
    ((name, where),) = pretended.run(_mix)
    assert name == "aten::index_select"
    assert "test_pretended_cuda.py" in where
