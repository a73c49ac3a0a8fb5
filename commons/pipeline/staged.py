"""StagedTrainPipeline: the shuffle as a PipelineStage, and the iterator that goes with it.

TorchRec's StagedTrainPipeline skips its stages on None, so the agreement on the end of the data is carried by the
iterator: `balanced_iter` starts each batch's shuffle and hands out empty batches until no rank has one, and
`shuffle_stage` finishes them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

# Where this class is defined differs between TorchRec versions; here it can be imported from in all of them.
from torchrec.distributed.train_pipeline.train_pipelines import PipelineStage

from commons.distributed.batch_shuffler import BaseTaskBalancedBatchShuffler
from commons.distributed.engine.engine import Starter
from commons.pipeline.look_ahead import LookAhead, ShufflingBatch


@dataclass(eq=False)
class _StagedStarter(Starter):
    """Keeps the iterator that was left last: the next one trains first what it has read ahead."""

    look_ahead: LookAhead | None = None

    @property
    def is_needed(self) -> bool:
        return self.in_flight or self.look_ahead is not None


class _BalancedIterator(LookAhead):
    """A LookAhead that raises errors where they come: a staged pipeline has no other place for them."""

    starter: _StagedStarter

    def __next__(self) -> ShufflingBatch:
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
    iterator: Iterator[Any],
    shuffler: BaseTaskBalancedBatchShuffler,
    pg_group: dist.ProcessGroup | None = None,
) -> Iterator[Any]:
    """Host batches whose shuffles are under way; pass the same object to every `progress`.

    What it hands out answers like the batch; a stage between the iterator and the shuffle hands on the copy that `to`
    or `pin_memory` returns. Where an earlier iterator of the same shuffler has not ended, the batch that it has read
    ahead comes first.

    An error of any rank's data or workloads is raised on every rank by the `progress` that reads the batch. As after
    any exception in a stage, TorchRec's pipeline has lost its place then: make a new one, with a new iterator.

    Args:
        iterator: the rank's own host batches; ranks may end at different steps.
        shuffler: the shuffler that the stage was made with.
        pg_group: the group, if not the shuffler's own.

    Raises:
        ValueError: the shuffler drives a pipeline with a loading thread.
    """
    engine = shuffler.engine
    engine.connect(pg_group)
    starter = next((each for each in engine.starters if isinstance(each, _StagedStarter)), None)
    starter = starter or _StagedStarter("StagedTrainPipeline")
    engine.begin(starter)
    starter.in_flight = True
    look_ahead = _BalancedIterator(iterator, shuffler, pg_group, starter.look_ahead)
    look_ahead.starter, starter.look_ahead = starter, look_ahead
    return look_ahead


def shuffle_stage(shuffler: BaseTaskBalancedBatchShuffler, stream: torch.Stream) -> PipelineStage:
    """The stage that exchanges rows; it comes right after the host-to-device copy.

    Args:
        shuffler: the shuffler that `balanced_iter` is given.
        stream: the copy's stream.

    Returns:
        A PipelineStage from a batch on its device to the balanced batch there.
    """

    def finish(shuffling: Any) -> Any:
        if not isinstance(shuffling, ShufflingBatch):
            raise ValueError(
                f"the shuffle stage got a {type(shuffling).__name__} whose shuffle was not started; batches must come "
                "from balanced_iter(iterator, shuffler), and stages before this one hand on what to() returns: wrap "
                "the iterator"
            )
        return shuffler.finish_shuffle(shuffling.batch, shuffling.handle)

    return PipelineStage(name="shuffle", runnable=finish, stream=stream)
