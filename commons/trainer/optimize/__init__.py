"""Optimization: optimizers, accumulation, clipping, learning rates, loss scaling."""
