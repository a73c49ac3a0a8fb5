"""What some ranks pass or call wrongly is raised on all of them, by every call of dispatch; the next one works."""

from __future__ import annotations

import itertools
import re
from unittest import mock

import torch
import torch.distributed as dist

from commons.dispatch import SingleRankLoader, Trim, redistribute_balanced, scatter_balanced
from commons.distributed.channel import agree
from commons.micro_batching import MicroBatchSpec, pack_micro_batches
from commons.perf_model.shuffle_plan import ShufflePlan
from tests.helpers.batches.any_batches import dense
from tests.helpers.batches.square_shuffler import SquareShuffler, closing, my_batch
from tests.helpers.ranks.faults import error_of, on_rank
from tests.helpers.ranks.on_ranks import on

ONE_TO_THREE = {"batch": {"a": dense([1, 2, 3]), "meta": "same"}, "workloads": [1, 2, 30]}
NOTHING = {"batch": None, "workloads": None}


def scatter(**changes):
    """Of rank 0."""
    rows = {"batch": {"a": dense([1, 2, 3, 4])}, "workloads": [1, 2, 3, 4]}
    arguments = (NOTHING if dist.get_rank() else rows) | changes
    return scatter_balanced(arguments.pop("batch"), arguments.pop("workloads"), **arguments)


def redistribute(**changes):
    return redistribute_balanced(**ONE_TO_THREE | changes)


SPEC = MicroBatchSpec()


def pack(lengths=([1, 2, 3], [10, 9], [4, 5], [6]), spec=SPEC, **options):
    """Several micro-batches of each rank's own rows."""
    own = lengths[dist.get_rank()]
    return pack_micro_batches(None if own is None else {"id": torch.arange(len(own))}, spec, own, **options)


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


def load(num_rows=4, **options):
    """One batch, which rank 0 loads."""
    return list(SingleRankLoader(**{"loader": [{"id": torch.arange(num_rows)}]} | options))


def resume(**state):
    loader = SingleRankLoader([{"id": torch.arange(4)}])
    loader.load_state_dict(state)
    return list(loader)


def texts(lengths, label):
    """Padded to the longest, where labels have a value of the caller's."""
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    batch = {"mask": mask, "ids": mask.long() * 3, "labels": torch.where(mask, 5, label)}
    return {"batch": batch, "workloads": lengths, "trim": Trim("mask")}


def jagged_with_gradients(rank):
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged, requires_grad=True)


