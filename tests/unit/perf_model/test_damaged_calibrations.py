"""Calibrations that are damaged in any way: they load, or are answered with a user's mistake in one line."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commons.perf_model.calibration import CalibratedTask, load_calibration
from tests.helpers.datasets.fuzzing import ODD_PLACES, damaged_text, fuzzed, odd_place, require_answer
from tests.helpers.models.calibrations import TASK, make_calibration


def use(path):
    return lambda: CalibratedTask(TASK, load_calibration(path)).get_workloads(5)


@fuzzed(40)
@given(random=st.randoms(use_true_random=False))
def test_toml(tmp_path, random):
    make_calibration().save(tmp_path / "whole.toml")
    path = tmp_path / "damaged.toml"
    path.write_bytes(damaged_text((tmp_path / "whole.toml").read_text(), random))
    require_answer(use(path))


@pytest.mark.parametrize("kind", ODD_PLACES)
def test_no_file(tmp_path, kind):
    assert require_answer(use(odd_place(tmp_path / "a.toml", kind))) is not None


def test_deeper_than_any_calibration(tmp_path):
    path = tmp_path / "a.toml"
    path.write_text("x = " + "[" * 50_000)
    assert "is no TOML" in require_answer(use(path))
