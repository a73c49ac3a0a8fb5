"""Ranks compare the plans of their samplers before training: a rank with another plan would read rows of the others."""

from __future__ import annotations

from collections.abc import Callable

from commons.datasets.samplers.planned import PlannedSampler
from commons.distributed.channel.agree import ControlChannel
from commons.distributed.errors import capture_error
from commons.distributed.options import ShufflerOptions


def require_one_plan(call: str, check: Callable[[], PlannedSampler]) -> None:
    """Compare the samplers that `check` returns, on all ranks; `call` names the caller in messages.

    Raises:
        ValueError: samplers of different workloads, seeds or other settings.
        Exception: an error of `check` on any rank, raised on all.
    """
    sampler, error = capture_error(check)
    plan = None if sampler is None else {name: value for name, value in sampler.identity().items() if name != "rank"}
    channel = ControlChannel(None, ShufflerOptions.timeout, moves_rows=False)
    try:
        channel.agree(call, plan, error)
    finally:
        channel.close()
