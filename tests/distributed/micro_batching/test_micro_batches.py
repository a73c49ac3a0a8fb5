"""pack_micro_batches on two and four ranks: one number for all, weights of the global loss, and one plan for both.

Mistakes: tests/distributed/dispatch/test_mistakes.py.
"""

from __future__ import annotations

import functools
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from commons.dispatch import redistribute_balanced
from commons.distributed import global_mean_loss
from commons.distributed.channel.agree import ControlChannel
from commons.micro_batching import MicroBatchSpec, pack_micro_batches
from tests.helpers.ranks.faults import error_of, missed
from tests.helpers.ranks.on_ranks import of_all, on, on_four_ranks, on_ranks, on_two_ranks

LENGTHS = [[9, 8, 7, 6, 5, 4, 3, 2], [1, 1, 1, 1, 1, 1], [30, 1, 1, 1, 1], [2, 2, 2, 2, 2, 2]]


def _pack(lengths_of, spec):
    """What this rank packs."""
    rank = dist.get_rank()
    lengths = lengths_of[rank]
    micro_batches = pack_micro_batches({"row": torch.arange(len(lengths))}, MicroBatchSpec(**spec), lengths)
    rows = [each["row"].tolist() for each in micro_batches]
    assert all(rows) and sorted(row for each in rows for row in each) == list(range(len(lengths)))
    return rows, micro_batches.num_tokens


@pytest.mark.parametrize("algorithm", ["ffd", "kk", "refined"])
@on_ranks
def test_all_ranks_make_as_many_and_none_is_empty(algorithm):
    spec = {"max_tokens_per_mb": 31, "packing_algorithm": algorithm, "n_mbs": 1}
    rows, _ = _pack(LENGTHS, spec)
    assert len(rows) == 2
    tight = [lengths if max(lengths) < 30 else [9, 1, 1, 1] for lengths in LENGTHS]
    rows, tokens = _pack(tight, spec | {"max_tokens_per_mb": 12})
    assert len(rows) == 4 and max(tokens) <= 12  # rank 0 has 44 tokens
    rows, tokens = _pack(LENGTHS, spec | {"n_mbs_divisor": 3})
    assert len(rows) == 3
    assert dist.get_rank() != 1 or max(tokens) - min(tokens) <= 1  # it needs fewer, and deals its rows evenly, too


@on_ranks
def test_one_collective():
    redistribute_balanced(torch.arange(2), [1, 1])  # connects the ranks, also for rows
    with mock.patch.object(ControlChannel, "gather", autospec=True, side_effect=ControlChannel.gather) as gather:
        _pack(LENGTHS, {"max_tokens_per_mb": 31})
    assert [len(call.args[1]) for call in gather.mock_calls] == [6]  # a gather of six integers


@on_two_ranks
def test_a_rank_with_few_rows_is_spared_by_a_tighter_packing():
    """First fit needs 3 micro-batches for rank 0, but 2 are enough, and rank 1 has only 2 rows."""
    lengths, spec = [[4, 4, 3, 3, 3, 3], [1, 1]], {"max_tokens_per_mb": 10}
    assert len(_pack(lengths[:1] * 2, spec)[0]) == 3
    rows, tokens = _pack(lengths, spec)
    assert len(rows) == 2 and (dist.get_rank() == 1 or tokens == [10, 10])


@on_ranks
def test_a_rank_with_too_few_rows_is_named_on_every_rank():
    lengths = [[10] * 8, [1, 1, 1], [1] * 8, [1] * 2][: dist.get_world_size()]
    error = error_of(_pack, lengths, {"max_tokens_per_mb": 20})
    assert error.startswith("ValueError: rank 0 needs 4 micro-batches for its 8 rows, rank 1 has 3 rows")
    assert ("rank 3 has 2 rows" in error) == (len(lengths) == 4)
    blocks = error_of(_pack, [[10] * 8, [1] * 6, [1] * 8, [1] * 8], {"max_tokens_per_mb": 20, "granularity": 2})
    assert "rank 0 needs 4 micro-batches for its 8 rows, rank 1 has 6 rows in 3 blocks;" in blocks
    assert of_all([error, blocks]) == [error, blocks] * len(lengths)


