"""pack_micro_batches with joint=True on two and four ranks: rows once, even by index, sent home; mistakes on all."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist

from commons.dispatch import Trim
from commons.micro_batching import MicroBatches, MicroBatchSpec, pack_micro_batches
from tests.helpers.ranks.faults import error_of

LENGTHS = [[9, 8, 7, 6, 5, 4, 3, 2, 2, 1], [1, 1, 1, 1, 1, 1], [30, 1, 1], []]


def _rows(rank, lengths):
    return {"id": 100 * rank + torch.arange(len(lengths)), "text": [f"{rank}.{row}" for row in range(len(lengths))]}


def _pack(lengths_of, spec_of, options_of=None, batches=_rows):
    """What this rank packs; a list of specs or arguments stands for one per rank, and lengths of None for no batch."""
    rank = dist.get_rank()
    lengths = lengths_of[rank]
    spec = MicroBatchSpec(**(spec_of[rank] if isinstance(spec_of, list) else spec_of))
    options = options_of[rank] if isinstance(options_of, list) else options_of or {}
    batch = None if lengths is None else batches(rank, lengths)
    return pack_micro_batches(batch, spec, lengths, **{"joint": True, **options})


def _all_that_holds(lengths_of, spec_of, options_of=None):
    """Ids and tokens of each micro-batch, rows sent home, and what was said of them."""
    micro_batches = _pack(lengths_of, spec_of, options_of)
    moved = micro_batches.redistributed
    assert moved is not None and moved.batch is micro_batches.batch
    ids = [each["id"].tolist() for each in micro_batches]
    home = micro_batches.send_home([{"id": each["id"], "more": each["id"] * 2.0} for each in micro_batches])
    own = lengths_of[dist.get_rank()]
    if own:
        assert home["id"].tolist() == [100 * dist.get_rank() + row for row in range(len(own))]
        assert torch.equal(home["more"], home["id"] * 2.0)
    else:
        assert home is None
    for batch, lengths, tokens in zip(micro_batches, micro_batches.lengths, micro_batches.num_tokens):
        expected = [lengths_of[number // 100][number % 100] for number in batch["id"].tolist()]
        assert lengths.tolist() == expected and sum(expected) == tokens
        assert batch["text"] == [f"{number // 100}.{number % 100}" for number in batch["id"].tolist()]
    metrics = micro_batches.metrics
    return ids, micro_batches.num_tokens, metrics["rank_load_ratios"], metrics["sum_of_largest"], moved.bytes_sent


@pytest.mark.parametrize("algorithm", ["ffd", "kk", "refined"])
@pytest.mark.parametrize("absent", [[], None], ids=["no rows", "no batch"])
def test_every_row_once_under_the_budget_and_even_by_index(ranks, algorithm, absent):
    lengths_of = [lengths or absent for lengths in LENGTHS][: ranks.world_size]
    packed = ranks.run(_all_that_holds, lengths_of, {"max_tokens_per_mb": 31, "packing_algorithm": algorithm})
    seen = sorted(number for ids, *_ in packed for each in ids for number in each)
    assert seen == [100 * rank + row for rank, rows in enumerate(lengths_of) for row in range(len(rows or []))]
    assert all(each for ids, *_ in packed for each in ids) and len({len(ids) for ids, *_ in packed}) == 1
    assert max(max(tokens) for _, tokens, *_ in packed) <= 31
    tokens = np.array([tokens for _, tokens, *_ in packed])
    for _, _, ratios, sum_of_largest, _ in packed:
        assert ratios == pytest.approx(tokens.max(axis=0) / tokens.mean(axis=0))
        assert sum_of_largest == tokens.max(axis=0).sum()
    # 53 tokens on two ranks; on four one row alone holds them up.
    assert packed[0][3] <= (27 if ranks.world_size == 2 else 30)


def test_a_rank_without_a_batch(two_ranks):
    packed = two_ranks.run(_all_that_holds, [[5, 3, 3, 5], None], {"n_mbs": 2})
    assert [tokens for _, tokens, *_ in packed] == [[5, 3], [5, 3]]
    # Where others say what rows cost, it says nothing.
    costs = [{"workloads": [1, 9, 9, 1]}, {}]
    packed = two_ranks.run(_all_that_holds, [[5, 3, 3, 5], None], {"n_mbs": 2, "packing_algorithm": "kk"}, costs)
    assert [tokens for _, tokens, *_ in packed] == [[3, 5], [3, 5]]


def test_groups_come_together_and_go_home(ranks):
    """Group 0 lies on all ranks, the others on one each."""
    lengths = [[9, 8, 2, 2], [1, 1, 3, 9], [4], []][: ranks.world_size]
    groups = [["a", "x", "x", "y"], ["a", "z", "z", "v"], ["a"], None][: ranks.world_size]
    packed = ranks.run(_all_that_holds, lengths, {"n_mbs": 1}, [{"groups": each} for each in groups])
    of_row = {100 * rank + row: name for rank, names in enumerate(groups) for row, name in enumerate(names or [])}
    places = [
        (rank, index, of_row[number])
        for rank, (ids, *_) in enumerate(packed)
        for index, each in enumerate(ids)
        for number in each
    ]
    assert sorted(number for ids, *_ in packed for each in ids for number in each) == sorted(of_row)
    assert len({name for *_, name in places}) == len(set(places)) == 5


def _other_dtype(rank, lengths):
    return {"id": torch.arange(len(lengths), dtype=torch.int32 if rank else torch.int64)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"options": [{"joint": False}, {}]}, "joint is False on rank 0 and True on rank 1 in pack_micro_batches"),
        ({"options": {"joint": "yes"}}, "joint is 'yes'; it is True or False: choose one"),
        ({"options": {"joint": False, "trim": Trim("mask")}}, "trim is given and joint is False"),
        ({"options": [{}, {"trim": Trim("mask")}]}, "trim is 'None' on rank 0 and \"Trim(mask='mask'"),
        (
            {"spec": [{"max_tokens_per_mb": 20}, {"max_tokens_per_mb": 21}]},
            "max_tokens_per_mb is 20 on rank 0 and 21 on rank 1",
        ),
        ({"spec": {"max_tokens_per_mb": 8}}, "rank 1: row 0 has 10 tokens, row 1 has 9 tokens, max_tokens_per_mb is 8"),
        (
            {"options": [{"groups": [1, 1, 2]}, {}]},
            "ranks 0 and 1 differ: 'groups': given and absent; rows",
        ),
        (
            {"spec": {"granularity": 2}, "lengths": [[1, 2], [10, 9]], "options": {"groups": [1, 2]}},
            "groups are given and granularity is 2; both say which rows stay together: leave granularity at 1",
        ),
        (
            {"spec": {"max_tokens_per_mb": 11}, "options": [{"groups": [5, 6, 7]}, {"groups": [6, 7]}]},
            "rows 1 and 3 have 12 tokens together, rows 2 and 4 have 12 tokens together, max_tokens_per_mb is 11",
        ),
        ({"lengths": [None, None]}, "no rank has a row"),
        ({"lengths": [[1], None], "options": [{}, {"workloads": [3]}]}, "batch is None and there are 1 workloads"),
        (
            {"spec": {"packing_algorithm": "kk"}, "options": [{"workloads": [1, 2, 3]}, {}]},
            "the batches of ranks 0 and 1 differ: 'workloads': given and absent; rows",
        ),
        ({"options": [{"workloads": [1, 2, 3]}, {}]}, "workloads are given and packing_algorithm is 'ffd'"),
        (
            {"batches": _other_dtype},
            "ranks 0 and 1 differ: field 'id': tensor int64 [] and tensor int32 []",
        ),
    ],
)
def test_mistakes_are_raised_on_both(two_ranks, change, message):
    arguments = {"lengths": [[1, 2, 3], [10, 9]], "spec": {}, "options": {}, "batches": _rows, **change}
    error, same = two_ranks.run(error_of, _pack, *arguments.values())
    assert error == same and error.startswith("ValueError: ") and message in error and "\n" not in error
    two_ranks.run(_all_that_holds, LENGTHS, {"max_tokens_per_mb": 31})  # and the ranks go on


def test_results_that_do_not_match_are_told_on_all(two_ranks):
    said = two_ranks.run(_wrong_results)
    assert said[0] == said[1] == "rank 1: there are 1 results for 2 micro-batches; each has one: pass them in order"


def _wrong_results():
    micro_batches = _pack([[1, 2, 3], [10, 9]], {"n_mbs": 2})
    assert isinstance(micro_batches, MicroBatches)
    results = [each["id"] for each in micro_batches]
    with pytest.raises(ValueError) as caught:
        micro_batches.send_home(results[: 1 + (dist.get_rank() == 0)])
    micro_batches.send_home(results)
    return str(caught.value)
