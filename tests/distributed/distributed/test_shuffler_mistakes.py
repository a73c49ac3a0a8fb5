"""The shuffler on real ranks: every mistake of one rank is raised on all of them, and says whose it is."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from commons.distributed.options import ShufflerOptions
from commons.pipeline import windowed_iter
from tests.helpers.faults import raised_by
from tests.helpers.square_shuffler import SquareShuffler, closing, my_batch


def _other_token_features():
    with closing(SquareShuffler()) as shuffler:
        shuffler.token_feature_names = ("user",) if dist.get_rank() else None
        return raised_by(lambda: shuffler.shuffle(my_batch(0, [3] * 4)))


def test_ranks_that_count_other_features_as_tokens_are_told(two_ranks):
    for text in two_ranks.run(_other_token_features):
        assert "token_features is None on rank 0 and ['user'] on rank 1 in shuffle; all ranks pass" in text


class Wrong(SquareShuffler):
    """Returns wrong workloads on rank 1, or raises there."""

    def __init__(self, wrong, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.wrong = wrong

    def get_workloads(self, batch):
        right = super().get_workloads(batch)
        if dist.get_rank() != 1:
            return right
        return {
            "short": lambda: right[:-1],
            "negative": lambda: right - 100,
            "nan": lambda: right.double() * float("nan"),
            "shape": lambda: right[:, None],
            "array": lambda: right.numpy()[:, None],
            "empty array": lambda: right.numpy()[:, None][:, :0].copy(),
            "raises": lambda: {}["nothing here"],
            "key": lambda: batch.features["no_such"].lengths(),
            "crash": lambda: 1 // 0,
        }[self.wrong]()


def _wrong(kind):
    with closing(Wrong(kind)) as shuffler:
        first = raised_by(lambda: shuffler.shuffle(my_batch(0, [4] * 4)))
        shuffler.wrong = "short"  # and the ranks are still in step
        return first, raised_by(lambda: shuffler.shuffle(my_batch(0, [4] * 4)))


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("short", "ValueError", "rank 1: workloads has 3 entries, batch_size is 4"),
        ("negative", "ValueError", "rank 1: .*-"),
        ("nan", "ValueError", "rank 1: .*(nan|NaN)"),
        ("shape", "ValueError", r"rank 1: workloads have shape \(4, 1\)"),
        ("array", "ValueError", r"rank 1: workloads have shape \(4, 1\)"),
        ("empty array", "ValueError", r"rank 1: workloads have shape \(4, 0\)"),
        ("raises", "KeyError", "rank 1: nothing here"),
        ("key", "KeyError", r"rank 1: get_workloads asks for 'no_such'; the batch's keys are \['"),
        ("crash", "RuntimeError", "rank 1: ZeroDivisionError"),
    ],
)
def test_a_mistake_on_one_rank_is_raised_on_all(ranks, kind, error, message):
    for text, again in ranks.run(_wrong, kind):
        assert re.match(f"{error}: ['\"]?{message}", text) and "\n" not in text
        assert again.startswith("ValueError: rank 1: workloads has 3 entries, batch_size is 4")


def _differing(what):
    rank = dist.get_rank()
    batch = my_batch(0, [4] * 4, tiny_dtype=torch.int16 if what == "dtype" and rank == 1 else torch.int8)
    if what == "plain" and rank == 1:
        batch = dataclasses.replace(batch, note={"unit": "ms"})
    if what == "rows" and rank == 1:
        batch.image = batch.image[:2]
    if what == "no dataclass" and rank == 1:
        batch = [1, 2]
    if what == "values" and rank == 1:
        batch.features = KeyedJaggedTensor(
            keys=batch.features.keys(),
            values=torch.arange(1000),
            weights=torch.ones(1000),
            lengths=batch.features.lengths(),
        )
    with closing(SquareShuffler()) as shuffler:
        return raised_by(lambda: shuffler.shuffle(batch))


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("dtype", "the batches of ranks 0 and 1 differ: field 'tiny'"),
        ("plain", "the batches of ranks 0 and 1 differ: field 'note'"),
        ("rows", "rank 1: fields of RichBatch disagree on the number of rows"),
        ("no dataclass", "rank 1: the batch is a list"),
        ("values", "rank 1: field 'features' has lengths that add up to"),
    ],
)
def test_ranks_that_differ_stop_together(ranks, what, message):
    for text in ranks.run(_differing, what):
        assert message in text


def _with_gradients(what: str, mode: str, window: bool) -> tuple[str, bool]:
    """The message for a batch one of whose fields requires grad on rank 1, and whether the next batch is shuffled."""
    batch = my_batch(0, [4] * 4)
    weight = torch.ones((), requires_grad=True)
    if dist.get_rank() == 1 and what == "tensor":
        batch.image = batch.image * weight
    if dist.get_rank() == 1 and what == "weights":
        features = batch.features
        batch.features = KeyedJaggedTensor(
            features.keys(), features.values(), features.weights() * weight, features.lengths()
        )
    with closing(SquareShuffler(ShufflerOptions(mode=mode))) as shuffler:
        results = windowed_iter(iter([batch]), shuffler, 1) if window else map(shuffler.shuffle, [batch])
        text = raised_by(lambda: next(results))
        return text, window or shuffler.shuffle(my_batch(1, [4] * 4)).batch_size == 4


@pytest.mark.parametrize("window", [False, True])
@pytest.mark.parametrize(("what", "field"), [("tensor", "image"), ("weights", "features")])
def test_fields_that_require_grad_are_refused_on_all_ranks(ranks, what, field, window):
    for text, goes_on in ranks.run(_with_gradients, what, "balance", window):
        assert text.startswith(f"ValueError: rank 1: field '{field}' requires grad; ") and "detach it before" in text
        assert goes_on


@pytest.mark.parametrize("mode", ["observe", "off"])
def test_they_stay_where_nothing_moves(ranks, mode):
    assert ranks.run(_with_gradients, "tensor", mode, False) == [("no error", True)] * ranks.world_size


@dataclass
class Unpadded:
    """A batch type that cannot state padding."""

    features: KeyedJaggedTensor

    def to(self, device, non_blocking=False):
        return Unpadded(self.features.to(device))


def _unpadded():
    rows = 1 if dist.get_rank() == 0 else 0
    lengths = torch.full((rows,), 3)
    batch = Unpadded(KeyedJaggedTensor(keys=["a"], values=torch.arange(3 * rows), lengths=lengths, stride=rows))
    with closing(SquareShuffler()) as shuffler:
        return raised_by(lambda: shuffler.shuffle(batch))


def test_a_batch_that_cannot_state_padding_needs_a_row_on_every_rank(two_ranks):
    for text in two_ranks.run(_unpadded):
        assert "ranks [1] would train no row" in text and "actual_batch_size" in text
