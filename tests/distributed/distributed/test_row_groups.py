"""A shuffler with `get_groups`: rows of a group end on one rank, in one batch, whichever ranks brought them."""

from __future__ import annotations

import contextlib
from collections import Counter
from itertools import chain

import pytest
import torch
import torch.distributed as dist

from commons.distributed import global_mean_loss
from commons.distributed.options import ShufflerOptions
from commons.pipeline import windowed_iter
from tests.helpers.batches import rows_as_values
from tests.helpers.faults import error_of
from tests.helpers.models import make_batch
from tests.helpers.pipelines import CubicShuffler

ROWS = 8


class GroupShuffler(CubicShuffler):
    """Rows whose sample ids agree up to the last digit are a group."""

    def get_groups(self, batch):
        return batch.sample_id // 10 - 7


def batch_of(rank, step, group_size):
    """Groups of that size, whose rows lie on all ranks in turn; the last rows are padding."""
    world, count = dist.get_world_size(), ROWS - 2
    first = step * world * count
    places = range(first + rank, first + world * count, world)
    return make_batch([10 * (1 + place // group_size) + place % group_size for place in places], ROWS)


def _shuffle(options, group_size):
    with contextlib.closing(GroupShuffler(ShufflerOptions(**options))) as shuffler:
        results = []
        for step in range(2):
            batch = batch_of(dist.get_rank(), step, group_size)
            result = shuffler.shuffle(batch)
            results.append((rows_of(batch), rows_of(result), shuffler.last_stats.loads_after))
        return results


def _shuffle_windows(options, group_size):
    with contextlib.closing(GroupShuffler(ShufflerOptions(**options))) as shuffler:
        batches = [batch_of(dist.get_rank(), step, group_size) for step in range(4)]
        trained = list(windowed_iter(iter(batches), shuffler, 2))
        return [list(map(rows_of, each)) for each in (batches, trained)]


def rows_of(batch):
    """The id of every real row, and all of its values."""
    return list(zip(batch.sample_id.tolist(), map(repr, rows_as_values(batch))))


def check_groups(before, after, group_size):
    """All rows are there as they were, and every group is in one of the batches of `after`."""
    assert sorted(chain.from_iterable(before)) == sorted(chain.from_iterable(after))
    homes = [Counter(sample // 10 for sample, _ in rows) for rows in after]
    assert all(set(home.values()) == {group_size} for home in homes if home)


@pytest.mark.parametrize("transport", ["all_to_all", "all_gather"])
@pytest.mark.parametrize("options", [{"equal_size": False}, {}, {"equal_size": False, "min_gain": 1.0}])
def test_groups_come_together(ranks, world_size, options, transport):
    group_size = 3
    answers = ranks.run(_shuffle, {**options, "transport": transport, "verify": True}, group_size)
    for step in zip(*answers):
        before, after, loads = zip(*step)
        check_groups(before, after, group_size)
        assert len(set(loads)) == 1
        if options.get("equal_size", True):
            assert max(map(len, after)) - min(map(len, after)) in (0, group_size)


def test_groups_of_a_window_end_in_one_step_of_one_rank(ranks, world_size):
    answers = ranks.run(_shuffle_windows, {"equal_size": False}, 3)
    before, after = ([rows for answer in answers for rows in answer[at]] for at in (0, 1))
    check_groups(before, after, 3)


def _of_two_sizes():
    with contextlib.closing(GroupShuffler()) as shuffler:
        shuffler.shuffle(make_batch([10, 11, 20] if dist.get_rank() else [30, 31, 40], 4))


def test_groups_of_two_sizes_and_equal_counts_are_refused_on_every_rank(two_ranks):
    answers = two_ranks.run(error_of, _of_two_sizes)
    assert len(set(answers)) == 1
    assert answers[0] == (
        "ValueError: rank 0: groups have 1 to 2 rows, equal_size is True; partitions have equally many rows only if "
        "groups do: pass equal_size=False, or groups of one size (and on rank 1)"
    )


def _of_other_shape():
    class Wrong(CubicShuffler):
        def get_groups(self, batch):
            return torch.zeros(3 if dist.get_rank() else batch.batch_size, dtype=torch.int64)

    with contextlib.closing(Wrong()) as shuffler:
        shuffler.shuffle(make_batch([10, 11, 20], 4))


def _on_one_rank_alone():
    kind = CubicShuffler if dist.get_rank() else GroupShuffler
    GroupShuffler.__name__ = CubicShuffler.__name__
    try:
        with contextlib.closing(kind()) as shuffler:
            shuffler.shuffle(make_batch([10, 11, 20], 4))
    finally:
        GroupShuffler.__name__ = "GroupShuffler"


@pytest.mark.parametrize(
    "mistake, said",
    [
        (_of_other_shape, "groups has shape (3,), there are 4 rows; each has the number of its group"),
        (_on_one_rank_alone, "has_groups"),
    ],
)
def test_a_mistake_of_one_rank_is_named_on_all(two_ranks, mistake, said):
    answers = two_ranks.run(error_of, mistake)
    assert len(set(answers)) == 1 and said in answers[0], answers


def _trains_as_without():
    """The gradient of a loss over all rows, with groups and without."""
    gradients = []
    for kind in (GroupShuffler, CubicShuffler):
        weight = torch.ones(1, dtype=torch.float64, requires_grad=True)
        with contextlib.closing(kind(ShufflerOptions(equal_size=False))) as shuffler:
            batch = shuffler.shuffle(batch_of(dist.get_rank(), 0, 3))
            real = batch.actual_batch_size
            loss = global_mean_loss((weight * batch.target[:real].double()).square().sum(), real)
            loss.backward()
            dist.all_reduce(weight.grad)
            gradients.append(weight.grad.item() / dist.get_world_size())
    return gradients


def test_the_gradient_of_a_step_is_that_without_groups(ranks):
    for with_groups, without in ranks.run(_trains_as_without):
        assert with_groups == pytest.approx(without, rel=1e-12)
