"""The HSTU model on several ranks: exact gradients, TorchRec's sharding, a stock pipeline, metrics over all ranks."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from commons.datasets.hstu_batch import FeatureConfig, HSTUBatch, RandomDistribution
from hstu.metrics import RankingMetrics
from hstu.model import HSTUConfig, HSTURankingModel, RankingConfig, RankingOutput
from hstu.sharding import build_distributed_model, dense_parameters, require_rows_on_all_ranks

CPU = torch.device("cpu")
TABLES = {"user": 20, "item": 50, "action": 3}  # with four ranks, row-wise, one rank holds no row of "action"
CONFIG = RankingConfig(
    hstu=HSTUConfig(hidden_size=8, num_layers=2, num_attention_heads=2, kv_channels=4, max_sequence_length=64),
    embedding_tables=TABLES,
    prediction_head_arch=(8, 2),
    num_tasks=2,
)


def global_batch(batch_size: int, seed: int, max_num_candidates: int = 0) -> HSTUBatch:
    return HSTUBatch.random(
        batch_size,
        [
            FeatureConfig(["user"], [20], 1, is_jagged=False),
            FeatureConfig(["item", "action"], [50, 3], 20, True, RandomDistribution("zipf", low=1, high=20, alpha=1.2)),
        ],
        "item",
        ["user"],
        "action",
        max_num_candidates,
        2,
        device=CPU,
        generator=torch.Generator().manual_seed(seed),
    )


def share(batch: HSTUBatch, *, empty_rank: int | None = None) -> HSTUBatch:
    """This rank's rows: unevenly many, and padding alone on `empty_rank`."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    owners = [r for r in range(world_size) if r != empty_rank]
    owner = [owners[row * row % len(owners)] for row in range(batch.batch_size)]
    rows = [row for row in range(batch.batch_size) if owner[row] == rank]
    own = batch.index_select(rows or [0])
    return own if rows else empty_like(own)


def empty_like(batch: HSTUBatch) -> HSTUBatch:
    """One padding row."""

    def empty(kjt: KeyedJaggedTensor) -> KeyedJaggedTensor:
        keys = kjt.keys()
        return KeyedJaggedTensor(keys, kjt.values()[:0], lengths=torch.zeros(len(keys), dtype=torch.int64), stride=1)

    fields = dict(batch.__dict__)
    fields.update(features=empty(batch.features), labels=empty(batch.labels), batch_size=1, actual_batch_size=0)
    if batch.num_candidates is not None:
        fields["num_candidates"] = torch.zeros(1, dtype=torch.int64)
    return HSTUBatch(**fields)


# --------------------------------------------------------------------------------------------------------- sharding


def whole_weights(model) -> dict[str, torch.Tensor]:
    """Every weight, with the shards of all ranks put together."""
    result = {}
    for name, value in sorted(model.state_dict().items()):
        if hasattr(value, "local_shards"):
            whole = torch.zeros(value.size())
            for shard in value.local_shards():
                first = shard.metadata.shard_offsets[0]
                whole[first : first + shard.tensor.shape[0]] = shard.tensor
            dist.all_reduce(whole)
            value = whole
        result[name] = value.detach().clone()
    return result


def train_sharded(sharding):
    torch.manual_seed(0)
    model = HSTURankingModel(CONFIG)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    parallel = build_distributed_model(
        model, device=CPU, embedding_optimizer="sgd", embedding_lr=0.5, sharding=sharding
    )
    started = whole_weights(parallel)
    optimizer = torch.optim.SGD(dense_parameters(parallel).values(), lr=0.5)
    for step in range(4):
        # In one step a rank has no tokens, in the last one none has.
        batch = global_batch(12, step, max_num_candidates=step % 2 * 4)
        own = empty_like(batch.index_select([0])) if step == 3 else share(batch, empty_rank=1 if step == 1 else None)
        optimizer.zero_grad()
        parallel(own)[0].backward()
        optimizer.step()
    names = sorted(dense_parameters(parallel))
    return before, started, whole_weights(parallel), names


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
        model(global_batch(12, step, max_num_candidates=step % 2 * 4))[0].backward()
        optimizer.step()
    for name, value in model.state_dict().items():
        assert not torch.equal(value, before[name]), name
        torch.testing.assert_close(after[name], value, rtol=1e-4, atol=1e-5)


