"""`balanced(trainer)`, for Hugging Face's Trainer and what derives from it; see `commons.integrations.transformers`."""

from commons.integrations.transformers import balanced

__all__ = ["balanced"]
