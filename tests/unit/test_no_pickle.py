"""The packages run no code that lies in a file or comes from another rank: no pickle, no eval, no unsafe reader."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("commons", "evenrank", "hstu", "sid_gr")
MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
CALLS = {
    "torch.save",
    "pandas.read_pickle",
    "os.system",
    "os.popen",
    "eval",
    "exec",
    "yaml.load",
    "yaml.unsafe_load",
    "yaml.full_load",
}
# Of torch.distributed, which pickles them: all_gather_object, broadcast_object_list and the like.
OBJECTS = re.compile(r".*(gather|broadcast|scatter|send|recv)_object(_list)?")


def wrong_in(text):
    """Lines of a module that unpickle or execute, and what they do."""
    names, wrong = {}, []
    for node in ast.walk(tree := ast.parse(text)):
        if isinstance(node, ast.Import):
            for each in node.names:
                names[each.asname or each.name.split(".")[0]] = each.name if each.asname else each.name.split(".")[0]
            wrong += [(node.lineno, each.name) for each in node.names if each.name.split(".")[0] in MODULES]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
            wrong += [(node.lineno, node.module)] if node.module.split(".")[0] in MODULES else []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        head, *rest = ast.unparse(node.func).split(".")
        called = ".".join([names.get(head, head), *rest])
        given = {each.arg: ast.unparse(each.value) for each in node.keywords}
        if (
            called in CALLS
            or (called == "torch.load" and given.get("weights_only") != "True")
            or (called == "numpy.load" and given.get("allow_pickle", "False") != "False")
            or OBJECTS.fullmatch(called)
            or given.get("shell", "False") != "False"
        ):
            wrong.append((node.lineno, called))
    return wrong


@pytest.mark.parametrize("package", PACKAGES)
def test_nothing_of_ours_does(package):
    files = sorted((ROOT / package).rglob("*.py"))
    assert files and [(str(file), *each) for file in files for each in wrong_in(file.read_text())] == []


WRONG = [
    "import pickle",
    "from pickle import loads",
    "import joblib.numpy_pickle as p",
    "import torch\ntorch.save(1, 2)",
    "import torch as t\nt.load(1)",
    "from torch import load\nload(1, weights_only=False)",
    "import numpy as np\nnp.load(1, allow_pickle=True)",
    "import yaml\nyaml.load(1, Loader=yaml.Loader)",
    "import yaml\nyaml.unsafe_load(1)",
    "import torch.distributed as dist\ndist.all_gather_object([], 1)",
    "import subprocess\nsubprocess.run('ls', shell=True)",
    "eval('1')",
    "exec('1')",
]
RIGHT = [
    "model.eval()",
    "import torch\ntorch.load(1, weights_only=True)",
    "import numpy as np\nnp.load(1, allow_pickle=False)\nnp.load(2)",
    "import yaml\nyaml.safe_load(1)",
    "import json\njson.loads('1')",
]


@pytest.mark.parametrize("line", WRONG + RIGHT)
def test_a_line_that_does_is_found_and_no_other(line):
    assert len(wrong_in(line)) == (line in WRONG)
