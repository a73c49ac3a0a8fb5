"""The comparison at the first step: kernels that compute what they should, and kernels that do not."""

from __future__ import annotations

import pytest
import torch

from hstu.model import triton_launch
from hstu.model.triton_agreement import disagreement
from hstu.model.triton_launch import LayerKind
from tests.unit.hstu.interpreted.cases import use_blocks

KINDS = [
    LayerKind(torch.float32, 16, True, False, 1, has_position=True, has_time=False),
    LayerKind(torch.bfloat16, 16, True, True, 2, has_position=True, has_time=True),
    LayerKind(torch.float16, 24, False, False, 1, has_position=False, has_time=False),
    LayerKind(torch.float32, 16, True, True, 2, has_position=True, has_time=False, window=300),
]


@pytest.mark.parametrize("kind", KINDS)
def test_kernels_that_agree_are_trusted(monkeypatch, kind):
    use_blocks(monkeypatch, 64, 64)
    assert disagreement.__wrapped__(torch.device("cpu"), kind) is None


@pytest.mark.parametrize(
    ("planted", "reason"),
    [
        (lambda scalars: scalars | {"after": scalars["after"] * 1.2}, "it computes outputs that are off by"),
        (lambda scalars: 1 / 0, "its kernels cannot run (ZeroDivisionError: division by zero)"),
        (lambda scalars: scalars | {"window": 300}, "it computes outputs that are off by"),
    ],
)
def test_kernels_that_compute_something_else_are_not(monkeypatch, planted, reason):
    use_blocks(monkeypatch, 64, 64)
    scalars = triton_launch.scalars
    monkeypatch.setattr(triton_launch, "scalars", lambda inputs: planted(scalars(inputs)))
    assert reason in disagreement.__wrapped__(torch.device("cpu"), KINDS[-1])
