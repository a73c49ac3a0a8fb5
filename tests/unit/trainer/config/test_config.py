"""Config files and flags: what they give, and what they say about a mistake."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import json
import math
import operator
import subprocess
import sys
import typing
from pathlib import Path

import pytest

from commons.pipeline import TrainPipelineFactory
from commons.trainer.config.files import find_config
from commons.trainer.config.load import load_config, load_config_file
from hstu.train_config import TrainConfig
from sid_gr.train_config import TrainConfig as SIDTrainConfig
from tests.helpers.jobs.programs import run_program

ROOT = Path(__file__).parents[4]
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


def leaves(config_class, prefix=()):
    """Path and type of every field that is no dataclass."""
    hints = typing.get_type_hints(config_class)
    for field in dataclasses.fields(config_class):
        if dataclasses.is_dataclass(hints[field.name]):
            yield from leaves(hints[field.name], (*prefix, field.name))
        else:
            yield (*prefix, field.name), hints[field.name]


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
    "name", ["hstu/configs/none.toml", "no_such_package/run.toml", "__main__/run.toml", "../run.toml", "hstu"]
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


def test_a_boolean_flag_may_have_a_value(tmp_path):
    """What it sets is what the pair of flags sets."""
    name = "trainer.shuffler.equal_size"
    flag, config = f"--{name.replace('_', '-')}", ["--config", str(write(tmp_path, TOML))]
    section, _, last = flag.rpartition(".")
    for value, pair in ((True, flag), (False, f"{section}.no-{last}")):
        expected = load_config(TrainConfig, [*config, pair])
        assert functools.reduce(getattr, name.split("."), expected) is value
        for written in ([flag, str(value)], [flag, str(value).lower()], [f"{flag}={value}"], [f"--{name}", str(value)]):
            read = load_config(TrainConfig, [*config, *written, "--trainer.seed", "7"])
            assert dataclasses.replace(read, trainer=dataclasses.replace(read.trainer, seed=1234)) == expected


@dataclasses.dataclass
class Required:
    """A field without a default takes a value, as all such fields do."""

    must: bool
    may: bool = True
    either: bool | None = None


def test_fields_that_take_a_value_keep_it():
    assert load_config(Required, ["--must", "False", "--may", "False"]) == Required(False, may=False)
    assert load_config(Required, ["--must", "True", "--either", "False"]) == Required(True, either=False)
    for value, written in (("maybe", ["--may", "maybe"]), ("1", ["--may=1"]), ("", ["--may=", "--either", "None"])):
        with pytest.raises(ValueError, match=f"^--may is '{value}'; a boolean flag takes True, False or no value: "):
            load_config(Required, ["--must", "True", *written])


@pytest.mark.parametrize("path", sorted((ROOT / "hstu/configs").glob("*.toml")), ids=lambda path: path.name)
def test_the_configs_that_come_along(path):
    assert isinstance(load_config_file(TrainConfig, path), TrainConfig)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            TOML.replace("train_batch_size", "train_batch_sise"),
            r"run.toml: this field does not exist: trainer.train_batch_sise \(write trainer.train_batch_size\)$",
        ),
        (
            TOML.replace("[trainer]", "[trainer]\nseed = 9223372036854775808"),
            r"seed is 9223372036854775808; .* below 2\*\*63: lower it",
        ),
        (TOML.replace("slack", "zzz"), r"trainer.shuffler.zzz \(remove it\); trainer.shuffler has mode, partitioner, "),
        (
            TOML.replace("train_batch_size", "dropout").replace("dense_lr", "learning_rate") + "trainer_seed = 1",
            r"these fields do not exist: trainer.dropout \(write model.dropout\); optimizer.learning_rate "
            r"\(remove it\); optimizer.trainer_seed \(remove it\); optimizer has dense_optimizer, ",
        ),
        (TOML.replace("[model]", "[model]\nnum_tasks = 2"), r"model.num_tasks \(write dataset.num_tasks\)$"),
        (
            TOML + "[NetworkArgs]\nhidden_size = 8",
            r"this field does not exist: NetworkArgs \(remove it\); the config has trainer, dataset, model, ",
        ),
        (TOML.replace("= 4", '= "4"'), "run.toml: trainer.train_batch_size is '4'; it must be int: correct it"),
        (TOML.replace("eval_batch_size = 8", ""), "trainer.eval_batch_size is missing; it has no default: add it"),
        (
            "[trainer]\ntrain_batch_size = 3\n[dataset]\n",
            "trainer.eval_batch_size, dataset.dataset_name, dataset.max_history_seqlen are missing; they have no ",
        ),
        (TOML.replace("= 8", '= 8\nnum_epochs = "3"'), r"num_epochs is '3'; it must be int \| None: correct it$"),
        (TOML.replace("slack = 0.5", 'mode = "on"'), "trainer.shuffler.mode is 'on'; it must be .*'balance'"),
        (
            TOML.replace("[trainer]", '[trainer]\neval_metrics = "NDCG@10"'),
            r"trainer.eval_metrics is 'NDCG@10'; it must be a list, tuple\[str, \.\.\.\]: correct it$",
        ),
        (TOML.replace("dense_lr = 1", "adam_betas = 0.9"), r"optimizer.adam_betas is 0.9; it must be a list, tuple\["),
        (TOML + '[dataset.columns]\nactions = "click"', "dataset.columns.actions is 'click'; it must be a list, "),
        ('table_sharding = "row_wise"\n' + TOML, r"table_sharding is 'row_wise'; it must be dict\["),
        ('shuffler_type = "hst"\n' + TOML, "shuffler_type is 'hst'; registered are .*hstu.*: choose one"),
        (TOML.replace("dense_lr = 1", "dense_lr = 0"), "dense_lr is 0; it must be a positive and finite"),
        (TOML.replace("dense_lr = 1", "adam_betas = [0.9, 1.0]"), "adam_betas is .*; they are two numbers"),
        (TOML.replace("dense_lr = 1", "adam_eps = inf"), "adam_eps is inf; it must be .* finite number: correct it$"),
        (TOML.replace('"random"', '"sid-ml-1m"'), "'sid-ml-1m', .*; HSTU trains on random, ml-1m, .* sid_gr"),
        (TOML.replace("[dataset]", "[dataset"), "run.toml is no valid TOML .*line"),
    ],
)
def test_a_mistake_in_the_file_is_one_line(tmp_path, text, message):
    with pytest.raises(ValueError, match=message) as caught:
        load_config_file(TrainConfig, write(tmp_path, text))
    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_config(tmp_path):
    with pytest.raises(FileNotFoundError, match="none.toml does not exist"):
        load_config_file(TrainConfig, tmp_path / "none.toml")
    with pytest.raises(IsADirectoryError, match="is a folder; --config is a TOML"):  # such as that of a run
        load_config_file(TrainConfig, tmp_path)
    for name, text, message in (
        ("run.txt", "{}", r"run.txt ends in '.txt'; a config is a .toml, .yaml, .yml or .json file"),
        ("run.yaml", "a: [", "run.yaml is no valid YAML"),
        ("run.yaml", "[1]", "run.yaml contains list; a config has fields"),
        ("run.yaml", YAML.replace("slack: 0.5", "verify: yes"), "verify is 'yes'; it must be true or false"),
        ("run.yaml", YAML + "model: {}", r'run.yaml is no valid YAML \(found duplicate key "model" .*line 6'),
        ("run.yaml", "a: {b: {c: 1, c: 2}}", 'found duplicate key "c"'),
        ("run.json", '{"a": 1, "a": 2}', r"run.json is no valid JSON \(the key 'a' occurs twice\)"),
        ("run.gin", "TrainerArgs.seed = 1", 'run.gin is a gin file; .* the guide "Coming from recsys-examples"'),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            load_config_file(TrainConfig, write(tmp_path, text, name))
        assert "\n" not in str(caught.value)
    (tmp_path / "run.toml").write_bytes(TOML.encode() + "# café".encode("latin-1"))
    with pytest.raises(ValueError, match=r"run.toml is no UTF-8 text \(.* at byte \d+\): save it as UTF-8"):
        load_config_file(TrainConfig, tmp_path / "run.toml")


def test_yaml_numbers_are_those_of_toml(tmp_path):
    text = YAML.replace("dense_lr: 1", "dense_lr: 1e-3, embedding_lr: 5E-02, adam_eps: 0.1e-5")
    text = text.replace("slack: 0.5", "slack: 1e-2, mode: off")
    config = load_config_file(TrainConfig, write(tmp_path, text, "run.yaml"))
    assert (config.optimizer.dense_lr, config.optimizer.embedding_lr, config.optimizer.adam_eps) == (1e-3, 5e-2, 1e-6)
    assert (config.trainer.shuffler.slack, config.trainer.shuffler.mode) == (0.01, "off")
    merged = "sharding: &all {item: row_wise}\n".replace("sharding", "table_sharding") + YAML
    config = load_config_file(TrainConfig, write(tmp_path, merged, "run.yaml"))
    assert config.table_sharding == {"item": "row_wise"}


@pytest.mark.parametrize("name", ["hstu/configs/retrieval.toml", "sid_gr/configs/random.toml"])
def test_the_config_that_a_run_leaves_is_one(tmp_path, name):
    config_class = TrainConfig if name.startswith("hstu") else SIDTrainConfig
    flags = "--trainer.seed 5 --optimizer.adam-betas 0.8 0.9 --trainer.num-epochs 2 --optimizer.sharding row_wise"
    config = load_config(config_class, ["--config", str(ROOT / name), *flags.split()])
    path = write(tmp_path, json.dumps(dataclasses.asdict(config)), "config.json")
    assert load_config_file(config_class, path) == config


@pytest.mark.parametrize("config_class", [TrainConfig, SIDTrainConfig])
def test_no_number_is_absurd(tmp_path, config_class):
    """Every float of a config refuses NaN and infinity, every counter a negative number and one beyond 64 bits."""
    folder = "hstu" if config_class is TrainConfig else "sid_gr"
    whole = json.loads(
        json.dumps(dataclasses.asdict(load_config_file(config_class, ROOT / folder / "configs/random.toml")))
    )
    tried = 0
    for path, hint in leaves(config_class):
        kinds = {kind for kind in (int, float) if hint in (kind, kind | None)}
        values = [math.nan, math.inf, -0.5] if float in kinds else [-2, True] if int in kinds else []
        if int in kinds and path[0] == "trainer":
            values.append(2**63)
        for value in values:
            content = copy.deepcopy(whole)
            functools.reduce(operator.getitem, path[:-1], content)[path[-1]] = value
            with pytest.raises(ValueError, match=rf"\b{path[-1]} is "):
                load_config_file(config_class, write(tmp_path, json.dumps(content), "run.json"))
            tried += 1
    assert tried > 70


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--trainer.train-batch-size", "0"], "^train_batch_size is 0; it must be an integer of at least 1: correct"),
        (
            ["--trainer.train-batch-sise", "4"],
            "^Unrecognized options: --trainer.train-batch-sise.*perhaps you meant --trainer.train-batch-size",
        ),
        (["--config"], "--config is without a value"),
        (["--dense-lr", "1"], "^Unrecognized options: --dense-lr, 1; perhaps you meant --optimizer.dense-lr$"),
        (["--dense-lr", "1", "--seed", "2"], "meant --(trainer.seed or --optimizer.dense-lr|.* --trainer.seed)$"),
        (["--no-dataset.shuffle"], "^Unrecognized options: --no-dataset.shuffle; .* meant --dataset.no-shuffle$"),
        (["--model.dense_lr", "1"], "^Unrecognized options: --model.dense_lr, 1; .* meant --optimizer.dense-lr$"),
        (["--bogus", "1"], "^Unrecognized options: --bogus, 1: see --help$"),
        (["--trainer.num-epochs", "1.5"], r"instantiated from \['1.5'\]; it takes {None}.INT$"),
        (["--gin-config-file", "a.gin"], '--gin-config-file is a flag of recsys-examples; here .* guide "Coming from'),
        (["--config", "a.toml", "--config", "b.toml"], "--config is given twice"),
        (
            ["--project", "a"],
            "^Unrecognized options: --project, a; .* --trainer.sink-options.mlflow.project or --trainer",
        ),
        (["--import", "no_module"], "^import names 'no_module', which is neither installed nor in "),
    ],
)
def test_a_mistake_in_a_flag_is_one_line(tmp_path, flags, message):
    argv = flags if "--config" in flags else ["--config", str(write(tmp_path, TOML)), *flags]
    with pytest.raises(ValueError, match=message) as caught:
        load_config(TrainConfig, argv)
    assert "\n" not in str(caught.value)


def test_a_module_registers_names_of_the_config_and_a_flag_replaces_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "pipelines_of_mine", raising=False)
    monkeypatch.setattr(TrainPipelineFactory, "_makers", dict(TrainPipelineFactory._makers))
    (tmp_path / "pipelines_of_mine.py").write_text(
        "from commons.pipeline import TrainPipelineFactory\nTrainPipelineFactory.register('mine', lambda **_: None)\n"
    )
    mine = TOML.replace("eval_batch_size = 8", 'eval_batch_size = 8\npipeline_type = "mine"')
    path = write(tmp_path, 'imports = ["pipelines_of_mine"]' + mine)
    assert load_config(TrainConfig, ["--config", str(path)]).trainer.pipeline_type == "mine"
    path = write(tmp_path, 'imports = ["no_module"]' + mine)
    config = load_config(TrainConfig, ["--config", str(path), "--import", "pipelines_of_mine"])
    assert config.imports == ("pipelines_of_mine",)


def test_a_config_without_imports_takes_no_flag_for_them(tmp_path):
    """The file has no such field, and is not to blame."""

    @dataclasses.dataclass
    class Plain:
        rows: int = 1

    for argv in (["--config", str(write(tmp_path, "rows = 2"))], []):
        with pytest.raises(ValueError, match="^--import is json, and Plain has no field 'imports'.*: leave it out"):
            load_config(Plain, [*argv, "--import", "json"])


def test_nothing_given_asks_for_a_config():
    with pytest.raises(ValueError, match=r"there is no --config FILE, and --trainer.train-batch-size, .* no default"):
        load_config(TrainConfig, [])


def test_help_shows_flags_and_examples(capsys):
    with pytest.raises(SystemExit) as stop:
        load_config(TrainConfig, ["--help"], description="Train it.\n\nExample:\n  do this")
    assert stop.value.code in (0, None)
    shown = capsys.readouterr().out
    assert "--trainer.enable-balanced-shuffler" in shown and "do this" in shown and "--config FILE" in shown


@pytest.mark.slow
def test_help_has_whole_lines():
    """tyro joins the lines of a comment, except one that begins with no letter."""
    env = {"COLUMNS": "60", "PYTHONIOENCODING": "utf-8"}
    printed = run_program(sys.executable, "-m", "hstu.train", "--help", env=env).stdout
    lines = {line.strip("│ ") for line in printed.splitlines()}
    assert "data set, with any number of ranks. (default:" in lines
    wrapped = [line.strip("│").rstrip() for line in printed.splitlines()]
    for one, two in itertools.pairwise(wrapped):
        assert not one.startswith(" " * 7) or not two.startswith(" " * 7) or len(f"{one} {two.split()[0]}") > 57


def test_a_recipe_with_its_own_loaders_may_have_another_data_set(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(TOML)
    assert load_config(
        TrainConfig, ["--config", str(path), "--dataset.dataset-name", "clicks"]
    ).dataset.dataset_name == ("clicks")


@pytest.mark.slow
def test_a_script_of_completion_is_not_wrapped():
    printed = run_program(sys.executable, "-m", "hstu.train", "--tyro-print-completion", "bash", env={"COLUMNS": "60"})
    done = subprocess.run(["bash", "-n"], input=printed.stdout, text=True, capture_output=True, check=False)
    assert "trainer" in printed.stdout and (done.returncode, done.stderr) == (0, "")
