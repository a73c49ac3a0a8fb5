"""A shuffler that nobody closes: its thread ends and its groups serve the next one, whenever a rank lets go of it."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import weakref
from pathlib import Path

import torch.distributed as dist

from commons.distributed.options import ShufflerOptions
from commons.distributed.process_group import resolve_process_group
from commons.pipeline import balanced_iter
from tests.helpers.models import rank_batches
from tests.helpers.pipelines import CubicShuffler


def _make_and_use(group, step):
    """A used shuffler, the ids of its rows, and the threads that came with it."""
    before = set(threading.enumerate())
    shuffler = CubicShuffler(ShufflerOptions(timeout=30.0), group)
    result = shuffler.shuffle(next(rank_batches(dist.get_rank() + 10 * step, 1, [6])))
    return shuffler, result.sample_id.tolist(), set(threading.enumerate()) - before


def _open_channels():
    """Sockets, pipes and events that are open; files come and go with imports and whoever measures coverage."""
    names = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # that of the list itself
            names.append(str(descriptor.readlink()))
    return sum(name.startswith(("socket:", "pipe:", "anon_inode:")) for name in names)


def _quiet(thread_count):
    """Whether no more threads than that are left, within some seconds: a worker ends on its own."""
    deadline = time.monotonic() + 60
    while threading.active_count() > thread_count and time.monotonic() < deadline:
        time.sleep(0.01)
    return threading.active_count() <= thread_count


def _dropped(subgroups):
    """Ten shufflers, each dropped; rank 0 lets go of each one step later than the others."""
    group = resolve_process_group()
    if subgroups:
        halves = [dist.new_group(members) for members in ([0, 1], [2, 3])]
        group = halves[dist.get_rank() // 2]
    kept = [_make_and_use(group, step)[0] for step in range(2)]
    threads = threading.active_count()
    kept.clear()
    counts, seen, last = [], [], set()
    for step in range(10):
        shuffler, ids, own = _make_and_use(group, step)
        seen.append(ids)
        if dist.get_rank() == 0:
            kept.append(shuffler)
            del kept[:-1]
            own, last = last, own
        del shuffler
        # Its groups are free when its work has ended, which a busy machine may put off: until then others are made.
        for thread in own:
            thread.join(30)
        counts.append((len(dist.distributed_c10d._world.pg_names), _open_channels()))
    kept.clear()
    return counts[3:], _quiet(threads), seen


def test_dropped_shufflers_leave_nothing_behind(ranks):
    for subgroups in (False, True) if ranks.world_size == 4 else (False,):
        answers = ranks.run(_dropped, subgroups)
        for counts, quiet, _ in answers:
            assert len(set(counts)) == 1 and quiet  # no more groups, no more descriptors, no threads left
        assert len([i for _, _, seen in answers for ids in seen for i in ids]) == 10 * 6 * ranks.world_size


def _collected():
    """An iterator of a staged pipeline and its shuffler refer to each other; both go together."""
    shuffler = CubicShuffler(ShufflerOptions(timeout=30.0))
    source = balanced_iter(rank_batches(dist.get_rank(), 2, [6]), shuffler)
    next(source)
    shuffler.drain()
    gone = weakref.ref(shuffler)
    del shuffler, source
    gc.collect()
    return gone() is None


def test_a_shuffler_and_its_iterator_are_collected_together(two_ranks):
    assert two_ranks.run(_collected) == [True, True]
