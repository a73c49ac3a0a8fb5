"""The comparison at the first step: kernels that compute what they should, and kernels that do not."""

from __future__ import annotations

import pytest
import torch

from hstu.model import triton_attention, triton_launch
from hstu.model.triton_agreement import disagreement
from hstu.model.triton_blocks import KERNELS
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


def test_all_buckets_of_times_are_compared(monkeypatch):
    use_blocks(monkeypatch, 64, 64)
    made = triton_attention.time_table
    order = [0, *range(22, 0, -1), 23]  # the first and the last one stay
    monkeypatch.setattr(triton_attention, "time_table", lambda bias: made(bias[:, order]))
    assert "off by" in str(disagreement.__wrapped__(torch.device("cpu"), KINDS[1]))


@pytest.mark.parametrize("planted", ["backward", None])
def test_every_kernel_that_a_batch_may_take_is_compared(monkeypatch, planted):
    """Also the one that adds up gradients of queries in memory, where a GPU can: long rows take it, short ones not."""
    use_blocks(monkeypatch, 64, 64)
    kind, launch, launched = KINDS[1], triton_attention.launch, set()

    def spoiled(kernel, inputs, outputs, *grad):
        launched.add(kernel)
        launch(kernel, inputs, outputs, *grad)
        if kernel == planted:
            for each in filter(lambda each: each is not None, outputs.values()):
                each.mul_(2)

    monkeypatch.setattr(triton_attention, "launch", spoiled)
    monkeypatch.setattr(triton_attention, "adds_up", lambda _: True)
    found = disagreement.__wrapped__(torch.device("cpu"), kind)
    if planted is None:
        assert found is None and launched == set(KERNELS) - {"backward_value"}  # which is of wide heads
    else:
        assert found is not None and "off by" in found
