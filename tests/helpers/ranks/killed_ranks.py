"""hstu.train with a fault: `python -m tests.helpers.ranks.killed_ranks STEP VICTIM FLAGS...` under torchrun.

In the first attempt of a job one rank ends with SIGKILL after STEP steps: the rank numbered VICTIM, or with `host` that
of this agent and the agent with it, as where a host is lost; with `nobody` none does.
"""

from __future__ import annotations

import os
import signal
import sys

import torch.distributed as dist

from commons.trainer.loop import TrainingLoop
from commons.trainer.observe.meter import StepOutput
from commons.trainer.ranks.errors import run_main
from hstu.train import main


def _kill(victim: str) -> None:
    if victim == "host":
        os.kill(os.getppid(), signal.SIGKILL)
    if victim in ("host", str(dist.get_rank())):
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    step, victim = int(sys.argv[1]), sys.argv[2]
    del sys.argv[1:3]
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        after_step = TrainingLoop._after_step

        def after_step_or_never(self: TrainingLoop, output: StepOutput) -> None:
            after_step(self, output)
            if self._step == step:
                _kill(victim)

        TrainingLoop._after_step = after_step_or_never  # type: ignore[method-assign]
    run_main(main)
