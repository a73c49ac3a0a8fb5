"""One native call: from the messages of all ranks to the plan and one rank's exchange; mistakes that it refuses."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from benchmarks.shared.one_of_many_ranks import packed_rows
from commons.perf_model.partitioner.core import encode_rows
from commons.perf_model.shuffle_plan import (
    BATCH_NUMBERS,
    MESSAGE_NUMBERS,
    GatheredRows,
    ShufflePlan,
    ShufflePlanner,
    plan_shuffle,
)

PARTS = np.array([[0, 2, 1], [-1, 1, 3]])
# Two rows of one rank and one of another.
BROUGHT = [[(2, 2, np.array([5, 6]), np.array([[1, 2], [3, 4]]))], [(1, 1, np.array([9]), np.array([[7], [8]]))]]


def allocate(size):
    array = np.empty(size, np.int64)
    return array, array.ctypes.data


@st.composite
def batches_of_ranks(draw):
    """By rank its batches, each rows, real rows, workloads and lengths `(keys, real rows)`; and the most of a rank."""
    ranks, window = draw(st.integers(1, 5)), draw(st.sampled_from([1, 1, 3]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    brought = []
    for _ in range(ranks):
        sizes = draw(st.lists(st.integers(0, 6), min_size=0 if window > 1 else 1, max_size=window))
        real = [draw(st.integers(0, rows)) for rows in sizes]
        brought.append([(n, k, rng.integers(0, 10**6, k), rng.integers(0, 9, (2, k))) for n, k in zip(sizes, real)])
    assume(any(brought))
    return brought, window


def messages_of(brought, window, capacity):
    header = MESSAGE_NUMBERS + BATCH_NUMBERS * window
    messages = np.zeros((len(brought), header + capacity), np.int64)
    for message, batches in zip(messages, brought):
        message[:MESSAGE_NUMBERS] = 0, len(batches)
        at = header
        for number, (rows, real, workloads, lengths) in enumerate(batches):
            words = encode_rows(workloads, [lengths], [int(lengths.sum())], [], [0, 1], real, real)
            message[MESSAGE_NUMBERS + BATCH_NUMBERS * number :][:BATCH_NUMBERS] = rows, real, len(words)
            fits = words[: max(0, len(message) - at)]
            message[at : at + len(fits)] = fits
            at += len(words)
    return messages


def gathered_by_hand(brought):
    steps = max(map(len, brought))
    nothing = (0, 0, np.zeros(0, np.int64), np.zeros((2, 0), np.int64))
    places = [(*batches, *[nothing] * (steps - len(batches))) for batches in brought]
    flat = [each for batches in places for each in batches]
    rows, real = (np.array([each[at] for each in flat]) for at in (0, 1))
    workloads = np.concatenate([each[2] for each in flat])
    lengths = np.concatenate([each[3] for each in flat], axis=1).T
    return packed_rows(rows, real, workloads, lengths.sum(axis=1), np.ascontiguousarray(lengths), steps=steps)


@given(case=batches_of_ranks(), all_gather=st.booleans())
def test_a_plan_of_messages_is_that_of_the_rows(case, all_gather):
    """The same plan, sums and exchange, whether rows come packed in messages or as arrays."""
    brought, window = case
    exchange = {"parts": PARTS, "all_gather": all_gather, "allocate": allocate, "num_keys": 2}
    planner = ShufflePlanner(len(brought), window, **exchange)
    messages = np.pad(messages_of(brought, window, 200), ((0, 0), (2, 0)))[:, 2:]  # behind other numbers
    plan = planner.plan_messages(messages, 200)
    known = gathered_by_hand(brought)
    other = ShufflePlanner(known.num_ranks, known.steps, **exchange)
    expected = other.plan(known)
    for name in ("destination", "planned", "loads_before", "loads_planned", "loads_after", "result_real_rows", "moved"):
        np.testing.assert_array_equal(getattr(plan, name), getattr(expected, name), err_msg=name)
    for name in ("rows", "real_rows", "workloads", "tokens", "home", "global_id"):
        np.testing.assert_array_equal(getattr(plan.gathered, name), getattr(known, name), err_msg=name)
    assert plan.digest() == expected.digest() and plan.lower_bound == expected.lower_bound
    assert planner.exchange == other.exchange
    size = planner.head["index_room"]
    assert planner.indices[:size].tolist() == other.indices[:size].tolist()
    assert plan.gathered.lengths_of_keys([0, 1]).tolist() == known.lengths_of_keys([0, 1]).tolist()


@given(case=batches_of_ranks(), ranks_per_node=st.integers(1, 4), data=st.data())
def test_sums_of_a_plan_are_those_counted_by_hand(case, ranks_per_node, data):
    known = gathered_by_hand(case[0])
    places, rows = known.num_places, len(known.workloads)
    firsts = np.cumsum(known.rows) - known.rows
    ids = [first + row for first, real in zip(firsts, known.real_rows) for row in range(real)]
    assert known.global_id.tolist() == ids
    destination = np.array(data.draw(st.lists(st.integers(0, places - 1), min_size=rows, max_size=rows)), np.int64)
    plan = ShufflePlanner(known.num_ranks, known.steps, ranks_per_node=ranks_per_node).plan(known, destination)
    for name, place in (("loads_before", known.home), ("loads_planned", destination), ("loads_after", destination)):
        sums = [int(known.workloads[place == each].sum()) for each in range(places)]
        assert getattr(plan, name).tolist() == sums, name
    assert plan.result_real_rows.tolist() == np.bincount(destination, minlength=places).tolist()
    moved = np.zeros((6, known.steps), np.int64)
    for start, end, size in zip(known.home.tolist(), destination.tolist(), known.tokens.tolist()):
        sender, receiver = start // known.steps, end // known.steps
        kinds = (True, sender != receiver, sender // ranks_per_node != receiver // ranks_per_node)
        for kind in np.flatnonzero(kinds):
            moved[2 * kind, end % known.steps] += 1
            moved[2 * kind + 1, end % known.steps] += size
    assert plan.moved.tolist() == moved.tolist()
    assert plan.num_moved == int((known.home // known.steps != destination // known.steps).sum())


def speeds_of(known):
    of_ranks = st.lists(st.integers(1, 100), min_size=known.num_ranks, max_size=known.num_ranks)
    return of_ranks.map(np.array)


def slowest(known, place, speeds):
    """Sum over the steps of what the slowest rank takes, in loads of the fastest, by exact arithmetic."""
    loads = np.zeros(known.num_places, np.int64)
    np.add.at(loads, place, known.workloads)
    times = [Fraction(int(load) * max(speeds), speeds[at // known.steps]) for at, load in enumerate(loads)]
    return sum(max(times[step :: known.steps]) for step in range(known.steps))


@given(
    case=batches_of_ranks(),
    options=st.fixed_dictionaries(
        {
            "equal_size": st.booleans(),
            "slack": st.sampled_from([0.0, 0.01, 0.5]),
            "min_gain": st.sampled_from([0.0, 0.1]),
        }
    ),
    data=st.data(),
)
def test_a_plan_is_never_worse_than_staying(case, options, data):
    known = gathered_by_hand(case[0])
    speeds = data.draw(st.none() | speeds_of(known))
    plan = plan_shuffle(known, **options, speeds=speeds)
    of_ranks = [1] * known.num_ranks if speeds is None else speeds.tolist()
    before, after = (slowest(known, at, of_ranks) for at in (known.home, plan.destination))
    assert after <= before and plan.loads_after.sum() == known.workloads.sum() and plan.speeds is speeds
    if plan.changes:
        assert after < before and float((before - after) / before) >= options["min_gain"] - 1e-9
        counts = plan.result_real_rows
        assert known.steps > 1 or not options["equal_size"] or counts.max() - counts.min() <= 1
    else:
        assert np.array_equal(plan.destination, known.home)
    observed = plan_shuffle(known, **options, speeds=speeds, carry_out=False)
    assert np.array_equal(observed.destination, known.home) and np.array_equal(observed.planned, plan.planned)
    assert observed.loads_after.tolist() == observed.loads_before.tolist()
    sums = [int(known.workloads[plan.planned == place].sum()) for place in range(known.num_places)]
    assert observed.loads_planned.tolist() == plan.loads_planned.tolist() == sums
    if speeds is None and after:
        assert plan.loads_planned.reshape(-1, known.steps).max(axis=0).sum() >= plan.lower_bound


def test_rows_that_stay_are_not_below_the_bound():
    """No plan of equal sizes keeps the cap better than these rows, whose sizes differ and whose load is smaller."""
    rows = np.array([0, 2, 1, 0, 1, 0])
    known = GatheredRows(rows, rows, np.array([504, 378, 4, 1258]), np.array([29, 6, 41, 8]), steps=3)
    plan = plan_shuffle(known, max_tokens=21)
    assert not plan.changes and plan.lower_bound <= plan.loads_planned.reshape(-1, 3).max(axis=0).sum() == 1262


def test_a_gain_of_exactly_the_least_one_is_taken_and_speeds_are_in_the_digest():
    rows = np.array([2, 2])
    known = GatheredRows(rows, rows, np.array([2, 2, 1, 1]), np.ones(4, np.int64))
    assert [plan_shuffle(known, min_gain=least).changes for least in (0.25, 0.26)] == [True, False]
    plans = [plan_shuffle(known, speeds=np.array([1000, speed])) for speed in (1001, 1002)]
    assert np.array_equal(plans[0].destination, plans[1].destination) and plans[0].digest() != plans[1].digest()


@given(case=batches_of_ranks(), cap=st.integers(1, 300), data=st.data())
def test_a_cap_is_kept_or_exceeded_no_more_than_at_home(case, cap, data):
    known = gathered_by_hand(case[0])
    plan = plan_shuffle(known, max_tokens=cap, speeds=data.draw(st.none() | speeds_of(known)))
    planned, home = (np.bincount(at, known.tokens, known.num_places).max() for at in (plan.destination, known.home))
    assert plan.excess_tokens == max(0, planned - cap) <= max(0, home - cap)


@given(case=batches_of_ranks(), equal_size=st.booleans(), slack=st.sampled_from([0.0, 0.01, 0.5]), gain=st.booleans())
def test_without_padding_every_rank_has_a_row_if_there_are_enough(case, equal_size, slack, gain):
    known = gathered_by_hand([of_rank[:1] for of_rank in case[0] if of_rank])
    options = {"equal_size": equal_size, "slack": slack, "min_gain": float(gain)}
    plan = plan_shuffle(known, **options, pads=False)
    if len(known.workloads) >= known.num_ranks:
        assert plan.result_real_rows.min() >= 1
    if known.real_rows.all() and equal_size:
        assert np.array_equal(plan.destination, plan_shuffle(known, **options).destination)


def test_what_stops_a_plan_is_told():
    planner = ShufflePlanner(2, num_keys=2)
    assert planner.plan_messages(messages_of(BROUGHT, 1, 1), 1) is None and planner.head["most_words"] > 1
    needed = planner.head["most_words"]
    messages = messages_of(BROUGHT, 1, needed)
    assert planner.plan_messages(messages, needed) is not None and planner.head["num_rows"] == 3
    messages[1, 0] = 7
    assert planner.plan_messages(messages, needed) is None and planner.head["other_steps"]
    assert planner.plan_messages(messages_of([[], []], 1, 4), 4) is None and planner.head["steps"] == 0
    reads = ShufflePlanner(2, num_keys=2, has_plan=False)
    assert reads.plan_messages(messages_of(BROUGHT, 1, 0), 0) is None and reads.head["steps"] == 1


def test_one_planner_plans_messages_rows_and_given_places_in_turn():
    known, messages, planner = gathered_by_hand(BROUGHT), messages_of(BROUGHT, 1, 9), ShufflePlanner(2, num_keys=2)
    bare = GatheredRows(known.rows, known.real_rows, known.workloads, known.tokens)
    planned = plan_shuffle(known).destination.tolist()
    for _ in range(2):
        assert planner.plan(known, np.array([1, 1, 1])).destination.tolist() == [1, 1, 1] != planned
        assert planner.plan_messages(messages, 9).destination.tolist() == planned
        assert planner.plan(bare).destination.tolist() == planned
        planner.plan(known, np.array([1, 1, 1]))
        assert planner.plan(known).destination.tolist() == planned


def test_answers_grow_with_the_batches():
    rng = np.random.default_rng(0)
    planner = ShufflePlanner(2, parts=PARTS, allocate=allocate)
    for rows in (3, 5000, 40):
        count = np.full(2, rows)
        known = packed_rows(
            count, count, rng.integers(0, 99, 2 * rows), np.ones(2 * rows, int), np.ones((2 * rows, 2), int)
        )
        plan = planner.plan(known)
        assert plan.loads_after.sum() == known.workloads.sum()
        assert planner.head["index_room"] <= len(planner.indices)


@pytest.mark.parametrize(
    ("place", "number"),
    [(1, -1), (1, 2), (2, -1), (2, 2**31), (3, -1), (3, 3), (3, 2**62), (4, -1), (5, -1)],
)
def test_messages_that_are_none_are_refused(place, number):
    """Whatever another rank has sent, nothing outside the message is read."""
    messages = messages_of(BROUGHT, 1, 10)
    messages[0, place] = number
    more_batches = np.zeros_like(messages)  # whose second batch would have no rows
    more_batches[:, 1] = 2
    for each in (messages, more_batches):
        with pytest.raises(ValueError, match="a gathered table"):
            ShufflePlanner(2, num_keys=2).plan_messages(each, 10)


def test_what_is_no_plan_is_refused():
    rows, ones = np.array([2, 1]), np.ones(3, np.int64)
    good = packed_rows(rows, rows, ones, ones, np.array([[1, 2], [3, 4], [5, 6]]))
    for destination in (np.array([0, 1, 2]), np.array([0, -1, 1]), np.array([0, 1])):
        with pytest.raises(ValueError, match="a number is out of its range|sizes do not match"):
            ShufflePlan.of(good, destination)
    real_rows = [{"real_rows": rows + 1}, {"real_rows": -rows}]
    for changes in (*real_rows, {"rows": rows - 1}, {"rows": rows + 2**31}, {"rows": rows[:1]}, {"tokens": ones[:2]}):
        with pytest.raises(ValueError, match="sizes do not match"):
            plan_shuffle(GatheredRows(**{**vars(good), **changes}))
    for parts in ([[1, 2, 1]], [[0, -5, 1]], [[2**62, 2**62, 1]]):
        planner = ShufflePlanner(2, parts=np.array(parts), allocate=allocate)
        with pytest.raises(ValueError, match="a number is out of its range"):
            planner.plan(good)
    for changes in ({"words": np.zeros_like(good.words)}, {"first": good.first + 9}):
        planner = ShufflePlanner(2, parts=PARTS, allocate=allocate)
        with pytest.raises(ValueError, match="a gathered table"):
            planner.plan(GatheredRows(**{**vars(good), **changes}))
    for speeds in ([1, 2**31], [0, 1], [1, 2**60]):
        with pytest.raises(ValueError, match=r"speeds are not positive integers below 2\^31"):
            plan_shuffle(good, speeds=np.array(speeds))
    with pytest.raises(ValueError, match="speeds has 3 entries, there are 2 ranks; each has one: match them"):
        plan_shuffle(good, speeds=ones)
    with pytest.raises(ValueError, match=r"the sum of workloads is \d+; it must be below 2\^62"):
        plan_shuffle(GatheredRows(rows, rows, ones << 61, ones))
    with pytest.raises(ValueError, match=r"tokens\[0\] is -1; values must be non-negative integers"):
        plan_shuffle(GatheredRows(rows, rows, ones, -ones))
