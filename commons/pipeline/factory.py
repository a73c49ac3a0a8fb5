"""Train pipelines by name."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torchrec.distributed.train_pipeline.train_pipelines import (
    PrefetchTrainPipelineSparseDist,
    TrainPipeline,
    TrainPipelineBase,
    TrainPipelineFusedSparseDist,
    TrainPipelineSemiSync,
    TrainPipelineSparseDist,
)

from commons.checks import require_name
from commons.distributed.batch_shuffler import BaseTaskBalancedBatchShuffler
from commons.pipeline.balanced import balanced

# TorchRec's classes of these names work on CUDA streams.
CUDA_PIPELINES = ("prefetch", "fused", "semi_sync")


class TrainPipelineFactory:
    """Registry of pipelines.

    "none" copies one batch ahead (TorchRec's Base), "native" also overlaps the input distribution (SparseDist);
    "prefetch", "fused" and "semi_sync" are TorchRec's pipelines with these names, which need CUDA.
    """

    _makers: dict[str, Callable[..., Any]] = {}

    @classmethod
    def register(cls, name: str, pipeline_class: Callable[..., Any]) -> None:
        """Register a pipeline class, or any callable that makes a pipeline.

        Args:
            name: the name for `create`.
            pipeline_class: called with `(model, optimizer, device, *, batch_shuffler, **kwargs)`. A pipeline class of
                TorchRec, or a subclass, that names no `batch_shuffler` is balanced when it is created.

        Raises:
            ValueError: the name is taken, or empty.
            TypeError: `pipeline_class` is not callable, or the name is not a string.
        """
        require_name(name, "pipeline", "my_pipeline")
        if not callable(pipeline_class):
            raise TypeError(
                f"pipeline {name!r} is {pipeline_class!r}, which cannot be called; the registered object must make a "
                "pipeline: give a class or a function"
            )
        if name in cls._makers:
            raise ValueError(f"pipeline {name!r} is already registered; names are unique: choose another")
        if (
            isinstance(pipeline_class, type)
            and issubclass(pipeline_class, TrainPipeline)
            and "batch_shuffler" not in inspect.signature(pipeline_class).parameters
        ):
            pipeline_class = functools.partial(_make_balanced, pipeline_class)
        cls._makers[name] = pipeline_class

    @classmethod
    def create(
        cls,
        name: str,
        *,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        batch_shuffler: BaseTaskBalancedBatchShuffler,
        **kwargs: Any,
    ) -> Any:
        """Construct the pipeline of that name.

        Raises:
            ValueError: the name is unknown.
            TypeError: TorchRec's pipeline of that name cannot be balanced.
        """
        if name not in cls._makers:
            raise ValueError(
                f"pipeline {name!r} is not registered; valid names are {', '.join(map(repr, sorted(cls._makers)))}: "
                "choose one or register it"
            )
        return cls._makers[name](model, optimizer, device, batch_shuffler=batch_shuffler, **kwargs)

    @classmethod
    def list_available(cls) -> list[str]:
        """Registered names."""
        return sorted(cls._makers)


def _make_balanced(pipeline_class: type, *args: Any, **kwargs: Any) -> Any:
    """Balance the class when it is used, so that the other names work if TorchRec's class cannot be balanced."""
    return balanced(pipeline_class)(*args, **kwargs)


for _name, _pipeline_class in {
    "none": TrainPipelineBase,
    "native": TrainPipelineSparseDist,
    "prefetch": PrefetchTrainPipelineSparseDist,
    "fused": TrainPipelineFusedSparseDist,
    "semi_sync": TrainPipelineSemiSync,
}.items():
    TrainPipelineFactory.register(_name, _pipeline_class)
