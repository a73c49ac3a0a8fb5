"""Exceptions in a balanced pipeline: no row is torn between batches, and the next step goes on rightly or refuses."""

from __future__ import annotations

import dataclasses
import gc
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchrec.distributed.train_pipeline.train_pipelines import (
    EvalPipelineSparseDist,
    TrainPipelineBase,
    TrainPipelineSparseDist,
)
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from commons.distributed.options import ShufflerOptions
from commons.pipeline import balanced, balanced_iter
from tests.helpers.models import torchrec_model as models
from tests.helpers.models.torchrec_model import KEYS, SampleBatch, head_of
from tests.helpers.pipelines.shuffled_pipelines import (
    PIPELINES,
    CubicShuffler,
    Source,
    before_a_commit,
    staged_pipeline,
    steps_of,
)
from tests.helpers.ranks.faults import error_of

# One of each way to schedule batches, and the evaluation with a loading thread.
SCHEDULES = [
    *(name for name in PIPELINES if name not in ("base in place", "sparse in place", "sparse free early")),
    "eval",
]
# In `make test`: on the main thread, ahead, further ahead, and on a thread.
FIRST = ["base", "sparse", "semi-sync, before it starts", "copies on a thread", "eval"]
ROWS = 4
LENGTHS = [1, 2, 5, 12]


class Injected(Exception):
    """An error of a test."""


def named_batch(rank: int, step: int) -> SampleBatch:
    """Every value says which row it is of, and all batches have as many of them."""
    ids = torch.arange(ROWS) + 1 + rank * 100_000 + step * 100
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(step * 7 + rank))
    # Rank 0 has the long rows, so that rows move; the sum is the same in every step.
    lengths = (torch.tensor(LENGTHS)[order] * (3 if rank == 0 else 1)).repeat(len(KEYS))
    row = torch.repeat_interleave(ids.repeat(len(KEYS)), lengths)
    return SampleBatch(
        features=KeyedJaggedTensor(KEYS, row % models.NUM_IDS, lengths=lengths, weights=row.double(), stride=ROWS),
        batch_size=ROWS,
        feature_to_max_seqlen=dict.fromkeys(KEYS, 64),
        actual_batch_size=ROWS,
        sample_id=ids,
        target=ids.double(),
    )


def ids_of(*batches: tuple[int, int]) -> list[int]:
    """The ids of batches, by rank and step."""
    return sorted(int(sample) for rank, step in batches for sample in named_batch(rank, step).sample_id)


def own_batches(steps: int, first: int = 0, fails_at: int | None = None) -> Source:
    """Batches of this rank."""
    batches = (named_batch(dist.get_rank(), step) for step in range(first, first + steps))
    return Source(batches, fails_at, Injected("in the loader"))


class FailingShuffler(CubicShuffler):
    fails_with: int | None = None

    def get_workloads(self, batch):
        if self.fails_with is not None and int(batch.sample_id[0]) == self.fails_with:
            raise Injected("in the workload")
        return super().get_workloads(batch)


