"""SID-GR: the semantic-ID decoder, its shuffler (importing this package registers "sid_gr"), configs and training."""

from sid_gr.batch_shuffler import SIDGRBalancedBatchShuffler

__all__ = ["SIDGRBalancedBatchShuffler"]
