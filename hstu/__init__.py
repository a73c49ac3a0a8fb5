"""HSTU: the model, its shuffler (registered as "hstu" on import), its configs and its training script."""

from hstu.batch_shuffler import HSTUBalancedBatchShuffler

__all__ = ["HSTUBalancedBatchShuffler"]