class Run:
    """A model, its pipeline, and what the head sees."""

    def __init__(self, pipeline: str) -> None:
        self.model, self.optimizer = models.build_sharded()
        self.shuffler = FailingShuffler(ShufflerOptions(timeout=30.0))
        pipeline_class, options = (EvalPipelineSparseDist, {}) if pipeline == "eval" else PIPELINES[pipeline]
        self.model.train(pipeline != "eval")
        self.trainer = balanced(pipeline_class)(
            self.model, self.optimizer, torch.device("cpu"), batch_shuffler=self.shuffler, **options
        )
        self.head = head_of(self.model)
        self.fails_in: str | None = None
        self.torn = 0
        self.moved = 0
        self.head.register_forward_pre_hook(self._look)
        # After the backward pass: DistributedDataParallel cannot go on after one that it has not finished.
        self._backward = backward = torch.Tensor.backward
        torch.Tensor.backward = lambda *args, **kwargs: (backward(*args, **kwargs), self._maybe_fail("backward"))[0]
        step = self.optimizer.step
        self.optimizer.step = lambda *args, **kwargs: self._maybe_fail("optimizer") or step(*args, **kwargs)

    def _maybe_fail(self, place: str) -> None:
        if self.fails_in == place:
            self.fails_in = None
            raise Injected(f"in the {place}")

    def _look(self, _: Any, inputs: tuple[Any, ...]) -> None:
        batch = inputs[1]
        for key in KEYS:
            jagged = batch.features[key]
            row = torch.repeat_interleave(batch.sample_id, jagged.lengths().long())
            self.torn += int((jagged.weights().long() != row).sum())
        self.torn += int((batch.target.long() != batch.sample_id).sum())
        self._maybe_fail("forward")

    def progress(self, source: Source) -> None:
        self.trainer.progress(source)
        self.moved += bool(self.trainer.last_stats.moved)

    def to_the_end(self, source: Source) -> None:
        for _ in steps_of(self.trainer, source):
            self.moved += bool(self.trainer.last_stats.moved)

    @property
    def seen(self) -> list[int]:
        return [sample for step in self.head.seen for sample in step]

    def close(self) -> None:
        torch.Tensor.backward = self._backward
        self.trainer.reset()
        self.shuffler.close()


def _in_the_middle_of_a_step(pipeline, places, fails_after):
    """All ranks fail in the same place; the pipeline refuses to go on until it is reset."""
    results = []
    for place in places:
        run = Run(pipeline)
        source = own_batches(10)
        for _ in range(fails_after):
            run.progress(source)
        run.fails_in = place
        messages = [error_of(run.progress, source) for _ in range(2)]
        run.trainer.reset()
        run.to_the_end(source)
        results.append((messages, run.torn, run.seen, run.moved))
        run.close()
    return results


@pytest.mark.parametrize("pipeline", before_a_commit(["sparse", "copies on a thread", "eval"], SCHEDULES))
def test_an_error_in_a_step_tears_no_row(two_ranks, pipeline):
    places = ["forward"] if pipeline == "eval" else ["forward", "backward", "optimizer"]
    fails_after = 1 + list(PIPELINES).index(pipeline) % 3 if pipeline in PIPELINES else 2
    answers = two_ranks.run(_in_the_middle_of_a_step, pipeline, places, fails_after)
    for place, *results in zip(places, *answers):
        for messages, torn, _, moved in results:
            assert messages[0] == f"Injected: in the {place}" and torn == 0 and moved > 2
            assert f"raised Injected: in the {place}" in messages[1] and "reset() on every rank" in messages[1]
        seen = [sample for _, _, ids, _ in results for sample in ids]
        assert len(seen) == len(set(seen))
        # what reset() drops is what was in flight: at most the copied batches, and the one read ahead
        assert 2 * ROWS * 10 - len(seen) <= 2 * ROWS * 5


def _between_steps(pipeline, cause, same_iterator):
    """Rank 1 fails at its fourth batch: an error once, on every rank, after the batches before; then it goes on."""
    run = Run(pipeline)
    rank, bad = dist.get_rank(), 3
    if cause == "workload" and rank == 1:
        run.shuffler.fails_with = int(named_batch(1, bad).sample_id[0])
    source = own_batches(8, fails_at=bad if cause == "loader" and rank == 1 else None)
    trained_before, message = 0, ""
    try:
        while True:
            run.progress(source)
            trained_before += 1
    except RuntimeError as error:
        message = str(error)
    if not same_iterator:
        source = own_batches(4, first=20)
    run.to_the_end(source)
    answer = message, trained_before, run.torn, run.seen
    run.close()
    return answer


