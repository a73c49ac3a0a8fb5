"""Exceptions in a balanced pipeline: no row is torn between batches, and the next step goes on rightly or refuses."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torchrec.distributed.train_pipeline.train_pipelines import (
    EvalPipelineSparseDist,
)
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from commons.distributed.engine.shuffle_handle import ShuffleHandle
from commons.distributed.exchange.row_exchange import RowExchange
from commons.distributed.options import ShufflerOptions
from commons.pipeline import balanced, balanced_iter
from tests.helpers.models import torchrec_model as models
from tests.helpers.models.torchrec_model import SampleBatch, head_of
from tests.helpers.pipelines.named_batches import ROWS, Injected, ids_of, is_torn, named_batch, own_batches
from tests.helpers.pipelines.shuffled_pipelines import (
    PIPELINES,
    CubicShuffler,
    Source,
    before_a_commit,
    staged_pipeline,
    steps_of,
)
from tests.helpers.ranks.faults import error_of
from tests.helpers.ranks.on_ranks import of_all, on_two_ranks

# One of each way to schedule batches, and the evaluation with a loading thread.
SCHEDULES = [
    *(name for name in PIPELINES if name not in ("base in place", "sparse in place", "sparse free early")),
    "eval",
]
# In `make test`: on the main thread, ahead, further ahead, and on a thread.
FIRST = ["base", "sparse", "semi-sync, before it starts", "copies on a thread", "eval"]


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
        self.torn += is_torn(inputs[1])
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


@pytest.mark.parametrize("pipeline", before_a_commit(["sparse", "copies on a thread", "eval"], SCHEDULES))
@on_two_ranks
def test_an_error_in_a_step_tears_no_row(pipeline):
    """All ranks fail in the same place; the pipeline refuses to go on until it is reset."""
    fails_after = 1 + list(PIPELINES).index(pipeline) % 3 if pipeline in PIPELINES else 2
    for place in ["forward"] if pipeline == "eval" else ["forward", "backward", "optimizer"]:
        run, source = Run(pipeline), own_batches(10)
        for _ in range(fails_after):
            run.progress(source)
        run.fails_in = place
        first, second = (error_of(run.progress, source) for _ in range(2))
        assert first == f"Injected: in the {place}"
        assert f"raised Injected: in the {place}" in second and "reset() on every rank" in second
        run.trainer.reset()
        run.to_the_end(source)
        seen = of_all(run.seen)
        assert run.torn == 0 and run.moved > 2 and len(seen) == len(set(seen))
        # what reset() drops is what was in flight: at most the copied batches, and the one read ahead
        assert 2 * ROWS * 10 - len(seen) <= 2 * ROWS * 5
        run.close()


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
@on_two_ranks
def test_an_error_of_the_data_is_raised_once_and_nothing_else_is_lost(pipeline, cause, same_iterator):
    """Rank 1 fails at its fourth batch: an error on every rank, after the batches before; then it goes on."""
    run, rank, bad = Run(pipeline), dist.get_rank(), 3
    if cause == "workload" and rank == 1:
        run.shuffler.fails_with = int(named_batch(1, bad).sample_id[0])
    source = own_batches(8, fails_at=bad if cause == "loader" and rank == 1 else None)
    trained_before = 0
    with pytest.raises(RuntimeError, match=f"^rank 1: Injected: in the {cause}$"):
        while True:
            run.progress(source)
            trained_before += 1
    run.to_the_end(source if same_iterator else own_batches(4, first=20))
    assert (trained_before, run.torn) == (3, 0)
    steps = list(range(8 if same_iterator else 4))
    if rank == 1 and (cause == "workload" or not same_iterator):
        steps.remove(bad)  # the batch at fault, or never read
    steps += [] if same_iterator else [20, 21, 22, 23]
    assert sorted(of_all(run.seen)) == sorted(of_all(ids_of(*((rank, step) for step in steps))))
    run.close()


@pytest.mark.parametrize("pipeline", ["base", "sparse"])
@on_two_ranks
def test_a_signals_handler_that_raises_in_a_wait_fails_every_rank(pipeline):
    """As torch's does on the main thread if a loader's worker was killed; once within the data, once at the end."""
    run, rank, wait, bad = Run(pipeline), dist.get_rank(), ShuffleHandle.wait, [3, 9]

    def interrupted(handle):
        if rank == 1 and handle.step in bad:
            bad.remove(handle.step)
            raise Injected("in the handler")
        wait(handle)

    source, trained_before = own_batches(8), 0
    with mock.patch.object(ShuffleHandle, "wait", interrupted):
        with pytest.raises(RuntimeError, match="^rank 1: Injected: in the handler$"):
            while True:
                run.progress(source)
                trained_before += 1
        # No other rank is at fault for what happens when its data has ended.
        assert error_of(run.to_the_end, source) == ["no error", "Injected: in the handler"][rank]
    assert (trained_before, run.torn) == (4, 0)
    assert sorted(of_all(run.seen)) == sorted(of_all(ids_of(*((rank, step) for step in range(8)))))
    run.close()


@pytest.mark.parametrize("pipeline", ["base", "copies on a thread"])
@on_two_ranks
def test_an_error_in_the_copy_of_one_rank_reaches_the_others_at_once(pipeline):
    copy, last = SampleBatch.to, int(named_batch(1, 2).sample_id[0])

    def copy_or_fail(batch, *args, **kwargs):
        if int(batch.sample_id[0]) == last:
            raise Injected("in the copy")
        return copy(batch, *args, **kwargs)

    run, text = Run(pipeline), "Injected: in the copy"
    with mock.patch.object(SampleBatch, "to", copy_or_fail):
        expected = [f"RankMissingError: rank 1 failed in the exchange of step 2: {text}", text]
        assert error_of(run.to_the_end, own_batches(4)) == expected[dist.get_rank()]
    run.close()


@on_two_ranks
def test_a_loaders_worker_that_was_killed_during_the_exchange_is_no_missing_rank():
    """Torch's signal handler raises in any line: here in the call of the collective, while rank 0 is in its model."""
    rank, batch = dist.get_rank(), named_batch(dist.get_rank(), 0)
    error = RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed.")
    with contextlib.closing(CubicShuffler(ShufflerOptions(timeout=30.0))) as shuffler:
        handle = shuffler.start_shuffle(batch)
        assert not handle.has_ended()
        if rank == 1:
            with mock.patch.object(RowExchange, "send_rows", side_effect=error):
                said = error_of(shuffler.finish_shuffle, batch, handle)
        dist.barrier()
        if rank == 0:
            said = error_of(shuffler.finish_shuffle, batch, handle)
    assert said == ["RankMissingError: rank 1 failed in the exchange of step 0: ", ""][rank] + f"RuntimeError: {error}"


