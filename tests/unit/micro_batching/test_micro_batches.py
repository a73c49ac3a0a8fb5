"""pack_micro_batches on one rank: any batch, blocks that stay whole, order, weights of the loss, mistakes."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from commons.micro_batching import MicroBatchSpec, block_packing, pack_micro_batches, packing_metrics
from commons.micro_batching.block_packing import BlockPacking, RowBlocks, budget_of
from commons.micro_batching.fewest_groups import groups_of
from commons.micro_batching.packing import _Needs, _require_blocks
from tests.helpers.batches.any_batches import concat_rows, padded_batch

ALGORITHMS = ("ffd", "kk", "refined")


@st.composite
def packings(draw):
    """Lengths and a spec that they keep."""
    granularity = draw(st.sampled_from([1, 1, 2, 3]))
    num_blocks = draw(st.integers(1, 12))
    lengths = draw(st.lists(st.integers(0, 30), min_size=granularity * num_blocks, max_size=granularity * num_blocks))
    largest = max(sum(lengths[at : at + granularity]) for at in range(0, len(lengths), granularity))
    spec = MicroBatchSpec(
        n_mbs=draw(st.integers(1, num_blocks)),
        granularity=granularity,
        max_tokens_per_mb=draw(st.sampled_from([None, max(1, largest), 2 * largest + 1])),
        n_mbs_divisor=1,
        packing_algorithm=draw(st.sampled_from(ALGORITHMS)),
        order=draw(st.sampled_from(["heaviest_first", "light_ends"])),
    )
    return lengths, spec


@settings(max_examples=50)
@given(packings(), st.sampled_from([str, int]), st.data())
def test_groups_are_packed_as_their_sums_are(packing, kind, data):
    lengths, spec = packing
    groups = data.draw(st.lists(st.sampled_from([7, -3, 0, 2**40]), min_size=len(lengths), max_size=len(lengths)))
    names = list(dict.fromkeys(groups))
    sums = [sum(length for length, group in zip(lengths, groups) if group == name) for name in names]
    limit = None if spec.max_tokens_per_mb is None else max(1, *sums)
    spec = dataclasses.replace(spec, granularity=1, n_mbs=min(spec.n_mbs, len(names)), max_tokens_per_mb=limit)
    packed = pack_micro_batches(
        torch.arange(len(lengths)), spec, lengths, groups=[kind(group) for group in groups], workloads=None
    )
    merged = pack_micro_batches(torch.arange(len(names)), spec, sums)
    rows_of = [[row for row, group in enumerate(groups) if group == name] for name in names]
    assert packed.groups == [sorted(row for name in each for row in rows_of[name]) for each in merged.groups]
    assert packed.num_tokens == merged.num_tokens
    assert packed.metrics | {"seconds": 0} == merged.metrics | {"seconds": 0}


@settings(max_examples=50)
@given(packings(), st.data())
def test_what_always_holds(packing, data):
    lengths, spec = packing
    rows = len(lengths)
    terms = data.draw(st.lists(st.integers(0, 9), min_size=rows, max_size=rows))
    batch = {"id": torch.arange(rows), "name": [f"row {row}" for row in range(rows)]}
    micro_batches = pack_micro_batches(batch, spec, lengths, loss_tokens=terms)

    assert sorted(row for group in micro_batches.groups for row in group) == list(range(rows))
    assert len(micro_batches) >= spec.n_mbs and all(micro_batches.groups)
    assert spec.max_tokens_per_mb is None or max(micro_batches.num_tokens) <= spec.max_tokens_per_mb
    for rows_of_one in micro_batches.groups:
        blocks = {row // spec.granularity for row in rows_of_one}
        assert len(rows_of_one) == len(blocks) * spec.granularity and rows_of_one == sorted(rows_of_one)
    for micro_batch, group in zip(micro_batches, micro_batches.groups):
        assert micro_batch["id"].tolist() == group and micro_batch["name"] == [f"row {row}" for row in group]
    for group, each, tokens, total in zip(
        micro_batches.groups, micro_batches.lengths, micro_batches.num_tokens, micro_batches.loss_tokens
    ):
        assert each.tolist() == [lengths[row] for row in group] and sum(each.tolist()) == tokens
        assert total == sum(terms[row] for row in group)

    forward, backward = micro_batches.forward_indices, micro_batches.backward_indices
    assert torch.equal(forward[backward], torch.arange(rows)) and torch.equal(backward[forward], torch.arange(rows))
    together = concat_rows(list(micro_batches))
    assert together["id"].tolist() == forward.tolist()
    assert torch.equal(together["id"][backward], batch["id"])
    assert micro_batches.restore([{"square": each["id"] ** 2} for each in micro_batches])["square"].tolist() == [
        row**2 for row in range(rows)
    ]

    if sum(terms):
        assert sum(micro_batches.loss_weights) == pytest.approx(1) and micro_batches.loss_scale == 1 / sum(terms)
    else:
        assert set(micro_batches.loss_weights) == {0.0} and micro_batches.loss_scale == 0.0
    tokens = micro_batches.num_tokens
    assert sorted(micro_batches.metrics["group_sums"]) == sorted(tokens)
    if spec.order == "heaviest_first":
        assert tokens == sorted(tokens, reverse=True)
    else:
        top = tokens.index(max(tokens))
        assert tokens[: top + 1] == sorted(tokens[: top + 1])
        assert tokens[top:] == sorted(tokens[top:], reverse=True)
        assert len(set(tokens)) < len(tokens) or abs(top - (len(tokens) - 1 - top)) <= 1


@pytest.mark.parametrize("kind", [dict, lambda fields: TensorDict(fields, [4])])
def test_fields_added_after_a_first_pass_are_in_the_next_one(kind):
    """As in PPO: log-probabilities of the first pass, and then advantages; one plan for both."""
    batch = kind({"id": torch.arange(4), "advantage": torch.zeros(4)})
    micro_batches = pack_micro_batches(batch, MicroBatchSpec(max_tokens_per_mb=8), [2, 6, 5, 3])
    batch["log_prob"] = micro_batches.restore([each["id"] * 10 for each in micro_batches])
    batch["advantage"] = torch.ones(4)
    for each in [*micro_batches, *micro_batches[:]]:
        assert torch.equal(each["log_prob"], each["id"] * 10) and torch.equal(each["advantage"], torch.ones(2))


def test_workloads_are_balanced_under_the_token_budget():
    rng = np.random.default_rng(0)
    for _ in range(20):
        lengths = rng.lognormal(5, 1, 64).astype(np.int64).clip(1, 2000)
        workloads = lengths**2 + 24576 * rng.integers(0, 2, 64) * lengths  # some rows are images, say
        for algorithm in ("kk", "refined"):
            spec = MicroBatchSpec(max_tokens_per_mb=2500, packing_algorithm=algorithm)
            by_tokens = pack_micro_batches(lengths, spec, lengths)
            by_work = pack_micro_batches(lengths, spec, torch.from_numpy(lengths), workloads=workloads)
            assert len(by_work) == len(by_tokens) and max(by_work.num_tokens) <= 2500 and all(by_work.groups)
            of_tokens = [int(workloads[group].sum()) for group in by_tokens.groups]
            assert by_work.workloads == [int(workloads[group].sum()) for group in by_work.groups]
            assert by_work.workloads == sorted(by_work.workloads, reverse=True)
            assert max(by_work.workloads) <= max(of_tokens)
            assert by_tokens.workloads is None


def test_a_budget_so_tight_that_only_the_packing_keeps_it(monkeypatch):
    balanced = []
    refine = block_packing.refine
    monkeypatch.setattr(block_packing, "refine", lambda *args, **more: balanced.append(1) or refine(*args, **more))
    lowered = 0
    for seed in (5, 8, 15):
        rng = np.random.default_rng(seed)
        lengths = rng.lognormal(np.log(90), 0.35, 64) + rng.lognormal(np.log(200), 0.5, 64)
        lengths = lengths.clip(1, 1024).astype(np.int64)
        workloads = lengths * np.random.default_rng(seed).integers(1, 50, 64)
        spec = MicroBatchSpec(max_tokens_per_mb=lengths.max(), packing_algorithm="refined")  # numpy's integer
        assert type(spec.max_tokens_per_mb) is int  # ranks compare it as JSON
        by_tokens = pack_micro_batches(lengths, spec, lengths)
        by_work = pack_micro_batches(lengths, spec, lengths, workloads=workloads)
        assert len(by_work) == len(by_tokens) and max(by_work.num_tokens) <= lengths.max() and all(by_work.groups)
        before = max(int(workloads[group].sum()) for group in by_tokens.groups)
        assert max(by_work.workloads) <= before
        lowered += max(by_work.workloads) < before
    assert balanced and lowered


def test_loss_terms_of_a_base_batch_are_its_label_values():
    batch = padded_batch([3, 1, 4, 2], rows=6)  # dense labels, three values in each real row
    lengths = [5, 1, 4, 2, 0, 0]
    micro_batches = pack_micro_batches(batch, MicroBatchSpec(n_mbs=2, packing_algorithm="kk"), lengths)
    assert sum(micro_batches.loss_tokens) == batch.num_loss_tokens() == 12
    for micro_batch, terms in zip(micro_batches, micro_batches.loss_tokens):
        assert micro_batch.num_loss_tokens() == terms
    for labels in (batch.features, {"jagged": batch.features, "dense": [batch.labels]}):
        jagged = dataclasses.replace(batch, labels=labels)
        micro_batches = pack_micro_batches(jagged, MicroBatchSpec(n_mbs=2), lengths)
        assert sum(micro_batches.loss_tokens) == jagged.num_loss_tokens()
        for micro_batch, terms in zip(micro_batches, micro_batches.loss_tokens):
            assert micro_batch.num_loss_tokens() == terms
    without_rows = dataclasses.replace(empty := padded_batch([]), labels=empty.features)
    with pytest.raises(ValueError, match="no rank has a row"):
        pack_micro_batches(without_rows, MicroBatchSpec(), [], joint=True)
    unlabelled = dataclasses.replace(batch, labels=None)
    assert sum(pack_micro_batches(unlabelled, MicroBatchSpec(), lengths).loss_tokens) == sum(lengths)


def test_metrics_are_those_of_the_packing():
    lengths = [9, 7, 5, 4, 4, 3]
    spec = MicroBatchSpec(max_tokens_per_mb=12, packing_algorithm="refined")
    micro_batches = pack_micro_batches(lengths, spec, lengths)
    metrics = dict(micro_batches.metrics)
    assert metrics.pop("seconds") > 0
    assert metrics == packing_metrics(lengths, micro_batches.groups, 12)
    # Without a budget the largest micro-batch is what the others are compared with.
    metrics = pack_micro_batches(lengths, MicroBatchSpec(n_mbs=3), lengths).metrics
    assert metrics["utilization"] == pytest.approx(32 / 3 / metrics["max_load"])


@pytest.mark.parametrize(
    ("lengths", "options", "message"),
    [
        ([], {}, "the batch has no rows; .*: take rows of other ranks with joint=True"),
        ([3, 9, 4], {"max_tokens_per_mb": 8}, "^row 1 has 9 tokens, max_tokens_per_mb is 8; rows and blocks are never"),
        ([9] * 7, {"max_tokens_per_mb": 8}, "row 0 has 9 tokens, .*row 4 has 9 tokens and 2 more do too, max_tokens"),
        (
            [1, 1, 5, 4],
            {"max_tokens_per_mb": 8, "granularity": 2},
            "the block of row 2 has 9 tokens, max_tokens_per_mb is 8; rows and blocks are never split",
        ),
        ([1, 1, 1], {"granularity": 2}, "the batch has 3 rows, granularity is 2; every block has granularity rows"),
        ([1, 1], {"n_mbs": 3}, "n_mbs is 3, the batch has 2 rows; no micro-batch is empty: lower n_mbs"),
        ([1] * 4, {"n_mbs": 3, "granularity": 2}, "n_mbs is 3, the batch has 4 rows in 2 blocks; no micro-batch"),
        ([1] * 5, {"n_mbs_divisor": 8}, "n_mbs_divisor is 8, the batch has 5 rows; no micro-batch is empty"),
        (
            [1] * 5,
            {"n_mbs_divisor": 3, "n_mbs": 4},
            "^the batch has 5 rows, which need 4 or more micro-batches, in number a multiple of 3 .n_mbs_divisor., "
            "none of them empty: lower n_mbs, lower n_mbs_divisor or pass more rows$",
        ),
        ([1, -1], {}, r"lengths\[1\] is -1"),
    ],
)
def test_mistakes_are_one_line(lengths, options, message):
    for algorithm in ALGORITHMS:
        with pytest.raises(ValueError, match=message) as caught:
            spec = MicroBatchSpec(packing_algorithm=algorithm, **options)
            pack_micro_batches(torch.zeros(len(lengths)), spec, lengths)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": [1, 2]}, "lengths has 2 entries, there are 3 rows"),
        ({"loss_tokens": [1] * 4}, "loss_tokens has 4 entries, there are 3 rows"),
        ({"spec": MicroBatchSpec(packing_algorithm="kk"), "workloads": [1] * 4}, "workloads has 4 entries, there are"),
        ({"workloads": [1] * 3}, "packing_algorithm is 'ffd'; only 'kk' and 'refined' balance them"),
        ({"batch": {"id": torch.arange(3), "other": torch.arange(4)}}, "disagree on the number of rows"),
        ({"spec": {"n_mbs": 2}}, "spec is a dict; it must be a MicroBatchSpec"),
    ],
)
def test_arguments_that_do_not_match(changes, message):
    fine = {"batch": {"id": torch.arange(3)}, "spec": MicroBatchSpec(), "lengths": [1, 2, 3]}
    with pytest.raises(TypeError if "spec is a dict" in message else ValueError, match=message):
        pack_micro_batches(**fine | changes)


def test_many_ranks_with_too_few_rows_are_one_short_line():
    needs = [_Needs(8, 8, 4, 0), *[_Needs(1, 1, 1, 0)] * 40]
    with pytest.raises(ValueError, match="rank 15 has 1 rows, rank 16 has 1 rows and 24 more; all ranks make"):
        _require_blocks(needs, range(41))


def test_results_that_do_not_match():
    micro_batches = pack_micro_batches({"id": torch.arange(4)}, MicroBatchSpec(n_mbs=2), [1, 1, 1, 1])
    with pytest.raises(ValueError, match="results of micro-batch 1 have 3 rows, micro-batch 1 has 2"):
        micro_batches.restore([torch.zeros(2), torch.zeros(3)])
    with pytest.raises(ValueError, match="micro-batch 1 are a PaddedBatch with 1 rows of padding, which"):
        micro_batches.restore([padded_batch([1, 2]), padded_batch([3], rows=2)])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_mbs": 0}, "n_mbs is 0; it must be an integer of at least 1"),
        ({"n_mbs": 1.5}, "n_mbs is 1.5"),
        *(({"n_mbs": value}, "n_mbs is True;") for value in (True, np.True_)),
        ({"n_mbs": "3"}, "n_mbs is '3';"),
        ({"granularity": -2}, "granularity is -2"),
        ({"n_mbs_divisor": 0}, "n_mbs_divisor is 0"),
        ({"max_tokens_per_mb": 0}, "max_tokens_per_mb is 0; it must be an integer of at least 1"),
        ({"packing_algorithm": "FFD"}, "packing_algorithm is 'FFD'; it must be one of 'ffd', 'kk', 'refined'"),
        ({"packing_algorithm": None}, "packing_algorithm is None"),
        ({"order": "random"}, "order is 'random'; it must be one of 'heaviest_first', 'light_ends'"),
    ],
)
def test_a_spec_is_validated_when_made(options, message):
    with pytest.raises(ValueError, match=message):
        MicroBatchSpec(**options)
    with pytest.raises(dataclasses.FrozenInstanceError):
        MicroBatchSpec().n_mbs = 2


@settings(max_examples=50)
@given(packings())
def test_every_number_of_micro_batches_from_the_fewest_on_can_be_made(packing):
    # What lets ranks that need different numbers meet at the largest of them.
    lengths, spec = packing
    workloads = None if spec.packing_algorithm == "ffd" else np.array(lengths) // 10  # many without any
    packed, refined = (
        BlockPacking.of(each, RowBlocks.of(each, len(lengths)), np.array(lengths), workloads)
        for each in (spec, dataclasses.replace(spec, packing_algorithm="refined"))
    )
    for number in range(packed.num_fewest, len(packed.tokens) + 1):
        groups = groups_of(packed.into(number))
        assert len(groups) == number and all(groups)
        assert sorted(block for group in groups for block in group) == list(range(len(packed.tokens)))
        assert max(int(packed.tokens[group].sum()) for group in groups) <= budget_of(spec, packed.tokens)
    assert refined.num_fewest <= packed.num_fewest


@pytest.mark.parametrize("raises", [False, True])
def test_an_algorithm_that_skips_a_number_is_split_to_it(monkeypatch, raises):
    # Karmarkar-Karp may find a packing for two micro-batches and none for three.
    def skips_three(values, capacity, min_groups, divisor):
        if raises and min_groups > 2:
            raise ValueError("none was found")
        return [[0, 1], [2, 3]] if min_groups <= 2 else [[0], [1], [2], [3]]

    spec = MicroBatchSpec(max_tokens_per_mb=10, packing_algorithm="kk")
    alike = BlockPacking.of(spec, RowBlocks.of(spec, 6), np.full(6, 3), None)
    assert np.bincount(alike.into(3)).tolist() == [2, 2, 2]  # where it skips none, the groups are its own
    monkeypatch.setattr(block_packing, "get_allocate_fn", lambda name: skips_three)
    packed = BlockPacking.of(spec, RowBlocks.of(spec, 4), np.array([6, 4, 5, 3]), None)
    assert groups_of(packed.into(2)) == [[0, 1], [2, 3]] and groups_of(packed.into(3)) == [[2, 3], [0], [1]]


def test_micro_batches_are_a_sequence_with_a_short_repr():
    lengths = [7, 5, 4, 4, 3, 1]
    micro_batches = pack_micro_batches({"row": torch.arange(6)}, MicroBatchSpec(max_tokens_per_mb=9), lengths)
    assert isinstance(micro_batches, Sequence)
    rows = [each["row"].tolist() for each in micro_batches]
    assert rows == micro_batches.groups and micro_batches[-1]["row"].tolist() == rows[-1]
    assert [each["row"].tolist() for each in micro_batches[1:]] == rows[1:]
    assert repr(micro_batches) == "MicroBatches(3 of 2 to 2 rows, 7 to 9 tokens)"