MICRO = MicroBatchSpec(packing_algorithm="kk")
# By call what a rank passes to it otherwise than it should, and the error of all ranks, which is a ValueError mostly.
MISTAKES = {
    scatter: [
        (lambda rank: NOTHING, "rank 0: this rank is the source and passes no batch and no workloads"),
        (lambda rank: ONE_TO_THREE, "rank 1: this rank passes batch and workloads, the source is rank"),
        (lambda rank: {"src": rank}, "src is 0 on rank 0 and 1 on rank 1 in scatter_balanced; all ranks pass the same"),
        (lambda rank: {"pad": rank == 0}, "pad is True on rank 0 and False on rank 1 in scatter_balanced"),
        (lambda rank: {"trim": Trim("mask")}, "KeyError: \"rank 0: the batch has no field 'mask' to trim by;"),
        (lambda rank: {"trim": Trim("ab"[rank])}, "trim is [\"Trim(mask='a', lengths=None"),
        (lambda rank: {"src": 2}, "rank 0: src is 2, the group has 2 ranks; "),
        (lambda rank: {"equal_size": "no"}, "rank 0: equal_size is 'no'; it is True or False: choose one"),
        (lambda rank: {"src": torch.tensor(0) if rank else 0}, "TypeError: rank 1: src is a Tensor; ranks compare"),
        (lambda rank: {"groups": [1, 2, 3, 4]}, "rank 1: this rank passes groups, the source is rank 0"),
    ],
    gather_back: [
        (lambda rank: {"rows": 2 - rank}, "rank 1: results of the share have 1 rows, the share has 2; results need"),
        (lambda rank: {"width": 1 + rank}, "rank 0: batches 0 and 1 differ at 'the batch itself': tensor float32 [1]"),
        (lambda rank: {"to_all": "no"}, "rank 0: to_all is 'no'; it is True or False: choose one"),
        (lambda rank: {"to_all": rank == 0}, "to_all is True on rank 0 and False on rank 1 in gather_back"),
    ],
    scatter_more: [
        (lambda rank: {"rows": 5, "everywhere": False}, "rank 0: the batch has 5 rows, 4 were scattered; scatter_more"),
        (lambda rank: {"rows": 4, "everywhere": True}, "rank 1: this rank passes batch, the source is rank 0"),
    ],
    redistribute: [
        (lambda rank: {"timeout": -1} if rank else {}, "rank 1: timeout is -1; it is a number of seconds above 0"),
        (lambda rank: NOTHING, "the batch has 0 real rows; at least one is needed"),
        (
            lambda rank: {"batch": {"a": dense([1])}, "workloads": [1]} if rank else NOTHING,
            "there are 1 rows for 2 parts (chunks or ranks); every part needs at least one: use",
        ),
        (
            lambda rank: {"batch": {"a": dense([1, 2, 3]).int(), "meta": "same"}} if rank else {},
            "the batches of ranks 0 and 1 differ: field 'a': tensor int64 [3] and tensor int32 [3]; type, keys,",
        ),
        (
            lambda rank: {"batch": {"a": dense([1, 2, 3]), "meta": "other"}} if rank else {},
            "the batches of ranks 0 and 1 differ: field 'meta': 'same' and 'other'; type, keys,",
        ),
        (lambda rank: {"workloads": None} if rank else {}, "rank 1: workloads is None, the batch has 3 rows; one per"),
        (lambda rank: {"batch": None} if rank else {}, "rank 1: batch is None and there are 3 workloads"),
        (lambda rank: {"equal_size": rank == 0}, "equal_size is True on rank 0 and False on rank 1 in redistribute_"),
        (lambda rank: {"slack": rank / 10}, "slack is 0.0 on rank 0 and 0.1 on rank 1 in redistribute_balanced"),
        (
            lambda rank: {"trim": Trim("a", side="left" if rank else "right")},
            "trim is [\"Trim(mask='a', lengths=None, fields=None, side='right'",
        ),
        (lambda rank: {"groups": [1, 2, 3]} if rank else {}, "ranks 0 and 1 differ: 'groups': absent and given; type,"),
        (lambda rank: {"groups": [1, 1, 1]}, "there are 1 groups for 2 parts (chunks or ranks); every part needs at"),
        (lambda rank: {"groups": [rank, 2 + rank, 2 + rank]}, "equal_size is True; "),
        (lambda rank: {"slack": -1}, "rank 0: slack is -1; it must be at least 0 and at most 1"),
        (
            lambda rank: {"batch": {"mask": torch.ones(3, 4)}, "trim": Trim("mask", side="both")},
            "rank 0: sequences of 'mask' are padded on both sides; rows of different",
        ),
        (
            lambda rank: texts([5, 2], -100 * rank),
            "'labels' is 0 and -100 beyond the tokens of its rows on ranks 0 and",
        ),
        (
            lambda rank: texts([5 + 4 * rank] * (3 - 2 * rank), -100),
            "no row has padding in 'ids', 'labels', and rows 5 to 9 wide need it; ",
        ),
        (
            lambda rank: {"batch": {"x": jagged_with_gradients(rank), "y": torch.ones(2)}, "workloads": [1, 2]},
            "rank 0: field 'x' requires grad and is jagged; gradients follow only rows of dense tensors: pass",
        ),
        (
            lambda rank: {"batch": {"x": torch.ones(3, 4, requires_grad=True)}, "trim": Trim("x")},
            "rank 0: field 'x' requires grad and is trimmed; gradients do not follow trimmed rows: pass detach()",
        ),
    ],
    load: [
        (lambda rank: {"get_workloads": lambda batch: [1, 2]}, "rank 0: workloads has 2 entries, there are 4 rows;"),
        (lambda rank: {"num_rows": 1}, "rank 0: there are 1 rows for 2 parts (chunks or ranks); "),
        (lambda rank: {"pin_memory": "no"} if rank else {}, "rank 1: pin_memory is 'no'; it is True or False: "),
        (lambda rank: {"loader": None}, "rank 0: this rank is the source and passes no loader; the source loads"),
        (lambda rank: {"loader": [None]}, "rank 0: the batch is a NoneType without rows; a batch holds tensors,"),
        (lambda rank: {"src": rank}, "src is 0 on rank 0 and 1 on rank 1 in SingleRankLoader; all ranks pass"),
        (lambda rank: {"trim": Trim("id")} if rank else {}, "trim is [] on rank 0 and [\"Trim(mask='id', lengths=None"),
    ],
    resume: [
        (lambda rank: {"batches": 7, "loader": None}, "rank 0: the state is 7 batches into the data, the loader ends"),
        (lambda rank: {"batch": 3}, "the state has the entries ['batch']; a state has 'batches' and 'loader'"),
    ],
    send_home: [
        (lambda rank: {"left_out": rank}, "rank 1: results of the batch have "),
        (lambda rank: {"requires_grad": rank == 0}, "gradients"),
    ],
    pack_jointly: [
        (lambda rank: {"joint": rank == 1}, "joint is False on rank 0 and True on rank 1 in pack_micro_batches"),
        (lambda rank: {"joint": "yes"}, "joint is 'yes'; it is True or False: choose one"),
        (lambda rank: {"joint": False, "trim": Trim("mask")}, "trim is given and joint is False"),
        (lambda rank: {"trim": Trim("mask")} if rank else {}, "trim is 'None' on rank 0 and \"Trim(mask='mask'"),
        (lambda rank: budget(20 + rank), "max_tokens_per_mb is 20 on rank 0 and 21 on rank 1"),
        (lambda rank: budget(8), "rank 1: row 0 has 10 tokens, row 1 has 9 tokens, max_tokens_per_mb is 8"),
        (lambda rank: {} if rank else {"groups": [1, 1, 2]}, "ranks 0 and 1 differ: 'groups': given and absent; type,"),
        (
            lambda rank: {"spec": MicroBatchSpec(granularity=2), "lengths": [[1, 2], [10, 9]], "groups": [1, 2]},
            "groups are given and granularity is 2; both set which rows stay together: leave granularity at 1",
        ),
        (
            lambda rank: budget(11) | {"groups": [6, 7] if rank else [5, 6, 7]},
            "the block of row 1 has 12 tokens, the block of row 2 has 12 tokens, max_tokens_per_mb is 11",
        ),
        (lambda rank: {"lengths": [None, None]}, "no rank has a row"),
        (
            lambda rank: {"lengths": [[1], None]} | ({"workloads": [3]} if rank else {}),
            "batch is None and there are 1 workloads",
        ),
        (
            lambda rank: {"spec": MICRO} | ({} if rank else {"workloads": [1, 2, 3]}),
            "the batches of ranks 0 and 1 differ: 'workloads': given and absent; type,",
        ),
        # Else the loss of rank 1 would be divided by tokens that are no terms of it.
        (lambda rank: {} if rank else {"loss_tokens": [1, 2, 3]}, "1 differ: 'loss_tokens': given and absent; type,"),
        (lambda rank: {} if rank else {"workloads": [1, 2, 3]}, "workloads are given and packing_algorithm is 'ffd'"),
    ],
    send_micro_batches_home: [
        (lambda rank: {"left_out": rank}, "rank 1: there are 1 results for 2 micro-batches; each micro-batch has one"),
    ],
    pack: [
        (lambda rank: {"timeout": "60" if rank else 60}, "rank 1: timeout is '60'; it is a number of seconds above 0"),
        (lambda rank: {"lengths": [[1, 2, 3], [1.5, 2]]}, "rank 1: lengths[0] is 1.5"),
        (lambda rank: budget(9), "rank 1: row 0 has 10 tokens, max_tokens_per_mb is 9"),
        (lambda rank: budget(31, n_mbs=1 + rank), "n_mbs is 1 on rank 0 and 2 on rank 1 in pack_micro_batches;"),
        # The message names the difference, not what follows from it: here n_mbs above the rows of its rank.
        (lambda rank: budget(31, n_mbs=1 + 98 * rank), "all ranks pass the same"),
        (
            lambda rank: {"spec": MICRO} | ({} if rank else {"workloads": [1, 2, 3]}),
            "workloads given is True on rank 0 and False on rank 1",
        ),
        (lambda rank: {} if rank else {"loss_tokens": [1, 2, 3]}, "loss_tokens given is True on rank 0 and False on"),
        # A rank without a batch has no loss tokens either.
        (
            lambda rank: {"lengths": [[1, 2, 3], None]} | ({} if rank else {"loss_tokens": [1, 2, 3]}),
            "rank 1: the batch has no rows; every micro-batch has at least one: take rows of other ranks with joint",
        ),
        (lambda rank: {"spec": None} if rank else {}, "spec is 'MicroBatchSpec' on rank 0 and 'NoneType' on rank 1"),
    ],
}


