"""What ends a shuffler: abort() at once, also where something waits; close() soon; the end of the process anyway; or
nothing but that a rank lets go of it: its thread ends and its groups serve the next one.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import threading
import weakref
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torchrec.distributed.train_pipeline.train_pipelines import TrainPipelineBase

from commons.distributed.channel import absence
from commons.distributed.channel.absence import ShufflerAbortedError
from commons.distributed.engine import engine
from commons.distributed.options import ShufflerOptions
from commons.distributed.process_group import resolve_process_group
from commons.pipeline import balanced, balanced_iter, windowed_iter
from tests.helpers.models import torchrec_model as models
from tests.helpers.models.torchrec_model import rank_batches
from tests.helpers.pipelines.shuffled_pipelines import CubicShuffler
from tests.helpers.ranks.faults import ends_by_itself, my_batch
from tests.helpers.ranks.on_ranks import of_all, on, on_ranks, on_two_ranks
from tests.helpers.ranks.stopped_ranks import wait_for

# Far above what the test may take, which the pool limits: nothing ends by it.
TIMEOUT = 600.0


def _gather(shuffler):
    """Waits for a handle; the other rank starts no shuffle."""
    handle = shuffler.start_shuffle(my_batch(1)) if dist.get_rank() == 0 else None
    return lambda: handle.has_ended()


def _exchange(shuffler):
    """Waits on the main thread for rows; the other rank plans with this one and sends none."""
    handle = shuffler.start_shuffle(batch := my_batch(1))
    handle.prepared()
    return lambda: shuffler.finish_shuffle(batch, handle)


def _window(shuffler):
    windowed = windowed_iter(rank_batches(dist.get_rank(), 6, [6]), shuffler, 3)
    return lambda: next(windowed)


def _pipeline(shuffler):
    model, optimizer = models.build_plain()
    pipeline = balanced(TrainPipelineBase)(model, optimizer, torch.device("cpu"), batch_shuffler=shuffler)
    batches = rank_batches(dist.get_rank(), 6, [6])
    return lambda: pipeline.progress(batches)


WAITS = {"gather": _gather, "exchange": _exchange, "window": _window, "pipeline": _pipeline}


@on("own_two_ranks", timeout=240)
def test_whatever_waits_ends_at_once_and_the_process_starts_again(tmp_path):
    """Rank 0 waits for rank 1 in every way, and is aborted by another thread; each time on process groups made anew."""
    for name in WAITS:
        _abort_in(name, tmp_path)


def _abort_in(name, folder):
    rank = dist.get_rank()
    shuffler = CubicShuffler(ShufflerOptions(timeout=TIMEOUT))
    if name != "exchange":
        shuffler.shuffle(my_batch())
    wait = WAITS[name](shuffler)
    if rank == 0:
        thread = threading.Timer(0.2, shuffler.abort)  # by then it waits; on a busy machine it may begin to
        thread.start()
        with pytest.raises(ShufflerAbortedError, match="the shuffler of rank 0 was aborted") as raised:
            wait()
        thread.join()
        assert "\n" not in str(raised.value)
        with pytest.raises(ShufflerAbortedError):
            shuffler.start_shuffle(my_batch(2))
        shuffler.abort()
        shuffler.drain()
        shuffler.close()
        dist.barrier()
    else:
        dist.barrier()
        with pytest.raises(RuntimeError) as raised:
            shuffler.shuffle(my_batch(1))
        assert name != "gather" or str(raised.value) == "rank 0 aborted its shuffler: see the log there"
        shuffler.abort()
    threads = [each for each in threading.enumerate() if "Shuffler" in each.name]
    for thread in threads:
        thread.join(60)
    assert not [each.name for each in threads if each.is_alive()], name
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{folder}/{name}", rank=rank, world_size=2)
    with contextlib.closing(CubicShuffler(ShufflerOptions(timeout=60.0))) as again:
        again.shuffle(my_batch())
        assert again.last_stats.moved


@on("own_two_ranks", timeout=120)
def test_the_process_starts_again_while_groups_are_made(tmp_path):
    """Rank 1 cannot make groups; rank 0 is interrupted in its construction, and torch goes on waiting on its thread."""
    rank = dist.get_rank()
    if rank == 1:
        with mock.patch.object(dist, "new_group", side_effect=OSError("Too many open files")), pytest.raises(OSError):
            CubicShuffler(ShufflerOptions(timeout=TIMEOUT))
    if rank == 0:
        interrupt = mock.patch.object(absence.CollectiveWait, "has_failed_elsewhere", side_effect=KeyboardInterrupt)
        with interrupt, pytest.raises(KeyboardInterrupt):
            CubicShuffler(ShufflerOptions(timeout=TIMEOUT))
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=rank, world_size=2)
    with contextlib.closing(CubicShuffler(ShufflerOptions(timeout=60.0))) as again:
        again.shuffle(my_batch())
        assert again.last_stats.moved


CLOSED = "^the shuffler is closed; it cannot start or finish a shuffle any more: make a new one$"
ABORTED = "^the shuffler of rank 0 was aborted; .* it cannot be used again: make a new one after "


@pytest.mark.parametrize(
    "calls", [("close",), ("abort",), ("abort", "abort"), ("close", "abort"), ("abort", "close")], ids=str
)
def test_nothing_begins_after_close_or_abort(calls):
    """Before the first shuffle, after the other call, and again; groups for a window would never return to the pool."""
    shuffler = CubicShuffler()
    for call in calls:
        getattr(shuffler, call)()
    assert isinstance(shuffler.failure, ShufflerAbortedError) == ("abort" in calls)
    error, text = (ShufflerAbortedError, ABORTED) if "abort" in calls else (RuntimeError, CLOSED)
    for begin in (shuffler.start_shuffle, lambda batch: windowed_iter(iter([batch]), shuffler, 3)):
        with pytest.raises(error, match=text):
            begin(models.make_batch([1], 1))


def test_a_shuffle_that_a_loading_thread_starts_during_close_does_not_run():
    """Its groups are gone, and it would plan with this rank's rows alone."""

    class Closing(CubicShuffler):
        def get_workloads(self, batch):
            self.close()  # as the main thread does, while a loading thread is here
            return super().get_workloads(batch)

    shuffler = Closing()
    with pytest.raises(RuntimeError, match=CLOSED):
        shuffler.start_shuffle(models.make_batch([1], 1)).has_ended()
    assert not [each.name for each in threading.enumerate() if "Closing" in each.name]


