"""Ranks that share a table do not start their shards alike."""

from __future__ import annotations

import torch
import torch.distributed as dist

from commons.trainer.ranks.launch import seed_all
from hstu.model import HSTUConfig, HSTURankingModel, RankingConfig
from hstu.sharding import build_distributed_model


def _shards():
    seed_all(7 + dist.get_rank())
    config = RankingConfig(HSTUConfig(8, 1, 2, 4, max_sequence_length=16), {"item": 64, "action": 8}, (1,), 1)
    model = build_distributed_model(
        HSTURankingModel(config, embedding_device=torch.device("meta")),
        device=torch.device("cpu"),
        sharding="row_wise",
        local_world_size=dist.get_world_size(),
    )
    tables, dense = {}, {}
    for name, value in model.state_dict().items():
        if hasattr(value, "local_shards"):
            tables[name] = [shard.tensor.clone() for shard in value.local_shards()]
        else:
            dense[name] = value.clone()
    return tables, dense


def test_shards_differ_and_dense_weights_do_not(ranks):
    answers = ranks.run(_shards)
    first_tables, first_dense = answers[0]
    for tables, dense in answers[1:]:
        for name, shards in tables.items():
            assert not torch.equal(shards[0][:2], first_tables[name][0][:2])
        assert all(torch.equal(dense[name], first_dense[name]) for name in dense)
