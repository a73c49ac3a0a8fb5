"""`evenrank calibrate` and `evenrank simulate`: what they write, and what they say of a mistake."""

from __future__ import annotations

import pytest
import torch

from commons.cli.main import main
from commons.perf_model import measurement
from commons.perf_model.calibration import load_calibration
from tests.helpers.jobs.training_configs import CONFIG


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(CONFIG.format(candidates=3))
    return path


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def even_clock(monkeypatch):
    """Steps are run, but take the time that their size says: a busy machine must not decide a test."""

    def time_step(target, batch):
        target.train_step(batch)
        rows, tokens, pairs = measurement.batch_size_of(target, batch)
        return 1.0 + 0.1 * rows + 0.01 * tokens + 1e-4 * pairs

    monkeypatch.setattr(measurement, "time_step", time_step)


def test_calibrate_then_simulate(tmp_path, capsys, config, even_clock):
    output, figure = tmp_path / "out" / "c.toml", tmp_path / "out" / "gain.png"
    argv = ["calibrate", "--config", str(config), "--output", str(output), "--num-mixes", "24", "--repeats", "1"]
    assert main(argv) == 0, capsys.readouterr().err
    calibration = load_calibration(output)
    assert calibration.model["hidden_size"] == 32 and calibration.device.threads == 1
    assert calibration.quality.num_measurements == 24
    assert calibration.coefficients == pytest.approx((1.0, 0.1, 0.01, 1e-4))
    assert "held-out error" in capsys.readouterr().out
    argv = ["simulate", "--config", str(config), "--ranks", "2", "4", "--steps", "3"]
    assert main([*argv, "--shuffler.calibration", str(output), "--figure", str(figure)]) == 0
    assert "ms" in capsys.readouterr().out and figure.stat().st_size > 5000
    assert main(argv) == 0
    assert "speed-up" in capsys.readouterr().out


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--output", "c.json"], "let it end in .toml"),
        (["--model", "no_such_package"], "there is no module no_such_package.recipe"),
        (["--model", "commons"], "there is no module commons.recipe"),
        (["--config", "none.toml"], "none.toml does not exist"),
        (["--num-mixes", "3"], "there are 3 measurements"),
        (["--repeats", "0"], "repeats is 0"),
        (["--threads", "0"], "threads is 0"),
        (["--seed", "-1"], "seed is -1"),
        (["--model", "../x"], "it names an importable package"),
        (["--model", ""], "it names an importable package"),
        (["--output", "/dev/null/c.toml"], "/dev/null"),
    ]
    + ([] if torch.cuda.is_available() else [(["--device", "cuda"], "no GPU that torch can use")]),
)
def test_calibrate_says_what_is_wrong(tmp_path, capsys, config, flags, message):
    assert main(["calibrate", "--config", str(config), "--output", str(tmp_path / "c.toml"), *flags]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--shuffler.calibration", "none.toml"], "none.toml does not exist"),
        (["--shuffler.min-gain", "3"], "min_gain is 3"),
        (["--shuffler.mode", "observe"], "shuffler.mode is 'observe'"),
    ],
)
def test_simulate_says_what_is_wrong(capsys, config, flags, message):
    assert main(["simulate", "--config", str(config), "--ranks", "2", "--steps", "1", *flags]) == 2
    assert message in capsys.readouterr().err
