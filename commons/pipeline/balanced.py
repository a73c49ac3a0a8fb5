"""balanced(PipelineClass): a stock TorchRec pipeline with one hook.

The subclass wraps the data iterator in a LookAhead, which starts shuffles, and finishes each batch's shuffle on the
memcpy stream right after TorchRec has copied the batch. Nothing of TorchRec is copied or patched.
"""

from __future__ import annotations

import functools
from importlib import metadata

from torchrec.distributed.train_pipeline.train_pipelines import (
    EvalPipelineSparseDist,
    PrefetchTrainPipelineSparseDist,
    TrainPipelineBase,
    TrainPipelineFusedSparseDist,
    TrainPipelineSemiSync,
    TrainPipelineSparseDist,
    TrainPipelineSparseDistLite,
)

from commons.pipeline.hooks import (
    BalancedPipeline,
    HookAtCopy,
    HookAtDataDist,
    HookAtEnqueue,
    HookAtEnqueueWithEvents,
)

# Subclasses of SparseDist schedule batches in ways of their own: each is listed once it has been tested.
_HOOKS: dict[type, type[BalancedPipeline]] = {
    TrainPipelineBase: HookAtCopy,
    TrainPipelineSparseDist: HookAtEnqueue,
    TrainPipelineSparseDistLite: HookAtEnqueue,
    TrainPipelineFusedSparseDist: HookAtEnqueue,
    PrefetchTrainPipelineSparseDist: HookAtEnqueue,
    TrainPipelineSemiSync: HookAtEnqueueWithEvents,
    EvalPipelineSparseDist: HookAtDataDist,
}

_REQUIRED: dict[type[BalancedPipeline], tuple[str, ...]] = {
    HookAtCopy: ("_copy_batch_to_gpu", "_reset_data_iter"),
    HookAtEnqueue: ("enqueue_batch", "wait_sparse_data_dist", "attach"),
    HookAtEnqueueWithEvents: ("enqueue_batch", "wait_sparse_data_dist", "attach"),
    HookAtDataDist: ("start_sparse_data_dist",),
}


def _hook_for(pipeline_class: type) -> type[BalancedPipeline] | None:
    """The hook of the nearest TorchRec ancestor; None if that one is not listed."""
    for ancestor in getattr(pipeline_class, "__mro__", ()):
        if ancestor.__module__.startswith("torchrec."):
            return _HOOKS.get(ancestor)
    return None


@functools.cache
def balanced(pipeline_class: type) -> type:
    """A subclass of a stock TorchRec pipeline that trains balanced batches.

    Args:
        pipeline_class: a TorchRec pipeline (Base, SparseDist, SparseDistLite, FusedSparseDist, Prefetch, SemiSync,
            EvalSparseDist), or a subclass of a user's own that leaves its scheduling as it is.

    Returns:
        A subclass whose constructor takes two more keywords, `batch_shuffler` and `pg_group=None`, and that has
        `last_stats`, the stats of the batch trained last.

    Raises:
        TypeError: a class without a known place after the host-to-device copy, as Prefetch of TorchRec 1.6 is.
    """
    hook = _hook_for(pipeline_class)
    if hook is None:
        supported = ", ".join(known.__name__ for known in _HOOKS)
        raise TypeError(
            f"{getattr(pipeline_class, '__name__', pipeline_class)!s} has no known place for the shuffle after the "
            f"host-to-device copy; supported are {supported} and their subclasses: use one of them"
        )
    if issubclass(pipeline_class, PrefetchTrainPipelineSparseDist) and (
        "fill_pipeline" not in PrefetchTrainPipelineSparseDist.__dict__
    ):
        raise TypeError(
            f"{pipeline_class.__name__} of TorchRec {metadata.version('torchrec')} does not copy batches in "
            "enqueue_batch, where the shuffle is hooked in; that of TorchRec 1.7 and 1.8 does: install one of them, or "
            "use another pipeline"
        )
    missing = [name for name in _REQUIRED[hook] if not callable(getattr(pipeline_class, name, None))]
    if missing:
        raise TypeError(
            f"{pipeline_class.__name__} of TorchRec {metadata.version('torchrec')} has no {', '.join(missing)}, where "
            "the shuffle is hooked in; TorchRec 1.6 to 1.8 have it: install one of them"
        )
    return type(f"Balanced{pipeline_class.__name__}", (hook, pipeline_class), {"__module__": __name__})