def test_a_shuffle_cannot_be_finished_after_close():
    """The shuffler's groups may serve another one, and `verify` would compare the checksums of this rank alone."""
    shuffler, batch = CubicShuffler(), models.make_batch([1], 1)
    handle = shuffler.start_shuffle(batch)
    shuffler.close()
    with pytest.raises(RuntimeError, match=CLOSED):
        shuffler.finish_shuffle(batch, handle)
    with contextlib.closing(CubicShuffler()) as other:
        with pytest.raises(ValueError, match="the handle of step 0 belongs to another shuffler, .* that started it"):
            other.finish_shuffle(batch, handle)
        own = other.start_shuffle(batch)
        assert other.finish_shuffle(batch, own).sample_id.tolist() == [1]


def test_a_wait_without_process_groups_is_aborted_too():
    blocked, go_on = threading.Event(), threading.Event()

    def source():
        blocked.set()
        go_on.wait(60)
        yield models.make_batch([1], 1)

    shuffler = CubicShuffler()
    windowed = windowed_iter(source(), shuffler, 3)
    threading.Thread(target=lambda: blocked.wait(60) and shuffler.abort()).start()
    try:
        with pytest.raises(ShufflerAbortedError):  # although the iterator does not return
            next(windowed)
    finally:
        go_on.set()


def _leave_a_gather_behind(close):
    """Rank 0 starts a shuffle that nobody else joins, and goes home."""
    shuffler = CubicShuffler(ShufflerOptions(timeout=TIMEOUT))
    shuffler.shuffle(my_batch())
    if dist.get_rank() == 0:
        shuffler.start_shuffle(my_batch(1))
    if close:
        with mock.patch.object(engine, "_CLOSE_SECONDS", 0.5):
            shuffler.close()


@pytest.mark.parametrize("close", [False, True])
def test_a_worker_that_still_waits_keeps_neither_close_nor_the_process(close):
    assert ends_by_itself(_leave_a_gather_behind, close)


def _closed_far_apart():
    """Rank 0 closes a shuffler with a shuffle in flight before the other ranks have started theirs."""
    is_first, shuffler = dist.get_rank() == 0, CubicShuffler(ShufflerOptions(timeout=30.0))
    if not is_first:
        dist.barrier()
    shuffler.start_shuffle(my_batch(1))
    with mock.patch.object(engine, "_CLOSE_SECONDS", 0.1 if is_first else 30.0):
        shuffler.close()
    if is_first:
        dist.barrier()
    with contextlib.closing(CubicShuffler(ShufflerOptions(timeout=30.0))) as following:
        return following.shuffle(my_batch(2)).actual_batch_size


def test_the_next_shuffler_works_after_a_close_that_did_not_wait(ranks):
    assert sum(ranks.run(_closed_far_apart)) == 6 * ranks.world_size


# ------------------------------------------------------------------------------------------------------------ collected


def _make_and_use(group, step):
    """A used shuffler, the ids of its rows, and the threads that came with it."""
    before = set(threading.enumerate())
    shuffler = CubicShuffler(ShufflerOptions(timeout=30.0), group)
    result = shuffler.shuffle(next(rank_batches(dist.get_rank() + 10 * step, 1, [6])))
    return shuffler, result.sample_id.tolist(), set(threading.enumerate()) - before


def _open_channels():
    """Sockets, pipes and events that are open; no files, which imports and coverage open and close."""
    names = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # that of the list itself
            names.append(str(descriptor.readlink()))
    return sum(name.startswith(("socket:", "pipe:", "anon_inode:")) for name in names)


def _drop_ten(subgroups):
    """Rank 0 lets go of each shuffler one step later than the others."""
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
    assert len(set(counts[3:])) == 1, counts  # no more groups, no more descriptors
    assert wait_for(lambda: threading.active_count() <= threads, 60)  # a worker ends on its own
    assert len(of_all(itertools.chain(*seen))) == 10 * 6 * dist.get_world_size()


@on_ranks
def test_dropped_shufflers_leave_nothing_behind():
    for subgroups in (False, True) if dist.get_world_size() == 4 else (False,):
        _drop_ten(subgroups)


@on_two_ranks
def test_a_shuffler_and_its_iterator_are_collected_together():
    """An iterator of a staged pipeline and its shuffler refer to each other."""
    shuffler = CubicShuffler(ShufflerOptions(timeout=30.0))
    source = balanced_iter(rank_batches(dist.get_rank(), 2, [6]), shuffler)
    next(source)
    shuffler.drain()
    gone = weakref.ref(shuffler)
    del shuffler, source
    gc.collect()
    assert gone() is None
