"""Balanced dispatch of any batch: chunks, shares of one rank's batch, and rows exchanged between all ranks."""

from commons.dispatch.chunks import BalancedChunks, split_balanced
from commons.dispatch.redistribute import RedistributedRows, redistribute_balanced
from commons.dispatch.scatter import BalancedShare, scatter_balanced
from commons.dispatch.single_rank_loader import SingleRankLoader
from commons.dispatch.trim import Trim, trim_batch

__all__ = [
    "BalancedChunks",
    "BalancedShare",
    "RedistributedRows",
    "SingleRankLoader",
    "Trim",
    "redistribute_balanced",
    "scatter_balanced",
    "split_balanced",
    "trim_batch",
]
