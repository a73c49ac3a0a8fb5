"""The functions of AReaL's utils/seqpack.py; see `commons.integrations.areal`."""

from commons.integrations.areal import balanced_greedy_partition, ffd_allocate, get_allocate_fn, kk_allocate

__all__ = ["balanced_greedy_partition", "ffd_allocate", "get_allocate_fn", "kk_allocate"]