@pytest.mark.parametrize("pipeline", before_a_commit(FIRST, SCHEDULES))
@pytest.mark.parametrize(
    "cause, same_iterator",
    [
        ("loader", True),
        ("workload", False),
        pytest.param("loader", False, marks=pytest.mark.slow),
        pytest.param("workload", True, marks=pytest.mark.slow),
    ],
)
def test_an_error_of_the_data_is_raised_once_and_nothing_else_is_lost(two_ranks, pipeline, cause, same_iterator):
    answers = two_ranks.run(_between_steps, pipeline, cause, same_iterator)
    for message, trained_before, torn, _ in answers:
        assert message == f"rank 1: Injected: in the {cause}"
        assert (trained_before, torn) == (3, 0)
    steps = {0: list(range(8)), 1: list(range(8))} if same_iterator else {rank: [0, 1, 2, 3] for rank in (0, 1)}
    if cause == "workload" or not same_iterator:
        steps[1].remove(3)  # the batch at fault, or never read
    if not same_iterator:
        steps = {rank: [*own, 20, 21, 22, 23] for rank, own in steps.items()}
    expected = ids_of(*((rank, step) for rank, own in steps.items() for step in own))
    assert sorted(i for *_, seen in answers for i in seen) == expected


def _always_failing():
    """A loader that fails for good fails every step, and a shuffler that is right again goes on."""
    run = Run("sparse")

    class Broken(Iterator[Any]):
        def __next__(self):
            raise Injected("for good")

    source = Broken() if dist.get_rank() == 0 else own_batches(2)
    messages = [error_of(run.progress, source) for _ in range(3)]
    run.to_the_end(own_batches(2, first=20))
    answer = messages, run.seen
    run.close()
    return answer


def test_a_loader_that_fails_for_good_fails_every_time(two_ranks):
    answers = two_ranks.run(_always_failing)
    assert all(messages == ["RuntimeError: rank 0: Injected: for good"] * 3 for messages, _ in answers)
    expected = ids_of((0, 20), (0, 21), (1, 20), (1, 21), (1, 0))  # rank 1 had read one of its first, not the second
    assert sorted(i for _, ids in answers for i in ids) == expected


@dataclasses.dataclass
class PlainBatch:
    features: KeyedJaggedTensor
    sample_id: torch.Tensor
    target: torch.Tensor
    batch_size: int


def _not_pipelineable():
    """A batch that TorchRec cannot copy, on both ranks and on rank 1 alone; the pipeline goes on with the next ones."""
    run, said, rank = Run("sparse"), [], dist.get_rank()
    for step, plain in enumerate((True, rank == 1)):
        batch: Any = named_batch(rank, step)
        if plain:
            batch = PlainBatch(batch.features, batch.sample_id, batch.target, ROWS)
        said.append(error_of(run.progress, iter([batch])))
    run.to_the_end(own_batches(1, first=2))
    answer = said, run.seen
    run.close()
    return answer


def test_a_batch_that_is_not_pipelineable_is_refused_on_every_rank(two_ranks):
    answers = two_ranks.run(_not_pipelineable)
    for (both, one), _ in answers:
        assert both == one.replace("rank 1:", "rank 0:") + " (and on rank 1)"
        assert one.startswith(
            "TypeError: rank 1: the batch is a PlainBatch, without to and record_stream; a pipeline trains"
        )
    expected = ids_of((0, 1), (0, 2), (1, 2))  # rank 0 keeps the batch that was not the reason
    assert sorted(i for _, ids in answers for i in ids) == expected


def _staged_error():
    shuffler = FailingShuffler(ShufflerOptions(timeout=30.0))

    def run(source):
        staged = staged_pipeline(shuffler)
        while (batch := staged.progress(source)) is not None:
            rows = batch.sample_id[: batch.actual_batch_size].tolist()
            weights = torch.repeat_interleave(batch.sample_id, batch.features[KEYS[0]].lengths())
            assert torch.equal(batch.features[KEYS[0]].weights().long(), weights)
            seen.extend(rows)

    seen: list[int] = []
    message = error_of(run, balanced_iter(own_batches(6, fails_at=3 if dist.get_rank() == 1 else None), shuffler))
    run(balanced_iter(own_batches(2, first=20), shuffler))
    plain = error_of(run, own_batches(1))
    shuffler.close()
    return message, seen, plain


