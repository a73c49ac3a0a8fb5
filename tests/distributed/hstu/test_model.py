"""The HSTU model on several ranks: exact gradients, TorchRec's sharding, metrics over all ranks, one way to execute."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from commons.datasets.hstu_batch import HSTUBatch
from commons.distributed.process_group import resolve_process_group
from commons.trainer.ranks.collectives import gather_texts
from commons.trainer.sharding import dense_parameters
from hstu.metrics import RankingMetrics
from hstu.model import ExecutionConfig, HSTURankingModel, RankingOutput, execution, triton_launch
from hstu.model.execution import Execution, choose_execution, execution_of
from hstu.model.triton_blocks import KERNELS, Blocks
from hstu.sharding import build_distributed_model
from tests.helpers.models import hstu_models
from tests.helpers.models.hstu_models import random_batch
from tests.helpers.models.torchrec_model import weights_of
from tests.helpers.ranks.faults import error_of
from tests.helpers.ranks.on_ranks import of_all, on_ranks, on_two_ranks

CPU = torch.device("cpu")
HSTU = dataclasses.replace(hstu_models.HSTU, max_sequence_length=64)
CONFIG = dataclasses.replace(hstu_models.CONFIG, hstu=HSTU)


def share(batch: HSTUBatch, *, empty_rank: int | None = None) -> HSTUBatch:
    """This data-parallel rank's rows: unevenly many, and padding alone on `empty_rank`, unless it is the only one."""
    group = resolve_process_group()
    owners = [rank for rank in range(dist.get_world_size(group)) if rank != empty_rank] or [empty_rank]
    rows = [row for row in range(batch.batch_size) if owners[row * row % len(owners)] == dist.get_rank(group)]
    return batch.index_select(rows) if rows else padding(batch.max_num_candidates)


def padding(max_num_candidates: int = 0) -> HSTUBatch:
    return random_batch(1, actual_batch_size=0, max_num_candidates=max_num_candidates)


# --------------------------------------------------------------------------------------------------------- sharding


def batch_of_step(step: int) -> HSTUBatch:
    return random_batch(12, longest=20, seed=step, max_num_candidates=step % 2 * 4)


def train_sharded(sharding):
    torch.manual_seed(0)
    model = HSTURankingModel(CONFIG)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    parallel = build_distributed_model(
        model, device=CPU, embedding_optimizer="sgd", embedding_lr=0.5, sharding=sharding
    )
    started = weights_of(parallel)
    optimizer = torch.optim.SGD(dense_parameters(parallel).values(), lr=0.5)
    for step in range(4):
        # In one step a rank has no tokens, in the last one none has.
        own = padding(4) if step == 3 else share(batch_of_step(step), empty_rank=1 if step == 1 else None)
        optimizer.zero_grad()
        parallel(own)[0].backward()
        optimizer.step()
    return before, started, weights_of(parallel), sorted(dense_parameters(parallel))


@pytest.mark.parametrize("sharding", [None, "table_wise", "row_wise", {"item": "row_wise", "user": "table_wise"}])
def test_sharded_training_equals_one_process(ranks, sharding):
    before, started, after, names = ranks.run(train_sharded, sharding)[0]
    assert names == sorted(name for name in before if not name.startswith("embedding."))
    for name, value in before.items():
        assert torch.equal(started[name], value), name
    model = HSTURankingModel(CONFIG)
    model.load_state_dict(before)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(3):
        optimizer.zero_grad()
        model(batch_of_step(step))[0].backward()
        optimizer.step()
    for name, value in model.state_dict().items():
        assert not torch.equal(value, before[name]), name
        torch.testing.assert_close(after[name], value, rtol=1e-4, atol=1e-5)


@on_two_ranks
def test_tables_on_meta_are_initialised_by_their_shards():
    torch.manual_seed(dist.get_rank())
    model = HSTURankingModel(CONFIG, embedding_device=torch.device("meta"))
    parallel = build_distributed_model(model, device=CPU, sharding="row_wise")
    parallel(share(batch_of_step(0)))[0].backward()
    table = weights_of(parallel)["embedding.collections.8.embeddings.item.weight"]
    assert bool(table.all()) and 0.9 < float(table.abs().max()) * 50**0.5 < 1.1  # ±1/√rows, and one small update
    assert not torch.equal(table[:2], table[25:27])  # shards do not start alike
    first, second = of_all([parallel.module.dense.head[0].weight.tolist()])
    assert first == second  # rank 0's


