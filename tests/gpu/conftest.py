"""Every rank of a torchrun job runs these tests; without torchrun they skip. `ci/test_gpu.sh` starts the job."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

_TIMEOUT = datetime.timedelta(seconds=300)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    here = [item for item in items if "gpu" in item.path.parent.name]
    reason = None
    if not dist.is_torchelastic_launched():
        reason = "runs on every rank of a torchrun job: ci/test_gpu.sh, or ci/test_gpu.sh --cpu 2"
    elif config.getoption("--device") == "cuda" and not torch.cuda.is_available():
        reason = "needs CUDA: ci/test_gpu.sh --cpu 2 runs the same cases over gloo"
    if reason:
        for item in here:
            item.add_marker(pytest.mark.skip(reason=reason))


class Groups(NamedTuple):
    """How a script makes its process groups."""

    device: str
    backend: str
    binds: bool = False  # whether it passes device_id, as the trainer does


_OF_TRAINER = "nccl with device_id"
GROUPS = {
    "nccl": Groups("cuda", "nccl"),
    _OF_TRAINER: Groups("cuda", "nccl", binds=True),
    "cpu:gloo,cuda:nccl": Groups("cuda", "cpu:gloo,cuda:nccl"),
    "gloo": Groups("cpu", "gloo"),
}
# Models and kernels, which take long to compile; groups matter little to them.
_ON_ONE_KIND = ("test_hstu_layers_on_device.py", "test_hstu_on_device.py")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Cases run on each kind of process groups that users have on the device."""
    if "device" in metafunc.fixturenames:
        device = metafunc.config.getoption("--device")
        names = [name for name, kind in GROUPS.items() if kind.device == device]
        if metafunc.definition.path.name in _ON_ONE_KIND and _OF_TRAINER in names:
            names = [_OF_TRAINER]
        metafunc.parametrize("device", names, indirect=True, scope="session")


@pytest.fixture(scope="session")
def rendezvous() -> tuple[dist.Store, int, int]:
    """torchrun's store, this rank and the number of ranks."""
    torch.set_num_threads(1)
    return next(dist.rendezvous("env://", timeout=_TIMEOUT))


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest, rendezvous: tuple[dist.Store, int, int]) -> Iterator[str]:
    """The kind of device, with process groups of one kind: one rank per GPU."""
    groups, (store, rank, world_size) = GROUPS[request.param], rendezvous
    device_id = None
    if groups.device == "cuda":
        device_id = torch.device("cuda", dist.get_node_local_rank())
        torch.cuda.set_device(device_id)
    dist.init_process_group(
        groups.backend,
        store=dist.PrefixStore(request.param, store),  # which still has the keys of the groups before
        rank=rank,
        world_size=world_size,
        timeout=_TIMEOUT,
        device_id=device_id if groups.binds else None,
    )
    yield groups.device
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def in_step(request: pytest.FixtureRequest):
    """Ranks begin every case together, so that a failure on one shows there and not in the next case."""
    if "device" in request.fixturenames:
        request.getfixturevalue("device")
        dist.barrier()
    yield
