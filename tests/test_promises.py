"""What evenrank promises, one test per sentence of "What always holds", on two and on four real ranks.

Each test is the shortest that could fail; the folders beside this file go into the corners. That what README and docs
print runs as printed is tests/distributed/test_documented_blocks.py.
"""

from __future__ import annotations

import ast
import dataclasses
import itertools
import pickle
import re
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torchrec.distributed.train_pipeline.tracing import Tracer

from commons.distributed import global_mean_loss
from commons.distributed.channel.absence import RankMissingError
from commons.distributed.exchange.row_exchange import RowExchange
from commons.distributed.options import ShufflerOptions
from commons.pipeline import windowed_iter
from commons.trainer import TrainerArgs
from tests.helpers.batches.random_batches import JAGGED_DTYPES, random_batch, rows_as_values
from tests.helpers.batches.square_shuffler import SquareShuffler, closing
from tests.helpers.models.torchrec_model import build_plain, make_batch, rank_batches, weights_of
from tests.helpers.pipelines.shuffled_pipelines import (
    PIPELINES,
    CubicShuffler,
    evaluate,
    expected_ids,
    lacking,
    largest_difference,
    one_process,
    one_process_of,
    train,
)
from tests.helpers.ranks.faults import error_of, logged, meet
from tests.helpers.ranks.rank_pool import RankPool

ROOT = Path(__file__).parents[1]
ROWS = [7, 0, 12, 3]


def _shuffled(seed, rows, real=None, longest=6, **options):
    """Rows before and after one shuffle, by value, with their indices, sizes and the bytes sent; on every rank."""
    rank, real = dist.get_rank(), real or rows
    dtype = JAGGED_DTYPES[seed % len(JAGGED_DTYPES)]
    first = sum(real[:rank])
    longest = longest if rank == 0 else 2
    batch = random_batch(seed + rank, rows[rank], real[rank], first_id=first, tiny_dtype=dtype, max_length=longest)
    with closing(SquareShuffler(ShufflerOptions(**options))) as shuffler:
        before = rows_as_values(batch)
        result, indices = shuffler.shuffle(batch, return_indices=True)
        sizes, sent = (result.batch_size, result.actual_batch_size), shuffler.last_stats.bytes_sent
    return before, rows_as_values(result), indices.tolist(), sizes, sent


def _rows(answers, column):
    return [row for answer in answers for row in answer[column]]


def test_01_nothing_is_lost_or_doubled(ranks):
    """The multiset of real samples, with every field and its weights, is the same before and after."""
    for seed in range(len(JAGGED_DTYPES)):
        answers = ranks.run(_shuffled, seed, ROWS, longest=40)
        assert sorted(_rows(answers, 0)) == sorted(_rows(answers, 1))
        assert any(before != after for before, after, *_ in answers)


def test_02_the_training_is_the_same(ranks):
    """Shuffler on or off, float64 weights after ten steps are those of one process over the global batch."""
    counts = [10, 7, 10, 4][: ranks.world_size]
    reference = one_process(counts, ranks.world_size)
    for kind in ("balance", "identity"):
        for rank in ranks.run(train, ("build_plain",), "base", kind, [(counts, 0)]):
            assert largest_difference(rank["weights"], reference) < 1e-10
    for rank, losses in enumerate(ranks.run(_losses_of_few_tokens)):
        assert losses == [(0.0, True)] * 2 + [(0.0 if rank else 5.0 * ranks.world_size, True)] * 2


def _losses_of_few_tokens():
    """Of no token, and of 3 tokens of rank 0 with a loss of 5 each: their number is counted, then known."""
    losses = []
    for all_tokens in (0, 3):
        tokens = 0 if dist.get_rank() else all_tokens
        loss_sum = torch.full((), 5.0 * tokens, requires_grad=True)
        losses += [global_mean_loss(loss_sum, tokens, global_count=known) for known in (None, all_tokens)]
    return [(float(loss), loss.requires_grad) for loss in losses]


def _never_worse():
    """Loads before and after, with a plan that helps, one that cannot, a cap that costs balance, and none that fits."""
    rank, seen = dist.get_rank(), {}
    lengths = {"unequal": [9, 9, 1, 1] if rank == 0 else [1, 1, 1, 1], "equal": [3, 3, 3, 3]}
    for name, caps in (("unequal", None), ("equal", None), ("unequal", 1)):
        batch = make_batch(list(range(1 + 10 * rank, 5 + 10 * rank)), 4)
        shuffler, workloads = CubicShuffler(ShufflerOptions(max_tokens_per_rank=caps)), torch.tensor(lengths[name])
        with mock.patch.object(shuffler, "get_workloads", return_value=workloads), logged() as warnings:
            for _ in range(2):
                shuffler.shuffle(batch)
        stats, told = shuffler.last_stats, sum("max_tokens_per_rank" in warning for warning in warnings)
        loads = max(stats.loads_before), max(stats.loads_after)
        seen[name, caps] = (*loads, stats.moved, shuffler.num_cap_exceeded, told)
        shuffler.close()
    return seen


