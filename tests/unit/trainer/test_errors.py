"""What a run says of a folder that it cannot write."""

from __future__ import annotations

import pytest

from commons.trainer.ranks.errors import log_to_file


def test_a_run_dir_that_cannot_be_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"run_dir is '.*/file/run', which cannot be written \(Not a directory\)"):
        log_to_file(tmp_path / "file" / "run")
