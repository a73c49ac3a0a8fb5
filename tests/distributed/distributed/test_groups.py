"""Process groups: which ranks share a global batch, peers that stay alike, and the groups for rows."""

from __future__ import annotations

import datetime
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

from commons.distributed import global_mean_loss, mean_over_ranks
from commons.distributed.batch_shuffler import IdentityBalancedBatchShuffler
from commons.distributed.channel import groups
from commons.distributed.channel.store_barrier import StoreBarrier
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
from tests.helpers.ranks.faults import error_of, my_batch, on_rank, own_groups
from tests.helpers.ranks.on_ranks import of_all, on, on_four_ranks, on_two_ranks


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


@on_four_ranks
def test_losses_cover_the_terms_of_context_parallel_peers():
    """DP 2 × CP 2: peers have different terms of the same rows, and gradients are averaged over all ranks."""
    from megatron.core import parallel_state

    terms = [torch.arange(count, dtype=torch.float64) for count in (1, 5, 0, 3)]
    own, whole, gradients = terms[dist.get_rank()], torch.cat(terms), []
    parallel_state.initialize_model_parallel(context_parallel_size=2)
    try:
        for known in (None, len(whole)):
            weight = torch.ones((), dtype=torch.float64, requires_grad=True)
            loss = global_mean_loss((weight * own).sum(), len(own), global_count=known)
            loss.backward()
            assert float(mean_over_ranks(loss)) == pytest.approx(float(whole.mean()))
            gradients.append(float(weight.grad))
        with closing(CubicShuffler()) as shuffler:
            shuffled = shuffler.shuffle(my_batch())
        assert shuffled.global_loss_terms() is None  # those of the data-parallel group alone are known
    finally:
        parallel_state.destroy_model_parallel()
    assert np.mean(of_all([gradients]), axis=0) == pytest.approx([float(whole.mean())] * 2)


@on_four_ranks
def test_a_given_group_shuffles_by_itself():
    """Each half trains by itself, in a pipeline."""
    half, rank = dist.get_rank() // 2, dist.get_rank()
    members = [[0, 1], [2, 3]]
    groups = [dist.new_group(each) for each in members]
    model, optimizer = build_plain()
    keywords = {"model": model, "optimizer": optimizer, "device": torch.device("cpu"), "pg_group": groups[half]}
    with closing(CubicShuffler(pg_group=groups[half])) as shuffler:
        pipeline = TrainPipelineFactory.create("none", batch_shuffler=shuffler, **keywords)
        list(steps_of(pipeline, rank_batches(rank, 3, [6])))
    seen = of_all([list(itertools.chain(*head_of(model).seen))])
    rows = [int(i) for each in members[half] for batch in rank_batches(each, 3, [6]) for i in batch.sample_id]
    assert sorted(row for each in members[half] for row in seen[each]) == sorted(rows)
    assert describe_group(groups[half]) == f"ranks {members[half]}"
    with pytest.raises(ValueError, match="is not in the given process group"):
        resolve_process_group(groups[1 - half])


def _rows_moved_by(group):
    """The rows of two shufflers, one after the other, whose groups the second takes over."""
    rows = []
    for _ in range(2):
        with closing(CubicShuffler(pg_group=group)) as shuffler:
            rows += shuffler.shuffle(my_batch()).sample_id.tolist()
    return rows


@pytest.mark.parametrize("world_size", [4])
@on("own_ranks")
def test_groups_of_some_ranks_and_of_all_find_one_another_in_any_order():
    """Up to torch 2.13 groups are named by their number, from 2.14 on by the number of calls of new_group."""
    rank, everyone = dist.get_rank(), [0, 1, 2, 3]
    first, second = dist.new_group([0, 1]), dist.new_group([1, 2, 3])
    gone, moved = dist.new_group([rank], backend="gloo", use_local_synchronization=True), []
    if rank < 2:
        with closing(CubicShuffler(pg_group=first)):
            dist.destroy_process_group(gone)  # the number of groups is an earlier one again
            moved = _rows_moved_by(first)
    # The calls of ranks 0 and 1 in a shuffler must not count here, where all ranks make a group.
    all_ranks = dist.new_group(everyone)
    numbers = torch.tensor([rank])
    dist.all_reduce(numbers, group=all_ranks)
    assert numbers.item() == sum(everyone)
    if rank == 1:  # its groups and calls are more than those of the others from here on
        dist.new_group([1], backend="gloo", use_local_synchronization=True)
    moved += _rows_moved_by(second) if rank > 0 else []
    moved += _rows_moved_by(None)
    rows = [1 + 1000 * member + row for group in ([0, 1], [1, 2, 3], everyone) for member in group for row in range(6)]
    assert sorted(of_all(moved)) == sorted(2 * rows)