@on_two_ranks
def test_what_cannot_be_sharded_is_refused():
    model, plain = HSTURankingModel(CONFIG), HSTURankingModel(CONFIG, plain_embeddings=True)
    refused = [
        ({"embedding_optimizer": "adam"}, "embedding_optimizer is 'adam' on CPU"),
        ({"embedding_optimizer": "lion"}, "embedding_optimizer is 'lion'"),
        ({"embedding_lr": 0.0}, "embedding_lr is 0.0"),
        ({"sharding": "data_parallel"}, "sharding of table 'user' is 'data_parallel' on CPU"),
        (
            {"sharding": {"movie": "row_wise"}},
            "sharding names tables ['movie'], the model has ['user', 'tags', 'item', 'action']: correct the names",
        ),
        ({"sharding": {"item": "diagonal"}}, "sharding of table 'item' is 'diagonal'"),
        ({"model": plain}, "the model has plain embeddings"),
    ]
    for changes, said in refused:
        text = error_of(build_distributed_model, **{"model": model, "device": CPU} | changes)
        assert text.startswith(f"ValueError: {said}"), text


def test_sharding_needs_a_process_group():
    with pytest.raises(RuntimeError, match=r"torch\.distributed is not initialised"):
        build_distributed_model(HSTURankingModel(CONFIG), device=CPU)


@on_ranks
def test_auc_is_over_all_ranks_also_those_without_predictions():
    def gathered(scores_by_rank):
        metrics = RankingMetrics(1)
        for score, label in scores_by_rank[dist.get_rank()]:
            metrics.update(RankingOutput(torch.tensor([[score]]), torch.tensor([[label]]), torch.zeros(()), 1))
        return metrics.compute()["auc_task_0"]

    scores = [[(1.0, 1.0), (5.0, 0.0), (-2.0, 0.0)], [], [(6.0, 1.0)], []]
    assert gathered(scores) == (0.5 if dist.get_world_size() == 2 else 0.75)
    assert math.isnan(gathered([[]] * 4))


# ------------------------------------------------------------------------------------------------------------ execution


@on_ranks
def test_texts_of_all_ranks():
    texts = gather_texts("é" * 3 * dist.get_rank(), CPU)
    assert texts == ["é" * 3 * rank for rank in range(dist.get_world_size())]


@on_ranks
def test_where_one_rank_cannot_compile_none_does():
    rank = dist.get_rank()
    hstu = dataclasses.replace(HSTU, execution=ExecutionConfig(compile=True))
    with (
        mock.patch.object(execution, "compile_problem", lambda _: "it failed (no compiler)" if rank == 1 else None),
        mock.patch.object(execution.platform, "node", lambda: f"node{rank}"),
        mock.patch.object(execution, "_warn_once") as warn,
    ):
        model = HSTURankingModel(dataclasses.replace(CONFIG, hstu=hstu))
        build_distributed_model(model, device=CPU, sharding="table_wise", local_world_size=dist.get_world_size())
        assert execution_of(hstu, CPU, torch.float32) == Execution(False, False)
    said = [call.args[0] for call in warn.call_args_list]
    assert len(said) == (rank == 0) and all("on node node1 (rank 1) it failed (no compiler)" in text for text in said)


class _Ranks(execution._Ranks):
    """Ranks on GPUs in pretence, whose texts go over gloo."""

    def gather(self, value):
        with mock.patch.object(self, "device", CPU):
            return super().gather(value)


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


@on_ranks
def test_the_first_rank_of_every_kind_of_gpu_measures_for_the_others():
    rank = dist.get_rank()
    assert _choose("auto", None) == (True, [rank] if rank < 2 else [], [16 << rank % 2])


@on_ranks
def test_where_one_rank_cannot_use_the_kernels_none_does():
    used, *_ = _choose("auto", 1)
    assert not used
    said = _choose("triton", 1)
    assert "(rank 1) its kernels cannot run; choose 'pytorch'" in said and len(set(of_all([said]))) == 1
