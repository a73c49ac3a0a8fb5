"""What goes wrong on one rank is raised on all of them, in the same words, and the next batch is shuffled."""

from __future__ import annotations

import contextlib
import json
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from commons.dispatch import exchange, redistribute_balanced
from commons.distributed import errors
from commons.distributed.channel.agree import ControlChannel
from commons.distributed.errors import describe_error
from commons.distributed.exchange import verification
from commons.distributed.exchange.row_exchange import RowExchange
from commons.distributed.options import ShufflerOptions
from commons.perf_model.shuffle_plan import ShufflePlan, ShufflePlanner
from commons.pipeline import windowed_iter
from commons.sequence_batch.schema import BatchSchema
from tests.helpers.batches.random_batches import RichBatch, random_batch
from tests.helpers.batches.square_shuffler import SquareShuffler, closing, my_batch
from tests.helpers.ranks.faults import error_of, logged, on_rank
from tests.helpers.ranks.on_ranks import of_all, on, on_four_ranks, on_ranks, on_two_ranks

# Far beyond the pools' own limit: a rank that waits for another one fails its test.
PATIENT = 600.0


class OtherShuffler(SquareShuffler):
    pass


class UnprintableError(Exception):
    def __str__(self):
        raise OSError("no text")


Patch = Callable[[Any, str, Any], Any]  # of an object's attribute, until the shuffle is over


@dataclass(frozen=True)
class Mistake:
    """What rank 1 does wrong, and the error of every rank: its text, or a pattern of it."""

    spoil: Callable[[SquareShuffler, RichBatch, Patch], Any]  # called on rank 1; may change the batch
    said: str
    options: dict[str, Any] = field(default_factory=dict)
    goes_on: bool = True  # whether the next batch is shuffled


def _fails(error):
    return mock.Mock(side_effect=error)


def _workloads(change):
    def spoil(shuffler, batch, patch):
        right = shuffler.get_workloads
        patch(shuffler, "get_workloads", lambda each: change(right(each)))

    return spoil


def _raises(error):
    return lambda shuffler, batch, patch: patch(shuffler, "get_workloads", _fails(error))


def _breaks(owner, name, error):
    return lambda shuffler, batch, patch: patch(owner, name, _fails(error))


def _unreadable_text(shuffler, batch, patch):
    patch(BatchSchema, "text", property(_fails(ValueError("\ud800"))))


def _field(**changes):
    """Other values of fields, each made of the batch."""

    def spoil(shuffler, batch, patch):
        for name, change in changes.items():
            object.__setattr__(batch, name, change(batch))

    return spoil


def _jagged(**changes):
    return _field(features=lambda batch: KeyedJaggedTensor(**_parts(batch.features) | changes))


def _parts(features, sign=1):
    parts = {"values": features.values(), "weights": features.weights(), "lengths": sign * features.lengths()}
    return {"keys": features.keys(), **parts}


def _with_grad(batch):
    parts = _parts(batch.features)
    return KeyedJaggedTensor(**parts | {"weights": parts["weights"] * torch.ones((), requires_grad=True)})


def _no_column(shuffler, batch, patch):
    patch(shuffler, "get_workloads", lambda each: each.features["no_such"].lengths())


def _groups(shuffler, batch, patch):
    patch(shuffler.engine.costs, "has_groups", True)
    patch(shuffler, "get_groups", lambda each: torch.zeros(each.batch_size, dtype=torch.int64))


def _checksum(number):
    """The checksum of that number, from 1, cannot be computed."""

    def spoil(shuffler, batch, patch):
        right, calls = verification.checksums, []

        def failing(*args):
            calls.append(1)
            if len(calls) == number:
                raise MemoryError("no room")
            return right(*args)

        patch(verification, "checksums", failing)

    return spoil


