"""Ranks that make different calls learn of it at once: every rank raises, and says which rank has made which call."""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist

from commons.dispatch import SingleRankLoader, redistribute_balanced, scatter_balanced
from commons.micro_batching import MicroBatchSpec, pack_micro_batches

CALLS = [
    "redistribute_balanced",
    "pack_micro_batches",
    "pack_micro_batches, joint",
    "scatter_balanced",
    "SingleRankLoader",
    "send_home",
    "gather_back",
    "scatter_more",
]
# A call of one name with another option is told as the option.
PAIRS = [pair for pair in itertools.combinations(CALLS, 2) if len({name.split(",")[0] for name in pair}) == 2]


def make_call(name, moved, share):
    batch = {"x": torch.arange(4)}
    if name == "redistribute_balanced":
        redistribute_balanced(batch, [1, 2, 3, 4])
    elif name.startswith("pack_micro_batches"):
        pack_micro_batches(batch, MicroBatchSpec(n_mbs=2), [1, 2, 3, 4], joint=name.endswith("joint"))
    elif name == "scatter_balanced":
        of_source = dist.get_rank() == 0
        scatter_balanced(batch if of_source else None, [1] * 4 if of_source else None)
    elif name == "SingleRankLoader":
        SingleRankLoader([batch]).close()
    elif name == "send_home":
        moved.send_home(moved.batch)
    elif name == "gather_back":
        share.gather_back(share.batch)
    else:
        share.scatter_more(batch if dist.get_rank() == 0 else None)


def call_differently(pairs):
    """What every pair ends in; the calls after it are made together and go well."""
    rank, errors = dist.get_rank(), []
    for first, second in pairs:
        batch = {"x": torch.arange(4) + rank}
        moved = redistribute_balanced(batch, [1 + 20 * rank] * 4)
        share = scatter_balanced(*((batch, [1] * 4) if rank == 0 else (None, None)))
        try:
            make_call(second if rank == 1 else first, moved, share)
        except ValueError as error:
            errors.append(str(error))
        assert torch.equal(moved.send_home(moved.batch)["x"], batch["x"])
    return errors


def test_every_pair_of_calls(ranks):
    others = "rank 0 calls" if ranks.world_size == 2 else "ranks 0, 2, 3 call"
    expected = [
        f"{others} {first.split(',')[0]} and rank 1 calls {second.split(',')[0]}; all ranks make the same calls in "
        "the same order: correct the program"
        for first, second in PAIRS
    ]
    assert ranks.run(call_differently, PAIRS, timeout=120) == [expected] * ranks.world_size
