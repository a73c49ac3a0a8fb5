"""`build_dp_schedule`, for slime; see `commons.integrations.slime`."""

from commons.integrations.slime import build_dp_schedule

__all__ = ["build_dp_schedule"]