NO_ROOM = "RuntimeError: rank 1: MemoryError: no room"
MISTAKES = {
    "negative": Mistake(_workloads(lambda right: right - 10**6), r"ValueError: rank 1: workloads\[0\] is -"),
    "nan": Mistake(_workloads(lambda right: right.double() * float("nan")), "ValueError: rank 1: .*(nan|NaN)"),
    "shape": Mistake(_workloads(lambda right: right[:, None]), r"ValueError: rank 1: workloads have shape \(4, 1\)"),
    "array": Mistake(
        _workloads(lambda right: right.numpy()[:, None][:, :0].copy()),
        r"ValueError: rank 1: workloads have shape \(4, 0\)",
    ),
    "masked": Mistake(
        _workloads(lambda right: np.ma.masked_array(right.numpy(), right.numpy() > 0)),
        r"ValueError: rank 1: workloads\[0\] is masked; every row needs a value",
    ),
    "sum": Mistake(_workloads(lambda right: right.sum()), r"ValueError: rank 1: workloads have shape \(\)"),
    "number": Mistake(_workloads(lambda right: 3), r"ValueError: rank 1: workloads have shape \(\)"),
    "nothing": Mistake(_workloads(lambda right: None), "TypeError: rank 1: get_workloads returned None; "),
    "no column": Mistake(_no_column, r"""KeyError: "rank 1: get_workloads reads 'no_such'; the batch's keys are \["""),
    "no key of another dict": Mistake(_raises(KeyError("item")), "KeyError: 'rank 1: item'$"),
    "no text": Mistake(_raises(ValueError("")), r"ValueError: rank 1: mock\.py, line \d+, in \w+$"),
    "no text of another kind": Mistake(
        _raises(OSError()), r"RuntimeError: rank 1: OSError: mock\.py, line \d+, in \w+$"
    ),
    "unprintable": Mistake(
        _raises(UnprintableError()), "RuntimeError: rank 1: UnprintableError: its text is not available: str.. of it"
    ),
    "surrogate": Mistake(_raises(ValueError("file \udcff.parquet")), r"ValueError: rank 1: file \\udcff.parquet"),
    "two lines": Mistake(_raises(KeyError("first\nsecond")), r"KeyError: 'rank 1: first\\nsecond'"),
    "huge text": Mistake(
        _raises(ValueError("x" * 1_000_000)), "ValueError: rank 1: x{4000}… and 996000 more characters"
    ),
    "dtype": Mistake(
        _field(tiny=lambda batch: batch.tiny.to(torch.int16)),
        "SchemasDifferError: the batches of ranks 0 and 1 differ: field 'tiny'",
    ),
    "rows": Mistake(
        _field(image=lambda batch: batch.image[:2]),
        "ValueError: rank 1: fields of RichBatch disagree on the number of rows",
    ),
    "lengths": Mistake(
        _jagged(values=torch.arange(1000), weights=torch.ones(1000)),
        "ValueError: rank 1: field 'features' has lengths that add up to",
    ),
    "negative lengths": Mistake(
        _field(features=lambda batch: KeyedJaggedTensor(**_parts(batch.features, -1))),
        "ValueError: rank 1: field 'features' has a length of -",
    ),
    "padding": Mistake(
        _field(actual_batch_size=lambda batch: 1), r"ValueError: rank 1: field '\w+' has values in padding rows \[1, 4"
    ),
    "too many rows": Mistake(
        _field(actual_batch_size=lambda batch: 5), "ValueError: rank 1: actual_batch_size is 5, batch_size is 4"
    ),
    "a part of a row": Mistake(
        _field(actual_batch_size=lambda batch: 3.5),
        "ValueError: rank 1: actual_batch_size is 3.5; it must be an integer",
    ),
    "inverse indices": Mistake(
        _jagged(inverse_indices=(["user"], torch.zeros(1, 4, dtype=torch.int64))), ".*field 'features' has inverse_ind"
    ),
    "grad": Mistake(
        _field(image=lambda batch: batch.image * torch.ones((), requires_grad=True)),
        "ValueError: rank 1: field 'image' requires grad; .*detach it before",
    ),
    "grad of weights": Mistake(_field(features=_with_grad), "ValueError: rank 1: field 'features' requires grad; "),
    "features that are tokens": Mistake(
        lambda shuffler, batch, patch: patch(shuffler, "token_feature_names", ("user",)),
        r"ValueError: token_features is None on ranks? 0.* and \['user'\] on rank 1 in shuffle; all ranks pass",
        goes_on=False,
    ),
    "groups": Mistake(
        _groups, "ValueError: get_groups overridden is False on ranks? 0.* and True on rank 1 in shuffle", goes_on=False
    ),
    "another class": Mistake(
        lambda shuffler, batch, patch: setattr(shuffler, "__class__", OtherShuffler),
        "ValueError: shuffler is 'SquareShuffler' on ranks? 0.* and 'OtherShuffler' on rank 1 in shuffle",
        goes_on=False,
    ),
    "plan": Mistake(_breaks(ShufflePlanner, "plan_messages", MemoryError("no room")), NO_ROOM),
    "exchange": Mistake(_breaks(RowExchange, "of", MemoryError("no room")), NO_ROOM),
    "writing schemas": Mistake(_unreadable_text, r"ValueError: rank 1: \\ud800"),
    "reading schemas": Mistake(_breaks(BatchSchema, "from_text", KeyError("a type")), "KeyError: 'rank 1: a type'"),
    "comparing schemas": Mistake(
        _breaks(BatchSchema, "__ne__", ZeroDivisionError()), "RuntimeError: rank 1: ZeroDivisionError: "
    ),
    "first checksum": Mistake(_checksum(1), NO_ROOM, {"verify": True}),
    "second checksum": Mistake(_checksum(2), NO_ROOM, {"verify": True}),
    "checksum where nobody moves": Mistake(_checksum(2), NO_ROOM, {"verify": True, "min_gain": 0.99}),
}
IN_WINDOWS = ("grad", "grad of weights", "plan", "exchange")
IN_WINDOWS += ("first checksum", "second checksum", "checksum where nobody moves")


