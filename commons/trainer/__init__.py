"""Training: arguments, configs, launch, the loop and its log."""

from commons.trainer.config.args import DatasetArgs, TrainerArgs

__all__ = ["DatasetArgs", "TrainerArgs"]
