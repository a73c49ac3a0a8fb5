"""Process groups: which ranks share a global batch, peers that stay alike, and the groups for rows."""

from __future__ import annotations

import itertools
import threading
import weakref
from contextlib import closing
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from commons.distributed.batch_shuffler import IdentityBalancedBatchShuffler
from commons.distributed.channel import groups
from commons.distributed.options import ShufflerOptions
from commons.distributed.process_group import describe_group, resolve_process_group
from commons.pipeline import TrainPipelineFactory
from tests.helpers.models.sid_models import model_parallel
from tests.helpers.models.torchrec_model import (
    build_plain,
    build_sharded,
    head_of,
    make_batch,
    rank_batches,
    weights_of,
)
from tests.helpers.pipelines.shuffled_pipelines import CubicShuffler, largest_difference, steps_of
from tests.helpers.ranks.faults import my_batch, own_groups, raised_by
from tests.helpers.ranks.rank_pool import RankPool


def _trained(rank, shuffler):
    """Weights after six steps."""
    model, optimizer = build_sharded()
    pipeline = TrainPipelineFactory.create(
        "native", model=model, optimizer=optimizer, device=torch.device("cpu"), batch_shuffler=shuffler
    )
    source = rank_batches(rank, 6, [6, 2, 5])
    for _ in range(6):
        pipeline.progress(source)
    shuffler.close()
    return weights_of(model)


def _tensor_parallel_training():
    """Tables sharded over all four ranks: a peer's copy of a batch does not count twice.

    TorchRec averages over four ranks what the two data-parallel ranks contribute twice each, and the loss is scaled by
    the two data-parallel ranks.
    """
    from megatron.core import parallel_state

    with model_parallel(2):
        rank = parallel_state.get_data_parallel_rank()
        return [_trained(rank, kind()) for kind in (CubicShuffler, IdentityBalancedBatchShuffler)]


def _two_ranks_training():
    return _trained(dist.get_rank(), IdentityBalancedBatchShuffler())


def test_tensor_parallel_peers_do_not_double_the_gradients(two_ranks, rank_pools):
    reference = two_ranks.run(_two_ranks_training)[0]
    for weights in itertools.chain(*rank_pools[4].run(_tensor_parallel_training)):
        assert largest_difference(weights, reference) < 1e-5


def _given_group():
    """Each half trains by itself, in a pipeline; and what is said of the other half's group."""
    half, rank = dist.get_rank() // 2, dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model, optimizer = build_plain()
    keywords = {"model": model, "optimizer": optimizer, "device": torch.device("cpu"), "pg_group": groups[half]}
    with closing(CubicShuffler(pg_group=groups[half])) as shuffler:
        pipeline = TrainPipelineFactory.create("none", batch_shuffler=shuffler, **keywords)
        list(steps_of(pipeline, rank_batches(rank, 3, [6])))
    mistake = raised_by(lambda: resolve_process_group(groups[1 - half]))
    return head_of(model).seen, describe_group(groups[half]), mistake


def test_a_given_group_shuffles_by_itself(rank_pools):
    answers = rank_pools[4].run(_given_group)
    for half in ([0, 1], [2, 3]):
        seen = sorted(i for rank in half for step in answers[rank][0] for i in step)
        assert seen == sorted(int(i) for rank in half for batch in rank_batches(rank, 3, [6]) for i in batch.sample_id)
        assert answers[half[0]][1] == f"ranks {half}"
    assert all("ValueError: " in mistake and "is not in the given process group" in mistake for *_, mistake in answers)


def _payload_groups():
    """The groups of shufflers when they are made, by name, and the backends of the groups that were made."""
    had, asked = [], []
    new_group = dist.new_group

    def ask(*args, **kwargs):
        asked.append(kwargs.get("backend"))
        return new_group(*args, **kwargs)

    # The third takes the groups of the first two; the last ranks do not agree, and none may wait for another.
    with own_groups(), mock.patch.object(dist, "new_group", ask):
        for kind in (IdentityBalancedBatchShuffler, IdentityBalancedBatchShuffler, CubicShuffler, None):
            differing = CubicShuffler if dist.get_rank() == 0 else IdentityBalancedBatchShuffler
            shuffler = (kind or differing)()
            (channel,) = shuffler.engine._channels.values()
            had.append([each.group_desc for each in (channel.control_group, channel.payload_group) if each is not None])
            if kind is not None:
                shuffler.shuffle(make_batch([1 + dist.get_rank(), 9], 2))
            if len(had) == 2:  # a pipeline that is reset in its middle; the worker has the control group
                assert channel.gather(np.array([dist.get_rank()]), 0, on_main=True).tolist() == [[0], [1]]
            shuffler.close()
            if kind is CubicShuffler:
                groups._WORLDS.clear()
    return had, asked


def test_only_shufflers_that_move_rows_make_a_payload_group(two_ranks):
    for had, asked in two_ranks.run(_payload_groups):
        # The names are those in dumps of the flight recorder.
        assert had == [["evenrank/control"]] * 2 + [["evenrank/control", "evenrank/payload"]] * 2
        # The rings of the first, those for the gather on the main thread, the payload group of the third, and both of
        # the fourth.
        assert asked == ["gloo", "gloo", None, "gloo", None]


class _World(SimpleNamespace):
    """Unlike its base, it can be a weak key, as a process group can."""

    __hash__ = object.__hash__


class _Options:
    def __init__(self):
        self.config = SimpleNamespace()


