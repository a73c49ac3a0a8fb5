"""Windows on real ranks: every row once, never worse, the same number of batches everywhere, errors on every rank."""

from __future__ import annotations

import dataclasses
import itertools
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torchrec.datasets.utils import Batch as TorchRecBatch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from commons import available_memory
from commons.distributed.options import ShufflerOptions
from commons.pipeline import windowed_iter, windows
from commons.sequence_batch.batch import BaseBatch
from tests.helpers.batches.random_batches import JAGGED_DTYPES, random_batch, rows_as_values
from tests.helpers.batches.square_shuffler import SquareShuffler, closing
from tests.helpers.models import torchrec_model as models
from tests.helpers.models.torchrec_model import make_batch
from tests.helpers.pipelines.shuffled_pipelines import CubicShuffler, Source, expected_ids
from tests.helpers.ranks.faults import error_of, logged
from tests.helpers.ranks.on_ranks import of_all, on_ranks, on_two_ranks
from tests.helpers.ranks.stopped_ranks import wait_for


def own_batches(seed, sizes):
    """This rank's batches: `sizes` has (rows, real rows) of every batch of every rank."""
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(seed)
    for index, (rows, real) in enumerate(sizes[rank]):
        longest = 30 if int(torch.randint(0, 5, (), generator=generator)) == 0 else 4
        dtype = JAGGED_DTYPES[seed % len(JAGGED_DTYPES)]
        yield random_batch(
            seed + 1000 * rank + index,
            rows,
            real,
            first_id=100_000 * rank + 100 * index,
            tiny_dtype=dtype,
            max_length=longest,
        )


def _windows(seed, sizes, window, options):
    batches = list(own_batches(seed, sizes))
    with closing(SquareShuffler(ShufflerOptions(**options))) as shuffler:
        windowed = windowed_iter(iter(batches), shuffler, window)
        seen, stats, whole = [], [], []
        num_rows = [windowed.num_rows(0)]  # before the first batch
        with mock.patch.object(windowed, "_begin_window", side_effect=AssertionError):  # a later window
            assert windowed.num_rows(10**6) is None
        for batch in windowed:
            num_rows.append(windowed.num_rows(len(seen)))
            seen.append(batch)
            stats.append(windowed.take_stats())
            if windowed.last_window not in whole:
                whole.append(windowed.last_window)
        with mock.patch.object(shuffler.engine, "start_window", side_effect=AssertionError):  # a rank may ask alone
            with pytest.raises(StopIteration):
                next(windowed)
            assert windowed.num_rows(len(seen)) is None and shuffler.last_stats == stats[-1]
        of_stats = [None if each is None else each.num_rows for each in stats]
        assert num_rows == of_stats[:1] + of_stats
        loads = [int(SquareShuffler.get_workloads(shuffler, batch)[: batch.actual_batch_size].sum()) for batch in seen]
    return {
        "before": [rows_as_values(batch) for batch in batches],
        "after": [rows_as_values(batch) for batch in seen],
        "padding": [rows_as_values(batch, padding=True)[batch.actual_batch_size :] for batch in seen],
        "sizes": [(batch.batch_size, batch.actual_batch_size) for batch in seen],
        "loads": loads,
        "stats": [None if each is None else each.to_dict() for each in stats],
        "windows": [each.to_dict() for each in whole if each is not None],
    }


