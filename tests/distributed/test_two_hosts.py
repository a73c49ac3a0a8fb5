"""Two hosts on one machine train alike, and each names the other's ranks when the link is cut; see the script."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest

from tests.helpers.jobs.programs import ROOT, run_program

SCRIPT = ("bash", "ci/test_two_hosts.sh")


@pytest.mark.slow
def test_two_hosts_train_alike_and_a_cut_link_is_told():
    job = subprocess.Popen(
        SCRIPT, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        said, errors = job.communicate(timeout=400)
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
    if job.returncode == 77:
        pytest.skip(said.strip())
    assert job.returncode == 0, said + errors
    assert "first host, after" in said and "second host, after" in said


@pytest.mark.parametrize("arguments", [("--timeout", "0"), ("--timeout",), ("--keep",), ("--hosts", "3")])
def test_mistakes_on_the_command_line_are_one_line(arguments):
    job = run_program(*SCRIPT, *arguments)
    assert job.returncode == 2 and not job.stdout
    assert job.stderr.startswith("error: ") and job.stderr.count("\n") == 1


def test_the_help_says_what_happens_where_namespaces_cannot_be_made():
    job = run_program(*SCRIPT, "--help")
    assert job.returncode == 0 and "--timeout 30" in job.stdout and "77" in job.stdout


def test_without_namespaces_it_is_skipped(tmp_path):
    """As a user who may not make them."""
    for tool in ("bash", "dirname", "id", "sed"):
        (tmp_path / tool).symlink_to(subprocess.check_output(["which", tool], text=True).strip())
    (tmp_path / "python3").symlink_to("/bin/true")
    job = subprocess.run(
        [tmp_path / "bash", "ci/test_two_hosts.sh"],
        cwd=ROOT,
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert job.returncode == 77 and job.stdout.startswith("skipped: there is no ") and not job.stderr
