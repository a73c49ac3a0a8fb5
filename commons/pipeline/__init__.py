"""STAGE: stock TorchRec train pipelines with the shuffle hooked in right after the host-to-device copy."""

from commons.pipeline.balanced import balanced
from commons.pipeline.factory import TrainPipelineFactory

__all__ = ["TrainPipelineFactory", "balanced"]
