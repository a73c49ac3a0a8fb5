"""The cases of `interpreted/`, in a process of their own: the interpreter is chosen before Triton is imported."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

HAS_TRITON = importlib.util.find_spec("triton") is not None
FOLDER = Path(__file__).parent / "interpreted"


@pytest.mark.skipif(not HAS_TRITON, reason="needs triton, which requirements/dev.txt has for Linux")
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_kernels_compute_what_the_reference_does():
    # Two processes: it is the last test to end, and takes ten minutes and more in one.
    command = [sys.executable, "-m", "pytest", "-x", "-n", "2", "-p", "no:cacheprovider", str(FOLDER)]
    run = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    assert " passed" in run.stdout and "skipped" not in run.stdout
