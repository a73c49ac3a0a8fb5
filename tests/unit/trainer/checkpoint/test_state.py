"""A checkpoint's state of optimizers, loaded to a device; "meta" stands for it."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from commons.trainer.checkpoint.state import load_state, read_entries, state_to_save, write_state


class Scored(nn.Linear):
    """A layer with a learned temperature, a scalar."""

    def __init__(self, device):
        super().__init__(2, 2, device=device)
        self.temperature = nn.Parameter(torch.tensor(1.0, device=device))

    def forward(self, values):
        return super().forward(values) * self.temperature


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(("options", "where"), [({}, "cpu"), ({"capturable": True}, "meta")])
def test_slots_are_where_the_optimizer_keeps_them(one_rank, tmp_path, options, where):
    """A mean of a scalar's gradient was left on the host, and so was the count of an optimizer that counts there."""
    model = Scored("cpu")
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    write_state(tmp_path / "saved", state_to_save(model, optimizer))
    on_device = Scored("meta")
    resumed = torch.optim.Adam(on_device.parameters(), **options)
    load_state(tmp_path / "saved", read_entries(tmp_path / "saved"), on_device, resumed)
    for parameter in on_device.parameters():
        devices = {slot: value.device.type for slot, value in resumed.state[parameter].items()}
        assert devices == {"step": where, "exp_avg": "meta", "exp_avg_sq": "meta"}
