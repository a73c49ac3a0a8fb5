"""Configs and calibrations that are damaged in any way: they load, or a user's mistake is named in one line."""

import json
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from commons.perf_model.calibration import CalibratedTask, load_calibration
from commons.trainer.config.files import tomllib
from commons.trainer.config.load import load_config_file
from hstu.train_config import TrainConfig
from tests.helpers.datasets.fuzzing import ODD_PLACES, damaged_json, damaged_text, fuzzed, odd_place, require_answer
from tests.helpers.models.calibrations import TASK, make_calibration

TOML = Path("hstu/configs/parquet.toml").read_text()
CONTENT = tomllib.loads(TOML)


def load(path):
    return lambda: load_config_file(TrainConfig, path)


def calibrate(path):
    return lambda: CalibratedTask(TASK, load_calibration(path)).get_workloads(5)


@fuzzed(40)
@given(random=st.randoms(use_true_random=False))
def test_a_damaged_calibration(tmp_path, random):
    path = tmp_path / "a.toml"
    make_calibration().save(path)
    path.write_bytes(damaged_text(path.read_text(), random))
    require_answer(calibrate(path))


@pytest.mark.parametrize("suffix", ["toml", "yaml", "json"])
@fuzzed(35)
@given(random=st.randoms(use_true_random=False))
def test_a_damaged_file(tmp_path, suffix, random):
    path = tmp_path / f"a.{suffix}"
    if suffix != "toml" and random.random() < 0.5:  # whole, but for what it says
        damaged = damaged_json(CONTENT, random)
        text = json.dumps(damaged) if suffix == "json" else yaml.safe_dump(damaged, allow_unicode=True)
        path.write_text(text, "utf-8", errors="surrogatepass")
    else:
        whole = {"toml": TOML, "yaml": yaml.safe_dump(CONTENT), "json": json.dumps(CONTENT, indent=1)}
        path.write_bytes(damaged_text(whole[suffix], random))
    require_answer(load(path))


@pytest.mark.parametrize(("use", "suffix"), [(load, "toml"), (load, "yaml"), (load, "json"), (calibrate, "toml")])
@pytest.mark.parametrize("kind", ODD_PLACES)
def test_no_file(tmp_path, kind, use, suffix):
    assert require_answer(use(odd_place(tmp_path / f"a.{suffix}", kind))) is not None
