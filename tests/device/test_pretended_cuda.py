"""The pretence itself: waits and mixtures that no other test plants are found, with the line that asks for them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.helpers.cuda.pretended_cuda import Watch, fake_mode, like_on_cuda
from tests.helpers.cuda.pretended_process import PretendedProcess

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
