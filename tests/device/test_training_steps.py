"""A whole training step of our models on a pretended device: nothing waits, nothing is mixed, few things are launched.

Tables are plain (HSTU) or unsharded TorchRec's (SID-GR), and layers are not compiled. Ceilings of launches are about a
tenth above what there is: whoever adds to a step sees it here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from commons.sequence_batch.batch import BaseBatch
from commons.trainer.config.args import OptimizationArgs
from commons.trainer.optimize.updates import StepUpdate
from hstu.model import HSTURankingModel, HSTURetrievalModel, RetrievalConfig
from hstu.model.config import ExecutionConfig, KernelBackend
from hstu.negatives import with_negatives
from tests.helpers.cuda.pretended_cuda import CUDA, Watch, fake_mode, pretended_pinning
from tests.helpers.models import hstu_models, sid_models
from tests.helpers.ranks.on_ranks import on


@contextlib.contextmanager
def autocast_on_cuda() -> Iterator[None]:
    """Let autocast believe in the device."""
    with (
        mock.patch.object(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False),
        mock.patch.object(torch.cuda, "is_bf16_supported", lambda: True),
    ):
        yield


def require_clean_step(make_model: Callable[[], torch.nn.Module], host: BaseBatch, forward: int, whole: int) -> None:
    """Train one batch that was copied from pinned memory and knows the loss terms of all ranks.

    There is neither a wait nor a mixture, copies from the host are pinned, and there are no more launches than these.
    """
    with autocast_on_cuda(), pretended_pinning() as pinned, fake_mode():
        model = make_model().to(CUDA).train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Watch(pinned) as to_device:
            batch = host.pin_memory().to(CUDA, non_blocking=True)
        known = mock.patch.object(type(batch), "global_loss_terms", lambda *_: 100)
        with known, Watch(pinned) as watch:
            loss, _ = model(batch)
            of_forward = watch.num_launches
            loss.backward()
            optimizer.step()
    for each in (to_device, watch):
        assert not each.waits and not each.mixed, (each.waits, each.mixed)
        assert all(copy.pinned and copy.non_blocking for copy in each.copies), each.copies
    assert not watch.collectives, watch.collectives
    assert 0 < of_forward <= forward, of_forward
    assert of_forward < watch.num_launches <= whole, watch.num_launches


def _hstu(task: str, dtype: str, backend: KernelBackend = "pytorch", **changes: Any) -> Callable[[], torch.nn.Module]:
    execution = ExecutionConfig(compute_dtype=dtype, kernel_backend=backend)
    hstu = dataclasses.replace(hstu_models.HSTU, max_sequence_length=80, execution=execution, **changes)
    if task == "ranking":
        config = dataclasses.replace(hstu_models.CONFIG, hstu=hstu)
        return lambda: HSTURankingModel(config, plain_embeddings=True)
    retrieval = RetrievalConfig(hstu, hstu_models.TABLES, "item", num_negatives=4 if task == "drawn" else -1)
    return lambda: HSTURetrievalModel(retrieval, plain_embeddings=True)


def _hstu_batch(task: str) -> BaseBatch:
    candidates = 3 if task == "ranking" else 0
    batch = hstu_models.random_batch(8, max_num_candidates=candidates, actual_batch_size=7, longest=30)
    batch = hstu_models.with_timestamps(batch)
    if task == "drawn":
        batch = with_negatives(batch, "item_negatives", torch.ones(7, 4, dtype=torch.int64))
    return batch


_TRITON = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton of requirements/dev.txt")
# Task, options, and launches of forward and step: with PyTorch's operations, and with the kernels, each a launch.
_CASES: list[tuple[str, dict[str, Any], dict[KernelBackend, tuple[int, int]]]] = [
    ("ranking", {}, {"pytorch": (210, 560), "triton": (115, 240)}),
    ("ranking", {"time_bias": True}, {"pytorch": (310, 800), "triton": (140, 270)}),
    ("ranking", {"contextual_mask": True}, {"pytorch": (240, 650), "triton": (115, 240)}),
    ("in batch", {}, {"pytorch": (205, 490), "triton": (145, 330)}),
    ("drawn", {}, {"pytorch": (270, 660), "triton": (210, 485)}),
]


@pytest.mark.parametrize(
    "backend, dtype",
    [
        pytest.param("pytorch", "fp32", marks=pytest.mark.slow),
        ("pytorch", "bf16"),
        pytest.param("triton", "fp32", marks=[_TRITON, pytest.mark.slow]),
        pytest.param("triton", "bf16", marks=_TRITON),
    ],
)
@pytest.mark.parametrize(("task", "changes", "most"), _CASES, ids=str)
@on("pretended")
def test_hstu(
    task: str, changes: dict[str, Any], most: dict[KernelBackend, tuple[int, int]], backend: KernelBackend, dtype: str
) -> None:
    require_clean_step(_hstu(task, dtype, backend, **changes), _hstu_batch(task), *most[backend])


@contextlib.contextmanager
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@on("pretended")
def test_sid_gr() -> None:
    with one_rank(), sid_models.model_parallel():
        require_clean_step(sid_models.make_model, sid_models.make_batch(0, num_real=5), 120, 260)


@on("pretended")
def test_accumulating_gradients_waits_for_nothing() -> None:
    """Of an update over two steps with a limit on its gradient."""
    with one_rank(), fake_mode():
        model = torch.nn.Linear(4, 4, device=CUDA)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        args = OptimizationArgs(accumulation_steps=2, max_grad_norm=1.0)
        update = StepUpdate(args, optimizer, model, 10, CUDA)
        with Watch() as watch:
            for step in range(2):
                update.before_step(step)
                model(torch.ones(3, 4, device=CUDA)).sum().backward()
                update.after_step(step, 3)
    assert not watch.waits, watch.waits
    assert update.is_whole_after(2) and not update.is_whole_after(1)
