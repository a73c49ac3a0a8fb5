"""The allocators in the planner's native core, where it has been built: the same groups as the reference."""

from __future__ import annotations

import logging
from functools import cache
from typing import Protocol

from commons.micro_batching import reference
from commons.micro_batching.request import PackRequest
from commons.perf_model.partitioner.native_core import native_core

logger = logging.getLogger(__name__)

# Raised, here and in native/packing.hpp of the planner, whenever the same request gives another packing: ranks that
# agree on a number of groups must also agree on what an algorithm does.
PACKINGS = 1


class Core(Protocol):
    """What turns requests into groups: the native core or `reference`."""

    def pack(self, request: PackRequest) -> list[list[int]] | None:
        """Pack."""


class NativePacker:
    """The compiled function behind the interface of `reference`.

    Raises:
        ImportError: the core was built from sources that packed otherwise.

    """

    def __init__(self) -> None:
        from commons.perf_model.partitioner import _native

        built_for = getattr(_native, "PACKINGS", 0)
        if built_for != PACKINGS:
            raise ImportError(f"it was built for packings {built_for}, the sources make packings {PACKINGS}")
        self._pack = _native.pack

    def pack(self, request: PackRequest) -> list[list[int]] | None:
        """Pack."""
        return self._pack(
            request.values,
            request.capacity,
            request.algorithm,
            request.min_groups,
            request.divisor,
            request.equal_size,
        )


@cache
def native_packer() -> NativePacker | None:
    """The native core, or None where it has not been built or, said once, cannot pack."""
    if native_core() is None:  # which has said so
        return None
    try:
        return NativePacker()
    except ImportError as error:
        logger.warning(
            "the native core cannot pack micro-batches (%s): groups are the same, but take longer; install evenrank "
            "again where there is a C++ compiler",
            error,
        )
        return None


def core() -> Core:
    """What packs: the native core where it is there, else the reference."""
    return native_packer() or reference
