"""`balance_packed_sequences()`, for Megatron-Core; see `commons.integrations.megatron`."""

from commons.integrations.megatron import balance_packed_sequences

__all__ = ["balance_packed_sequences"]
