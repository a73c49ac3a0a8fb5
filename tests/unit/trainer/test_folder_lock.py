"""Two processes and one folder of a run."""

import errno
import fcntl
import subprocess
import sys
from unittest import mock

import pytest

from commons.trainer.folder_lock import lock_folder, unlock_folder

LOCK = (
    "import sys, pathlib; from commons.trainer.folder_lock import lock_folder; lock_folder(pathlib.Path(sys.argv[1]))"
)


def locks(folder, *, then="print('locked')"):
    """Another process that locks a folder; its output."""
    return subprocess.Popen(
        [sys.executable, "-c", f"{LOCK}; {then}", str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_a_lock_ends_with_its_process_and_not_before(tmp_path):
    lock_folder(tmp_path / "a")
    lock_folder(tmp_path / "a")  # a second run of this process
    output, error = locks(tmp_path / "a").communicate(timeout=120)
    assert output == "" and "another run is writing to run_dir" in error
    unlock_folder(tmp_path / "a")
    holder = locks(tmp_path / "a", then="print('locked', flush=True); import time; time.sleep(600)")
    assert holder.stdout.readline() == "locked\n"
    with pytest.raises(ValueError, match="another run is writing"):
        lock_folder(tmp_path / "a")
    holder.kill()
    holder.communicate()
    lock_folder(tmp_path / "a")
    unlock_folder(tmp_path / "a")


def test_without_locks_nothing_is_refused(tmp_path):
    with mock.patch.object(fcntl, "lockf", side_effect=OSError(errno.ENOLCK, "No locks available")):
        lock_folder(tmp_path)
    unlock_folder(tmp_path)
    (tmp_path / "file").touch()
    lock_folder(tmp_path / "file" / "run")  # the next write raises the error