def shard_from_meta():
    torch.manual_seed(dist.get_rank())
    model = HSTURankingModel(CONFIG, embedding_device=torch.device("meta"))
    parallel = build_distributed_model(model, device=CPU, sharding="row_wise")
    parallel(share(global_batch(12, 0)))[0].backward()
    table = whole_weights(parallel)["embedding.collections.8.embeddings.item.weight"]
    head = parallel.module.dense.head[0].weight.detach().clone()
    return table, head


def test_tables_on_meta_are_initialised_by_their_shards(two_ranks):
    (table, head), (_, other_head) = two_ranks.run(shard_from_meta)
    assert bool(table.all()) and 0.9 < float(table.abs().max()) * 50**0.5 < 1.1  # ±1/√rows, and one small update
    assert not torch.equal(table[:2], table[25:27])  # shards do not start alike
    assert torch.equal(head, other_head)  # rank 0's


def refusals():
    messages = []
    for model_options, options in [
        ({}, {"embedding_optimizer": "adam"}),
        ({}, {"embedding_optimizer": "lion"}),
        ({}, {"embedding_lr": 0.0}),
        ({}, {"sharding": "data_parallel"}),
        ({}, {"sharding": {"movie": "row_wise"}}),
        ({}, {"sharding": {"item": "diagonal"}}),
        ({"plain_embeddings": True}, {}),
    ]:
        try:
            build_distributed_model(HSTURankingModel(CONFIG, **model_options), device=CPU, **options)
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_what_cannot_be_sharded_is_refused(two_ranks):
    for messages in two_ranks.run(refusals):
        assert [message.split(";")[0] for message in messages] == [
            "embedding_optimizer is 'adam' on CPU",
            "embedding_optimizer is 'lion'",
            "embedding_lr is 0.0",
            "sharding of table 'user' is 'data_parallel' on CPU",
            "sharding names tables ['movie'], the model has ['user', 'item', 'action']: correct the names",
            "sharding of table 'item' is 'diagonal'",
            "the model has plain embeddings",
        ]


@pytest.mark.parametrize(("rows", "world_size", "fits"), [(3, 4, False), (4, 4, True), (5, 4, False), (7, 4, True)])
def test_the_last_rank_has_rows(rows, world_size, fits):
    config = dataclasses.replace(CONFIG, embedding_tables={"item": 50, "action": rows}, embedding_dims={"item": 4})
    require_rows_on_all_ranks(config, ["item"], world_size)
    require_rows_on_all_ranks(dataclasses.replace(config, embedding_dims={}), ["item", "action"], world_size)
    if fits:
        require_rows_on_all_ranks(config, ["item", "action"], world_size)
        return
    with pytest.raises(ValueError, match="choose 'table_wise' for them"):
        require_rows_on_all_ranks(config, ["item", "action"], world_size)


def test_sharding_needs_a_process_group():
    with pytest.raises(RuntimeError, match=r"torch\.distributed is not initialised"):
        build_distributed_model(HSTURankingModel(CONFIG), device=CPU)


# ---------------------------------------------------------------------------------------------------------- metrics


def gathered_auc(scores_by_rank):
    metrics = RankingMetrics(1)
    for score, label in scores_by_rank[dist.get_rank()]:
        metrics.update(RankingOutput(torch.tensor([[score]]), torch.tensor([[label]]), torch.zeros(()), 1))
    return metrics.compute()["auc_task_0"]


def test_auc_is_over_all_ranks_also_those_without_predictions(ranks):
    scores = [[(1.0, 1.0), (5.0, 0.0), (-2.0, 0.0)], [], [(6.0, 1.0)], []][: ranks.world_size]
    expected = 0.5 if ranks.world_size == 2 else 0.75
    assert ranks.run(gathered_auc, scores) == [expected] * ranks.world_size
    nothing = ranks.run(gathered_auc, [[]] * ranks.world_size)
    assert all(math.isnan(value) for value in nothing)
