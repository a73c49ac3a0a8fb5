"""A trace of a window of steps, for Perfetto or chrome://tracing, with the loads of the ranks as counter tracks."""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from commons.distributed.spans import RecordedSpan, SpanRecorder
from commons.distributed.stats import ShuffleStats
from commons.run_log.files import write_whole
from commons.trainer.config.args import TrainerArgs
from commons.trainer.observe.sinks import by_rank

logger = logging.getLogger(__name__)

# A time in nanoseconds since 1970, and the values of every counter track from then on.
_Counters = tuple[int, Mapping[str, Mapping[str, float]]]
_RECORDING = (torch.profiler.ProfilerAction.RECORD, torch.profiler.ProfilerAction.RECORD_AND_SAVE)


class StepProfiler:
    """Records steps `[profile_step_start, profile_step_end)` if `profile` is set, else does nothing.

    Rank r writes its trace to `<run_dir>/trace-rank<r>.json`: torch's events of the main thread and the device, the
    shuffle stage's spans of other threads, and the loads of the ranks before and after balancing as counter tracks.
    `first_step` is the number of steps before a resumed run; a run that is resumed within these steps writes their rest
    to `trace-rank<r>-from<first_step>.json`, beside the first part.
    """

    def __init__(self, args: TrainerArgs, device: torch.device, first_step: int = 0) -> None:
        self._window = (args.profile_step_start, args.profile_step_end)
        part = f"-from{first_step}" if args.profile_step_start < first_step < args.profile_step_end else ""
        self._path = Path(args.run_dir) / f"trace-rank{dist.get_rank()}{part}.json"
        self._profile: torch.profiler.profile | None = None
        # A run resumed after these steps may have their trace, or a part of it, from before.
        traces = self._path.parent.glob(f"trace-rank{dist.get_rank()}[.-]*")
        self._is_written = not args.profile or (first_step >= args.profile_step_end and any(traces))
        self._counters: list[_Counters] = []
        self._recorder = SpanRecorder()
        self._step_began = time.time_ns()
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
            self._record_other_threads()

    def step(self, stats: ShuffleStats | None) -> None:
        """End a step; `stats` describe the shuffle of its batch, None without shuffle."""
        if self._profile is None:
            return
        if stats is not None and self._profile.current_action in _RECORDING:
            tracks = {
                "evenrank/load before": _series(stats.loads_before),
                "evenrank/load after": _series(stats.loads_after),
                "evenrank/imbalance": {"before": stats.imbalance_before, "after": stats.imbalance_after},
            }
            self._counters.append((self._step_began, tracks))
        self._profile.step()
        self._record_other_threads()
        self._step_began = time.time_ns()

    def close(self) -> None:
        """Write the trace that is being recorded; log a warning if no step was recorded."""
        if self._profile is not None:
            self._profile.stop()
        if not self._is_written:
            first, end = self._window
            logger.warning(
                "no trace was recorded: this run has trained none of the steps from %d to %d; set "
                "profile_step_start and profile_step_end to steps of this run, counted from 0",
                first,
                end - 1,
            )

    def _record_other_threads(self) -> None:
        """Record the spans of other threads in the steps that torch records."""
        if self._profile is not None and self._profile.current_action in _RECORDING:
            self._recorder.start()

    def _write(self, profile: torch.profiler.profile) -> None:
        self._recorder.stop()
        self._is_written = True
        try:
            self._write_trace(profile)
        except OSError as error:
            logger.warning("the trace %s cannot be written: %s; training continues", self._path, error)

    def _write_trace(self, profile: torch.profiler.profile) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        profile.export_chrome_trace(str(self._path))
        text = self._path.read_text(encoding="utf-8")
        begin, base = re.search(r'"traceEvents"\s*:\s*\[', text), re.search(r'"baseTimeNanoseconds"\s*:\s*(\d+)', text)
        added = _events(self._counters, self._recorder.spans, 0 if base is None else int(base[1]))
        if begin is not None and added:
            events = "".join(f"{json.dumps(each)},\n" for each in added)
            write_whole(self._path, f"{text[: begin.end()]}{events}{text[begin.end() :]}")


def _events(counters: Sequence[_Counters], spans: Sequence[RecordedSpan], zero: int) -> list[dict[str, Any]]:
    """Trace events for the counters, and for spans of threads that torch did not record.

    `zero` is the trace's time 0, in nanoseconds since 1970.
    """
    pid = os.getpid()
    events: list[dict[str, Any]] = [
        {"ph": "C", "name": name, "pid": pid, "ts": (since - zero) / 1e3, "args": dict(values)}
        for since, tracks in counters
        for name, values in tracks.items()
    ]
    for thread, name in {each.thread: each.thread_name for each in spans}.items():
        events.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": thread, "args": {"name": name}})
    for each in spans:
        times = {"ts": (each.began - zero) / 1e3, "dur": (each.ended - each.began) / 1e3}
        events.append({"ph": "X", "cat": "user_annotation", "name": each.name, "pid": pid, "tid": each.thread, **times})
    return events


def _series(loads: Sequence[int]) -> dict[str, float]:
    return {f"rank {name}" if name.isdigit() else name: load for name, load in by_rank(loads).items()}
