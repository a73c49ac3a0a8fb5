"""Ranks compute the layers in one way, which works on all of them."""

from __future__ import annotations

import contextlib
import dataclasses
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist

from commons.trainer.ranks.collectives import gather_texts
from hstu.model import ExecutionConfig, HSTURankingModel, execution, triton_launch
from hstu.model.execution import Execution, choose_execution, execution_of
from hstu.model.triton_blocks import KERNELS, Blocks
from hstu.sharding import build_distributed_model
from tests.helpers.models.hstu_models import CONFIG, HSTU

CPU = torch.device("cpu")


def _texts():
    return gather_texts("é" * 3 * dist.get_rank(), CPU)


def test_texts_of_all_ranks(ranks):
    expected = ["é" * 3 * rank for rank in range(ranks.world_size)]
    assert ranks.run(_texts) == [expected] * ranks.world_size


def _compiles():
    """Rank 1 has no compiler."""
    problem = "it failed (no compiler)" if dist.get_rank() == 1 else None
    hstu = dataclasses.replace(HSTU, execution=ExecutionConfig(compile=True))
    with (
        mock.patch.object(execution, "compile_problem", lambda device: problem),
        mock.patch.object(execution.platform, "node", lambda: f"node{dist.get_rank()}"),
        mock.patch.object(execution, "_warn_once") as warn,
    ):
        model = HSTURankingModel(dataclasses.replace(CONFIG, hstu=hstu))
        build_distributed_model(model, device=CPU, sharding="table_wise", local_world_size=dist.get_world_size())
        return execution_of(hstu, CPU, torch.float32), [call.args[0] for call in warn.call_args_list]


def test_where_one_rank_cannot_compile_none_does(ranks):
    found = ranks.run(_compiles)
    assert [each for each, _ in found] == [Execution(False, False)] * ranks.world_size
    (warning,) = found[0][1]
    assert "on node node1 (rank 1) it failed (no compiler)" in warning
    assert all(warnings == [] for _, warnings in found[1:])


class _Ranks(execution._Ranks):
    """Ranks on GPUs in pretence, whose texts go over gloo."""

    def gather(self, value):
        gpu, self.device = self.device, CPU
        try:
            return super().gather(value)
        finally:
            self.device = gpu


def _choose(backend, broken):
    """Ranks with GPUs of two kinds in turn, each of which measures other blocks; the kernels fail on one rank."""
    rank, measured = dist.get_rank(), []
    blocks = dict.fromkeys(KERNELS, Blocks(16 << rank, 16, 4, 2))
    properties = SimpleNamespace(
        name=f"kind {rank % 2}", major=9, minor=0, multi_processor_count=9, shared_memory_per_block_optin=9
    )

    def measure(*_):
        measured.append(rank)
        return blocks

    changes = {
        "_Ranks": _Ranks,
        "why_not": lambda *_: None,
        "choose_blocks": measure,
        "slowness": lambda *_: None,
        "disagreement": lambda *_: "its kernels cannot run" if rank == broken else None,
    }
    hstu = dataclasses.replace(HSTU, execution=ExecutionConfig("bf16", kernel_backend=backend))
    with contextlib.ExitStack() as stack:
        for name, change in changes.items():
            stack.enter_context(mock.patch.object(execution, name, change))
        stack.enter_context(mock.patch.object(triton_launch, "_BLOCKS", {}))
        stack.enter_context(mock.patch.object(torch.cuda, "is_available", lambda: True))
        stack.enter_context(mock.patch.object(torch.cuda, "get_device_properties", lambda _: properties))
        stack.enter_context(mock.patch.object(torch.cuda, "device", contextlib.nullcontext))
        try:
            chosen = choose_execution(hstu, torch.device("cuda", 0))
        except ValueError as error:
            return str(error)
        return chosen.uses_triton, measured, [each["forward"].queries for each in triton_launch._BLOCKS.values()]


def test_the_first_rank_of_every_kind_of_gpu_measures_for_the_others(ranks):
    first = [rank % 2 for rank in range(ranks.world_size)]
    expected = [(True, [rank] if rank < 2 else [], [16 << first[rank]]) for rank in range(ranks.world_size)]
    assert ranks.run(_choose, "auto", None) == expected


def test_where_one_rank_cannot_use_the_kernels_none_does(ranks):
    assert [used for used, *_ in ranks.run(_choose, "auto", 1)] == [False] * ranks.world_size
    refused = set(ranks.run(_choose, "triton", 1))
    assert len(refused) == 1 and "(rank 1) its kernels cannot run; choose 'pytorch'" in refused.pop()
