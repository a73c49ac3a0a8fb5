"""Data: batches, random data, public data sets with their preprocessors, samplers, and the loader."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from commons.datasets.samplers.balanced import BalancedBatchSampler
    from commons.datasets.samplers.budget import BudgetBatchSampler

__all__ = ["BalancedBatchSampler", "BudgetBatchSampler"]

_MODULE_OF = {"BalancedBatchSampler": "samplers.balanced", "BudgetBatchSampler": "samplers.budget"}


if not TYPE_CHECKING:  # as in evenrank/__init__.py

    def __getattr__(name: str) -> Any:
        """Import a sampler at its first use: samplers import torch, which preprocessing does not need."""
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