@on_four_ranks
def test_a_group_of_some_ranks():
    """Ranks are named by their global numbers, and the other group does not notice."""
    rank, groups = dist.get_rank(), [dist.new_group([0, 1]), dist.new_group([2, 3])]

    def pack(lengths_of):
        lengths, spec = lengths_of[rank], MicroBatchSpec(max_tokens_per_mb=10)
        return len(pack_micro_batches(torch.tensor(lengths), spec, lengths, groups[rank // 2]))

    assert pack([[10] * 3, [1] * 3, [10] * 2, [1] * 2]) == [3, 3, 2, 2][rank]
    too_few = [[10] * 3, [1] * 3, [10] * 2, [1]]
    if rank < 2:
        assert pack(too_few) == 3
    else:
        said = "ValueError: rank 2 needs 2 micro-batches for its 2 rows, rank 3 has 1 rows;"
        assert error_of(pack, too_few).startswith(said)


@pytest.mark.parametrize(
    ("fewest_terms_of_a_mean", "joint"), [(None, False), (1, False), (None, True)], ids=["sums", "means", "joint"]
)
@on_ranks
def test_gradients_are_those_of_one_process(fewest_terms_of_a_mean, joint):
    """Those of DistributedDataParallel over micro-batches."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    rows_of = [5, 9, 3, 7][:world_size]
    data = [{"x": torch.randn(rows, 6, dtype=torch.float64), "terms": torch.randint(0, 4, (rows,))} for rows in rows_of]
    data[-1]["terms"][:] = 0  # a rank without a term
    data[0]["terms"][2:] = 0  # and a rank with micro-batches that have none
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()

    def sum_of(module, batch):
        return (module(batch["x"]).squeeze(1) ** 2 * batch["terms"]).sum()

    whole = {name: torch.cat([each[name] for each in data]) for name in ("x", "terms")}
    (sum_of(model, whole) / int(whole["terms"].sum())).backward()
    expected = torch.cat([weight.grad.flatten() for weight in model.parameters()])
    model.zero_grad()

    parallel = DistributedDataParallel(model)
    spec = MicroBatchSpec(max_tokens_per_mb=12, packing_algorithm="refined")
    terms = data[rank]["terms"]
    micro_batches = pack_micro_batches(data[rank], spec, [4] * rows_of[rank], loss_tokens=terms, joint=joint)
    for number, batch in enumerate(micro_batches):
        parallel.require_backward_grad_sync = number == len(micro_batches) - 1
        if fewest_terms_of_a_mean is not None:
            terms = batch["terms"].sum().clamp(min=fewest_terms_of_a_mean)
            loss = micro_batches.loss_weights[number] * (sum_of(parallel, batch) / terms)
        else:
            loss = micro_batches.loss_scale * sum_of(parallel, batch)
        loss.backward()
    reached = torch.cat([weight.grad.flatten() for weight in model.parameters()])

    # The same weights as global_mean_loss has for the whole batch of a rank.
    model.zero_grad()
    global_mean_loss(sum_of(parallel, data[rank]), int(data[rank]["terms"].sum())).backward()
    direct = torch.cat([weight.grad.flatten() for weight in model.parameters()])
    assert float(expected.abs().max()) > 1e-3
    assert all(float((each - expected).abs().max()) < 1e-14 for each in (reached, direct))


UNEVEN_LENGTHS = [[9, 8, 7, 6, 5, 4, 3, 2, 2, 1], [1, 1, 1, 1, 1, 1], [30, 1, 1], []]


def _rows(rank, lengths):
    return {"id": 100 * rank + torch.arange(len(lengths)), "text": [f"{rank}.{row}" for row in range(len(lengths))]}


def _all_that_holds(lengths_of, spec_of, options_of=None):
    """Ids and tokens of each micro-batch, rows sent home, and the metrics."""
    rank = dist.get_rank()
    own, options = lengths_of[rank], options_of[rank] if options_of else {}
    batch = None if own is None else _rows(rank, own)
    micro_batches = pack_micro_batches(batch, MicroBatchSpec(**spec_of), own, joint=True, **options)
    moved = micro_batches.redistributed
    assert moved is not None and moved.batch is micro_batches.batch
    ids = [each["id"].tolist() for each in micro_batches]
    home = micro_batches.send_home({"id": each["id"], "more": each["id"] * 2.0} for each in micro_batches)
    if own:
        assert home["id"].tolist() == [100 * rank + row for row in range(len(own))]
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
    lengths_of = [lengths or absent for lengths in UNEVEN_LENGTHS][: ranks.world_size]
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


@on_two_ranks
def test_a_rank_without_a_batch():
    """Where others say what rows cost, it says nothing."""
    lengths_of, costs = [[5, 3, 3, 5], None], [{"workloads": [1, 9, 9, 1]}, {}]
    _, tokens, *_ = _all_that_holds(lengths_of, {"n_mbs": 2})
    assert tokens == [5, 3]
    spec = {"n_mbs": 2, "packing_algorithm": "kk"}
    for lengths, given in ((lengths_of, costs), (lengths_of[::-1], costs[::-1]), ([[], lengths_of[0]], costs[::-1])):
        _, tokens, *_ = _all_that_holds(lengths, spec, given)
        assert tokens == [3, 5]


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


@pytest.mark.slow
@pytest.mark.parametrize("joint", [False, True])
@on("own_two_ranks")
def test_a_rank_that_does_not_come_is_named(joint):
    pack = functools.partial(pack_micro_batches, {"row": torch.ones(1)}, MicroBatchSpec(), [1], joint=joint)
    said = missed(pack, functools.partial(pack, timeout=0.5))
    assert dist.get_rank() == 1 or said.startswith("RankMissingError: rank 1 did not take part")