@on("two_ranks", timeout=120)
def test_a_mistake_is_raised_on_every_rank():
    for call, mistakes in MISTAKES.items():
        for change, said in mistakes:
            error = error_of(call, **change(dist.get_rank()))
            assert error.startswith(said if "Error: " in said else "ValueError: "), (error, said)
            assert said in error and "\n" not in error, (error, said)
            for right in (scatter, redistribute, pack_jointly):
                right()


def calls_of(moved, share):
    """Every call, by the name that messages have; `moved` and `share` are results of earlier ones."""
    return {
        "redistribute_balanced": redistribute,
        "pack_micro_batches": pack,
        "pack_micro_batches, joint": pack_jointly,
        "scatter_balanced": scatter,
        "SingleRankLoader": load,
        "send_home": lambda: moved.send_home(moved.batch),
        "gather_back": lambda: share.gather_back(share.batch),
        "scatter_more": lambda: share.scatter_more(None if dist.get_rank() else dense([1, 2, 3, 4])),
    }


@on("four_ranks", timeout=120)
def test_a_subgroup_s_errors_name_global_ranks():
    """As the shuffler's do: with tensor parallelism every data-parallel group is a subgroup."""
    group, other, rank = dist.new_group([1, 3]), dist.new_group([1, 3]), dist.get_rank()
    if rank not in (1, 3):
        return
    wrong = {"workloads": [-1, 2, 3] if rank == 3 else [1, 2, 3], "group": group}
    padded = {"a": torch.full((3, 4), rank), "mask": torch.tensor([[1] * rank + [0] * (4 - rank)] * 3)}
    role = ({"a": torch.arange(4)}, None if rank == 3 else [1] * 4)
    for error, said in (
        (error_of(redistribute, **wrong), "ValueError: rank 3: workloads[0] is -1;"),
        (error_of(pack_jointly, lengths=[[1] * 3] * 4, **wrong), "rank 3: workloads[0] is -1;"),
        (error_of(redistribute, batch={"a": dense([1, 2, 3]), "meta": rank}, group=group), "ranks 1 and 3 differ"),
        (error_of(redistribute, batch=padded, trim=Trim("mask"), group=group), "rows on ranks 1 and 3; "),
        (error_of(scatter_balanced, *role, group=group), "rank 3: this rank passes batch, the source is rank 1; "),
        # As two threads do whose calls come in another order on each rank; rows of both calls would mix.
        (
            error_of(redistribute, group=group if rank == 3 else other),
            f"rank 1 calls redistribute_balanced in the group {other.group_name!r} and rank 3 calls redistribute_bal",
        ),
    ):
        assert said in error
    # As `split_group` names it where one of the ranks has further groups; NCCL connects such a group.
    other._set_group_name(f"{rank}a")
    assert error_of(redistribute, group=other) == "no error"