def test_a_staged_pipeline_is_made_anew_after_an_error(two_ranks):
    answers = two_ranks.run(_staged_error)
    assert all(message == "RuntimeError: rank 1: Injected: in the loader" for message, _, _ in answers)
    for *_, plain in answers:
        assert "got a SampleBatch whose shuffle was not started" in plain and plain.endswith(": wrap the iterator")
    seen = [i for _, ids, _ in answers for i in ids]
    # the good batch of rank 0 in the step of the error comes again
    expected = ids_of((0, 3), (0, 20), (0, 21), (1, 20), (1, 21))
    assert len(seen) == len(set(seen)) and set(expected) <= set(seen)


def _shared_with_a_thread():
    """A training pipeline in the middle of its data, and an evaluation that reads on a thread, with one shuffler."""
    model, optimizer = models.build_sharded()
    shuffler = CubicShuffler(ShufflerOptions(timeout=20.0))
    device = torch.device("cpu")
    trainer = balanced(TrainPipelineSparseDist)(model, optimizer, device, batch_shuffler=shuffler)
    evaluator = balanced(EvalPipelineSparseDist)(model, optimizer, device, batch_shuffler=shuffler)
    training = own_batches(6)
    trainer.progress(training)
    messages = [error_of(evaluator.progress, own_batches(3, first=20))]
    list(steps_of(trainer, training))  # the training is not disturbed
    trainer.detach()
    model.eval()
    evaluation = own_batches(5, first=20)
    evaluator.progress(evaluation)
    model.train()
    other = balanced(TrainPipelineBase)(model, optimizer, device, batch_shuffler=shuffler)
    iterator = own_batches(1, first=40)
    messages += [error_of(other.progress, iterator), error_of(balanced_iter, iterator, shuffler)]
    evaluator.reset()
    other.progress(iterator)
    shuffler.close()
    return messages


def test_a_shuffler_does_not_serve_a_loading_thread_beside_another_pipeline(two_ranks):
    for messages in two_ranks.run(_shared_with_a_thread, timeout=60):
        assert all(text.startswith("ValueError") for text in messages)
        assert "already drives a BalancedTrainPipelineSparseDist whose data has not ended" in messages[0]
        assert all("already drives a BalancedEvalPipelineSparseDist" in text for text in messages[1:])


@dataclasses.dataclass
class _Comparable(CubicShuffler):
    """A user's shuffler as a dataclass, which compares by value and so has no hash."""

    name: str = ""

    def __post_init__(self):
        super().__init__(ShufflerOptions(timeout=20.0))


def _left_and_dropped(first, second):
    """A pipeline is left half way and dropped; rank 0 happens to hold on to it."""
    model, optimizer = models.build_sharded()
    shuffler, device = _Comparable(), torch.device("cpu")
    kept = [balanced(first)(model, optimizer, device, batch_shuffler=shuffler)]
    model.train(first is not EvalPipelineSparseDist)
    kept[0].progress(own_batches(4))
    if dist.get_rank() == 1:
        kept.clear()
        gc.collect()
    message = error_of(
        balanced(second)(model, optimizer, device, batch_shuffler=shuffler).progress, own_batches(2, first=20)
    )
    shuffler.close()
    return message


def test_what_a_dropped_pipeline_leaves_behind_is_the_same_on_every_rank(two_ranks):
    for first, second in itertools.permutations([TrainPipelineBase, EvalPipelineSparseDist]):
        for message in two_ranks.run(_left_and_dropped, first, second, timeout=60):
            assert message.startswith("ValueError")
            assert f"already drives a Balanced{first.__name__} whose data has not ended" in message
