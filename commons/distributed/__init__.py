"""Moving rows between ranks: the shuffler, its exchange, and the loss of the global mean."""

from commons.distributed.loss import global_mean_loss, mean_over_ranks

__all__ = ["global_mean_loss", "mean_over_ranks"]
