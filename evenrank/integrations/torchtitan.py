"""`assign_training_samples_to_rows`, for torchtitan's RL batcher; see `commons.integrations.torchtitan`."""

from commons.integrations.torchtitan import assign_training_samples_to_rows

__all__ = ["assign_training_samples_to_rows"]