@on_two_ranks
def test_only_shufflers_that_move_rows_make_a_payload_group():
    had, asked, new_group = [], [], dist.new_group

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
            assert len(channel._groups.connections) == len(had[-1])  # one with the other rank in each
            if kind is not None:
                shuffler.shuffle(make_batch([1 + dist.get_rank(), 9], 2))
            for _ in range(2 * (len(had) == 2)):  # a pipeline that is reset in its middle, twice
                assert channel.gather(np.array([dist.get_rank()]), 0, on_main=True).tolist() == [[0], [1]]
            shuffler.close()
            if kind is CubicShuffler:
                groups._WORLDS.clear()
    # The names are those in dumps of the flight recorder.
    assert had == [["evenrank/control"]] * 2 + [["evenrank/control", "evenrank/payload"]] * 2
    # The rings of the first, those for the gather on the main thread, the payload group of the third, and both of the
    # fourth.
    assert asked == ["gloo", "gloo", None, "gloo", None]


class _World(SimpleNamespace):
    """Unlike its base, it can be a weak key, as a process group can."""

    __hash__ = object.__hash__


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

    def options_of_nccl():
        return SimpleNamespace(config=SimpleNamespace())

    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=world))
    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(dist, "get_rank", lambda group=None: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 4 if group is None or not half else 2)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1] if half else [0, 1, 2, 3])
    monkeypatch.setattr(dist, "get_backend_config", lambda group: of_world or backends if group is world else backends)
    monkeypatch.setattr(dist, "get_backend", lambda group: "its own")
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=options_of_nccl), raising=False)
    monkeypatch.setattr(groups, "_WORLDS", weakref.WeakKeyDictionary())
    monkeypatch.setattr(groups, "_NAMED_BY_CALLS", False)
    monkeypatch.setattr(groups, "_num_groups", lambda: 0)
    monkeypatch.setattr(groups, "serves", lambda group, kind: False)
    monkeypatch.setattr(groups, "_align_group_names", lambda barrier: None)
    monkeypatch.setattr(groups, "_free_on_all", lambda ranks, group, barrier: None)
    barrier = SimpleNamespace(timeout=5.0)

    idle = groups.acquire_groups(given, barrier)
    assert idle.payload is None and [options.get("backend") for options in asked] == ["gloo"]
    moving = groups.with_payload(idle, given, barrier)
    assert moving.payload.name == payload and moving.has_all_to_all is None
    made = asked[1:]
    assert len(made) == (payload == "new")
    for options in made:
        assert options.get("backend") == ("its own" if of_world else None)
        assert options["use_local_synchronization"] == half
        nccl = options["pg_options"]
        assert nccl is None if max_ctas is None else nccl.config.max_ctas == max_ctas
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist.distributed_c10d, "_world", SimpleNamespace(pg_names=list(moving.rings)))
    groups.release_groups([0, 1], moving, given)
    (kept,) = groups.rank_set([0, 1]).ordered
    assert kept.payload is (None if payload == "given" else moving.payload)  # the user may destroy the given one


@on("own_ranks")
def test_rows_go_over_the_backend_of_the_given_group(tmp_path):
    """As on a host group of ranks that train with NCCL: here in a world that serves CUDA alone."""
    rank, world_size, by_backend = dist.get_rank(), dist.get_world_size(), []
    dist.destroy_process_group()
    dist.init_process_group("cuda:gloo", init_method=f"file://{tmp_path}/store", rank=rank, world_size=world_size)
    for backend, makes_groups in (("gloo", True), ("cpu:gloo", True), ("gloo", False)):  # the pool has those of both
        group = dist.new_group(backend=backend)
        before = groups._num_groups()
        shuffler = CubicShuffler(pg_group=group)
        (channel,) = shuffler.engine._channels.values()
        assert dist.get_backend_config(channel.payload_group) == dist.get_backend_config(group)
        with closing(shuffler):
            by_backend.append([shuffler.shuffle(batch).sample_id.tolist() for batch in rank_batches(rank, 2, [6])])
        assert (groups._num_groups() > before) == makes_groups
    assert by_backend[0] == by_backend[1] == by_backend[2]


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


@on("own_ranks", timeout=120)
def test_an_error_of_the_first_all_to_all_is_no_missing_all_to_all():
    """A rank that has too little memory for it fails, with its own error; the others quote it and wait for nothing."""
    text = "CUDA out of memory. Tried to allocate 2 MiB"
    quoted = f"rank 1 failed in the connection of step 0: OutOfMemoryError: {text}"
    expected = ("OutOfMemoryError", text) if dist.get_rank() == 1 else ("RankMissingError", quoted)
    for others_hang in (True, False):
        assert _payload_tried(torch.OutOfMemoryError(text), [1], others_hang) == expected
        dist.barrier()  # before anyone tries again


@on("own_ranks", timeout=120)
@pytest.mark.parametrize("error", [RuntimeError("no address for eth9"), OSError("Too many open files")])
def test_a_rank_that_cannot_make_its_groups_is_quoted_by_the_others(error):
    fails = mock.patch.object(dist, "new_group", side_effect=error)
    with own_groups(), on_rank(1, fails):
        text = error_of(CubicShuffler, ShufflerOptions(timeout=300.0))
    if dist.get_rank() == 1 and isinstance(error, OSError):
        assert text == f"OSError: {error}"
    else:
        kind = "OSError: " if isinstance(error, OSError) else ""
        assert text == f"RankMissingError: rank 1 failed in the connection of step 0: {kind}{error}"


