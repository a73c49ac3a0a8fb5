"""StagedTrainPipeline: the shuffle as a PipelineStage, and the iterator that goes with it.

TorchRec's StagedTrainPipeline skips its stages on None, so the agreement on the end of the data is carried by the
iterator: `balanced_iter` starts each batch's shuffle and hands out empty batches until no rank has one, and
`shuffle_stage` finishes them in order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

# Where this class is defined differs between TorchRec versions; here it can be imported from in all of them.
from torchrec.distributed.train_pipeline.train_pipelines import PipelineStage

from commons.distributed.batch_shuffler import BaseTaskBalancedBatchShuffler
from commons.pipeline.look_ahead import LookAhead


def balanced_iter(
    iterator: Iterator[Any],
    shuffler: BaseTaskBalancedBatchShuffler,
    pg_group: dist.ProcessGroup | None = None,
) -> Iterator[Any]:
    """Host batches whose shuffles are under way; pass the same object to every `progress`.

    Args:
        iterator: the rank's own host batches; ranks may end at different steps.
        shuffler: the shuffler that the stage was made with.
        pg_group: the group, if not the shuffler's own.
    """
    return LookAhead(iterator, shuffler, pg_group, shuffler.in_flight)


def shuffle_stage(shuffler: BaseTaskBalancedBatchShuffler, stream: torch.Stream) -> PipelineStage:
    """The stage that exchanges rows; it comes right after the host-to-device copy.

    Args:
        shuffler: the shuffler that `balanced_iter` was given.
        stream: the copy's stream.

    Returns:
        A PipelineStage from a batch on its device to the balanced batch there.
    """

    def finish(batch: Any) -> Any:
        if not shuffler.in_flight:
            raise ValueError(
                "the shuffle stage got a batch whose shuffle was not started; batches must come from "
                "balanced_iter(iterator, shuffler): wrap the iterator"
            )
        return shuffler.finish_shuffle(batch, shuffler.in_flight.popleft())

    return PipelineStage(name="shuffle", runnable=finish, stream=stream)
