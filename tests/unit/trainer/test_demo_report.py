"""The options and the data of a demo; that it trains both ways is in tests/distributed."""

from __future__ import annotations

import pytest

from commons.datasets.public.movielens import preprocess_movielens
from commons.trainer.demo import DemoOptions, choose_ranks, prepare_data
from tests.helpers.datasets.movielens import write_zip


def test_options():
    assert DemoOptions(quick=True).steps < DemoOptions().steps
    with pytest.raises(ValueError, match="batch_size is 0"):
        DemoOptions(batch_size=0)
    assert choose_ranks("cpu") == (2, "device cpu: two ranks on the CPU (gloo, one thread each)")


def test_the_demo_replaces_no_data_of_ones_own(tmp_path):
    options = DemoOptions(run_dir=tmp_path)
    options.data_dir.mkdir()
    preprocess_movielens(write_zip(tmp_path / "ml-1m.zip"), options.data_dir)
    before = {path: path.stat().st_mtime_ns for path in options.data_dir.rglob("*")}
    with pytest.raises(FileExistsError, match="holds data that were not generated; .*: choose another --run-dir"):
        prepare_data(options)
    assert {path: path.stat().st_mtime_ns for path in options.data_dir.rglob("*")} == before
