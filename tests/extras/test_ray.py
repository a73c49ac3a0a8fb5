"""Ray Train's workers train HSTU, in the process group that Ray makes."""

from __future__ import annotations

import json
import sys

import pytest

from tests.helpers.jobs.programs import run_program

pytestmark = [pytest.mark.extra("ray"), pytest.mark.timeout(620), pytest.mark.slow]


def example(*arguments):
    # Workers start within a minute on an idle machine.
    env = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_WORKER_REGISTER_TIMEOUT_SECONDS": "300"}
    return run_program(sys.executable, "examples/ray_train.py", *arguments, timeout=600, env=env)


def test_two_workers_train_balanced(tmp_path):
    done = example("--steps", "10", "--run-dir", tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "2 workers of Ray" in done.stdout and "imbalance" in done.stdout
    (line,) = [line for line in map(json.loads, (tmp_path / "log.jsonl").read_text().splitlines()) if "loss" in line]
    assert line["step"] == 10 and line["imbalance_after"] < 0.1 * line["imbalance_before"]
    assert json.loads((tmp_path / "config.json").read_text())["trainer"]["enable_balanced_shuffler"] is True


@pytest.mark.parametrize(
    ("arguments", "mistake"),
    [
        (("--num-workers", "0"), "num_workers is 0"),
        (("--address", "auto"), "address is 'auto', where no Ray cluster responds"),
        (("--use-gpu", "--num-workers", "1000"), "use_gpu is set for 1000 workers, this machine has "),
    ],
)
def test_what_cannot_start_is_one_line(arguments, mistake):
    done = example(*arguments)
    assert done.returncode == 2
    assert [mistake in line for line in done.stderr.splitlines() if "error: " in line] == [True], done.stderr[-3000:]
