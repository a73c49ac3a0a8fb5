"""Boolean flags with a value: what they set is what their pair of flags sets, for every field of every config."""

from __future__ import annotations

import dataclasses
import typing

import pytest

from commons.cli.main import _parse, main
from commons.trainer.config.load import load_config
from hstu.train_config import TrainConfig
from sid_gr.train_config import TrainConfig as SIDTrainConfig

CONFIGS = {"hstu/configs/random.toml": TrainConfig, "sid_gr/configs/random.toml": SIDTrainConfig}


def booleans(config_class, prefix=""):
    """Paths of the boolean fields."""
    for name, hint in typing.get_type_hints(config_class).items():
        if hint is bool:
            yield f"{prefix}{name}"
        elif dataclasses.is_dataclass(hint):
            yield from booleans(hint, f"{prefix}{name}.")


def value_of(config, path):
    for name in path.split("."):
        config = getattr(config, name)
    return config


FIELDS = [(file, path) for file, config_class in CONFIGS.items() for path in booleans(config_class)]
assert ("hstu/configs/random.toml", "trainer.shuffler.equal_size") in FIELDS


@pytest.mark.parametrize(("file", "path"), FIELDS[::6])  # all are read by the same code
def test_a_value_sets_what_the_pair_of_flags_sets(file, path):
    flag = "--" + path.replace("_", "-")
    section, dot, name = path.replace("_", "-").rpartition(".")
    off = f"--{section}{dot}no-{name}"
    for value, pair in ((True, flag), (False, off)):
        read = []
        for written in (
            [pair],
            [flag, str(value)],
            [flag, str(value).lower()],
            [f"{flag}={value}"],
            [f"--{path}", str(value)],
        ):
            try:
                read.append(load_config(CONFIGS[file], ["--config", file, *written, "--trainer.seed", "7"]))
            except ValueError as error:  # fields that exclude each other do so however they are written
                read.append(str(error))
        assert all(each == read[0] for each in read)
        if not isinstance(read[0], str):
            assert value_of(read[0], path) is value and read[0].trainer.seed == 7


@dataclasses.dataclass
class Required:
    """A field without a default takes a value, as all such fields do."""

    must: bool
    may: bool = True
    either: bool | None = None


def test_fields_that_take_a_value_keep_it():
    assert load_config(Required, ["--must", "False", "--may", "False"]) == Required(False, may=False)
    assert load_config(Required, ["--must", "True", "--either", "False"]) == Required(True, either=False)
    with pytest.raises(ValueError, match="Unrecognized options: maybe"):
        load_config(Required, ["--must", "True", "--may", "maybe"])


def test_commands_take_them_too(tmp_path, capsys):
    command = _parse(
        ["simulate", "--lengths", "x.csv", "--json", "False", "--in-order", "true", "--shuffler.equal-size=False"]
    )
    assert (
        command.of_output.json is False and command.of_lengths.in_order is True and command.shuffler.equal_size is False
    )
    assert main(["simulate", "--lengths", "zipf:1.2:64", "--ranks", "2", "--json", "True", "--steps", "2"]) == 0
    assert capsys.readouterr().out.startswith("{")
    command = _parse(["report", "--json", "True", "runs/a"])
    assert command.of_output.json is True and [str(run) for run in command.runs] == ["runs/a"]