def test_03_never_worse(ranks):
    """If the plan would not lower the largest load nobody moves; a cap that cannot be kept is exceeded least."""
    for seen in ranks.run(_never_worse):
        before, after, *others = seen["unequal", None]
        assert after < before and others == [True, 0, 0]
        assert seen["equal", None] == (12, 12, False, 0, 0)
        assert seen["unequal", 1][3:] == (2, 1)  # counted twice, told once


def _empty_histories():
    """Every id that 7 divides is a user with an empty history; the last two rows are padding."""
    first = 7 * (1 + 20 * dist.get_rank())
    shuffler = CubicShuffler()
    result = shuffler.shuffle(make_batch(list(range(first, first + 8)), 10, longest=40 if dist.get_rank() == 0 else 3))
    shuffler.close()
    return result.sample_id[: result.actual_batch_size].tolist(), result.batch_size, shuffler.last_stats.num_rows


def test_04_padding_is_stated_never_inferred(ranks):
    """A real user with an empty history is a real user."""
    answers = ranks.run(_empty_histories)
    expected = [7 * (1 + 20 * rank) + row for rank in range(ranks.world_size) for row in range(8)]
    assert sorted(row for rows, _, _ in answers for row in rows) == expected
    assert all(size == 10 and rows == len(expected) for _, size, rows in answers)


def test_05_ranks_may_bring_different_rows_and_end_at_different_steps(ranks):
    """Nothing hangs, nothing is dropped."""
    counts = [5, 0, 3, 7][: ranks.world_size]
    answers = ranks.run(train, ("build_sharded",), "sparse", "balance", [(counts, 0)], timeout=60)
    trained = sorted(i for rank in answers for step in rank["seen"] for i in step)
    assert trained == expected_ids(counts, ranks.world_size)
    assert {len(rank["seen"]) for rank in answers} == {max(counts)}


def test_06_both_transports_and_every_pipeline_give_the_same_rows_in_the_same_order(ranks):
    """Ascending global ids, padding last."""
    both = [ranks.run(_shuffled, 3, ROWS, longest=40, transport=name) for name in ("all_to_all", "all_gather")]
    assert all(direct[:4] == gathered[:4] and direct[2] == sorted(direct[2]) for direct, gathered in zip(*both))
    assert any(direct[4] < gathered[4] for direct, gathered in zip(*both))
    counts = [3, 2, 4, 1][: ranks.world_size]
    seen = [
        [rank["seen"] for rank in ranks.run(train, ("build_sharded",), pipeline, "balance", [(counts, 0)])]
        for pipeline in PIPELINES
        if lacking(*PIPELINES[pipeline]) is None  # with an old TorchRec
    ]
    assert all(each == seen[0] for each in seen)


def _disagree():
    """One rank has another option, then another plan; returns the errors and how many payloads were sent."""
    sent, said = [], []
    last = dist.get_rank() == dist.get_world_size() - 1
    with mock.patch.object(RowExchange, "send_rows", lambda *_, **__: sent.append(1)):
        for options, digest in ((ShufflerOptions(slack=0.5 if last else 0.1), 0), (ShufflerOptions(), 1)):
            shuffler = CubicShuffler(options)
            with mock.patch("commons.perf_model.shuffle_plan.ShufflePlan.digest", lambda _, d=digest: d * last):
                batch = make_batch([1 + 10 * dist.get_rank()], 1, longest=40)
                said.append(error_of(shuffler.shuffle, batch))
            shuffler.close()
    return said, len(sent)


def test_07_ranks_that_disagree_stop_all_of_them_before_any_payload_moves(ranks):
    """With an error that names them."""
    last = ranks.world_size - 1
    first = "ranks 0, 1, 2" if last == 3 else "rank 0"
    for (options, plan), sent in ranks.run(_disagree):
        assert sent == 0
        assert f"{{'slack': 0.1}} on {first} and {{'slack': 0.5}} on rank {last} in shuffle" in options
        assert f"ranks [{last}] made another plan" in plan


def test_08_evaluation_is_not_shuffled_unless_asked_and_ends_for_all_together(ranks):
    """It runs in a pipeline of its own, and gives the same number either way."""
    assert {field.name: field.default for field in dataclasses.fields(TrainerArgs)}["shuffle_eval"] is False
    counts = [4, 0, 2, 1][: ranks.world_size]
    totals = []
    for kind in ("identity", "balance"):
        answers = ranks.run(evaluate, counts, kind, 1)
        evaluated = sorted(i for seen, _, _ in answers for step in seen for i in step)
        assert evaluated == expected_ids(counts, ranks.world_size)
        totals.append(sum(error for _, error, _ in answers))
    assert totals[0] == pytest.approx(totals[1], rel=1e-5)


