"""balanced(PipelineClass): a stock TorchRec pipeline with one hook.

The subclass wraps the data iterator in a LookAhead, which starts shuffles, and finishes each batch's shuffle on the
memcpy stream directly after TorchRec has copied the batch. No code of TorchRec is copied or patched.
"""

from __future__ import annotations

import functools
from importlib import metadata

from commons.pipeline.hooks import (
    BalancedPipeline,
    HookAtCopy,
    HookAtTransform,
    HookBehindThread,
    HookInSparseDist,
    HookWithEvents,
)
from commons.releases import NEWEST_TORCHREC, OLDEST_TORCHREC

# TorchRec's classes by name, because releases have different classes. Each schedules batches differently and is listed
# only after it was tested; tests/distributed/pipeline/test_every_pipeline.py finds classes that are not listed.
HOOKS: dict[str, type[BalancedPipeline]] = {
    "TrainPipelineBase": HookAtCopy,
    "TrainPipelinePT2": HookAtTransform,
    "TrainPipelineSparseDist": HookInSparseDist,
    "TrainPipelineSparseDistLite": HookInSparseDist,
    "TrainPipelineFusedSparseDist": HookInSparseDist,
    "TrainPipelineSemiSync": HookWithEvents,
    "PrefetchTrainPipelineSparseDist": HookInSparseDist,
    "TrainPipelineSparseDistCompAutograd": HookInSparseDist,
    "TrainPipelineSparseDistT": HookInSparseDist,
    "TrainPipelineSparseDistOptStash": HookInSparseDist,
    "TrainPipelineSparseDistEmbStash": HookInSparseDist,
    "TrainPipelinePrefetchEMS": HookInSparseDist,
    "TrainEvalHybridPipelineBase": HookInSparseDist,
    "EvalPipelineSparseDist": HookBehindThread,
    "EvalPipelineFusedSparseDist": HookInSparseDist,
}

REFUSED: dict[str, str] = {
    "TrainPipeline": (
        "is abstract and does not define where a batch is copied; derive from one of TorchRec's pipelines, or put "
        "windowed_iter(iterator, shuffler, 1) in front of your own, which exchanges rows on the host"
    ),
    "TrainPipelineSparseDistBwdOpt": (
        "steps the optimizer inside the backward pass, before DistributedDataParallel has averaged the dense "
        "gradients, so the ranks' dense parameters would differ; use TrainPipelineSparseDist"
    ),
    "TrainPipelinePEC": (
        "does not train a PECEmbeddingCollection as TrainPipelineSparseDist trains its tables, also without a shuffle, "
        "so the weights would depend on which rank has which rows; use TrainPipelineSparseDist and EmbeddingCollection"
    ),
    "EvalPipelineCPUSparse": (
        "looks embeddings up on the host and copies the embeddings, so no batch is on the device when its rows should "
        "move; put windowed_iter(iterator, shuffler, 1) in front of it, which exchanges rows on the host"
    ),
    "StagedTrainPipeline": (
        "copies batches in one of your stages; put shuffle_stage(shuffler, stream) behind that stage and give progress "
        "balanced_iter(iterator, shuffler)"
    ),
    "GradientAccumulationWrapper": "is not a pipeline, it wraps one; put it around balanced(PipelineClass)(...)",
}


@functools.cache
def balanced(pipeline_class: type) -> type:
    """A subclass of a stock TorchRec pipeline that trains balanced batches.

    Args:
        pipeline_class: a TorchRec pipeline, or a user's subclass of one, which may override how a batch is copied but
            must not change the schedule. docs/pipelines.md lists all classes.

    Returns:
        A subclass whose constructor has two more keywords, `batch_shuffler` and `pg_group=None`, and that has
        `last_stats`, the stats of the last trained batch. A balanced class is returned unchanged.

    Raises:
        TypeError: a class that cannot be balanced, or a subclass of one; the error has the reason and the remedy.
    """
    if not isinstance(pipeline_class, type):
        own = type(pipeline_class).__name__
        is_pipeline = any(each.__name__ in HOOKS for each in type(pipeline_class).__mro__)
        name = own if is_pipeline else "TrainPipelineSparseDist"
        raise TypeError(
            f"pipeline_class is an object of {own}; balanced takes the class of a pipeline: write "
            f"balanced({name})(model, optimizer, device, batch_shuffler=shuffler)"
        )
    if issubclass(pipeline_class, BalancedPipeline):
        return pipeline_class
    name = pipeline_class.__name__
    # The nearest class of TorchRec, which may be the class itself.
    known = next((each.__name__ for each in pipeline_class.__mro__ if each.__module__.startswith("torchrec.")), None)
    if known in REFUSED:
        raise TypeError(f"{name} {'' if known == name else f'is a {known}, which '}{REFUSED[known]}")
    hook = HOOKS.get(known or "")
    if hook is None:
        raise TypeError(
            f"{name} is not a supported pipeline, because it has no known point after the host-to-device copy for the "
            f"shuffle; supported are {', '.join(HOOKS)} and their subclasses: use one of them"
        )
    missing = [method for method in hook.hooked if not callable(getattr(pipeline_class, method, None))]
    if missing:
        raise TypeError(
            f"{name} of TorchRec {metadata.version('torchrec')} has no {', '.join(missing)}, which the shuffle needs "
            f"as a hook; TorchRec {OLDEST_TORCHREC} to {NEWEST_TORCHREC} have it: install one of them"
        )
    return type(f"Balanced{name}", (hook, pipeline_class), {"__module__": __name__})
