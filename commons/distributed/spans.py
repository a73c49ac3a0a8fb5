"""Names of the stage's parts in a trace: evenrank/workload, gather, plan, wait, exchange and select.

docs/observe.md says on which thread each of them runs, and how to record them.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch._C._profiler import _RecordFunctionFast
from torch.autograd import profiler

Part = Literal["workload", "gather", "plan", "wait", "exchange", "select"]


def span(part: Part) -> Any:
    """A context manager: what is done in it is named in the trace of whatever profiler runs.

    While one of this process' profilers does, it is `record_function`, whose name is shown beside the GPU's work too.
    Otherwise it takes half a microsecond, not ten, keeps the interpreter lock, and serves profilers from outside.

    >>> with span("plan"):
    ...     pass
    """
    name = f"evenrank/{part}"
    if profiler._is_profiler_enabled:
        return torch.profiler.record_function(name)
    return _RecordFunctionFast(name)