# Where calls differ in an option alone, the message names the option.
PAIRS = [
    pair for pair in itertools.combinations(calls_of(None, None), 2) if len({name.split(",")[0] for name in pair}) == 2
]


@on("ranks", timeout=120)
def test_every_pair_of_calls():
    """The calls after it are made together and go well."""
    others = "rank 0 calls" if dist.get_world_size() == 2 else "ranks 0, 2, 3 call"
    rank = dist.get_rank()
    for pair in PAIRS:
        rows = dense([1, 2, 3]) + rank
        moved = redistribute(batch={"a": rows, "meta": "same"}, workloads=[1 + 20 * rank] * 3)
        share = scatter()
        first, second = (name.split(",")[0] for name in pair)
        assert error_of(calls_of(moved, share)[pair[rank == 1]]) == (
            f"ValueError: {others} {first} and rank 1 calls {second}; all ranks make the same calls in the same order: "
            "correct the program"
        )
        assert moved.num_moved and torch.equal(moved.send_home(moved.batch)["a"], rows)


@on("two_ranks", timeout=120)
def test_ranks_with_another_plan_are_refused_before_rows_move():
    """Every rank sent its rows by its own plan, with the indices of other rows."""
    for right in (redistribute, pack_jointly):
        with on_rank(1, mock.patch.object(ShufflePlan, "digest", return_value=7)):
            error = error_of(right)
        assert re.match(r"ValueError: plans are {'digest': \d+} on rank 0 and {'digest': 7} on rank 1 in ", error)
        right()


def _shuffle():
    with closing(SquareShuffler()) as shuffler:
        shuffler.shuffle(my_batch(0, [2, 2]))


@on("own_two_ranks", timeout=120)
def test_ranks_of_two_releases():
    """They compare their versions in the first message of each connection."""
    calls = (_shuffle, redistribute, pack_jointly)
    for name in ("__version__", "SOURCES"):
        with on_rank(1, mock.patch.object(agree, name, "9.9.9")):
            for call in calls:
                text = "ValueError: versions are .* on rank 0 and .*9.9.9.* on rank 1 in connection"
                assert re.match(text, error_of(call))
    for call in calls:
        call()


@on("own_two_ranks", timeout=120)
def test_a_call_beside_the_first_shuffle_of_another_rank():
    """Their first messages have one size: gloo ends the process that receives a longer one than it expects."""
    assert error_of(_shuffle if dist.get_rank() else redistribute) == (
        "ValueError: rank 0 calls redistribute_balanced and rank 1 calls shuffle; all ranks make the same calls in the "
        "same order: correct the program"
    )