@on_two_ranks
def test_a_loader_that_fails_for_good_fails_every_time():
    """And a shuffler that is right again goes on."""
    run = Run("sparse")

    class Broken(Iterator[Any]):
        def __next__(self):
            raise Injected("for good")

    source = Broken() if dist.get_rank() == 0 else own_batches(2)
    for _ in range(3):
        assert error_of(run.progress, source) == "RuntimeError: rank 0: Injected: for good"
    run.to_the_end(own_batches(2, first=20))
    expected = ids_of((0, 20), (0, 21), (1, 20), (1, 21), (1, 0))  # rank 1 had read one of its first, not the second
    assert sorted(of_all(run.seen)) == expected
    run.close()


@dataclasses.dataclass
class PlainBatch:
    features: KeyedJaggedTensor
    sample_id: torch.Tensor
    target: torch.Tensor
    batch_size: int


@on_two_ranks
def test_a_batch_that_is_not_pipelineable_is_refused_on_every_rank():
    """On both ranks and on rank 1 alone; the pipeline goes on with the next ones."""
    run, said, rank = Run("sparse"), [], dist.get_rank()
    for step, plain in enumerate((True, rank == 1)):
        batch: Any = named_batch(rank, step)
        if plain:
            batch = PlainBatch(batch.features, batch.sample_id, batch.target, ROWS)
        said.append(error_of(run.progress, iter([batch])))
    both, one = said
    of_list = error_of(run.progress, [named_batch(rank, 0)])
    assert "the batches come from a list; a pipeline reads them from an iterator: pass iter(...) of it" in of_list
    assert both == one.replace("rank 1:", "rank 0:") + " (and on rank 1)"
    assert one.startswith(
        "TypeError: rank 1: the batch is a PlainBatch, without to and record_stream; a pipeline trains"
    )
    run.to_the_end(own_batches(1, first=2))
    # Rank 0 keeps the batch that was not the reason.
    assert sorted(of_all(run.seen)) == ids_of((0, 1), (0, 2), (1, 2))
    run.close()


@on_two_ranks
def test_first_batches_that_differ_are_left_out_on_every_rank():
    """Nobody knows which of them is right."""
    run, rank = Run("sparse"), dist.get_rank()
    first = named_batch(rank, 0)
    first.target = first.target.double() if rank == 1 else first.target
    source = iter([first, named_batch(rank, 1)])
    said = error_of(run.progress, source)
    assert said.startswith("SchemasDifferError: the batches of ranks 0 and 1 differ: field 'target'")
    run.to_the_end(source)
    assert sorted(of_all(run.seen)) == ids_of((0, 1), (1, 1))
    run.close()


@on_two_ranks
def test_a_staged_pipeline_is_made_anew_after_an_error():
    shuffler, seen = FailingShuffler(ShufflerOptions(timeout=30.0)), []

    def run(source):
        staged = staged_pipeline(shuffler)
        while (batch := staged.progress(source)) is not None:
            assert not is_torn(batch)
            seen.extend(batch.sample_id[: batch.actual_batch_size].tolist())

    source = balanced_iter(own_batches(6, fails_at=3 if dist.get_rank() == 1 else None), shuffler)
    assert error_of(run, source) == "RuntimeError: rank 1: Injected: in the loader"
    run(balanced_iter(own_batches(2, first=20), shuffler))
    plain = error_of(run, own_batches(1))
    assert "got a SampleBatch whose shuffle was not started" in plain and plain.endswith(": wrap the iterator")
    rows = of_all(seen)
    # The good batch of rank 0 in the step of the error comes again.
    assert len(rows) == len(set(rows)) and set(ids_of((0, 3), (0, 20), (0, 21), (1, 20), (1, 21))) <= set(rows)
    shuffler.close()
