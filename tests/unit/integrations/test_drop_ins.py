"""Functions with the signatures of other frameworks: every sample once, under the cap, as these expect it."""

import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from commons.integrations import areal, megatron, slime, torchtitan
from commons.integrations.model_cost import model_cost
from commons.micro_batching import ffd_allocate

lengths = st.lists(st.integers(1, 100), min_size=1, max_size=40)


@given(lengths, st.integers(100, 300), st.sampled_from([None, 1, 2, 5]), st.sampled_from([1, 2]))
def test_areal_s_allocators(values, capacity, min_groups, divisor):
    fewest = max(min_groups or 1, divisor)
    for name in ("ffd", "kk"):
        allocate = areal.get_allocate_fn(name)
        if len(values) < -(-fewest // divisor) * divisor:
            with pytest.raises(RuntimeError, match=f"there are {len(values)} rows"):
                allocate(values, capacity, min_groups, divisor)
            return
        try:
            groups = allocate(values, capacity, min_groups=min_groups, n_groups_divisor=divisor)
        except RuntimeError as error:
            assert divisor > 1 and "\n" not in str(error)
            return
        assert sorted(row for group in groups for row in group) == list(range(len(values)))
        assert all(groups) and len(groups) >= fewest and len(groups) % divisor == 0
        assert max(sum(values[row] for row in group) for group in groups) <= capacity
        assert len(groups) <= len(ffd_allocate(values, capacity, min_groups or 1, divisor))
    sizes = [len(group) for group in areal.kk_allocate(values, capacity * 2, equal_size=True)]
    assert sum(sizes) == len(values) and max(sizes) - min(sizes) <= 1
    with pytest.raises(RuntimeError, match="above the capacity|capacity is"):
        areal.ffd_allocate([capacity + 1], capacity, 1)
    with pytest.raises(ValueError, match="packing_algorithm is 'best'"):
        areal.get_allocate_fn("best")


@given(lengths, st.integers(1, 8))
def test_areal_s_partition(values, number):
    if len(values) < number:
        with pytest.raises(ValueError, match=f"there are {len(values)} values, K is {number}"):
            areal.balanced_greedy_partition(values, number)
        return
    groups = areal.balanced_greedy_partition(values, K=number)
    assert sorted(row for group in groups for row in group) == list(range(len(values)))
    sizes = [len(group) for group in groups]
    assert len(groups) == number and max(sizes) - min(sizes) <= 1


@given(lengths, st.integers(1, 4), st.integers(1, 3))
def test_rows_of_torchtitan_s_batcher(tokens, dp_degree, local_batch_size):
    batcher = SimpleNamespace(seq_len=100, local_batch_size=local_batch_size, _dp_degree=dp_degree)
    batcher.num_tokens_to_pack = lambda each: tokens[each]
    rows = torchtitan.assign_training_samples_to_rows(batcher, list(range(len(tokens))))
    assert sorted(each for row in rows for each in row) == list(range(len(tokens)))
    assert max(sum(tokens[each] for each in row) for row in rows) <= 100
    assert len(rows) <= len(ffd_allocate(tokens, 100))
    # As the batcher deals them: of a micro-batch, the ranks' first rows are neighbours in cost.
    places = -(-len(rows) // (local_batch_size * dp_degree)) * dp_degree
    costs = [sum(tokens[each] ** 2 for each in row) for row in rows]
    assert costs[:places] == sorted(costs, reverse=True)[:places]
    assert costs[places : 2 * places] == sorted(costs[places : 2 * places])  # the second turn is reversed
    assert torchtitan.assign_training_samples_to_rows(batcher, []) == []


def schedule_of(tokens, config, rollouts=None, size=None, images=None, **changes):
    """slime's schedule on two ranks, of rollouts of one sample each unless given, by default all in one step."""
    args = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 60, "micro_batch_size": 2, "balance_data": False}
    sizes = {"dp_size": 2, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}
    return slime.build_dp_schedule(
        SimpleNamespace(**args | changes),
        sizes | config,
        tokens,
        global_batch_size=size or len(tokens),
        rollout_indices=rollouts or list(range(len(tokens))),
        sample_is_multimodal=images,
    )


@pytest.fixture(autouse=True)
def flops_of_slime(monkeypatch):
    """slime is no package of the index; its estimate of a sample's operations."""
    flops = ModuleType("slime.utils.flops_utils")
    flops.calculate_fwd_flops = lambda lengths, args: sum(10 * length + length**2 for length in lengths)
    for name in ("slime", "slime.utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, flops.__name__, flops)


@given(
    st.lists(st.tuples(st.integers(1, 130), st.integers(0, 9)), min_size=4, max_size=40),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2]),
    st.booleans(),
)
def test_what_slime_s_schedule_guarantees(samples, ranks, cp_size, balances):
    tokens, rollouts = (list(each) for each in zip(*samples))
    names = list(dict.fromkeys(rollouts))
    size = max(1, len(names) // 2)
    steps = [names[at : at + size] for at in range(0, len(names) - size + 1, size)]
    kept = [[at for at, name in enumerate(rollouts) if name in step] for step in steps]
    try:
        config = {"dp_size": ranks, "cp_size": cp_size}
        schedule = schedule_of(tokens, config, rollouts, size, balance_data=balances)
    except ValueError as error:
        assert min(map(len, kept)) < 2 * ranks * 3 and "ranks" in str(error)
        return
    partitions, micro_batches, numbers, sizes = schedule
    assert sorted(at for part in partitions for at in part) == sorted(at for step in kept for at in step)
    assert sizes == [size] * len(steps) == [size] * len(numbers)
    for part, mine in zip(partitions, micro_batches):
        assert len(mine) == sum(numbers) and all(mine)
        assert [place for each in mine for place in each] == list(range(len(part)))
        first = 0
        for number, step in zip(numbers, kept):
            for each in mine[first : first + number]:
                here = [part[place] for place in each]
                assert set(here) <= set(step)
                assert sum(tokens[at] for at in here) <= 60 * cp_size or len(here) == 1
            first += number


def test_slime_s_micro_batches_of_a_fixed_size():
    tokens, options = [9, 1, 1, 1, 9, 1, 1, 1], {"use_dynamic_batch_size": False, "balance_data": True}
    options["config"] = {"vpp_size": 2, "microbatch_group_size_per_vp_stage": 2}
    partitions, micro_batches, numbers, _ = schedule_of(tokens, **options)
    assert numbers == [2] and [[len(each) for each in mine] for mine in micro_batches] == [[2, 2], [2, 2]]
    heavy = [
        [index for index, each in enumerate(mine) if 9 in (tokens[part[at]] for at in each)]
        for part, mine in zip(partitions, micro_batches)
    ]
    assert len(heavy[0]) == 1 and heavy[0] == heavy[1]  # both nines in the same micro-batch
    message = "a step has 7 samples; their number must be a multiple of 8 .*: correct micro_batch"
    with pytest.raises(ValueError, match=message):
        schedule_of(tokens[:7], **options)
    with pytest.raises(ValueError, match="there are 8 rollouts, global_batch_size is 9; a step has global_batch"):
        schedule_of(tokens, size=9, **options)


def test_work_whose_sum_exceeds_int64():
    """As of 16,384 long samples in a model with hundreds of billions of weights."""
    tokens = [2 * 10**9, 10**9, 10**9, 2 * 10**9]  # each costs about its square
    for dynamic in (True, False):
        options = {"use_dynamic_batch_size": dynamic, "balance_data": True, "max_tokens_per_gpu": 4 * 10**9}
        partitions, *_ = schedule_of(tokens, {}, **options)
        assert [sorted(tokens[at] for at in part) for part in partitions] == [[10**9, 2 * 10**9]] * 2


def test_arguments_that_some_sources_of_slime_add():
    def numbers(images=None, **changes):
        added = {"multimodal_aware_packing": "separate", "global_batch_tokens": None} | changes
        return schedule_of([20] * 4, {}, images=images, **added)[2]

    assert numbers() == numbers([False] * 4) == [1]  # two samples of 20 tokens on each rank, under the cap of 60
    assert numbers(packing_safety_margin=0.66) == [2]
    with pytest.raises(ValueError, match="multimodal_aware_packing is 'separate'; evenrank packs .*: set it to 'off'"):
        numbers([False, True, False, False])
    assert numbers([False, True, False, False], multimodal_aware_packing="off") == [1]
    with pytest.raises(ValueError, match="global_batch_tokens is 80; evenrank makes steps of global_batch_size"):
        numbers(global_batch_tokens=80)


def test_attention_layers_of_a_config_without_layer_types():
    """As Jamba's in releases of transformers before 5: "attention" and "mamba" in `layers_block_type`."""

    class Hybrid(torch.nn.Linear):
        config = SimpleNamespace(
            hidden_size=64,
            num_attention_heads=4,
            num_hidden_layers=4,
            layers_block_type=["mamba", "attention", "mamba", "mamba"],
        )

        def can_generate(self):
            return True

    one, two = model_cost(Hybrid(64, 64))(np.array([1, 2]))
    assert two - 2 * one == 2 * 4 * (16 + 16)  # of one pair of tokens more, in one layer


class InOrder:
    """What a packing scheduler of Megatron-Core's has."""

    def __init__(self, max_seqlen_per_dp_cp_rank, cp_size, dp_size, microbatch_group_size_per_vp_stage, **kwargs):
        self.max_seqlen_per_dp_cp_rank, self.cp_size, self.dp_size = max_seqlen_per_dp_cp_rank, cp_size, dp_size
        self.microbatch_group_size_per_vp_stage = microbatch_group_size_per_vp_stage

    def run(self, sequences, config):
        return self.get_groups_and_subsamples(sequences)


SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_layers": 2, "ffn_hidden_size": 256, "num_query_groups": 4}
CONFIG = SimpleNamespace(**SIZES, kv_channels=None, gated_linear_unit=False)


@given(
    st.lists(st.integers(1, 80), min_size=8, max_size=40),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 2]),
    st.booleans(),
)
def test_megatron_s_scheduler(tokens, dp_size, cp_size, interleaves):
    scheduler = megatron.balanced_scheduler(InOrder)(80, cp_size, dp_size, 2 if interleaves else None)
    sequences = [(number, length) for number, length in enumerate(tokens)]
    try:
        dealt = scheduler.run(sequences, config=CONFIG)
    except ValueError as error:
        assert interleaves and "none of them empty" in str(error)
        return
    assert len(dealt) % (2 if interleaves else 1) == 0 and all(len(each) == dp_size * cp_size for each in dealt)
    once = [number for each in dealt for ids in each[::cp_size] for number in ids]
    assert sorted(once) == list(range(len(tokens)))
    for each in dealt:
        for rank, ids in enumerate(each):
            assert ids and ids == each[rank // cp_size * cp_size]
            assert sum(tokens[number] for number in ids) <= 80 * cp_size
    assert scheduler._task == megatron.task_of(CONFIG)  # the work is not the number of tokens alone


def test_megatron_s_experts_are_costed_as_they_are_passed():
    experts = {"num_moe_experts": 8, "moe_ffn_hidden_size": 32, "moe_router_topk": 2}
    dense, sparse = (megatron.task_of(SimpleNamespace(**vars(CONFIG) | each)) for each in ({}, experts))
    of_layer = 2 * 64 * 8 + 4 * 64 * (2 * 32 - 256)  # the router, and two narrow experts in place of a wide block
    assert sparse.get_workloads(1) - dense.get_workloads(1) == CONFIG.num_layers * of_layer


def test_megatron_s_latent_attention_is_costed_by_the_widths_of_its_heads():
    """A row costs more than two rows of half its tokens by its further pairs, of 2·(192 + 128) operations per head."""
    latent = {"multi_latent_attention": True, "qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 128}
    task = megatron.task_of(SimpleNamespace(**vars(CONFIG) | latent))
    short, long = task.get_workloads([2048, 4096]).tolist()
    pairs = 4096 * 4097 // 2 - 2 * (2048 * 2049 // 2)
    assert long - 2 * short == CONFIG.num_layers * CONFIG.num_attention_heads * 2 * (192 + 128) * pairs


def test_megatron_s_most_sequences_of_a_micro_batch():
    scheduler = megatron.balanced_scheduler(InOrder)(80, 1, 2, None)
    sequences = [(number, 10) for number in range(12)]
    scheduler.max_num_seqs = 6  # newer releases have it
    assert [list(map(len, each)) for each in scheduler.run(sequences, config=CONFIG)] == [[6, 6]]
    scheduler.max_num_seqs = 5
    with pytest.raises(ValueError, match="has 6 sequences, thd_max_packed_sequences allows 5; .*: raise thd"):
        scheduler.run(sequences, config=CONFIG)


def test_megatron_without_packed_sequences_is_refused(monkeypatch):
    from megatron.core.datasets import data_schedule

    if not hasattr(data_schedule, "scheduler_map"):
        with pytest.raises(ValueError, match=r"megatron-core \S+ has no packing scheduler 'dp_balanced' .*: install"):
            megatron.balance_packed_sequences()
    monkeypatch.setattr(data_schedule, "scheduler_map", {"dp_balanced": InOrder}, raising=False)
    megatron.balance_packed_sequences()
    assert issubclass(data_schedule.scheduler_map["dp_balanced"], InOrder)
    assert data_schedule.scheduler_map["dp_balanced"] is not InOrder
