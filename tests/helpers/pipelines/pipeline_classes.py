"""What pipelines the installed TorchRec has, and subclasses as users write them."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from typing import Any

import torch
from torchrec.distributed import train_pipeline
from torchrec.distributed.train_pipeline.train_pipelines import (
    TrainPipeline,
    TrainPipelineBase,
    TrainPipelineSparseDist,
)
from torchrec.streamable import Pipelineable

from tests.helpers.models.torchrec_model import SampleBatch


def torchrec_pipelines() -> dict[str, type]:
    """Every class of TorchRec's package of pipelines that is one, or has `progress` like one, by name."""
    found = {}
    for info in pkgutil.walk_packages(train_pipeline.__path__, train_pipeline.__name__ + "."):
        module = importlib.import_module(info.name)
        for name, each in inspect.getmembers(module, inspect.isclass):
            if each.__module__ == info.name and (issubclass(each, TrainPipeline) or hasattr(each, "progress")):
                found[name] = each
    return found


class CopiesOnWorker(TrainPipelineSparseDist):
    """TorchRec's copies on a worker thread (`async_inplace_copy` of 1.9), which it makes for accelerators only."""

    def _setup_async_inplace_copy(self, enabled: bool, device: torch.device) -> None:
        super()._setup_async_inplace_copy(enabled, torch.device("cuda"))


class OwnCopy(TrainPipelineSparseDist):
    """Copies by itself, as where a batch needs more than `to`."""

    def copy_batch_to_gpu(self, dataloader_iter: Iterator[Any]) -> tuple[Any, Any]:
        context = self._create_context()
        batch = self._next_batch(dataloader_iter)
        return None if batch is None else batch.to(self._device, non_blocking=True), context


def rebuilt(batch: Any) -> SampleBatch:
    """A batch built anew, field by field."""
    names = [field.name for field in dataclasses.fields(SampleBatch)]
    return SampleBatch(**{name: getattr(batch, name) for name in names})


class OneAhead(TrainPipelineSparseDist):
    """Copies one batch more than it hands on."""

    ahead: Any = None

    def copy_batch_to_gpu(self, dataloader_iter: Iterator[Any]) -> tuple[Any, Any]:
        if self.ahead is None:
            self.ahead = super().copy_batch_to_gpu(dataloader_iter)
        batch, self.ahead = self.ahead, super().copy_batch_to_gpu(dataloader_iter)
        return batch


class OwnEnqueue(TrainPipelineSparseDist):
    """Fills the pipeline without TorchRec's copies."""

    def enqueue_batch(self, dataloader_iter: Iterator[Any]) -> bool:
        batch = next(dataloader_iter, None)
        if batch is None:
            return False
        self.batches.append(batch.to(self._device))
        self.contexts.append(self._create_context())
        return True


class OwnSchedule(TrainPipelineSparseDist):
    """A step of its own around TorchRec's copy."""

    def progress(self, dataloader_iter: Iterator[Any]) -> Any:
        batch, _ = self.copy_batch_to_gpu(dataloader_iter)
        if batch is None:
            raise StopIteration
        self._optimizer.zero_grad()
        losses, output = self._model(batch)
        losses.backward()
        self._optimizer.step()
        return output


class OwnBaseCopy(TrainPipelineBase):
    """Copies by itself, and builds the batch anew."""

    def _copy_batch_to_gpu(self, cur_batch: Any) -> None:
        assert isinstance(cur_batch, Pipelineable)
        self._cur_batch = rebuilt(cur_batch.to(self._device))


BALANCED_SUBCLASSES = [OwnCopy, OneAhead, OwnEnqueue, OwnSchedule, OwnBaseCopy]


class LeavesOut(TrainPipelineSparseDist):
    """Drops every other batch."""

    def copy_batch_to_gpu(self, dataloader_iter: Iterator[Any]) -> tuple[Any, Any]:
        self._next_batch(dataloader_iter)
        return super().copy_batch_to_gpu(dataloader_iter)


class ForgetsWhich(OneAhead):
    """Copies one batch more than it hands on, and builds it anew."""

    def copy_batch_to_gpu(self, dataloader_iter: Iterator[Any]) -> tuple[Any, Any]:
        batch, context = super().copy_batch_to_gpu(dataloader_iter)
        return None if batch is None else rebuilt(batch), context


class SkipsTheCopy(TrainPipelineSparseDist):
    """Trains what it has read from the iterator."""

    def progress(self, dataloader_iter: Iterator[Any]) -> Any:
        losses, output = self._model(next(dataloader_iter).to(torch.device("cpu")))
        losses.backward()
        return output


REFUSED_SUBCLASSES = {
    LeavesOut: "copied the batch of step 1 before that of step 0, which was read first; rows of a skipped batch",
    ForgetsWhich: "got a SampleBatch that is not the result of the batch's to(), while 2 batches that were read wait",
    SkipsTheCopy: "trained a batch whose shuffle was never finished; this TorchRec, or a subclass of yours, copies",
}
