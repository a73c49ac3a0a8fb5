"""Fixtures: pools of gloo ranks shared by the whole run, and hypothesis' profile."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.helpers.rank_pool import RankPool

torch.set_num_threads(1)  # the machine's cores are shared with the ranks
os.environ.pop("COLUMNS", None)  # workers of xdist have that of the terminal; tables are compared at their own width
settings.register_profile("evenrank", deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
# Many examples, drawn anew: what ci/soak.sh asks of the fuzz tests with --hypothesis-profile.
settings.register_profile("soak", settings.get_profile("evenrank"), max_examples=2000)
settings.load_profile("evenrank")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cuda", choices=["cuda", "cpu"], help="where the cases of tests/gpu run")


@pytest.fixture(scope="session")
def rank_pools() -> Iterator[dict[int, RankPool]]:
    """Pools by world size; a pool starts its ranks on first use and keeps them until the end of the run."""
    pools = {world_size: RankPool(world_size) for world_size in (2, 4)}
    yield pools
    for pool in pools.values():
        pool.stop()


@pytest.fixture(params=[2, 4], ids=["2ranks", "4ranks"])
def ranks(request: pytest.FixtureRequest, rank_pools: dict[int, RankPool]) -> RankPool:
    """A pool of two ranks, then one of four."""
    return rank_pools[request.param]


@pytest.fixture
def two_ranks(rank_pools: dict[int, RankPool]) -> RankPool:
    """A pool of two ranks."""
    return rank_pools[2]


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Programs that the test starts end with SIGINT, also where the suite itself ignores it (`nohup make test &`)."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