def _tensor_parallel_peers():
    """Pairs of ranks bring the same batch; each data-parallel group shuffles by itself."""
    rank, half = dist.get_rank(), dist.get_world_size() // 2
    groups = [dist.new_group([peer + 2 * data for data in range(half)]) for peer in range(2)]
    group, data_rank = groups[rank % 2], rank // 2
    shuffler = CubicShuffler(pg_group=group)
    batch = make_batch(list(range(1 + 100 * data_rank, 7 + 100 * data_rank)), 6, longest=40 if data_rank == 0 else 2)
    result = shuffler.shuffle(batch)
    loss = float(global_mean_loss(torch.ones(()), 3, group))
    shuffler.close()
    return rows_as_values(result, padding=True), shuffler.last_stats.moved, loss


def test_09_tensor_parallel_peers_end_with_identical_batches(ranks):
    """That sharded embeddings do not count the duplicates twice: tests/distributed/distributed/test_groups.py."""
    answers = ranks.run(_tensor_parallel_peers)
    for first in range(0, ranks.world_size, 2):
        assert answers[first] == answers[first + 1]
    assert answers[0][1] == (ranks.world_size == 4)  # two data-parallel ranks have something to move
    assert all(loss == pytest.approx(1 / 3) for _, _, loss in answers)


class _Reads(TorchDispatchMode):
    """Notes every operation whose result the host would wait for on a device."""

    WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal", "repeat_interleave")

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().split("::")[1].split(".")[0]
        by_mask = name == "index" and any(each is not None and each.dtype == torch.bool for each in args[1])
        if by_mask or (name in self.WAITS and not (kwargs or {}).get("output_size")):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


def _reads_in_finish(longest):
    shuffler = CubicShuffler()
    batch = make_batch(list(range(1 + 100 * dist.get_rank(), 7 + 100 * dist.get_rank())), 8, longest=longest)
    handle = shuffler.start_shuffle(batch)
    handle.prepared()
    with _Reads() as reads:
        result = shuffler.finish_shuffle(batch, handle)
        result.features.length_per_key()  # which TorchRec's input distribution asks for
    lengths = batch.features.lengths()
    with _Reads() as control:
        _ = lengths[0].item(), lengths.nonzero(), lengths.unique(), lengths.repeat_interleave(lengths)
        _ = lengths.equal(lengths), lengths.masked_select(lengths > 0), lengths[lengths > 0]
    shuffler.close()
    return reads.found, control.found, shuffler.last_stats.moved


def test_10_on_cuda_the_main_thread_never_synchronises(ranks):
    """Here: it runs no operation that reads a value back. On CUDA itself: tests/gpu/test_no_synchronisation.py."""
    for found, control, moved in ranks.run(_reads_in_finish, 40):
        assert found == [] and moved
        assert sorted(control) == sorted(["index", *_Reads.WAITS])


_refuse = mock.Mock(side_effect=AssertionError("something was pickled"))


def _shuffled_without_pickle():
    c10d = dist.distributed_c10d  # whose collectives of objects have a pickler of their own
    with mock.patch.multiple(pickle, dumps=_refuse, loads=_refuse), mock.patch.multiple(c10d, _pickler=_refuse):
        _shuffled(1, ROWS, longest=40)
        return error_of(dist.all_gather_object, [None] * dist.get_world_size(), "an object")


def test_11_no_pickle_in_messages(ranks):
    assert ranks.run(_shuffled_without_pickle) == ["AssertionError: something was pickled"] * ranks.world_size


def _imported_by(tree):
    """Modules that a file imports."""
    plain = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    return plain | {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}


def test_11_no_pickle_and_no_environment_variables():
    """What launchers tell a rank aside; torch.distributed.checkpoint and TorchRec's planner pickle inside."""
    for folder in ("commons", "hstu", "sid_gr", "evenrank"):
        for path in (ROOT / folder).rglob("*.py"):
            source = path.read_text(encoding="utf-8")
            assert not {"pickle", "dill", "cloudpickle", "shelve"} & _imported_by(ast.parse(source)), path
            if path != ROOT / "commons/trainer/ranks/rank_info.py":  # which knows the launchers
                read = re.findall(r"\b(?:environ|getenv|putenv)\b(?:\.get)?\W*(\w+)?", source)
                read += re.findall(r"(\w+) in os\.environ", source)
                assert set(read) <= {"MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"}, (path, read)  # of torchrun's store


