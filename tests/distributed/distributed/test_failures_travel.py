"""Whatever goes wrong on one rank, wherever, and whatever its text: all ranks raise it and stay in step."""

from __future__ import annotations

import warnings
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from commons.dispatch import exchange, redistribute_balanced
from commons.distributed.channel.agree import ControlChannel
from commons.distributed.errors import describe_error, raise_first_error
from commons.distributed.options import ShufflerOptions
from commons.distributed.row_exchange import RowExchange
from commons.perf_model.shuffle_plan import ShufflePlanner
from commons.sequence_batch.schema import BatchSchema
from tests.helpers.faults import my_batch, on_rank, raised_by
from tests.helpers.models import make_batch
from tests.helpers.pipelines import CubicShuffler

# Far beyond the pools' own limit: a rank that waits for another one fails its test.
PATIENT = ShufflerOptions(timeout=600.0)


class UnprintableError(Exception):
    def __str__(self):
        raise OSError("no text")


def _fails(error):
    return mock.Mock(side_effect=error)


def _nested(batch):
    batch.target = torch.nested.nested_tensor([torch.ones(2)] * batch.batch_size, layout=torch.jagged)
    return batch


# What the worker does between the gather and the comparison of plans.
PLANNING = ((ShufflePlanner, "plan_messages"), (RowExchange, "of"))


def _every_failure():
    """What each rank raises where rank 1 fails alone, case by case; the ranks go on together after each."""
    wrong, said = dist.get_rank() == 1, {}
    errors = {
        "empty text": ValueError(""),
        "empty text of another kind": OSError(),
        "no text": UnprintableError(),
        "lone surrogate": ValueError("file \udcff.parquet"),
        "two lines": KeyError("first\nsecond"),
        "huge text": ValueError("x" * 1_000_000),
    }
    shuffler = CubicShuffler(PATIENT)
    for name, error in errors.items():
        with mock.patch.object(shuffler, "get_workloads", _fails(error) if wrong else shuffler.get_workloads):
            said[name] = raised_by(lambda: shuffler.shuffle(my_batch()))
    said["nested"] = raised_by(lambda: shuffler.shuffle(_nested(my_batch()) if wrong else my_batch()))
    for owner, name in PLANNING:
        broken = _fails(MemoryError("no room")) if wrong else getattr(owner, name)
        with mock.patch.object(owner, name, broken):
            said[name] = raised_by(lambda: shuffler.shuffle(my_batch()))
    larger = make_batch(list(range(64)), 64)  # outgrows the messages, which are gathered once more
    session = shuffler.engine._session(None)
    planner = session._planner
    with mock.patch.object(
        planner, "plan_messages", _fails(MemoryError("no room")) if wrong else planner.plan_messages
    ):
        said["a larger batch"] = raised_by(lambda: shuffler.shuffle(larger))
    session._alike = None  # a schema that has been compared is not compared again
    with mock.patch.object(BatchSchema, "differences" if not wrong else "__ne__", lambda *_: 1 // 0):
        said["comparing schemas"] = raised_by(lambda: shuffler.shuffle(my_batch()))
    said["then"] = raised_by(lambda: shuffler.shuffle(my_batch()))
    shuffler.close()
    said |= _before_the_agreement(wrong)
    return said


def _before_the_agreement(wrong):
    said = {}
    shuffler = CubicShuffler(PATIENT)
    for owner, error in ((ShufflerOptions, OSError("no room")), (BatchSchema, ValueError("\ud800"))):
        with mock.patch.object(owner, "to_json", _fails(error) if wrong else owner.to_json):
            said[owner.__name__] = raised_by(lambda: shuffler.shuffle(my_batch()))
    with mock.patch.object(BatchSchema, "from_json", _fails(KeyError("a type")) if wrong else BatchSchema.from_json):
        said["reading schemas"] = raised_by(lambda: shuffler.shuffle(my_batch()))
    said["finally"] = raised_by(lambda: shuffler.shuffle(my_batch()))
    shuffler.close()
    return said


def test_every_failure_is_raised_on_every_rank(ranks):
    expected = {
        "empty text": "ValueError: rank 1: ValueError",
        "empty text of another kind": "RuntimeError: rank 1: OSError",
        "no text": "RuntimeError: rank 1: UnprintableError: its text cannot be had: str() of it raises OSError",
        "lone surrogate": r"ValueError: rank 1: file \udcff.parquet",
        "two lines": r"KeyError: 'rank 1: first\nsecond'",
        "huge text": f"ValueError: rank 1: {'x' * 4000}… and 996000 more characters",
        "nested": "ValueError: rank 1: field 'target' is a nested tensor; rows that move are those of dense tensors "
        "and of KeyedJaggedTensors: convert it to one of these",
        **dict.fromkeys((name for _, name in PLANNING), "RuntimeError: rank 1: MemoryError: no room"),
        "a larger batch": "RuntimeError: rank 1: MemoryError: no room",
        "reading schemas": "KeyError: 'rank 1: a type'",
        "comparing schemas": "RuntimeError: rank 1: ZeroDivisionError: integer division or modulo by zero",
        "then": "no error",
        "ShufflerOptions": "RuntimeError: rank 1: OSError: no room",
        "BatchSchema": r"ValueError: rank 1: \ud800",
        "finally": "no error",
    }
    for said in ranks.run(_every_failure, timeout=60):
        assert said == expected


def _warned_of():
    """What torch and numpy warn of while ranks tell each other numbers and texts."""
    channel = ControlChannel(dist.group.WORLD, timeout=30.0, moves_rows=False)
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)  # else only the first one of a process is told
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            texts = channel.gather_text(f"rank {dist.get_rank()}", 0)
            numbers = channel.gather(np.arange(6)[::2] + dist.get_rank(), 0)
    finally:
        torch.set_warn_always(always)
        channel.close()
    return texts, numbers.tolist(), [str(warning.message) for warning in caught]


