"""StagedTrainPipeline: the shuffle as a PipelineStage, and the iterator that goes with it.

TorchRec's StagedTrainPipeline skips its stages on None, so the agreement on the end of the data is carried by the
iterator: `balanced_iter` starts each batch's shuffle and hands out empty batches until no rank has one, and
`shuffle_stage` finishes them in order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

# Where this class is defined differs between TorchRec versions; here it can be imported from in all of them.
from torchrec.distributed.train_pipeline.train_pipelines import PipelineStage

from commons.distributed.batch_shuffler import BaseTaskBalancedBatchShuffler, ShuffleHandle
from commons.pipeline.look_ahead import LookAhead


@dataclass
class _InFlight:
    """What iterator and stage of one shuffler share: the iterator in use, and handles of batches handed out."""

    look_ahead: LookAhead | None = None
    handles: deque[ShuffleHandle] = field(default_factory=deque)


_IN_FLIGHT: WeakKeyDictionary[BaseTaskBalancedBatchShuffler, _InFlight] = WeakKeyDictionary()


def balanced_iter(
    iterator: Iterator[Any],
    shuffler: BaseTaskBalancedBatchShuffler,
    pg_group: dist.ProcessGroup | None = None,
) -> Iterator[Any]:
    """Host batches whose shuffles are under way; pass the same object to every `progress`.

    Where an earlier iterator of the same shuffler has not ended, the batch that it has read ahead comes first.

    Args:
        iterator: the rank's own host batches; ranks may end at different steps.
        shuffler: the shuffler that the stage was made with.
        pg_group: the group, if not the shuffler's own.
    """
    shuffler.connect(pg_group)
    in_flight = _IN_FLIGHT.setdefault(shuffler, _InFlight())
    previous = in_flight.look_ahead
    if previous is not None and previous.ended:
        previous = None
    in_flight.look_ahead = LookAhead(iterator, shuffler, pg_group, in_flight.handles, previous)
    return in_flight.look_ahead


def shuffle_stage(shuffler: BaseTaskBalancedBatchShuffler, stream: torch.Stream) -> PipelineStage:
    """The stage that exchanges rows; it comes right after the host-to-device copy.

    Making a stage drops the batches that an earlier pipeline of the same shuffler had in flight, on all ranks together.

    Args:
        shuffler: the shuffler that `balanced_iter` is given; one pipeline uses it at a time.
        stream: the copy's stream.

    Returns:
        A PipelineStage from a batch on its device to the balanced batch there.
    """
    in_flight = _IN_FLIGHT.setdefault(shuffler, _InFlight())
    if in_flight.handles:
        for handle in in_flight.handles:
            handle.drain()
        in_flight.handles.clear()
        if in_flight.look_ahead is not None:
            in_flight.look_ahead.drain()
            in_flight.look_ahead = None

    def finish(batch: Any) -> Any:
        if not in_flight.handles:
            raise ValueError(
                "the shuffle stage got a batch whose shuffle was not started; batches must come from "
                "balanced_iter(iterator, shuffler): wrap the iterator"
            )
        return shuffler.finish_shuffle(batch, in_flight.handles.popleft())

    return PipelineStage(name="shuffle", runnable=finish, stream=stream)
