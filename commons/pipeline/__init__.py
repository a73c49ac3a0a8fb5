"""STAGE: stock TorchRec train pipelines with the shuffle hooked in directly after the host-to-device copy."""

from commons.pipeline.balanced import balanced
from commons.pipeline.factory import TrainPipelineFactory
from commons.pipeline.staged import balanced_iter, shuffle_stage
from commons.pipeline.windows import windowed_iter

__all__ = ["TrainPipelineFactory", "balanced", "balanced_iter", "shuffle_stage", "windowed_iter"]