@on("own_ranks", timeout=120)
def test_a_rank_that_makes_no_shuffler_leaves_the_users_collectives_in_step():
    """Beside a shuffler in use: the others first agree on whether its groups are free. Then it comes, too late."""
    rank, everyone, options = dist.get_rank(), dist.get_world_size(), ShufflerOptions(timeout=0.5)
    some = dist.new_group(range(everyone), backend="gloo")
    with closing(CubicShuffler()) as used:
        for group in (None, some):
            if rank > 0:
                text = error_of(CubicShuffler, options, group)
                assert text.startswith("RankMissingError: rank 0 did not take part in the connection of step 0"), text
            numbers = torch.tensor([rank])
            dist.all_reduce(numbers, group=group)
            assert numbers.item() == everyone * (everyone - 1) // 2
            if rank == 0:
                late = error_of(CubicShuffler, options, group)
                assert late.startswith("RankMissingError: rank 0 reached the connection of step 0 only after the oth")
            with closing(CubicShuffler(pg_group=group)) as following:
                assert len(of_all(following.shuffle(my_batch()).sample_id)) == 6 * everyone
        assert len(of_all(used.shuffle(my_batch()).sample_id)) == 6 * everyone


@on("own_two_ranks", timeout=120)
def test_ranks_agree_at_a_barrier_of_their_world_alone(tmp_path):
    rank, barrier = dist.get_rank(), StoreBarrier("key", 2, 60.0)
    assert barrier.largest(3 + rank) == 4 and barrier.largest(rank) == 1 and barrier.named_by_all([1, 5 + rank]) == [1]
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=rank, world_size=2)
    assert (
        error_of(barrier.largest, 1) == "RuntimeError: the process group was destroyed while groups were made over it"
    )


@on("own_two_ranks", timeout=120)
def test_what_an_earlier_attempt_has_left_in_torchruns_store_does_not_count():
    """A rank of the first attempt gave up; a new process, in the second one, counts its channels anew."""
    if dist.get_rank() == 0:
        with mock.patch.object(groups, "attempt_of_store", lambda: "0"):
            text = error_of(CubicShuffler, ShufflerOptions(timeout=0.5))
        assert text.startswith("RankMissingError: rank 1 did not take part in the connection of step 0"), text
    dist.barrier()
    anew = mock.patch.object(groups, "_WORLDS", weakref.WeakKeyDictionary())
    with anew, mock.patch.object(groups, "attempt_of_store", lambda: "1"), closing(CubicShuffler()) as shuffler:
        assert len(of_all(shuffler.shuffle(my_batch()).sample_id)) == 12


@on("own_two_ranks", timeout=120)
def test_groups_in_the_pool_get_a_new_timeout_except_those_that_torch_checks():
    members, made = [0, 1], []
    with mock.patch.object(dist.distributed_c10d, "_set_pg_timeout") as changed:
        for timeout in (70.0, 5.0):
            barrier = StoreBarrier(groups.key_of_channel(members), 2, timeout)
            groups.release_groups(members, pair := groups.acquire_groups(dist.group.WORLD, barrier), None)
    # No group is None, which means WORLD.
    assert {call.args for call in changed.call_args_list} == {(datetime.timedelta(seconds=5), pair.control)}
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        for timeout in (60.0, 60.0, 0.5):
            barrier = StoreBarrier(groups.key_of_channel(members), 2, timeout)
            made.append(groups.acquire_groups(dist.group.WORLD, barrier))
            groups.release_groups(members, made[-1], None)
    finally:
        dist.set_debug_level(dist.DebugLevel.OFF)
    assert made[0] == made[1] and made[2].rings != made[0].rings and made[2].timeout == 0.5


@on("own_two_ranks", timeout=120)
def test_ranks_of_two_hosts_whose_agents_count_attempts_differently_find_one_another():
    """As where one agent has restarted its ranks only because the other did; the store is not the agents'."""
    agents = {"TORCHELASTIC_RESTART_COUNT": str(dist.get_rank()), "TORCHELASTIC_USE_AGENT_STORE": "False"}
    with mock.patch.dict("os.environ", agents), closing(CubicShuffler(ShufflerOptions(timeout=20.0))) as shuffler:
        assert len(of_all(shuffler.shuffle(my_batch()).sample_id)) == 12


@on("ranks", timeout=120)
def test_ranks_send_by_all_gather_where_one_has_no_all_to_all():
    rows = [1 + 1000 * rank + row for rank in range(dist.get_world_size()) for row in range(6)]
    for error in (RuntimeError("Backend mpi does not support alltoall_base"), NotImplementedError()):
        for only in ([1], [0, 1, 2, 3]):
            calls, moved, ids = _payload_tried(error, only)
            assert (calls, moved) == (0, True) and sorted(of_all(ids)) == rows