def test_what_ranks_tell_each_other_warns_of_nothing(ranks):
    size = len(answers := ranks.run(_warned_of))
    told = [f"rank {rank}" for rank in range(size)], [[rank, rank + 2, rank + 4] for rank in range(size)], []
    assert answers == [told] * size


def _fails_in_dispatch():
    """Rank 1 cannot pack its rows; then it cannot make room for those that come; the next call goes well."""
    rows = {"ids": torch.arange(8) + 100 * dist.get_rank()}
    workloads = torch.arange(8) * (100 if dist.get_rank() else 1)
    said, broken = [], _fails(MemoryError("no room for \ud800"))
    for owner, name in ((exchange.MessageBuffer, "append"), (torch.Tensor, "new_empty")):
        with on_rank(1, mock.patch.object(owner, name, broken)):
            said.append(raised_by(lambda: redistribute_balanced(rows, workloads)))
    return said, redistribute_balanced(rows, workloads).batch["ids"].tolist()


def test_a_rank_that_has_no_room_for_rows(own_ranks, world_size):
    answers = own_ranks.run(_fails_in_dispatch, timeout=60)
    for rank, ((packing, receiving), _) in enumerate(answers):
        assert packing == r"RuntimeError: rank 1: MemoryError: no room for \ud800"
        if rank == 1:
            assert receiving == "MemoryError: no room for \ud800"
        else:
            assert receiving.startswith("RankMissingError: rank 1 failed in the exchange of rows of step")
            assert receiving.endswith(r"MemoryError: no room for \ud800")
    assert sorted(row for _, ids in answers for row in ids) == [
        r * 100 + i for r in range(world_size) for i in range(8)
    ]


def test_the_same_mistake_of_many_ranks_is_told_once():
    mistakes = [describe_error(ValueError("no column 'item'"))] * 40
    mistakes[7] = describe_error(OSError("disk"))
    mistakes[8] = None
    named = ", ".join(str(rank) for rank in range(1, 19) if rank not in (7, 8))
    with pytest.raises(ValueError) as caught:
        raise_first_error(mistakes, None)
    assert str(caught.value) == f"rank 0: no column 'item' (and on ranks {named} and 21 more); rank 7: disk"
    with pytest.raises(RuntimeError) as caught:
        raise_first_error([describe_error(OSError(str(rank))) for rank in range(20)], None)
    assert str(caught.value).endswith("rank 15: OSError: 15; and 4 other errors")
