"""`BalancedBatches`, a callback for Lightning's Trainer; see `commons.integrations.lightning`."""

from commons.integrations.lightning import BalancedBatches

__all__ = ["BalancedBatches"]