def _shuffle_spoilt(spoil, rank, shuffler, batch, results):
    """The error of the first result, where one rank makes a mistake."""
    with contextlib.ExitStack() as stack:
        if dist.get_rank() == rank:
            spoil(shuffler, batch, lambda *what: stack.enter_context(mock.patch.object(*what)))
        return error_of(next, results)


@pytest.mark.parametrize("window", [False, True])
@on("ranks", timeout=100)
def test_a_mistake_of_one_rank_is_raised_on_all(window):
    """And the next batch is shuffled."""
    for name in IN_WINDOWS if window else MISTAKES:
        mistake = MISTAKES[name]
        batch = my_batch(0, [4] * 4, max_length=60 if dist.get_rank() == 0 else 6)
        with closing(SquareShuffler(ShufflerOptions(timeout=PATIENT, **mistake.options))) as shuffler:
            results = windowed_iter(iter([batch] * 3), shuffler, 2) if window else map(shuffler.shuffle, [batch])
            text = _shuffle_spoilt(mistake.spoil, 1, shuffler, batch, results)
            assert re.match(mistake.said, text) and "\n" not in text, (name, text)
            if mistake.goes_on and not window:
                assert error_of(shuffler.shuffle, my_batch(1, [4] * 4)) == "no error", name


@on_ranks
def test_mistakes_of_later_batches():
    """When batches were compared before, and with messages that are gathered once more."""
    with closing(SquareShuffler(ShufflerOptions(timeout=PATIENT))) as shuffler:
        shuffler.shuffle(my_batch(0, [4] * 4))
        planner = shuffler.engine._session(None)._planner
        with on_rank(1, mock.patch.object(planner, "plan_messages", _fails(MemoryError("no room")))):
            assert error_of(shuffler.shuffle, my_batch(1, [64] * 4)) == NO_ROOM
        if dist.get_rank() == 1:
            shuffler.engine._session(None).next_step()
        said = error_of(shuffler.shuffle, my_batch(2, [4] * 4))
        assert f"ranks are at steps {[2, 3] + [2] * (dist.get_world_size() - 2)}" in said


@on_two_ranks
def test_a_mistake_in_workloads_that_no_plan_needs():
    """In those of mode "off", which only `return_workloads` asks for; then they are of another integer type."""
    batch = my_batch(0, [4] * 4)
    with closing(SquareShuffler(ShufflerOptions(mode="off", timeout=PATIENT))) as shuffler:
        with on_rank(1, mock.patch.object(shuffler, "get_workloads", _fails(OSError("no costs")))):
            said = error_of(shuffler.shuffle, batch, return_workloads=True)
        assert said == "RuntimeError: rank 1: OSError: no costs"
        with mock.patch.object(shuffler, "get_workloads", lambda _: torch.tensor([1, 2, 3, -1], dtype=torch.int32)):
            batch.actual_batch_size = 3
            _, workloads = shuffler.shuffle(batch, return_workloads=True)
    assert workloads.dtype == torch.int64 and workloads.tolist() == [1, 2, 3]


@pytest.mark.parametrize("mode", ["observe", "off"])
@on_two_ranks
def test_fields_that_require_grad_stay_where_nothing_moves(mode):
    batch = my_batch(0, [4] * 4)
    batch.image = batch.image * torch.ones((), requires_grad=True)
    with closing(SquareShuffler(ShufflerOptions(mode=mode))) as shuffler:
        assert shuffler.shuffle(batch) is batch


@dataclass
class Unpadded:
    """A batch type that cannot state padding."""

    features: KeyedJaggedTensor


def unpadded_batch(rows):
    lengths = torch.full((rows,), 3)
    return Unpadded(KeyedJaggedTensor(keys=["a"], values=torch.arange(3 * rows), lengths=lengths, stride=rows))


@on_two_ranks
def test_what_no_rank_can_shuffle():
    batch = unpadded_batch(1 if dist.get_rank() == 0 else 0)
    with closing(SquareShuffler()) as shuffler:
        padding, no_batch = (error_of(shuffler.shuffle, each) for each in (batch, [1, 2]))
    assert "ranks [1] would train no row" in padding and "actual_batch_size" in padding
    assert "rank 0: the batch is a list" in no_batch and "or put it into a field of one" in no_batch
    assert no_batch.endswith("(and on rank 1)")


def _other_digest(shuffler, batch, patch):
    patch(ShufflePlan, "digest", lambda plan: 1)


