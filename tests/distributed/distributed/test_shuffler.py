"""The shuffler on real ranks: nothing lost, never worse, both transports alike, and every mistake on every rank."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torchrec.datasets.utils import Batch as TorchRecBatch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from commons.distributed import local_rows
from commons.distributed.batch_shuffler import BaseTaskBalancedBatchShuffler, IdentityBalancedBatchShuffler
from commons.distributed.control import ControlChannel
from commons.distributed.options import ShufflerOptions
from commons.distributed.payload import Part
from commons.distributed.window import WindowReader
from commons.perf_model.partitioner import METHODS
from commons.sequence_batch import fields, schema
from commons.sequence_batch.batch import BaseBatch
from commons.sequence_batch.fields import batch_items, batch_rows
from tests.helpers.batches import random_batch, rows_as_values


class SquareShuffler(BaseTaskBalancedBatchShuffler):
    """A row costs 10 plus the square of its items."""

    def get_workloads(self, batch: Any) -> torch.Tensor:
        features = batch.features if hasattr(batch, "features") else batch.sparse_features
        lengths = features.lengths().view(len(features.keys()), batch_rows(batch)).sum(0)
        return lengths.to(torch.int64) ** 2 + 10


@contextlib.contextmanager
def closing(shuffler):
    try:
        yield shuffler
    finally:
        shuffler.close()


def my_batch(seed, rows_by_rank, real_by_rank=None, **kwargs):
    rank = dist.get_rank()
    real = (real_by_rank or rows_by_rank)[rank]
    first = sum((real_by_rank or rows_by_rank)[:rank])
    return random_batch(seed * 100 + rank, rows_by_rank[rank], real, first_id=first, **kwargs)


# ------------------------------------------------------------------------------------------------ conservation


def _shuffle(seed, rows, real, options, kwargs):
    batch = my_batch(seed, rows, real, **kwargs)
    with closing(SquareShuffler(ShufflerOptions(**options))) as shuffler:
        before = rows_as_values(batch)
        result, indices, workloads = shuffler.shuffle(batch, return_indices=True, return_workloads=True)
        again = shuffler.shuffle(batch)
        assert rows_as_values(again, padding=True) == rows_as_values(result, padding=True)
        stats = shuffler.last_stats
    own = SquareShuffler.get_workloads(shuffler, result)[: result.actual_batch_size]
    assert torch.equal(own, workloads)
    return {
        "before": before,
        "after": rows_as_values(result),
        "indices": indices.tolist(),
        "workloads": workloads.tolist(),
        "rows": (batch.batch_size, result.batch_size, result.actual_batch_size),
        "padding": rows_as_values(result, padding=True)[result.actual_batch_size :],
        "stats": dataclasses.asdict(stats),
        "lookups": (_lookups(batch), _lookups(result)),
    }


def _lookups(batch):
    fields = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    return sum(
        value.values().numel()
        for name, value in fields.items()
        if isinstance(value, KeyedJaggedTensor) and name != "labels"
    )


def check(results, rows, real, options):
    before = [row for result in results for row in result["before"]]
    after = [row for result in results for row in result["after"]]
    assert sorted(map(repr, before)) == sorted(map(repr, after))  # nothing lost, nothing doubled
    starts = np.cumsum(rows) - rows
    ids = [int(start) + row for start, count in zip(starts, real) for row in range(count)]
    by_id = dict(zip(ids, before))
    for rank, result in enumerate(results):
        assert result["indices"] == sorted(result["indices"])
        assert result["after"] == [by_id[index] for index in result["indices"]]
        assert result["rows"][1] == max(1, rows[rank], result["rows"][2]) and result["rows"][2] == len(result["after"])
    assert sorted(index for result in results for index in result["indices"]) == ids
    loads_after = [sum(result["workloads"]) for result in results]
    stats = results[0]["stats"]
    assert max(loads_after) <= max(stats["loads_before"])  # never worse
    assert tuple(loads_after) == tuple(stats["loads_after"])
    lookups = [tuple(result["lookups"][after] for result in results) for after in (0, 1)]
    assert lookups == [stats["lookups_before"], stats["lookups_after"]]
    if sum(lookups[0]):
        assert stats["lookup_imbalance_before"] == max(lookups[0]) * len(results) / sum(lookups[0]) - 1
    if stats["moved"] and options.get("equal_size", True):
        assert max(len(r["after"]) for r in results) - min(len(r["after"]) for r in results) <= 1
        assert max(loads_after) < max(stats["loads_before"])
    for result in results[1:]:  # what does not depend on the rank or on time is the same everywhere
        same = ("imbalance_before", "imbalance_after", "rows_moved", "tokens_moved", "loads_before", "loads_after")
        same += ("lookups_before", "lookups_after", "rank_speeds")
        assert all(result["stats"][name] == stats[name] for name in same)


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    seed=st.integers(0, 10_000),
    sizes=st.lists(st.tuples(st.sampled_from([0, 1, 3, 7]), st.integers(0, 7)), min_size=4, max_size=4),
    options=st.fixed_dictionaries(
        {
            "transport": st.sampled_from(["all_to_all", "all_gather"]),
            "partitioner": st.sampled_from(sorted(METHODS)),
            "equal_size": st.booleans(),
            "slack": st.sampled_from([0.0, 0.01, 0.2]),
        }
    ),
    dtype=st.sampled_from([torch.int64, torch.int32, torch.float16, torch.uint8]),
)
def test_samples_are_conserved_and_never_worse(ranks, seed, sizes, options, dtype):
    rows = [size for size, _ in sizes][: ranks.world_size]
    real = [min(size, count) for size, count in sizes][: ranks.world_size]
    results = ranks.run(_shuffle, seed, rows, real, options, {"values_dtype": dtype, "tiny_dtype": dtype})
    check(results, rows, real, options)


@pytest.mark.parametrize("rows", [[8, 8, 8, 8], [0, 8, 8, 8], [7, 0, 1, 8], [0, 5, 0, 0]])
def test_both_transports_give_bit_identical_batches(ranks, rows):
    rows = rows[: ranks.world_size]
    results = {}
    for transport in ("all_to_all", "all_gather", "auto"):
        options = {"transport": transport, "slack": 0.0}
        results[transport] = ranks.run(_shuffle, 5, rows, rows, options, {"max_length": 40})
        check(results[transport], rows, rows, options)
    for rank in range(ranks.world_size):
        for key in ("after", "padding", "indices", "workloads", "rows"):
            assert results["all_to_all"][rank][key] == results["all_gather"][rank][key] == results["auto"][rank][key]
    assert results["all_to_all"][0]["stats"]["moved"]


def _giant(rows):
    """One rank holds every heavy row."""
    rank = dist.get_rank()
    heavy = rank == 0
    batch = my_batch(3, [rows] * dist.get_world_size(), max_length=60 if heavy else 1)
    with closing(SquareShuffler()) as shuffler:
        shuffler.shuffle(batch)
        return dataclasses.asdict(shuffler.last_stats)


def test_it_balances(ranks):
    stats = ranks.run(_giant, 16)[0]
    assert stats["imbalance_before"] > 0.5
    assert stats["imbalance_after"] < 0.05 and stats["optimality_gap"] < 0.05
    assert 0 < stats["rows_moved"] < 16 * ranks.world_size


# ------------------------------------------------------------------------------------------------ two phases


def _two_phase(steps):
    digests = []
    with closing(SquareShuffler()) as shuffler:
        batches = [my_batch(step, [4, 6, 1, 3]) for step in range(steps)]
        handles = [shuffler.start_shuffle(batch) for batch in batches]
        for batch, handle in zip(batches, handles):
            result = shuffler.finish_shuffle(batch, handle)
            digests.append(hashlib.sha256(repr(rows_as_values(result)).encode()).hexdigest())
            assert handle.stats.step == handle.step
        at_once = [shuffler.shuffle(batch) for batch in batches]
    return digests == [hashlib.sha256(repr(rows_as_values(result)).encode()).hexdigest() for result in at_once]


def test_two_phases_give_what_one_call_gives(ranks):
    assert all(ranks.run(_two_phase, 5))


class DirectShuffler(SquareShuffler):
    def get_workloads(self, batch: Any) -> torch.Tensor:
        return batch.features.lengths().view(3, -1).sum(0).to(torch.int64) ** 2 + 10


def _walks(mode):
    """How often a step lists the fields of its batch, and whether a row moved."""
    calls = []

    def counted(batch):
        calls.append(batch)
        return batch_items(batch)

    batch = my_batch(5, [16] * 4, max_length=60 if dist.get_rank() == 0 else 1)
    with closing(DirectShuffler(ShufflerOptions(mode=mode))) as shuffler, contextlib.ExitStack() as stack:
        for module in (fields, schema, local_rows):
            stack.enter_context(mock.patch.object(module, "batch_items", counted))
        handle = shuffler.start_shuffle(batch)
        result = shuffler.finish_shuffle(batch, handle)
    return len(calls), result is not batch


def test_the_fields_of_a_batch_are_walked_at_most_twice_per_step(ranks):
    assert ranks.run(_walks, "balance") == [(2, True)] * ranks.world_size
    assert ranks.run(_walks, "observe") == [(1, False)] * ranks.world_size


def _misuse():
    messages = []
    with closing(SquareShuffler()) as shuffler:
        batch = my_batch(1, [4] * 4)
        handle = shuffler.start_shuffle(batch)
        for call in (
            lambda: shuffler.finish_shuffle(batch.index_select([0, 1]), handle),
            lambda: shuffler.finish_shuffle(dataclasses.replace(batch, labels=None), handle),
            lambda: shuffler.finish_shuffle(dataclasses.replace(batch, labels=batch.sample_id), handle),
            lambda: shuffler.finish_shuffle(batch, None),
        ):
            try:
                call()
            except (ValueError, TypeError) as error:
                messages.append(str(error))
        shuffler.finish_shuffle(batch, handle)
        try:
            shuffler.finish_shuffle(batch, handle)
        except ValueError as error:
            messages.append(str(error))
    try:
        shuffler.start_shuffle(batch)
    except RuntimeError as error:
        messages.append(str(error))
    return messages


def test_handles_are_used_once_and_on_their_own_batch(two_ranks):
    for messages in two_ranks.run(_misuse):
        other, no_labels, dense_labels, missing, twice, closed = messages
        assert "started with a RichBatch of 4 rows" in other and "2 rows" in other
        assert all("and is finished with a RichBatch of 4 rows" in text for text in (no_labels, dense_labels))
        assert "start first" in missing and "used twice" in twice and "closed" in closed


# ------------------------------------------------------------------------------------------------ end of data


def _finished_after_the_end():
    with closing(SquareShuffler()) as shuffler, mock.patch.object(ControlChannel, "post_failure") as posted:
        handle = shuffler.start_shuffle(None)
        with pytest.raises(ValueError, match="no rank has a batch at step 0; the data has ended"):
            shuffler.finish_shuffle(my_batch(1, [4] * 4), handle)
        return handle.ended, posted.called


def test_a_shuffle_that_ended_for_all_is_no_failure_to_tell_others(two_ranks):
    assert two_ranks.run(_finished_after_the_end) == [(True, False)] * 2


def _ends(counts):
    seen, sizes = [], []
    rank = dist.get_rank()
    with closing(SquareShuffler()) as shuffler:
        for step in range(max(counts) + 1):
            batch = random_batch(step * 10 + rank, 3, first_id=step * 100 + rank * 10) if step < counts[rank] else None
            handle = shuffler.start_shuffle(batch)
            if handle.ended:
                return seen, sizes, step
            result = shuffler.finish_shuffle(handle.empty_batch() if batch is None else batch, handle)
            seen += result.sample_id[: result.actual_batch_size].tolist()
            sizes.append((result.batch_size, result.actual_batch_size))
    return seen, sizes, None


@pytest.mark.parametrize("counts", [[3, 5, 0, 7], [0, 4, 1, 1], [0, 0, 0, 0]])
def test_ranks_without_data_take_part_until_all_have_ended(ranks, counts):
    counts = counts[: ranks.world_size]
    results = ranks.run(_ends, counts)
    expected = [
        step * 100 + rank * 10 + row + 1
        for rank, count in enumerate(counts)
        for step in range(count)
        for row in range(3)
    ]
    assert sorted(sample for seen, _, _ in results for sample in seen) == sorted(expected)
    assert {step for _, _, step in results} == {max(counts)}
    assert all(size >= 1 for _, sizes, _ in results for size, _ in sizes)


# ------------------------------------------------------------------------------------------------ modes


def _mode(options):
    batch = my_batch(9, [8] * 4, max_length=60 if dist.get_rank() == 0 else 1)
    with closing(SquareShuffler(ShufflerOptions(**options))) as shuffler:
        result, indices = shuffler.shuffle(batch, return_indices=True)
        stats = shuffler.last_stats
    return result is batch, indices.tolist(), None if stats is None else dataclasses.asdict(stats)


def test_observe_plans_and_moves_nothing(ranks):
    for rank, (same, indices, stats) in enumerate(ranks.run(_mode, {"mode": "observe"})):
        assert same and indices == list(range(rank * 8, rank * 8 + 8))
        assert stats["imbalance_after"] < stats["imbalance_before"] and not stats["moved"] and stats["bytes_sent"] == 0


def test_off_and_the_gate_move_nothing(two_ranks):
    assert all(same and stats is None for same, _, stats in two_ranks.run(_mode, {"mode": "off"}))
    for same, _, stats in two_ranks.run(_mode, {"min_gain": 0.99}):
        assert same and stats["gated"] and not stats["moved"]


def _identity():
    batch = my_batch(9, [3, 0, 2, 5])
    with closing(IdentityBalancedBatchShuffler()) as shuffler:
        result, indices, workloads = shuffler.shuffle(batch, return_indices=True, return_workloads=True)
    return rows_as_values(result) == rows_as_values(batch), result.batch_size, indices.tolist(), workloads.tolist()


def test_identity_moves_nothing_and_gives_an_empty_rank_one_row_of_padding(ranks):
    rows, first = [3, 0, 2, 5], 0
    for rank, (same, size, indices, workloads) in enumerate(ranks.run(_identity)):
        assert same and size == max(1, rows[rank]) and workloads == [1] * rows[rank]
        assert indices == list(range(first, first + rows[rank]))
        first += rows[rank]


def _gather_grows():
    with closing(SquareShuffler()) as shuffler:
        sizes = []
        for step, rows in enumerate(([2, 2, 2, 2], [2, 30, 2, 2], [9, 9, 9, 9])):
            result = shuffler.shuffle(my_batch(step, rows))
            sizes.append(result.actual_batch_size)
    return sizes


def test_a_rank_may_outgrow_the_first_batch(ranks):
    results = ranks.run(_gather_grows)
    world_size = ranks.world_size
    assert [sum(sizes) for sizes in zip(*results)] == [2 * world_size, 30 + 2 * (world_size - 1), 9 * world_size]


def _windows_grow():
    sizes = []
    with closing(SquareShuffler()) as shuffler:
        for rows in ([2, 2, 2, 2], [2, 30, 2, 2], [9, 9, 9, 9]):
            batches = [my_batch(step, rows) for step in range(3)]
            window = shuffler.start_window(WindowReader(iter(batches), 3)).result()
            sizes.append(sum(batch.actual_batch_size for batch in window.batches))
    return sizes


def test_a_rank_may_outgrow_the_first_window_with_any_of_its_batches(two_ranks):
    assert [sum(sizes) for sizes in zip(*two_ranks.run(_windows_grow))] == [12, 96, 54]


def _empty_rows(transport):
    """Rows of no elements: they move, and there is nothing to send."""
    rows = 4
    features = KeyedJaggedTensor(
        keys=["a", "b"], values=torch.zeros(0), lengths=torch.zeros(2 * rows, dtype=torch.int64)
    )
    batch = BaseBatch(features, rows, {"a": 1, "b": 1})
    weight = 1000 if dist.get_rank() == 0 else 1
    with closing(SquareShuffler(ShufflerOptions(transport=transport, slack=0.0))) as shuffler:
        with mock.patch.object(shuffler, "get_workloads", lambda batch: torch.arange(1, rows + 1) * weight):
            results = [shuffler.shuffle(batch, return_indices=True) for _ in range(2)]
        stats = shuffler.last_stats
    return [(result.actual_batch_size, indices.tolist()) for result, indices in results], stats.moved, stats.bytes_sent


@pytest.mark.parametrize("transport", ["all_to_all", "all_gather"])
def test_rows_without_elements_move(ranks, transport):
    answers = ranks.run(_empty_rows, transport)
    assert all(moved and not sent for _, moved, sent in answers)
    for step in range(2):
        ids = [row for results, _, _ in answers for row in results[step][1]]
        assert sorted(ids) == list(range(4 * ranks.world_size)) and answers[0][0][step][1] != [0, 1, 2, 3]


def _other_token_features():
    with closing(SquareShuffler()) as shuffler:
        shuffler.token_feature_names = ("user",) if dist.get_rank() else None
        try:
            shuffler.shuffle(my_batch(0, [3] * 4))
        except ValueError as error:
            return str(error)
    return "no error"


def test_ranks_that_count_other_features_as_tokens_are_told(two_ranks):
    for text in two_ranks.run(_other_token_features):
        assert text.startswith("token_features is None on rank 0 and ['user'] on rank 1 in shuffle; all ranks pass")


def _long_lengths():
    lengths = torch.tensor([4096, 1, 2, 4096], dtype=torch.int32).repeat(3)
    features = KeyedJaggedTensor(
        keys=["user", "item", "action"], values=torch.zeros(int(lengths.sum())), lengths=lengths
    )
    batch = dataclasses.replace(random_batch(0, 4), features=features)
    with closing(SquareShuffler()) as shuffler:
        _, workloads = shuffler.shuffle(batch, return_workloads=True)
    return workloads.tolist()


def test_int32_lengths_of_4096_do_not_overflow(two_ranks):
    for workloads in two_ranks.run(_long_lengths):
        assert max(workloads) == (3 * 4096) ** 2 + 10


def _verified(damage):
    original = Part.read

    def damaged(part, words, rows):
        tensor = original(part, words, rows)
        if damage == "nothing" or dist.get_rank() != 1:
            return tensor
        if damage == "weights" and part.weights:
            tensor[0] += 1
        if damage == "rows" and part.field == "image":
            tensor[[0, 1]] = tensor[[1, 0]]
        return tensor

    Part.read = damaged
    batch = my_batch(3, [16] * 4, max_length=60 if dist.get_rank() == 0 else 1)
    try:
        with closing(SquareShuffler(ShufflerOptions(verify=True))) as shuffler:
            result = shuffler.shuffle(batch)
            assert result is not batch
    except RuntimeError as error:
        return str(error)
    finally:
        Part.read = original
    return "no error"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("nothing", "no error"),
        ("weights", "changed the content of features (weights)"),
        ("rows", "put fields of different rows together"),
    ],
)
def test_verify_notices_damage_on_any_rank(ranks, damage, message):
    assert all(message in text for text in ranks.run(_verified, damage))


# ------------------------------------------------------------------------------------------------ other dataclasses


def _torchrec_batch(rows, seed=0, longest=30):
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(seed + rank)
    count = rows[rank]
    lengths = torch.randint(0, longest if rank == 0 else 3, (2 * count,), generator=generator)
    batch = TorchRecBatch(
        dense_features=torch.rand(count, 3, generator=generator),
        sparse_features=KeyedJaggedTensor(keys=["a", "b"], values=torch.arange(int(lengths.sum())), lengths=lengths),
        labels=rank * 100 + torch.arange(count),
    )
    with closing(SquareShuffler()) as shuffler:
        result = shuffler.shuffle(batch)
        moved = shuffler.last_stats.moved
    return result.labels.tolist(), result.dense_features.shape[0], moved


def test_torchrecs_own_batch_is_shuffled(ranks):
    results = ranks.run(_torchrec_batch, [6, 7, 6, 5])
    sizes = [6, 7, 6, 5][: ranks.world_size]
    assert sorted(label for labels, _, _ in results for label in labels) == [
        rank * 100 + row for rank, size in enumerate(sizes) for row in range(size)
    ]
    assert all(len(labels) == rows for labels, rows, _ in results) and results[0][2]


# ------------------------------------------------------------------------------------------------ mistakes


class Wrong(SquareShuffler):
    """Returns wrong workloads on rank 1, or raises there."""

    def __init__(self, wrong, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.wrong = wrong

    def get_workloads(self, batch):
        right = super().get_workloads(batch)
        if dist.get_rank() != 1:
            return right
        return {
            "short": lambda: right[:-1],
            "negative": lambda: right - 100,
            "nan": lambda: right.double() * float("nan"),
            "shape": lambda: right[:, None],
            "raises": lambda: {}["nothing here"],
            "crash": lambda: 1 // 0,
        }[self.wrong]()


def _wrong(kind):
    with closing(Wrong(kind)) as shuffler:
        try:
            shuffler.shuffle(my_batch(0, [4] * 4))
        except Exception as error:
            first = (type(error).__name__, str(error))
        else:
            first = ("none", "")
        shuffler.wrong = "short"
        try:  # the ranks are still in step
            shuffler.shuffle(my_batch(0, [4] * 4))
        except ValueError as error:
            assert "has 3 entries" in str(error)
        else:
            raise AssertionError("a second mistake went unnoticed")
        return first


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("short", "ValueError", "rank 1: workloads has 3 entries, batch_size is 4"),
        ("negative", "ValueError", "rank 1: .*-"),
        ("nan", "ValueError", "rank 1: .*(nan|NaN)"),
        ("shape", "ValueError", r"rank 1: workloads have shape \(4, 1\)"),
        ("raises", "KeyError", "rank 1: nothing here"),
        ("crash", "RuntimeError", "rank 1: ZeroDivisionError"),
    ],
)
def test_a_mistake_on_one_rank_is_raised_on_all(ranks, kind, error, message):
    import re

    for kind_raised, text in ranks.run(_wrong, kind):
        assert kind_raised == error and re.search(message, text), text
        assert "\n" not in text


def _differing(what):
    rank = dist.get_rank()
    options = ShufflerOptions(slack=0.5 if what == "options" and rank == 1 else 0.01)
    batch = my_batch(0, [4] * 4, tiny_dtype=torch.int16 if what == "dtype" and rank == 1 else torch.int8)
    if what == "plain" and rank == 1:
        batch = dataclasses.replace(batch, note={"unit": "ms"})
    if what == "rows" and rank == 1:
        batch.image = batch.image[:2]
    if what == "no dataclass" and rank == 1:
        batch = [1, 2]
    if what == "values" and rank == 1:
        batch.features = KeyedJaggedTensor(
            keys=batch.features.keys(),
            values=torch.arange(1000),
            weights=torch.ones(1000),
            lengths=batch.features.lengths(),
        )
    with closing(SquareShuffler(options)) as shuffler:
        try:
            shuffler.shuffle(batch)
        except (ValueError, TypeError) as error:
            return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("options", "options differ: rank 0 has {'slack': 0.01}, rank 1 has {'slack': 0.5}"),
        ("dtype", "the batches of ranks 0 and 1 differ: field 'tiny'"),
        ("plain", "the batches of ranks 0 and 1 differ: field 'note'"),
        ("rows", "rank 1: fields of RichBatch disagree on the number of rows"),
        ("no dataclass", "rank 1: the batch is a list"),
        ("values", "rank 1: field 'features' has lengths that add up to"),
    ],
)
def test_ranks_that_differ_stop_together(ranks, what, message):
    for text in ranks.run(_differing, what):
        assert message in text


@dataclass
class Unpadded:
    """A batch type that cannot state padding."""

    features: KeyedJaggedTensor

    def to(self, device, non_blocking=False):
        return Unpadded(self.features.to(device))


def _unpadded():
    rows = 1 if dist.get_rank() == 0 else 0
    lengths = torch.full((rows,), 3)
    batch = Unpadded(KeyedJaggedTensor(keys=["a"], values=torch.arange(3 * rows), lengths=lengths, stride=rows))
    with closing(SquareShuffler()) as shuffler:
        try:
            shuffler.shuffle(batch)
        except ValueError as error:
            return str(error)
    return "no error"


def test_a_batch_that_cannot_state_padding_needs_a_row_on_every_rank(two_ranks):
    for text in two_ranks.run(_unpadded):
        assert "ranks [1] would train no row" in text and "actual_batch_size" in text


def _token_cap():
    batch = my_batch(2, [8] * 4, max_length=30 if dist.get_rank() == 0 else 3)
    with closing(SquareShuffler(ShufflerOptions(max_tokens_per_rank=5))) as shuffler:
        shuffler.shuffle(batch)
        shuffler.shuffle(batch)
        return shuffler.num_cap_exceeded, shuffler.last_stats.excess_tokens


def test_a_cap_that_no_plan_keeps_is_counted_and_exceeded_least(ranks):
    results = ranks.run(_token_cap)
    assert {count for count, _ in results} == {2}
    assert len({excess for _, excess in results}) == 1 and results[0][1] > 0


def _named_tokens(names):
    """Excess over a cap of one token, of key "b" alone: rows bring 3 values of key "a" and 1 of key "b"."""
    lengths = torch.tensor([3, 3, 1, 1])
    features = KeyedJaggedTensor(keys=["a", "b"], values=torch.arange(8), lengths=lengths, stride=2)
    batch = BaseBatch(features, 2, {"a": 3, "b": 1})
    with closing(SquareShuffler(ShufflerOptions(max_tokens_per_rank=1))) as shuffler:
        shuffler.token_feature_names = names
        try:
            shuffler.shuffle(batch)
        except KeyError as error:
            return error.args[0]
        return shuffler.last_stats.excess_tokens


def test_what_counts_as_a_token_can_be_said(two_ranks):
    excess = [two_ranks.run(_named_tokens, names)[0] for names in (None, ["a", "b"], ["b"])]
    assert excess == [7, 7, 1]
    for said in two_ranks.run(_named_tokens, ["b", "c"]):
        assert "features ['c'] are not among the batch's keys ['a', 'b']: correct token_feature_names" in said
