"""HSTU: the model, its shuffler (importing this package registers it as "hstu"), its configs and training script."""

from hstu.batch_shuffler import HSTUBalancedBatchShuffler

__all__ = ["HSTUBalancedBatchShuffler"]
