"""Every rank of a torchrun job runs these tests; without torchrun they skip. `ci/test_gpu.sh` starts the job."""

from __future__ import annotations

import datetime

import pytest
import torch
import torch.distributed as dist


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


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest):
    """The kind of device, with a process group of the matching backend: one rank per GPU."""
    kind = request.config.getoption("--device")
    torch.set_num_threads(1)
    if kind == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank())
    backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=300))
    yield kind
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def in_step(request: pytest.FixtureRequest):
    """Ranks begin every case together, so that a failure on one shows there and not in the next case."""
    if "device" in request.fixturenames:
        request.getfixturevalue("device")
        dist.barrier()
    yield
