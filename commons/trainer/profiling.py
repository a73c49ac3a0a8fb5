"""A trace of a window of steps, for chrome://tracing or Perfetto."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
import torch.distributed as dist

from commons.trainer.args import TrainerArgs

logger = logging.getLogger(__name__)


class StepProfiler:
    """Records steps `[profile_step_start, profile_step_end)` if `profile` is set, else does nothing.

    The trace of rank r is written to `<run_dir>/trace-rank<r>.json`.

    Args:
        args: settings.
        device: of this rank.
        first_step: steps that a resumed run has behind it.
    """

    def __init__(self, args: TrainerArgs, device: torch.device, first_step: int = 0) -> None:
        self._window = (args.profile_step_start, args.profile_step_end)
        self._path = Path(args.run_dir) / f"trace-rank{dist.get_rank()}.json"
        self._profile: torch.profiler.profile | None = None
        self._is_written = not args.profile
        before = max(0, args.profile_step_start - first_step)
        num_steps = args.profile_step_end - first_step - before
        if args.profile and num_steps > 0:
            activities = [torch.profiler.ProfilerActivity.CPU]
            if device.type == "cuda":
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            warmup = min(1, before)
            schedule = torch.profiler.schedule(
                skip_first=before - warmup, wait=0, warmup=warmup, active=num_steps, repeat=1
            )
            self._profile = torch.profiler.profile(activities=activities, schedule=schedule, on_trace_ready=self._write)
            self._profile.start()

    def step(self) -> None:
        """Say that a step has ended."""
        if self._profile is not None:
            self._profile.step()

    def close(self) -> None:
        """Write a trace that is being recorded; a warning if none ever was."""
        if self._profile is not None:
            self._profile.stop()
        if not self._is_written:
            first, end = self._window
            logger.warning(
                "no trace was recorded: this run has trained none of the steps from %d to %d; set "
                "profile_step_start and profile_step_end to some of its own, counted from 0",
                first,
                end - 1,
            )

    def _write(self, profile: torch.profiler.profile) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        profile.export_chrome_trace(str(self._path))
        self._is_written = True
