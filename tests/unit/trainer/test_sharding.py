"""The planner knows the memory of the GPU that it plans for."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from commons.trainer import sharding


@pytest.mark.parametrize(("device", "memory"), [("cuda", 141 * 2**30), ("cpu", None)])
def test_the_planner_is_told_the_memory_of_the_device(monkeypatch, device, memory):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=141 * 2**30))
    topology = mock.Mock(side_effect=InterruptedError)  # nothing is planned
    monkeypatch.setattr(sharding, "Topology", topology)
    with pytest.raises(InterruptedError):
        sharding.shard_model(
            torch.nn.Linear(1, 1), [], device=torch.device(device), process_group=object(), local_world_size=2
        )
    assert (topology.call_args.kwargs["hbm_cap"], topology.call_args.kwargs["compute_device"]) == (memory, device)