@on_four_ranks
def test_ranks_of_a_subgroup_are_named_by_their_global_number():
    halves = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    for spoil, expected in (
        (_workloads(lambda right: -right), "rank 3: workloads[0] is -"),
        (MISTAKES["dtype"].spoil, "the batches of ranks 1 and 3 differ: field 'tiny'"),
        (_other_digest, "ranks [3] made another plan than the rest of ranks [1, 3]"),
    ):
        batch = my_batch(0, [4] * 4)
        with closing(SquareShuffler(pg_group=halves[dist.get_rank() % 2])) as shuffler:
            said = _shuffle_spoilt(spoil, 3, shuffler, batch, map(shuffler.shuffle, [batch]))
        assert expected in said if dist.get_rank() % 2 else said == "no error"
    batch = unpadded_batch(0 if dist.get_rank() == 3 else 1)
    with closing(SquareShuffler(pg_group=halves[dist.get_rank() % 2])) as shuffler:
        said = error_of(shuffler.shuffle, batch)
    assert "ranks [3] would train no row" in said if dist.get_rank() % 2 else said == "no error"


@on_two_ranks
def test_what_ranks_exchange_warns_of_nothing():
    """Numbers and texts; neither torch nor numpy does."""
    channel = ControlChannel(dist.group.WORLD, timeout=30.0, moves_rows=False)
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)  # else a process shows its first warning alone
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            channel.gather_text(f"rank {dist.get_rank()}", 0)
            channel.gather(np.arange(6)[::2] + dist.get_rank(), 0)
    finally:
        torch.set_warn_always(always)
        channel.close()


@on("own_ranks", timeout=60)
def test_a_rank_that_has_no_room_for_dispatched_rows():
    """Rank 1 cannot pack its rows; then it cannot make room for those that come; the next call goes well."""
    rank, size, broken = dist.get_rank(), dist.get_world_size(), _fails(MemoryError("no room for \ud800"))
    rows = {"ids": torch.arange(8) + 100 * rank}

    def move():
        return redistribute_balanced(rows, torch.arange(8) * (100 if rank else 1)).batch["ids"].tolist()

    with on_rank(1, mock.patch.object(exchange.MessageBuffer, "append", broken)):
        assert error_of(move) == r"RuntimeError: rank 1: MemoryError: no room for \ud800"
    with on_rank(1, mock.patch.object(torch.Tensor, "new_empty", broken)):
        said = error_of(move)
    assert said.startswith("" if rank == 1 else "RankMissingError: rank 1 failed in the exchange of rows of step")
    assert said.endswith("MemoryError: no room for \ud800" if rank == 1 else r"MemoryError: no room for \ud800")
    assert sorted(of_all(move())) == [other * 100 + row for other in range(size) for row in range(8)]


def _told(mistakes):
    """What all ranks raise if each has made one of these mistakes."""
    texts = ["" if each is None else json.dumps(describe_error(each)) for each in mistakes]
    with mock.patch.object(errors, "gather_strings", lambda text, gather: texts):
        return error_of(errors.raise_on_all, None, range(len(mistakes)), np.asarray)


@pytest.mark.parametrize("window", [False, True])
@on_ranks
def test_ranks_that_read_the_same_rows_are_logged_once(window):
    """As without a DistributedSampler; not batches that may be alike by chance."""
    rank, ranks = dist.get_rank(), [*range(dist.get_world_size())]
    for seeds, rows, alike in (([0] * 4, 16, ranks), ([1, 2, 0, 0], 16, ranks[2:]), ([0] * 4, 2, [])):
        batches = [random_batch(10 * step + seeds[rank], rows, max_length=60) for step in range(2)]
        with closing(SquareShuffler()) as shuffler, logged() as texts:
            list(windowed_iter(iter(batches), shuffler, 2) if window else map(shuffler.shuffle, batches))
        assert [text.split(" have")[0] for text in texts] == [errors.name_ranks(alike)] * bool(alike and rank == 0)


def test_the_same_mistake_of_many_ranks_is_told_once():
    mistakes = [ValueError("no column 'item'")] * 40
    mistakes[7], mistakes[8] = OSError("disk"), None
    named = ", ".join(str(rank) for rank in range(1, 19) if rank not in (7, 8))
    said = _told(mistakes)
    assert said == f"ValueError: rank 0: no column 'item' (and on ranks {named} and 21 more); rank 7: OSError: disk"
    assert _told([ValueError("no rows"), KeyError("item")]) == "ValueError: rank 0: no rows; rank 1: KeyError: item"
    said = _told([OSError(str(rank)) for rank in range(20)])
    assert said.startswith("RuntimeError: ") and said.endswith("rank 15: OSError: 15; and 4 other errors")
