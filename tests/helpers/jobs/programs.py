"""Programs of this repository, run as a user runs them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[3]
# Starts two ranks of a module or a script, the arguments that follow.
TWO_RANKS = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")


def run_program(
    *command: object, timeout: float = 120.0, cwd: Path = ROOT, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end; it has its status and what it has printed. `env` is added to the environment."""
    return subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        env=os.environ | (env or {}),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
