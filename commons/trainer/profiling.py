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
    """

    def __init__(self, args: TrainerArgs, device: torch.device) -> None:
        self._window = (args.profile_step_start, args.profile_step_end) if args.profile else None
        self._path = Path(args.run_dir) / f"trace-rank{dist.get_rank()}.json"
        self._activities = [torch.profiler.ProfilerActivity.CPU]
        if device.type == "cuda":
            self._activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profile: torch.profiler.profile | None = None

    def step(self, num_steps: int) -> None:
        """Begin or end the trace as it is due after `num_steps` steps; called before the first one too."""
        if self._window is None:
            return
        if self._profile is None and self._window[0] <= num_steps < self._window[1]:
            self._profile = torch.profiler.profile(activities=self._activities)
            self._profile.start()
        elif self._profile is not None:
            if num_steps < self._window[1]:
                self._profile.step()
            else:
                self.close()

    def close(self) -> None:
        """End a trace that is being recorded, and write it; a warning if none ever was."""
        if self._profile is None:
            if self._window is not None:
                first, end = self._window
                logger.warning(
                    "no trace was recorded: this run has trained none of the steps from %d to %d; set "
                    "profile_step_start and profile_step_end to some of its own, counted from 0",
                    first,
                    end - 1,
                )
            return
        self._profile.stop()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._profile.export_chrome_trace(str(self._path))
        self._profile, self._window = None, None
