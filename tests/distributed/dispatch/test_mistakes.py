"""What some ranks pass or call wrongly is raised on all of them, by every call that deals out rows; the next one works.

Mistakes of `SingleRankLoader`: test_loader.py.
"""

from __future__ import annotations

import itertools

import numpy as np
import torch
import torch.distributed as dist

from commons.dispatch import SingleRankLoader, Trim, redistribute_balanced, scatter_balanced
from commons.micro_batching import MicroBatchSpec, pack_micro_batches
from tests.helpers.batches.any_batches import dense
from tests.helpers.ranks.faults import error_of

ONE_TO_THREE = {"batch": {"a": dense([1, 2, 3]), "meta": "same"}, "workloads": [1, 2, 30]}
NOTHING = {"batch": None, "workloads": None}


def scatter(**changes):
    """Of rank 0."""
    rows = {"batch": {"a": dense([1, 2, 3, 4])}, "workloads": [1, 2, 3, 4]}
    arguments = (NOTHING if dist.get_rank() else rows) | changes
    return scatter_balanced(arguments.pop("batch"), arguments.pop("workloads"), **arguments)


def redistribute(**changes):
    return redistribute_balanced(**ONE_TO_THREE | changes)


def pack(lengths=([1, 2, 3], [10, 9]), spec=MicroBatchSpec(), batch=torch.arange, **options):  # noqa: B008
    """Several micro-batches of each rank's own rows."""
    own = lengths[dist.get_rank()]
    return pack_micro_batches(None if own is None else {"id": batch(len(own))}, spec, own, **options)


def pack_jointly(**changes):
    return pack(**{"joint": True} | changes)


def budget(number, **options):
    return {"spec": MicroBatchSpec(max_tokens_per_mb=number, **options)}


def gather_back(rows=2, width=1, **options):
    return scatter().gather_back(torch.zeros(rows, width), **options)


def scatter_more(rows, everywhere):
    return scatter().scatter_more(torch.zeros(rows) if everywhere or dist.get_rank() == 0 else None)


def send_home(left_out=0, requires_grad=False):
    moved = redistribute()
    return moved.send_home(torch.ones(len(moved.indices) - left_out, requires_grad=requires_grad))


def send_micro_batches_home(left_out):
    micro_batches = pack_jointly(spec=MicroBatchSpec(n_mbs=2))
    return micro_batches.send_home([each["id"] for each in micro_batches][left_out:])


def texts(lengths, label):
    """Padded to the longest, where labels have a value of the caller's."""
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    batch = {"mask": mask, "ids": mask.long() * 3, "labels": torch.where(mask, 5, label)}
    return {"batch": batch, "workloads": lengths, "trim": Trim("mask")}


def jagged_with_gradients(rank):
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged, requires_grad=True)


