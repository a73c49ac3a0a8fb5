"""StagedTrainPipeline: the shuffle as a PipelineStage, and the iterator for it.

TorchRec's StagedTrainPipeline skips its stages on None, so the iterator implements the agreement on the end of the
data: `balanced_iter` starts each batch's shuffle and returns empty batches until no rank has a batch, and
`shuffle_stage` finishes the shuffles.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist

# The module that defines this class differs between TorchRec versions; this import works in all of them.
from torchrec.distributed.train_pipeline.train_pipelines import PipelineStage

from commons.checks import kind_of
from commons.distributed.batch_shuffler import BaseTaskBalancedBatchShuffler, require_shuffler
from commons.distributed.engine.engine import Starter
from commons.pipeline.look_ahead import LookAhead, ShufflingBatch

B = TypeVar("B")


class _BalancedIterator(LookAhead):
    """A LookAhead that raises errors in `__next__`, because a staged pipeline cannot raise them later."""

    starter: Starter
    _is_replaced = False  # whether a later iterator has taken over before the end of the data

    def abandon(self) -> None:
        self._is_replaced = not self.ended
        super().abandon()

    def __next__(self) -> ShufflingBatch:
        if self._is_replaced:
            raise ValueError(
                "this iterator was replaced by a later balanced_iter of the same shuffler before its data had ended; "
                "the later one has taken over the batch that was read ahead: give each pipeline a shuffler of its own"
            )
        try:
            return super().__next__()
        except StopIteration:
            error = self.take_error()
            if error is None:
                raise
        finally:
            self.starter.in_flight = not self.ended
        raise error


def balanced_iter(
    iterator: Iterator[B],
    shuffler: BaseTaskBalancedBatchShuffler,
    pg_group: dist.ProcessGroup | None = None,
) -> Iterator[B]:
    """An iterator over host batches that starts their shuffles; pass the same object to every `progress`.

    Its items have the attributes of the batch as it was loaded: only the shuffle stage moves rows. A loop of your own,
    without a pipeline, uses `windowed_iter(iterator, shuffler, 1)` instead. A stage between the iterator and the
    shuffle stage must return the result of the item's `to` or `pin_memory`. If an earlier iterator of the same shuffler
    has not ended, the batch that it has read ahead comes first, and its next use raises ValueError: a pipeline for
    evaluation beside the training has a shuffler of its own.

    An error of any rank's data or workloads is raised on every rank by the `progress` that reads the batch. After it,
    as after any exception in a stage, TorchRec's pipeline cannot continue: make a new one, with a new iterator.

    Args:
        iterator: the rank's own host batches; ranks may end at different steps.
        shuffler: the shuffler of the stage.
        pg_group: the process group; None for the shuffler's own.

    Raises:
        ValueError: the shuffler also serves a pipeline with a loading thread.
        TypeError: `shuffler` is not a shuffler.
    """
    require_shuffler("shuffler", shuffler)
    engine = shuffler.engine
    engine.connect(pg_group)
    starter = next((each for each in engine.starters if each.last is not None), None)
    starter = starter or Starter("StagedTrainPipeline")
    engine.begin(starter)
    starter.in_flight = True
    look_ahead = _BalancedIterator(iterator, shuffler, pg_group, starter.last)
    look_ahead.starter = starter
    starter.last = look_ahead
    return look_ahead


def shuffle_stage(shuffler: BaseTaskBalancedBatchShuffler, stream: torch.Stream) -> PipelineStage:
    """The stage that exchanges rows; put it directly after the host-to-device copy.

    Args:
        shuffler: the shuffler of `balanced_iter`.
        stream: the stream of the copy.

    Returns:
        A PipelineStage that turns a batch on its device into the balanced batch.

    Raises:
        TypeError: `shuffler` is not a shuffler.
    """
    require_shuffler("shuffler", shuffler)

    def finish(shuffling: Any) -> Any:
        if not isinstance(shuffling, ShufflingBatch):
            raise ValueError(
                f"the shuffle stage got {kind_of(shuffling)} whose shuffle was not started; batches must come "
                "from balanced_iter(iterator, shuffler), and earlier stages must return the result of to(): wrap the "
                "iterator"
            )
        return shuffler.finish_shuffle(shuffling.batch, shuffling.handle)

    return PipelineStage(name="shuffle", runnable=finish, stream=stream)
