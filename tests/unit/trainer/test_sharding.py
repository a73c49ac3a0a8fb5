"""What is known before tables are sharded: the memory of a GPU, and the tables that fbgemm cannot look up."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection

from commons.trainer import sharding


def start_sharding(monkeypatch, model, device, *, world_size=2, **options):
    """Call shard_model up to the planning, as if there were a process group; returns what the planner is given."""
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: world_size)
    topology, planner = mock.Mock(), mock.Mock(side_effect=InterruptedError)  # nothing is planned
    monkeypatch.setattr(sharding, "Topology", topology)
    monkeypatch.setattr(sharding, "EmbeddingShardingPlanner", planner)
    with pytest.raises(InterruptedError):
        sharding.shard_model(model, device=torch.device(device), local_world_size=world_size, **options)
    return topology.call_args.kwargs | planner.call_args.kwargs


def collection_of(**tables):
    """A collection of tables, each with a number of rows and a width."""
    configs = [
        EmbeddingConfig(name=name, num_embeddings=rows, embedding_dim=width, feature_names=[name])
        for name, (rows, width) in tables.items()
    ]
    return EmbeddingCollection(tables=configs, device=torch.device("meta"))


@pytest.mark.parametrize(("device", "memory"), [("cuda", 141 * 2**30), ("cpu", None)])
def test_the_planner_is_told_the_memory_of_the_device(monkeypatch, device, memory):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=141 * 2**30))
    found = start_sharding(monkeypatch, torch.nn.Linear(1, 1), device, tables=[])
    assert (found["hbm_cap"], found["compute_device"]) == (memory, device)


def test_widths_without_kernels_are_named(monkeypatch):
    tables = collection_of(item=(9, 6))
    with pytest.raises(ValueError, match="the table of 'item' is 6 wide; fbgemm's tables are a multiple of 4 wide"):
        start_sharding(monkeypatch, tables, "cpu", tables=["item"])


@pytest.mark.parametrize(("rows", "world_size", "fits"), [(3, 4, False), (4, 4, True), (5, 4, False), (7, 4, True)])
def test_the_last_rank_has_rows(monkeypatch, rows, world_size, fits):
    short, long = collection_of(action=(rows, 4)), collection_of(item=(50, 8))

    def start(*collections, kind="row_wise"):
        model = torch.nn.ModuleList(collections)
        names = [table.name for each in collections for table in each.embedding_configs()]
        start_sharding(monkeypatch, model, "cpu", world_size=world_size, tables=names, sharding=kind)

    start(collection_of(item=(50, 4), action=(rows, 4)))
    start(short, long, kind="table_wise")
    if fits:
        start(short, long)
        return
    with pytest.raises(ValueError, match=r"have rows \{'action': \d\}, too few for 4 .* 'table_wise' for these tables"):
        start(short, long)


def test_the_planner_does_not_shard_a_short_table_row_wise_on_a_cpu(monkeypatch):
    tables = collection_of(gender=(2, 4), item=(50, 4), age=(7, 4))
    for device, types in (("cpu", ["table_wise"]), ("cuda", ["table_wise", "row_wise"])):
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=2**30))
        found = start_sharding(monkeypatch, tables, device, world_size=4, tables=["gender", "item", "age"])
        chosen = {table: limits.sharding_types for table, limits in found["constraints"].items()}
        assert chosen == {"gender": types, "item": ["table_wise", "row_wise"], "age": ["table_wise", "row_wise"]}
