"""`balanced(trainer)`, for Hugging Face's Trainer and its subclasses; see `commons.integrations.transformers`."""

from commons.integrations.transformers import balanced

__all__ = ["balanced"]
