"""verl's, AReaL's and torchtitan's own code with our functions in place of theirs."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
import torch.distributed as dist

from benchmarks.drop_ins import PretendedVllm

pytestmark = pytest.mark.timeout(300)
LENGTHS = np.random.default_rng(0).lognormal(4, 0.8, 48).astype(int).clip(1, 512).tolist()


def padded(lengths):
    """A TensorDict as verl's actors take it."""
    from tensordict import TensorDict

    mask = torch.arange(512) < torch.tensor(lengths)[:, None]
    row = torch.arange(len(lengths))
    return TensorDict({"input_ids": row[:, None] * mask, "attention_mask": mask.long(), "row": row}, len(lengths))


def nested(lengths):
    """The same without padding."""
    from tensordict import TensorDict

    ids = torch.nested.as_nested_tensor(
        [torch.full((length,), row) for row, length in enumerate(lengths)], layout=torch.jagged
    )
    return TensorDict({"input_ids": ids, "row": torch.arange(len(lengths))}, len(lengths))


def largest(lengths, groups):
    """The costliest group, by verl's estimate."""
    from verl.utils.seqlen_balancing import calculate_workload

    costs = calculate_workload(torch.tensor(lengths))
    return max(int(costs[group].sum()) for group in groups)


@pytest.mark.extra("verl")
@pytest.mark.parametrize("batch_of", [padded, nested])
@pytest.mark.parametrize(
    "options", [{}, {"num_batches_divided_by": 4}, {"min_num_micro_batch": 9}, {"force_group_size": 4}]
)
def test_verl_s_micro_batches(batch_of, options):
    from verl.utils import seqlen_balancing as theirs

    from evenrank.integrations.verl import rearrange_micro_batches

    cap = 2048
    batches, groups = rearrange_micro_batches(batch_of(LENGTHS), cap, **options)
    _, of_verl = theirs.rearrange_micro_batches(batch_of(LENGTHS), cap, **options)
    assert sorted(row for group in groups for row in group) == list(range(48))
    assert [each["row"].tolist() for each in batches] == groups and len(groups) <= len(of_verl)
    assert max(sum(LENGTHS[row] for row in group) for group in groups) <= cap
    assert len(groups) % options.get("num_batches_divided_by", 1) == 0
    assert len(groups) >= options.get("min_num_micro_batch", 1)
    size = options.get("force_group_size", 1)
    assert all(len({row // size for row in group}) * size == len(group) for group in groups)
    assert len(groups) < len(of_verl) or largest(LENGTHS, groups) <= largest(LENGTHS, of_verl)


@pytest.mark.extra("verl")
def test_verl_s_own_callers(monkeypatch):
    from verl.protocol import DataProto
    from verl.utils import seqlen_balancing as theirs

    from evenrank.integrations import verl as ours

    theirs_of = {name: getattr(theirs, name) for name in ours.__all__}
    for name in ours.__all__:
        monkeypatch.setattr(theirs, name, getattr(ours, name))
    data = DataProto(batch=padded(LENGTHS), non_tensor_batch={"name": np.array([f"n{row}" for row in range(48)])})
    micro_batches, groups = theirs.prepare_dynamic_batch(data, max_token_len=2048)
    assert [each.non_tensor_batch["name"].tolist() for each in micro_batches] == [
        [f"n{row}" for row in each] for each in groups
    ]
    rows = torch.cat([each.batch["row"] for each in micro_batches])
    assert theirs.restore_dynamic_batch(rows, groups).tolist() == list(range(48))
    uids = [f"u{row // 4}" for row in range(48)]
    for name, arguments in (
        ("get_seqlen_balanced_partitions", (LENGTHS, 6, True)),
        ("get_group_balanced_partitions", (LENGTHS, uids, 6)),
    ):
        ours_found, found = getattr(theirs, name)(*arguments), theirs_of[name](*arguments)
        assert sorted(row for part in ours_found for row in part) == list(range(48))
        assert sorted(map(len, ours_found)) == sorted(map(len, found)) == [8] * 6
        if name.startswith("get_group"):
            assert all(len({uids[row] for row in part}) == 2 for part in ours_found)
            assert largest(LENGTHS, ours_found) <= largest(LENGTHS, found)
        else:
            assert max(sum(LENGTHS[row] for row in part) for part in ours_found) <= max(
                sum(LENGTHS[row] for row in part) for part in found
            )
    with pytest.raises(ValueError, match="there are 2 items, k_partitions is 3"):
        theirs.get_seqlen_balanced_partitions([1, 2], 3, equal_size=False)
    with pytest.raises(ValueError, match=r"row \d+ has \d+ tokens.*max_tokens_per_mb is 100"):
        theirs.rearrange_micro_batches(nested(LENGTHS), 100)


def _on_ranks(lengths_of):
    from evenrank.integrations.verl import rearrange_micro_batches

    lengths = lengths_of[dist.get_rank()]
    _, alike = rearrange_micro_batches(nested(lengths), 600, dp_group=dist.group.WORLD)
    _, alone = rearrange_micro_batches(nested(lengths), 600)
    return sorted(row for group in alike for row in group) == list(range(len(lengths))), len(alike), len(alone)


@pytest.mark.extra("verl")
def test_verl_s_ranks_make_as_many(two_ranks):
    found = two_ranks.run(_on_ranks, [[500, 400, 300, 200], [100, 100, 100, 100, 100]])
    assert found == [(True, 3, 3), (True, 3, 1)]


@pytest.mark.extra("areal")
def test_areal_s_own_caller(monkeypatch):
    from areal.api.cli_args import MicroBatchSpec
    from areal.utils import data, seqpack

    from evenrank.integrations import areal as ours

    for algorithm in ("ffd", "kk"):
        spec = MicroBatchSpec(n_mbs=2, max_tokens_per_mb=1024, packing_algorithm=algorithm)
        of_areal = data.allocate_balanced_mbs(spec, LENGTHS)
        with monkeypatch.context() as patched:
            for name in ("ffd_allocate", "kk_allocate"):
                patched.setattr(seqpack, name, getattr(ours, name))
            assert data.get_allocate_fn(algorithm) is getattr(ours, f"{algorithm}_allocate")
            groups = data.allocate_balanced_mbs(spec, LENGTHS)
        assert sorted(row for group in groups for row in group) == list(range(48)) and len(groups) <= len(of_areal)
        assert max(sum(LENGTHS[row] for row in group) for group in groups) <= 1024


@pytest.mark.extra("torchtitan")
def test_torchtitan_s_batcher(monkeypatch):
    monkeypatch.setattr(sys, "meta_path", [PretendedVllm(), *sys.meta_path])
    from torchtitan.experiments.rl.components.batcher import BatchConfig, Batcher
    from torchtitan.experiments.rl.types import RolloutTurnID, TrainingSample, TrainingSampleGroup

    from evenrank.integrations.torchtitan import assign_training_samples_to_rows

    samples = [
        TrainingSample(
            min_policy_version=0,
            max_policy_version=0,
            rollout_id=RolloutTurnID(group_id=0, rollout_id=number, turn_id=0),
            token_ids=[number + 1] * (length + 1),
            loss_mask=[False] + [True] * length,
            logprobs=[0.0] * (length + 1),
            advantage=[1.0] * (length + 1),
        )
        for number, length in enumerate(LENGTHS)
    ]

    def trained(batch):
        """Tokens of each sample, and the sum over micro-batches of the costliest rank, by squares of lengths."""
        counts, sums = torch.zeros(49, dtype=torch.int64), []
        for ranks in batch.microbatches:
            of_ranks = []
            for each in ranks:
                found = torch.bincount(each.token_ids.flatten(), minlength=50)[1:]
                counts += found[:49]
                of_ranks.append(int((found**2).sum()))
            sums.append(max(of_ranks))
        return counts[:48].tolist(), sum(sums)

    def pack():
        batcher = Batcher.Config(batch=BatchConfig(local_batch_size=2, seq_len=512)).build(
            num_prompts_per_train_step=1, dp_degree=2, pad_id=0
        )
        return batcher.add_training_samples(
            training_sample_group=TrainingSampleGroup(group_id=0, training_samples=samples, metrics=[])
        )

    of_torchtitan = pack()
    monkeypatch.setattr(Batcher, "_assign_training_samples_to_rows", assign_training_samples_to_rows)
    ours = pack()
    assert ours.num_global_valid_tokens == of_torchtitan.num_global_valid_tokens == sum(LENGTHS)
    assert trained(ours)[0] == trained(of_torchtitan)[0] == LENGTHS
    assert len(ours.microbatches) <= len(of_torchtitan.microbatches) and trained(ours)[1] <= trained(of_torchtitan)[1]