MICRO = MicroBatchSpec(packing_algorithm="kk")
# The call, what a rank passes to it otherwise than it should, and the error of all ranks.
MISTAKES = [
    (
        scatter,
        lambda rank: {} if rank else {"batch": {"a": dense([])[:0]}, "workloads": []},
        "ValueError: rank 0: the batch has 0 rows that are no padding; at least one is needed",
    ),
    (scatter, lambda rank: NOTHING, "ValueError: rank 0: this rank is the source and passes no batch and no workloads"),
    (
        scatter,
        lambda rank: ONE_TO_THREE,
        "ValueError: rank 1: this rank passes batch and workloads, the source is rank",
    ),
    (
        scatter,
        lambda rank: {"src": rank},
        "ValueError: src is 0 on rank 0 and 1 on rank 1 in scatter_balanced; all ranks pass the same",
    ),
    (scatter, lambda rank: {"pad": rank == 0}, "ValueError: pad is True on rank 0 and False on rank 1 in scatter_bal"),
    (scatter, lambda rank: {"trim": Trim("ab"[rank])}, "ValueError: trim is [\"Trim(mask='a', lengths=None"),
    (scatter, lambda rank: {"src": 9}, "ValueError: rank 0: src is 9, the group has 2 ranks; "),
    (
        scatter,
        lambda rank: {"trim": Trim("mask")},
        "KeyError: \"rank 0: the batch has no field 'mask' to trim by; its fields are 'a'",
    ),
    (
        scatter,
        lambda rank: {"equal_size": np.bool_(True)},
        "TypeError: rank 0: equal_size is a bool; ranks compare their options as JSON",
    ),
    (
        gather_back,
        lambda rank: {"rows": 2 - rank},
        "ValueError: rank 1: results of the share have 1 rows, the share has 2; there is a row per row",
    ),
    (
        gather_back,
        lambda rank: {"width": 1 + rank},
        "ValueError: rank 0: batches 0 and 1 differ at 'the batch itself': tensor float32 [1] and tensor",
    ),
    (
        gather_back,
        lambda rank: {"to_all": rank == 0},
        "ValueError: to_all is True on rank 0 and False on rank 1 in gather_back",
    ),
    (
        scatter_more,
        lambda rank: {"rows": 5, "everywhere": False},
        "ValueError: rank 0: the batch has 5 rows, 4 were dealt; more of the same rows has a row for each",
    ),
    (
        scatter_more,
        lambda rank: {"rows": 4, "everywhere": True},
        "ValueError: rank 1: this rank passes batch, the source is rank 0",
    ),
    (
        redistribute,
        lambda rank: NOTHING,
        "ValueError: the batch has 0 rows that are no padding; at least one is needed",
    ),
    (
        redistribute,
        lambda rank: {"batch": {"a": dense([1])}, "workloads": [1]} if rank else NOTHING,
        "ValueError: the number of rows is 1, that of parts (chunks or ranks) is 2; every part needs one: use",
    ),
    (
        redistribute,
        lambda rank: {"batch": {"a": dense([1, 2, 3]).int(), "meta": "same"}} if rank else {},
        "ValueError: the batches of ranks 0 and 1 differ: field 'a': tensor int64 [3] and tensor int32 [3]; rows",
    ),
    (
        redistribute,
        lambda rank: {"batch": {"a": dense([1, 2, 3]), "meta": "other"}} if rank else {},
        "ValueError: the batches of ranks 0 and 1 differ: field 'meta': 'same' and 'other'; rows can be mixed",
    ),
    (
        redistribute,
        lambda rank: {"workloads": None} if rank else {},
        "ValueError: rank 1: workloads is None, the batch has 3 rows; one per row is needed",
    ),
    (
        redistribute,
        lambda rank: {"batch": None} if rank else {},
        "ValueError: rank 1: batch is None and there are 3 workloads",
    ),
    (
        redistribute,
        lambda rank: {"equal_size": rank == 0},
        "ValueError: equal_size is True on rank 0 and False on rank 1 in redistribute_balanced",
    ),
    (
        redistribute,
        lambda rank: {"groups": [1, 2, 3]} if rank else {},
        "ValueError: the batches of ranks 0 and 1 differ: 'groups': absent and given; rows can be mixed",
    ),
    (
        redistribute,
        lambda rank: {"groups": [1, 1, 1]},
        "ValueError: the number of groups is 1, that of parts (chunks or ranks) is 2; every part needs one",
    ),
    (redistribute, lambda rank: {"groups": [rank, 2 + rank, 2 + rank]}, "equal_size is True; "),
    (redistribute, lambda rank: {"slack": -1}, "ValueError: rank 0: slack is -1; it must be at least 0 and at most 1"),
    (
        redistribute,
        lambda rank: {"batch": {"mask": torch.ones(3, 4)}, "trim": Trim("mask", side="both")},
        "ValueError: rank 0: sequences of 'mask' are padded on both sides; rows of different",
    ),
    (
        redistribute,
        lambda rank: texts([5, 2], -100 * rank),
        "'labels' is 0 and -100 beyond the tokens of its rows on ranks 0 and 1; ",
    ),
    (
        redistribute,
        lambda rank: texts([5 + 4 * rank] * (3 - 2 * rank), -100),
        "no row has padding in 'ids', 'labels', and rows 5 to 9 wide need it; ",
    ),
    (
        redistribute,
        lambda rank: {"batch": {"x": jagged_with_gradients(rank), "y": torch.ones(2)}, "workloads": [1, 2]},
        "ValueError: rank 0: field 'x' requires grad and is jagged; gradients follow rows of dense tensors: pass deta",
    ),
    (send_home, lambda rank: {"left_out": rank}, "ValueError: rank 1: results of the batch have "),
    (send_home, lambda rank: {"requires_grad": rank == 0}, "gradients"),
    (
        pack_jointly,
        lambda rank: {"joint": rank == 1},
        "joint is False on rank 0 and True on rank 1 in pack_micro_batches",
    ),
    (pack_jointly, lambda rank: {"joint": "yes"}, "joint is 'yes'; it is True or False: choose one"),
    (pack_jointly, lambda rank: {"joint": False, "trim": Trim("mask")}, "trim is given and joint is False"),
    (
        pack_jointly,
        lambda rank: {"trim": Trim("mask")} if rank else {},
        "trim is 'None' on rank 0 and \"Trim(mask='mask'",
    ),
    (pack_jointly, lambda rank: budget(20 + rank), "max_tokens_per_mb is 20 on rank 0 and 21 on rank 1"),
    (
        pack_jointly,
        lambda rank: budget(8),
        "rank 1: row 0 has 10 tokens, row 1 has 9 tokens, max_tokens_per_mb is 8",
    ),
    (
        pack_jointly,
        lambda rank: {} if rank else {"groups": [1, 1, 2]},
        "ranks 0 and 1 differ: 'groups': given and absent; rows",
    ),
    (
        pack_jointly,
        lambda rank: {"spec": MicroBatchSpec(granularity=2), "lengths": [[1, 2], [10, 9]], "groups": [1, 2]},
        "groups are given and granularity is 2; both say which rows stay together: leave granularity at 1",
    ),
    (
        pack_jointly,
        lambda rank: budget(11) | {"groups": [6, 7] if rank else [5, 6, 7]},
        "rows 1 and 3 have 12 tokens together, rows 2 and 4 have 12 tokens together, max_tokens_per_mb is 11",
    ),
    (pack_jointly, lambda rank: {"lengths": [None, None]}, "no rank has a row"),
    (
        pack_jointly,
        lambda rank: {"lengths": [[1], None]} | ({"workloads": [3]} if rank else {}),
        "batch is None and there are 1 workloads",
    ),
    (
        pack_jointly,
        lambda rank: {"spec": MICRO} | ({} if rank else {"workloads": [1, 2, 3]}),
        "the batches of ranks 0 and 1 differ: 'workloads': given and absent; rows",
    ),
    (
        pack_jointly,
        lambda rank: {} if rank else {"workloads": [1, 2, 3]},
        "workloads are given and packing_algorithm is 'ffd'",
    ),
    (
        pack_jointly,
        lambda rank: {"batch": lambda rows: torch.arange(rows, dtype=torch.int32)} if rank else {},
        "ranks 0 and 1 differ: field 'id': tensor int64 [] and tensor int32 []",
    ),
    (
        send_micro_batches_home,
        lambda rank: {"left_out": rank},
        "rank 1: there are 1 results for 2 micro-batches; each has one: pass them in order",
    ),
    (
        pack,
        lambda rank: budget(31) | {"lengths": [[1, 2, 3], [3, 40, 2]]},
        "ValueError: rank 1: row 1 has 40 tokens, max_tokens_per_mb is 31",
    ),
    (pack, lambda rank: {"lengths": [[1, 2, 3], [1.5, 2]]}, "ValueError: rank 1: lengths[0] is 1.5"),
    (pack, lambda rank: budget(31, n_mbs=1 + rank), "n_mbs is 1 on rank 0 and 2 on rank 1 in pack_micro_batches;"),
    # The difference is told rather than what follows from it: here n_mbs above the rows of its rank.
    (pack, lambda rank: budget(31, n_mbs=1 + 98 * rank), "all ranks pass the same"),
    (
        pack,
        lambda rank: {"spec": MICRO} | ({} if rank else {"workloads": [1, 2, 3]}),
        "workloads given is True on rank 0 and False on rank 1",
    ),
    (pack, lambda rank: {"spec": None} if rank else {}, "spec is 'MicroBatchSpec' on rank 0 and 'NoneType' on rank 1"),
]


def _every_mistake():
    found = []
    for call, change, _ in MISTAKES:
        found.append(error_of(call, **change(dist.get_rank())))
        for right in (scatter, redistribute, pack_jointly):
            right()
    return found


def test_a_mistake_is_raised_on_every_rank(two_ranks):
    for found in two_ranks.run(_every_mistake, timeout=120):
        for error, (_, _, said) in zip(found, MISTAKES, strict=True):
            assert said in error and "Error: " in error and "\n" not in error, (error, said)


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
