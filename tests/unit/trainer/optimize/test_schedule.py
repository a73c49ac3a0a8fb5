"""What is due after which step, in steps and in rows, over epochs and after a checkpoint."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from commons.trainer.optimize.schedule import Schedule

COUNTS = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=6), min_size=1, max_size=4)


@given(epochs=COUNTS, interval=st.integers(1, 30), every=st.integers(1, 3), ahead=st.integers(0, 2))
def test_rows_are_due_where_a_multiple_is_crossed(epochs, interval, every, ahead):
    """Asked for a step or two before it is trained, as the loop does, also where that is in the next epoch."""
    ends = [0, *itertools.accumulate(rows for epoch in epochs for rows in epoch)]
    schedule, step = Schedule(in_rows=True, look_back=every), 0
    for counts in epochs:
        schedule.begin_epoch(step, iter(counts))
        last = step + len(counts)
        for _ in counts:
            step += 1
            assert schedule.rows_after(step + ahead) == ends[min(step + ahead, last)]
            expected = step % every == 0 and ends[step] // interval > ends[step - every] // interval
            assert schedule.is_due(interval, step, every=every) == expected


def test_steps_are_due_at_multiples_whatever_rows_they_have():
    schedule = Schedule()
    assert [step for step in range(1, 13) if schedule.is_due(4, step)] == [4, 8, 12]
    assert [step for step in range(1, 13) if schedule.is_due(4, step, every=2)] == [4, 8, 12]


def test_a_resumed_run_counts_on():
    schedule = Schedule(in_rows=True, look_back=2, step=6, rows=40)
    schedule.begin_epoch(6, iter([5, 6, 7]))
    assert [schedule.done_after(step) for step in (4, 6, 7, 8, 9, 12)] == [40, 40, 45, 51, 58, 58]
    assert [step for step in (7, 8, 9) if schedule.is_due(10, step)] == [8]
