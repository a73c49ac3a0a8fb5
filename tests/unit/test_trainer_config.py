"""Config files and flags: what they give, and what they say about a mistake."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from commons.datasets.random_distribution import LengthDistribution
from commons.trainer.config import find_config, load_config, load_config_file
from commons.trainer.optimizers import build_optimizer
from hstu.train_config import TrainConfig

ROOT = Path(__file__).parents[2]
TOML = """
[trainer]
train_batch_size = 4
eval_batch_size = 8
[trainer.shuffler]
slack = 0.5
[dataset]
dataset_name = "random"
max_history_seqlen = 10
[model]
prediction_head_arch = [8, 1]
[optimizer]
dense_lr = 1
"""
YAML = """
trainer: {train_batch_size: 4, eval_batch_size: 8, shuffler: {slack: 0.5}}
dataset: {dataset_name: random, max_history_seqlen: 10}
model: {prediction_head_arch: [8, 1]}
optimizer: {dense_lr: 1}
"""


def write(folder, text, name="run.toml"):
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_toml_and_yaml_give_the_same(tmp_path):
    config = load_config_file(TrainConfig, write(tmp_path, TOML))
    assert config == load_config_file(TrainConfig, write(tmp_path, YAML, "run.yaml"))
    assert (config.trainer.train_batch_size, config.trainer.shuffler.slack) == (4, 0.5)
    assert config.model.prediction_head_arch == (8, 1)
    assert config.optimizer.dense_optimizer == "adam"


@pytest.mark.parametrize("name", ["hstu/configs/random.toml", "sid_gr/configs/demo.toml"])
def test_a_config_of_an_installed_package_is_found_in_any_folder(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    assert find_config(name).read_bytes() == (ROOT / name).read_bytes()
    own = tmp_path / name
    own.parent.mkdir(parents=True)
    own.write_text(TOML)
    assert find_config(name) == Path(name)  # the user's own comes first
    assert load_config_file(TrainConfig, name).trainer.train_batch_size == 4


@pytest.mark.parametrize(
    "name",
    ["hstu/configs/none.toml", "no_such_package/run.toml", "__main__/run.toml", "../run.toml", "hstu", "json/a.py"],
)
def test_a_config_that_is_nowhere_is_named_as_given(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    assert find_config(name) == Path(name)


def test_flags_replace_values_of_the_file(tmp_path):
    path = write(tmp_path, TOML)
    flags = "--trainer.enable-balanced-shuffler --trainer.train-batch-size 16 --trainer.shuffler.ranks-per-node 8"
    config = load_config(TrainConfig, [*flags.split(), f"--config={path}", "--model.prediction-head-arch", "4", "1"])
    assert config.trainer.enable_balanced_shuffler and config.trainer.train_batch_size == 16
    assert (config.trainer.shuffler.slack, config.trainer.shuffler.ranks_per_node) == (0.5, 8)
    assert config.model.prediction_head_arch == (4, 1)
    assert config.trainer.eval_batch_size == 8


def test_flags_alone_are_enough():
    flags = "--trainer.train-batch-size 2 --trainer.eval-batch-size 2 --dataset.dataset-name random"
    config = load_config(TrainConfig, [*flags.split(), "--dataset.max-history-seqlen", "5"])
    assert config.dataset.max_history_seqlen == 5


@pytest.mark.parametrize("path", sorted((ROOT / "hstu/configs").glob("*.toml")), ids=lambda path: path.name)
def test_the_configs_that_come_along(path):
    assert isinstance(load_config_file(TrainConfig, path), TrainConfig)


def test_lengths_of_random_data_by_file_and_by_flag(tmp_path):
    path = ROOT / "hstu/configs/benchmark.toml"
    assert load_config_file(TrainConfig, path).dataset.length_distribution == LengthDistribution("zipf", alpha=1.2)
    flags = ["--config", str(path), "--dataset.length-distribution.alpha", "1.5"]
    config = load_config(TrainConfig, flags)
    assert config.dataset.length_distribution == LengthDistribution("zipf", alpha=1.5)
    with pytest.raises(ValueError, match=r"alpha is 1.5 and dist_type is 'normal', which has no alpha: remove it"):
        load_config(TrainConfig, [*flags, "--dataset.length-distribution.dist-type", "normal"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            TOML.replace("train_batch_size", "train_batch_sise"),
            r"run.toml: field trainer.train_batch_sise does not exist; trainer has train_batch_size, .*: "
            "write train_batch_size$",
        ),
        (TOML.replace("[model]", "[modl]"), "field modl does not exist; the config has trainer, .*: write model$"),
        (TOML.replace("slack", "zzz"), "field trainer.shuffler.zzz does not exist; trainer.shuffler has mode, "),
        (TOML.replace("= 4", '= "4"'), "run.toml: trainer.train_batch_size is '4'; it must be int: correct it"),
        (TOML.replace("= 4", "= 0"), "run.toml: train_batch_size is 0; it is an integer of at least 1: correct it"),
        (TOML.replace("eval_batch_size = 8", ""), "trainer.eval_batch_size is missing; it has no default: add it"),
        (TOML.replace("slack = 0.5", 'mode = "on"'), "trainer.shuffler.mode is 'on'; it must be .*'balance'"),
        ('shuffler_type = "hst"\n' + TOML, "shuffler_type is 'hst'; registered are .*hstu.*: choose one"),
        (TOML.replace("dense_lr = 1", "dense_lr = 0"), "dense_lr is 0; a learning rate is positive"),
        (
            TOML.replace("dense_lr = 1", "adam_betas = [0.9, 1.0]"),
            "adam_betas is .*; they are two numbers",
        ),
        (TOML.replace("dense_lr = 1", "adam_eps = 0.0"), "adam_eps is 0.0; it is a small positive number"),
        (TOML.replace("[dataset]", "[dataset"), "run.toml is no valid TOML .*line"),
    ],
)
def test_a_mistake_in_the_file_is_one_line(tmp_path, text, message):
    with pytest.raises(ValueError, match=message) as caught:
        load_config_file(TrainConfig, write(tmp_path, text))
    assert "\n" not in str(caught.value)


def test_a_file_that_is_none(tmp_path):
    with pytest.raises(FileNotFoundError, match="none.toml does not exist"):
        load_config_file(TrainConfig, tmp_path / "none.toml")
    with pytest.raises(ValueError, match=r"run.json ends in '.json'; a config is a .toml, .yaml or .yml file"):
        load_config_file(TrainConfig, write(tmp_path, "{}", "run.json"))
    with pytest.raises(ValueError, match=r"run.yaml is no valid YAML"):
        load_config_file(TrainConfig, write(tmp_path, "a: [", "run.yaml"))
    with pytest.raises(ValueError, match=r"run.yaml holds list; a config holds fields"):
        load_config_file(TrainConfig, write(tmp_path, "[1]", "run.yaml"))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--trainer.train-batch-size", "0"], "^train_batch_size is 0; it is an integer of at least 1: correct it"),
        (["--trainer.train-batch-sise", "4"], "^Unrecognized options: --trainer.train-batch-sise.*Perhaps you meant"),
        (["--trainer.train-batch-size", "many"], "--trainer.train-batch-size"),
        (["--config"], "--config is without a value"),
        (["--config", "a.toml", "--config", "b.toml"], "--config is given twice"),
    ],
)
def test_a_mistake_in_a_flag_is_one_line(tmp_path, flags, message):
    argv = flags if "--config" in flags else ["--config", str(write(tmp_path, TOML)), *flags]
    with pytest.raises(ValueError, match=message) as caught:
        load_config(TrainConfig, argv)
    assert "\n" not in str(caught.value)


def test_adam_is_as_the_config_says(tmp_path):
    config = load_config_file(TrainConfig, write(tmp_path, TOML + "adam_betas = [0.8, 0.98]\nadam_eps = 1e-6\n"))
    group = build_optimizer(torch.nn.Linear(2, 2), config.optimizer).param_groups[0]
    assert (group["lr"], group["betas"], group["eps"]) == (1, (0.8, 0.98), 1e-6)


def test_nothing_given_asks_for_a_config():
    with pytest.raises(ValueError, match=r"there is no --config FILE, and --trainer.train-batch-size, .* no default"):
        load_config(TrainConfig, [])


def test_semantic_ids_are_not_for_hstu():
    flags = ["--trainer.train-batch-size", "1", "--trainer.eval-batch-size", "1", "--dataset.max-history-seqlen", "5"]
    with pytest.raises(ValueError, match="dataset_name is 'sid-ml-1m', .*; HSTU trains on random, ml-1m, .* sid_gr"):
        load_config(TrainConfig, [*flags, "--dataset.dataset-name", "sid-ml-1m"])


def test_help_shows_flags_and_examples(capsys):
    with pytest.raises(SystemExit) as stop:
        load_config(TrainConfig, ["--help"], description="Train it.\n\nExample:\n  do this")
    assert stop.value.code in (0, None)
    shown = capsys.readouterr().out
    assert "--trainer.enable-balanced-shuffler" in shown and "do this" in shown and "--config FILE" in shown
