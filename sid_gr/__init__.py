"""SID-GR: a decoder of semantic IDs, its shuffler (registered as "sid_gr" on import), its configs and its script."""

from sid_gr.batch_shuffler import SIDGRBalancedBatchShuffler

__all__ = ["SIDGRBalancedBatchShuffler"]