def check(results, sizes, window, options):
    before = [row for result in results for batch in result["before"] for row in batch]
    after = [row for result in results for batch in result["after"] for row in batch]
    assert sorted(map(repr, before)) == sorted(map(repr, after))  # nothing lost, nothing doubled
    steps = max(len(each) for each in sizes)
    for result, own in zip(results, sizes):
        assert len(result["after"]) == steps
        for (rows, real), brought in itertools.zip_longest(result["sizes"], own, fillvalue=(0, 0)):
            assert rows == max(1, brought[0], real)
    if options.get("mode") == "off":
        assert all(each is None for result in results for each in result["stats"])
        return
    for first in range(0, steps, window):
        mine = [result["stats"][first : first + window] for result in results]
        for index, each in enumerate(zip(*mine)):  # what does not depend on the rank or on time is the same everywhere
            trained = tuple(result["loads"][first + index] for result in results)
            assert all(stats["loads_after"] == trained for stats in each)
            assert each[0]["num_rows"] == sum(result["sizes"][first + index][1] for result in results)
        loads_before = sum(max(stats["loads_before"]) for stats in mine[0])
        loads_after = sum(max(stats["loads_after"]) for stats in mine[0])
        assert loads_after <= loads_before  # never worse
        brought = {real for each in sizes for _, real in (each + [(0, 0)] * steps)[first : min(first + window, steps)]}
        if len(brought) == 1 and options.get("equal_size", True):  # else the batches as loaded may be the better plan
            trained = {result["sizes"][step][1] for result in results for step in range(first, first + len(mine[0]))}
            assert trained == brought
    for result in results:
        assert len(result["windows"]) == -(-steps // window)
        for number, whole in enumerate(result["windows"]):
            check_window(whole, result["stats"][number * window : (number + 1) * window])


def check_window(whole, stats):
    """The stats of a window are the sums over those of its steps."""

    def total(name):
        return sum(each[name] for each in stats)

    assert whole["steps"] == len(stats) and whole["optimality_gap"] == stats[0]["optimality_gap"]
    for name in ("num_rows", "bytes_sent", "gather_ms", "plan_ms", "exchange_ms", "wait_ms"):
        assert whole[name] == pytest.approx(total(name)), name
    assert whole["read_ms"] > 0 and whole["exchange_ms"] > 0
    assert whole["token_fraction_moved"] * total("num_tokens") == pytest.approx(total("tokens_moved"))
    mean = sum(sum(each["loads_before"]) for each in stats) / len(stats[0]["loads_before"])
    for when in ("before", "after"):
        largest = total(f"largest_load_{when}")
        assert whole[f"imbalance_{when}"] == pytest.approx(largest / mean - 1 if mean else 0.0)


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@example(
    0, [[], [(0, 0), (3, 3)], [], []], 2, {"transport": "auto", "equal_size": True, "slack": 0.0, "mode": "balance"}
)
@given(
    seed=st.integers(0, 10_000),
    sizes=st.lists(
        st.lists(st.tuples(st.sampled_from([0, 1, 3, 6]), st.integers(0, 6)), max_size=7), min_size=4, max_size=4
    ),
    window=st.integers(1, 5),
    options=st.fixed_dictionaries(
        {
            "transport": st.sampled_from(["auto", "all_gather"]),
            "equal_size": st.booleans(),
            "slack": st.sampled_from([0.0, 0.01, 0.2]),
            "mode": st.sampled_from(["balance", "balance", "observe", "off"]),
            "verify": st.booleans(),
        }
    ),
)
def test_rows_are_conserved_and_windows_never_worse(ranks, seed, sizes, window, options):
    sizes = [[(rows, min(rows, real)) for rows, real in each] for each in sizes[: ranks.world_size]]
    if not any(sizes):
        sizes[0] = [(1, 1)]
    results = ranks.run(_windows, seed, sizes, window, options)
    check(results, sizes, window, options)
    if options["mode"] != "balance":
        for result in results:  # as they were loaded, in their order
            assert result["after"][: len(result["before"])] == result["before"]
            assert not any(result["after"][len(result["before"]) :])


def test_observing_says_what_a_window_gives(ranks):
    sizes = [[(6, 6)] * 4] * ranks.world_size
    observed, moved, gathered = (
        ranks.run(_windows, 3, sizes, 4, {"mode": mode, "slack": 0.0, "transport": transport})
        for mode, transport in (("observe", "auto"), ("balance", "auto"), ("balance", "all_gather"))
    )
    assert [each["after"] for each in moved] == [each["after"] for each in gathered]
    sent, sent_to_all = (sum(each["windows"][0]["bytes_sent"] for each in some) for some in (moved, gathered))
    assert 0 < sent < sent_to_all  # "auto" sends each row once
    for names in ("imbalance_before", "imbalance_after", "optimality_gap", "num_rows", "steps"):
        assert observed[0]["windows"][0][names] == moved[0]["windows"][0][names]
    assert moved[0]["windows"][0]["imbalance_after"] < moved[0]["windows"][0]["imbalance_before"] / 2
    assert observed[0]["windows"][0]["token_fraction_moved"] == 0 < moved[0]["windows"][0]["token_fraction_moved"]


@on_two_ranks
def test_the_next_window_is_read_while_one_trains_and_nothing_beyond_it():
    read = [0]

    def source():
        for batch in models.rank_batches(dist.get_rank(), 12, [4]):
            read[0] += 1
            yield batch

    with closing(CubicShuffler()) as shuffler:
        windowed = windowed_iter(source(), shuffler, 3)
        seen = [read[0]]
        for index, _ in enumerate(windowed):
            if index % 3 == 0:
                wait_for(lambda index=index: read[0] >= min(12, index + 6), 20)
                seen.append(read[0])
                time.sleep(0.05)
                assert read[0] == seen[-1]  # nor does a pause read on
    assert seen == [0, 6, 9, 12, 12]


@pytest.mark.parametrize(
    ("where", "at", "kind", "text"),
    [
        ("loader", 4, "RuntimeError", "rank 1: OSError: the disk is gone"),
        ("workloads", 5, "RuntimeError", "rank 1: ArithmeticError: no cost"),
        ("negative", 0, "ValueError", "rank 1: workloads[0] is -"),
        ("dtype", 4, "ValueError", "rank 1: this batch differs from the first: field 'target'"),
        # Of first batches nobody knows which is right: all ranks leave theirs out.
        ("dtype", 0, "SchemasDifferError", "the batches of ranks 0 and 1 differ: field 'target'"),
    ],
)
@on_ranks
def test_an_error_is_raised_on_every_rank_and_costs_its_own_batch_alone(where, at, kind, text):
    failing, size = dist.get_rank() == 1, dist.get_world_size()
    batches = list(models.rank_batches(dist.get_rank(), 8, [4]))
    if failing and where == "dtype":
        batches[at] = dataclasses.replace(batches[at], target=batches[at].target.double())
    source = Source(batches, at, OSError("the disk is gone") if failing and where == "loader" else None)

    class Shuffler(CubicShuffler):
        def get_workloads(self, batch):
            workloads = super().get_workloads(batch)
            bad = failing and int(batch.sample_id[0]) == 1 + 100_000 + 100 * at
            if bad and where == "workloads":
                raise ArithmeticError("no cost")
            return -workloads - 1 if bad and where == "negative" else workloads

    ids, errors = [], []
    with closing(Shuffler()) as shuffler:
        windowed = windowed_iter(source, shuffler, 3)
        while True:
            try:
                batch = next(windowed)
            except StopIteration:
                break
            except Exception as error:
                errors.append((len(ids), type(error).__name__, str(error)))
                continue
            ids.append(batch.sample_id[: batch.actual_batch_size].tolist())
    ((position, raised, said),) = errors
    assert (position, raised) == (at // 3 * 3, kind) and text in said
    faulty = [] if where == "loader" else range(size) if (where, at) == ("dtype", 0) else [1]
    lost = {row for rank in faulty for row in range(1 + 100_000 * rank + 100 * at, 5 + 100_000 * rank + 100 * at)}
    assert sorted(of_all(itertools.chain(*ids))) == sorted({*expected_ids([8] * size, size, sizes=[4])} - lost)


@pytest.mark.parametrize(
    ("window", "kind", "text"),
    [
        (0, None, "ValueError: rank 0: window is 0"),
        ([4, -1], None, "ValueError: rank 1: window is -1"),
        ([4, "four"], None, "window is 'four'"),
        ([4, 2], None, "ValueError: window is 4 on rank 0 and 2 on rank 1"),
        (1000, "memory", "window is 1000; that takes about"),
        (4, "torchrec", "ValueError: window is 4, and torchrec.datasets.utils.Batch cannot state padding"),
        (4, "device", "ValueError: rank 0: the batch of a window is on meta"),
        (2, "list", "pass iter(...) of it, the same one in every step (and on rank 1"),
    ],
)
@on_two_ranks
def test_bad_windows_are_refused_on_every_rank(window, kind, text):
    batch = make_batch([1 + dist.get_rank()], 1)
    if kind == "torchrec":
        features = KeyedJaggedTensor(keys=["a"], values=torch.arange(2), lengths=torch.ones(2, dtype=torch.int64))
        batch = TorchRecBatch(torch.rand(2, 3), features, torch.ones(2))
    elif kind == "device":
        batch = batch.to(torch.device("meta"))
    own = window[dist.get_rank()] if isinstance(window, list) else window
    memory = mock.patch.object(available_memory, "available_memory", lambda: 1000 if kind == "memory" else None)
    with closing(CubicShuffler()) as shuffler, memory:
        if kind == "torchrec":
            shuffler.get_workloads = lambda batch: torch.ones(2, dtype=torch.int64)
        source = [batch] if kind == "list" else iter([batch])
        assert text in error_of(lambda: next(windowed_iter(source, shuffler, own)))


def test_stats_are_taken_once_per_batch_and_do_not_pile_up(monkeypatch):
    monkeypatch.setattr(windows, "_MOST_WAITING", 4)
    with closing(CubicShuffler()) as shuffler:
        windowed = windowed_iter(models.rank_batches(0, 39, [4]), shuffler, 2)
        assert len(list(windowed)) == 39
        stats = [windowed.take_stats() for _ in range(5)]
        assert [(each.step, each.window) for each in stats] == [(34, 2), (35, 2), (36, 2), (37, 2), (38, 1)]
        with pytest.raises(ValueError, match="no stats are left; every batch has stats once"):
            windowed.take_stats()


@pytest.mark.parametrize("window", [1, 3])
@on_two_ranks
def test_batches_are_numbered_from_epoch_to_epoch(window):
    """The end of the data has no number, and a shorter last window has no more than its batches."""
    numbers = []
    with closing(SquareShuffler(ShufflerOptions(max_tokens_per_rank=7))) as shuffler, logged() as warnings:
        for length in (3, 4):  # in the second epoch no plan keeps the cap
            jagged = KeyedJaggedTensor(["a"], torch.zeros(2 * length), lengths=torch.tensor([length, length]))
            windowed = windowed_iter(iter([BaseBatch(jagged, 2)] * 4), shuffler, window)
            numbers += [windowed.take_stats().step for _ in windowed]
    assert numbers == list(range(8))
    assert warnings[0].startswith("no plan found for step 4, counted from 0, keeps max_tokens_per_rank=7")


@on_ranks
def test_windows_may_be_left_in_their_middle():
    """Closed or not, and others come after them; in the end nothing waits."""
    with closing(CubicShuffler(ShufflerOptions(timeout=60.0))) as shuffler:
        for attempt in range(4):
            windowed = windowed_iter(models.rank_batches(dist.get_rank() + 10 * attempt, 8, [4]), shuffler, 3)
            assert len(list(itertools.islice(windowed, 2 + attempt))) == 2 + attempt
            if attempt % 2:
                windowed.close()
                assert next(windowed, None) is None
            del windowed
        assert len(list(windowed_iter(models.rank_batches(dist.get_rank() + 50, 8, [4]), shuffler, 3))) == 8


def test_a_window_of_one_rank_keeps_the_cap_on_tokens():
    """Its steps cannot take less time, but rows in other steps keep the cap."""
    lengths = [torch.tensor([10, 10]), torch.tensor([1, 1])]
    jagged = [KeyedJaggedTensor(["a"], torch.arange(int(each.sum())), lengths=each) for each in lengths]
    with closing(SquareShuffler(ShufflerOptions(max_tokens_per_rank=12))) as shuffler:
        trained = list(windowed_iter(map(BaseBatch, jagged), shuffler, 2))
    assert [batch.features.lengths().tolist() for batch in trained] == [[10, 1], [10, 1]]
    assert shuffler.num_cap_exceeded == 0