@pytest.mark.parametrize(
    ("backends", "of_world", "bound", "half", "payload", "max_ctas"),
    [
        ("cpu:gloo,cuda:nccl", None, None, False, "new", 4),
        ("cuda:nccl", None, "cuda:0", False, "new", 4),
        ("cuda:nccl", None, None, True, "new", 4),
        ("cuda:nccl", None, "cuda:0", True, "given", None),  # torch would split WORLD, with all of its ranks
        ("cpu:gloo,cuda:gloo", None, None, False, "new", None),
        ("cuda:nccl", "cpu:gloo,cuda:gloo", None, True, "new", 4),
        ("cpu:gloo,cuda:gloo", "cuda:nccl", "cuda:0", False, "new", None),
    ],
)
def test_what_nccl_is_asked_for(monkeypatch, backends, of_world, bound, half, payload, max_ctas):
    """torch.distributed is pretended: a group is the keywords that it was made with."""
    world, given, asked = _World(bound_device_id=bound), SimpleNamespace(name="given"), []

    def new_group(members, **options):
        asked.append(options)
        return SimpleNamespace(name="new")

    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=world))
    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(dist, "get_rank", lambda group=None: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 4 if group is None or not half else 2)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1] if half else [0, 1, 2, 3])
    monkeypatch.setattr(dist, "get_backend_config", lambda group: of_world or backends if group is world else backends)
    monkeypatch.setattr(dist, "get_backend", lambda group: "its own")
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=_Options), raising=False)
    monkeypatch.setattr(groups, "_WORLDS", weakref.WeakKeyDictionary())
    monkeypatch.setattr(groups, "_num_groups", lambda: 0)
    monkeypatch.setattr(groups, "serves", lambda group, kind: False)
    monkeypatch.setattr(groups, "_align_group_names", lambda group: None)
    monkeypatch.setattr(groups, "_free_on_all", lambda members, group: None)

    idle = groups.acquire_groups(given, 5.0)
    assert idle.payload is None and [options.get("backend") for options in asked] == ["gloo"]
    moving = groups.with_payload(idle, given, 5.0)
    assert moving.payload.name == payload and moving.has_all_to_all is None
    made = asked[1:]
    assert len(made) == (payload == "new")
    for options in made:
        assert options.get("backend") == ("its own" if of_world else None)
        assert options["use_local_synchronization"] == half
        nccl = options["pg_options"]
        assert nccl is None if max_ctas is None else nccl.config.max_ctas == max_ctas


def _rows_over_other_backends(folder):
    """Shufflers over groups that serve the host, in a world that serves CUDA alone: backends, rows, and groups made."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    dist.init_process_group("cuda:gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    found = []
    for backend in ("gloo", "cpu:gloo", "gloo"):
        group = dist.new_group(backend=backend)
        before = groups._num_groups()
        shuffler = CubicShuffler(pg_group=group)
        (channel,) = shuffler.engine._channels.values()
        backends = dist.get_backend_config(channel.payload_group)
        with closing(shuffler):
            rows = [shuffler.shuffle(batch).sample_id.tolist() for batch in rank_batches(rank, 2, [6])]
        found.append((backends == dist.get_backend_config(group), rows, groups._num_groups() > before))
    return found


def test_rows_go_over_the_backend_of_the_given_group(world_size, tmp_path):
    """As on a host group of ranks that train with NCCL; the pool has groups of both backends."""
    with RankPool(world_size) as pool:
        found = pool.run(_rows_over_other_backends, str(tmp_path))
    for of_rank in found:
        assert all(is_its_own for is_its_own, _, _ in of_rank)
        assert [makes for _, _, makes in of_rank] == [True, True, False]
        assert of_rank[0][1] == of_rank[1][1] == of_rank[2][1]


def _payload_tried(error, failing_ranks, others_hang=False):
    """Some ranks' first all-to-all raises an error: what the shuffler's constructor raises, or how rows then travel.

    That of the others hangs in the call, as NCCL's does while it connects, or goes on in the background.
    """
    released = threading.Event()
    send = dist.all_to_all_single
    of_others = (lambda *arguments, **options: released.wait()) if others_hang else send
    fails = mock.Mock(side_effect=error if dist.get_rank() in failing_ranks else of_others)
    with own_groups():
        try:
            with mock.patch.object(dist, "all_to_all_single", fails):
                shuffler = CubicShuffler(ShufflerOptions(timeout=300.0))
        except Exception as raised:
            released.set()
            return type(raised).__name__, str(raised)
        with closing(shuffler), mock.patch.object(dist, "all_to_all_single", side_effect=send) as sent:
            result = shuffler.shuffle(my_batch())
        return sent.call_count, shuffler.last_stats.moved, result.sample_id[: result.actual_batch_size].tolist()


def test_an_error_of_the_first_all_to_all_is_no_missing_all_to_all(own_ranks):
    """A rank that has too little memory for it fails, with its own error; the others quote it and wait for nothing."""
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 MiB")
    for others_hang in (True, False):
        for rank, said in enumerate(own_ranks.run(_payload_tried, error, [1], others_hang, timeout=60)):
            quoted = f"rank 1 failed in the connection of step 0: OutOfMemoryError: {error}"
            assert said == (("OutOfMemoryError", str(error)) if rank == 1 else ("RankMissingError", quoted))


def test_ranks_send_by_all_gather_where_one_has_no_all_to_all(ranks):
    for error in (RuntimeError("Backend mpi does not support alltoall_base"), NotImplementedError()):
        for only in ([1], [0, 1, 2, 3]):
            answers = ranks.run(_payload_tried, error, only, timeout=60)
            assert [(calls, moved) for calls, moved, _ in answers] == [(0, True)] * ranks.world_size
            expected = [1 + 1000 * rank + row for rank in range(ranks.world_size) for row in range(6)]
            assert sorted(i for *_, ids in answers for i in ids) == expected
