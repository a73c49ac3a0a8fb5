"""The packages run no code that lies in a file or comes from another rank: `make lint` refuses what would.

By ruff's rules on security, and by the names that pyproject.toml bans.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.jobs.programs import ROOT

WRONG = [
    "import pickle",
    "from pickle import loads",
    "import joblib.numpy_pickle as p",
    "import torch\ntorch.save(1, 2)",
    "import torch as t\nt.load(1)",
    "from torch import load\nload(1, weights_only=False)",
    "import yaml\nyaml.unsafe_load(1)",
    "import torch.distributed as dist\ndist.all_gather_object([], 1)",
    "import subprocess\nsubprocess.run('ls', shell=True)",
    "import os\nos.system('ls')",
    "eval('1')",
    "exec('1')",
]
RIGHT = ["model.eval()", "import numpy as np\nnp.load(1, allow_pickle=False)", "import json\njson.loads('1')"]


@pytest.mark.parametrize("text", WRONG + RIGHT)
def test_lint_refuses_what_unpickles_or_executes_and_nothing_else(text):
    ruff = [Path(sys.executable).parent / "ruff", "check", "--select", "S,TID251", "--stdin-filename", "commons/any.py"]
    done = subprocess.run([*ruff, "-"], input=text, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == (text in WRONG), done.stdout + done.stderr


@pytest.mark.parametrize("package", ["commons", "evenrank", "hstu", "sid_gr"])
def test_arrays_are_read_without_objects(package):
    """numpy's default; no linter has a word on it."""
    for file in (ROOT / package).rglob("*.py"):
        assert "allow_pickle" not in file.read_text().replace("allow_pickle=False", ""), file