def _mistakes():
    """The last rank makes one mistake after another; what every rank raises."""
    wrong, said = dist.get_rank() == dist.get_world_size() - 1, []
    for mistake in (torch.tensor([1.5, 1, 1]), [1, 2], ValueError("no such column: pass item")):
        shuffler = CubicShuffler()
        get_workloads = mock.Mock(side_effect=[mistake]) if wrong else shuffler.get_workloads
        with mock.patch.object(shuffler, "get_workloads", get_workloads):
            said.append(error_of(shuffler.shuffle, make_batch([1, 2, 3], 3)))
        shuffler.close()
    return said


def test_12_a_users_mistake_is_told_on_every_rank(ranks):
    """A ValueError, TypeError or KeyError with the values, the rule and the remedy."""
    last = ranks.world_size - 1
    for floats, count, own in ranks.run(_mistakes):
        assert floats.startswith(f"ValueError: rank {last}: workloads") and "1.5" in floats and "integers" in floats
        assert f"ValueError: rank {last}: workloads has 2 entries, batch_size is 3" in count
        assert own == f"ValueError: rank {last}: no such column: pass item"


def _stalls(timeout):
    """The last rank does not come to the second step; the others say who is missing, and after how long."""
    rank, size = dist.get_rank(), dist.get_world_size()
    shuffler = CubicShuffler(ShufflerOptions(timeout=timeout))
    shuffler.shuffle(make_batch([1 + rank], 1))
    meet("the first step is over")
    started = time.monotonic()
    try:
        if rank == size - 1:
            return "", 0.0
        shuffler.shuffle(make_batch([100 + rank], 1))
    except RankMissingError as error:
        return str(error), time.monotonic() - started
    finally:
        meet("the others have given up")
        shuffler.close()
    return "no error", time.monotonic() - started


@pytest.mark.parametrize("world_size", [2, 4])
def test_13_no_call_outlasts_its_timeout_and_who_is_missing_is_named(world_size):
    """By more than a few seconds, whoever stalls."""
    with RankPool(world_size) as pool:  # of its own: ranks that were left behind are not used again
        *answers, _ = pool.run(_stalls, 2.0, timeout=60)
    for text, seconds in answers:
        assert text.startswith(f"rank {world_size - 1} did not take part in the gather of step 1")
        assert 2.0 <= seconds < 2.0 + 10.0


class _Model(torch.nn.Module):
    def forward(self, prediction, target):
        return global_mean_loss(((prediction - target) ** 2).sum(), target.numel())


def _traced():
    model = _Model()
    graph = Tracer().trace(model)
    values = torch.arange(3.0) + dist.get_rank(), torch.ones(3)
    return float(torch.fx.GraphModule(model, graph)(*values)), float(model(*values)), len(list(graph.nodes))


def _windows(window, leave_after):
    """Ids of each step and the weights after training them all; and the ids, resumed in the middle of a window."""
    counts, rank = [9, 6, 9, 2], dist.get_rank()
    model, optimizer = build_plain()
    shuffler, resumed = CubicShuffler(ShufflerOptions(slack=0.0)), []

    def batches():
        return list(rank_batches(rank, counts[rank], [6, 3, 0, 5]))

    def ids(batch):
        return batch.sample_id[: batch.actual_batch_size].tolist()

    steps = []
    for batch in windowed_iter(iter(batches()), shuffler, window):
        steps.append(ids(batch))
        loss, _ = model(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    first = leave_after // window * window  # the unfinished window is read again, and what was trained of it left out
    again = windowed_iter(iter(batches()[first:]), shuffler, window)
    resumed = [ids(batch) for batch in itertools.islice(again, leave_after - first, None)]
    shuffler.close()
    return steps, resumed, weights_of(model)


def test_14_a_window_loses_and_doubles_nothing_resumes_exactly_and_weighs_every_row_once(ranks):
    """Steps of windows hold every row once; resumed in the middle of one the rest is the same; float64 weights too."""
    loaded = expected_ids([9, 6, 9, 2], ranks.world_size, sizes=[6, 3, 0, 5])
    for window, leave_after in ((4, 6), (2, 5)):
        answers = ranks.run(_windows, window, leave_after)
        assert sorted(row for steps, _, _ in answers for step in steps for row in step) == loaded
        assert all(resumed == steps[leave_after:] for steps, resumed, _ in answers)
        reference = one_process_of([list(itertools.chain(*each)) for each in zip(*(steps for steps, _, _ in answers))])
        assert all(largest_difference(weights, reference) < 1e-10 for _, _, weights in answers)


def test_16_what_a_model_calls_survives_torchrecs_symbolic_tracing(ranks):
    """In every pipeline that traces: tests/distributed/pipeline/test_torchrec_batch.py."""
    for traced, direct, nodes in ranks.run(_traced):
        assert traced == direct > 0 and nodes > 3
