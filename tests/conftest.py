"""Fixtures: pools of gloo ranks shared by the whole run, and hypothesis' profile."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from torch.utils.data import _utils as loader_utils

from tests.helpers.ranks.fork_server import start_fork_server
from tests.helpers.ranks.rank_pool import RankPool

torch.set_num_threads(1)  # the machine's cores are shared with the ranks
# How long a loader that is left after an error of its worker waits for it: torch waits for five seconds.
loader_utils.MP_STATUS_CHECK_INTERVAL = 0.2
os.environ.pop("COLUMNS", None)  # workers of xdist have that of the terminal; tables are compared at their own width
# The same examples in every run: whoever changes something else is not refused by an example that nobody had seen.
settings.register_profile(
    "evenrank", deadline=None, max_examples=30, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
# Many examples, drawn anew: what ci/soak.sh asks of the fuzz tests with --hypothesis-profile.
settings.register_profile("soak", settings.get_profile("evenrank"), max_examples=2000, derandomize=False)
settings.load_profile("evenrank")
# Files whose tests run on four ranks in `make test` too; those of the others do so in `make test-slow`.
_ON_FOUR_RANKS_TOO = ("test_promises.py", "test_shuffler.py", "test_redistribute.py")
# Files that one worker runs, with one process, which takes long to start.
_ON_A_PRETENDED_DEVICE = tuple(
    f"tests/device/test_{name}.py" for name in ("exchange", "pretended_cuda", "training_steps")
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cuda", choices=["cuda", "cpu"], help="where the cases of tests/gpu run")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Files go to workers as with `--dist loadfile`, but those on a pretended device together."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "tests/device" if file in _ON_A_PRETENDED_DEVICE else file

    config.option.loadscopereorder = False  # in the order of folders: files of ranks, which take long, come first
    return Scheduling(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests of `world_size`, and so of `ranks` and `own_ranks`, run on two ranks and on four."""
    stated = str([mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")])
    if "world_size" in metafunc.fixturenames and "world_size" not in stated:
        marks = () if metafunc.definition.path.name in _ON_FOUR_RANKS_TOO else pytest.mark.slow
        worlds = [pytest.param(2, id="2ranks"), pytest.param(4, id="4ranks", marks=marks)]
        metafunc.parametrize("world_size", worlds)


@pytest.fixture(scope="session")
def rank_pools() -> Iterator[dict[int, RankPool]]:
    """Pools by world size; a pool starts its ranks on first use, and keeps one and two until the end of the run."""
    start_fork_server()  # before the first test, and where pytest captures what ranks print
    pools = {world_size: RankPool(world_size) for world_size in (1, 2, 4)}
    yield pools
    for pool in pools.values():
        pool.stop()


@pytest.fixture(scope="module", autouse=True)
def end_four_ranks(rank_pools: dict[int, RankPool]) -> Iterator[None]:
    """End four ranks with each file: few files need them, and every gloo group wakes a hundred times a second."""
    yield
    rank_pools[4].stop()


@pytest.fixture
def ranks(world_size: int, rank_pools: dict[int, RankPool]) -> RankPool:
    """A pool of two ranks, then one of four."""
    return rank_pools[world_size]


@pytest.fixture
def own_ranks(world_size: int) -> Iterator[RankPool]:
    """Two ranks of the test's own, then four: the groups of a broken exchange are not used again."""
    with RankPool(world_size) as pool:
        yield pool


@pytest.fixture
def own_two_ranks() -> Iterator[RankPool]:
    """Two ranks of the test's own."""
    with RankPool(2) as pool:
        yield pool


@pytest.fixture
def two_ranks(rank_pools: dict[int, RankPool]) -> RankPool:
    """A pool of two ranks."""
    return rank_pools[2]


@pytest.fixture
def four_ranks(rank_pools: dict[int, RankPool]) -> RankPool:
    """A pool of four ranks."""
    return rank_pools[4]


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """SIGINT interrupts the test and programs that it starts, also where the suite ignores it (`nohup make test &`)."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
