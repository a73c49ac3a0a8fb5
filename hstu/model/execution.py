"""The choice of how layers are computed, made before the first step and equal on all ranks.

For every kind of GPU, the first rank measures the block sizes of the kernels, and compares the kernels with PyTorch's
attention. Every rank then tries the kernels and torch.compile; each is used if it works on all ranks.
"""

from __future__ import annotations

import functools
import logging
import platform
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from commons.trainer.ranks.collectives import gather_values
from hstu.model.config import COMPUTE_DTYPES, HSTUConfig
from hstu.model.triton_agreement import disagreement, error_in_words, slowness
from hstu.model.triton_blocks import Blocks
from hstu.model.triton_launch import LayerKind, choose_blocks, use_blocks, uses_triton, why_not
from hstu.model.triton_plan import compiled_group_size, launched_window

logger = logging.getLogger(__name__)


class Execution(NamedTuple):
    """How the layers of a model are computed."""

    uses_triton: bool  # whether the Triton kernels compute the attention
    compiles: bool  # whether the rest of a layer is compiled with torch.compile


# Choices of this process, by config, device and dtype of the queries.
_CHOSEN: dict[tuple[HSTUConfig, torch.device, torch.dtype], Execution] = {}


def execution_of(config: HSTUConfig, device: torch.device, dtype: torch.dtype) -> Execution:
    """The earlier choice of `choose_execution` with all ranks; if there is none, a choice for this rank only."""
    chosen = _CHOSEN.get((config, device, dtype))
    return choose_execution(config, device, dtype, alone=True) if chosen is None else chosen


def choose_execution(
    config: HSTUConfig,
    device: torch.device,
    dtype: torch.dtype | None = None,
    *,
    alone: bool = False,
) -> Execution:
    """Choose how layers are computed; collective. If a rank lacks a capability, no rank uses it, with a warning.

    If the kernels may be used, they are compiled and measured, which takes about a minute the first time.

    Args:
        config: config of the layers, equal on all ranks.
        device: device of this rank.
        dtype: dtype of the queries; None for that of `compute_dtype`.
        alone: choose only for this process, without collectives.

    Raises:
        ValueError: `kernel_backend` is "triton" and a rank cannot use it; the error, raised on all ranks, names the
            node.
    """
    if device.type == "cuda" and device.index is None and torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    dtype = dtype or COMPUTE_DTYPES[config.execution.compute_dtype]
    ranks, settings = _Ranks(device, alone=alone or not dist.is_initialized()), config.execution
    compiles = device.type == "cuda" if settings.compile is None else settings.compile
    if device.type == "cuda" and not torch.cuda.is_available():  # fake tensors, on which no kernel runs
        chosen = Execution(uses_triton(settings.kernel_backend, device, dtype, config.kv_channels), compiles)
    else:
        chosen = Execution(_chooses_triton(config, dtype, ranks), compiles and _can_compile(ranks))
        if device.type == "cuda" and dtype == torch.float32:
            ranks.warn(
                "compute_dtype is 'fp32', the default; on a GPU 'bf16' is several times as fast: set compute_dtype"
            )
    _CHOSEN[config, device, dtype] = chosen
    return chosen


class _Ranks:
    """This rank's communication with the ranks that choose together."""

    def __init__(self, device: torch.device, *, alone: bool) -> None:
        self.device, self._alone = device, alone
        self.number = 0 if alone else dist.get_rank()

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks; a value must be JSON-serialisable."""
        return [value] if self._alone else gather_values(value, self.device)

    def first_problem(self, problem: str | None) -> str | None:
        """The first rank's problem, with its node; None if no rank has a problem."""
        problems = enumerate(self.gather([platform.node(), problem]))
        return next((f"on node {node} (rank {rank}) {why}" for rank, (node, why) in problems if why is not None), None)

    def warn(self, message: str) -> None:
        """Log a warning on the first rank, once per process."""
        if self.number == 0:
            _warn_once(message)


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning(message)


def _chooses_triton(config: HSTUConfig, dtype: torch.dtype, ranks: _Ranks) -> bool:
    backend, kind = config.execution.kernel_backend, _kind_of(config, dtype)
    if backend == "pytorch" or ranks.device.type != "cuda":
        return uses_triton(backend, ranks.device, dtype, kind.head_dim)
    reason = ranks.first_problem(_triton_problem(ranks, kind, compares=backend == "auto"))
    if reason is not None and backend == "triton":
        raise ValueError(f"kernel_backend is 'triton' and {reason}; choose 'pytorch'")
    if reason is not None:
        ranks.warn(f"PyTorch computes the attention: Triton was tried, and {reason}")
    return reason is None


def _kind_of(config: HSTUConfig, dtype: torch.dtype) -> LayerKind:
    return LayerKind(
        dtype,
        config.kv_channels,
        config.is_causal,
        config.contextual_mask and config.is_causal,
        compiled_group_size(config.target_group_size, is_causal=config.is_causal),
        config.position_bias != "none",
        config.time_bias,
        launched_window(config.max_attn_len),
    )


def _triton_problem(ranks: _Ranks, kind: LayerKind, *, compares: bool) -> str | None:
    """The reason not to use the kernels for these layers on this rank; None if there is none."""
    kinds = ranks.gather(_kind_of_gpu(ranks.device))
    first = kinds.index(kinds[ranks.number])
    measured = ranks.gather(_measure(ranks.device, kind, compares) if first == ranks.number else None)[first]
    if isinstance(measured, str):
        return measured
    use_blocks(ranks.device, kind, {kernel: Blocks(*numbers) for kernel, numbers in measured.items()})
    return disagreement(ranks.device, kind)


def _kind_of_gpu(device: torch.device) -> list[Any]:
    found: Any = torch.cuda.get_device_properties(device)
    return [found.name, found.major, found.minor, found.multi_processor_count, found.shared_memory_per_block_optin]


def _measure(device: torch.device, kind: LayerKind, compares: bool) -> dict[str, Blocks] | str:
    """The fastest blocks of the kernels, or the reason not to use the kernels."""
    if (reason := why_not(device, kind.dtype, kind.head_dim)) is not None:
        return reason.rpartition(":")[0]
    try:
        with torch.cuda.device(device):
            blocks = choose_blocks(device, kind)
            return (slowness(device, kind) if compares else None) or blocks
    except Exception as error:  # for example from Triton's compiler, or from the C compiler that Triton runs
        return f"its kernels cannot run ({error_in_words(error)})"


def _can_compile(ranks: _Ranks) -> bool:
    """Whether torch.compile works on all ranks; if not, this is logged."""
    reason = ranks.first_problem(compile_problem(ranks.device))
    if reason is not None:
        ranks.warn(
            f"layers are not compiled: torch.compile was tried, and {reason}; install a C++ compiler and Python's "
            "headers on that node, or set compile to False"
        )
    return reason is None


@functools.cache
def compile_problem(device: torch.device) -> str | None:
    """The reason why torch.compile does not work on this node, tested without its disk cache; None if it works."""
    from torch._inductor import config
    from torch._inductor.utils import fresh_cache

    try:
        with fresh_cache(), config.patch(compile_threads=1):
            torch.compile(lambda values: values.sigmoid() * values)(torch.zeros(8, device=device))
    except Exception as error:  # for example because a compiler is missing or broken
        return f"it failed ({error_in_words(error)})"
    return None
