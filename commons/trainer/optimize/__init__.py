"""Gradients to updates: optimizers, accumulation and clipping, learning rates, the scale of the loss."""
