"""Configs: a TOML or YAML file of nested dataclasses, with a command-line flag for every field.

The file is read first, flags replace single values of it. Without a file, flags alone must give every field that has
no default.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import importlib.util
import io
import re
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import dacite
import torch.distributed as dist
import tyro
import yaml

from commons.cli.console import parser_error

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

C = TypeVar("C")


def load_config(
    config_class: type[C],
    argv: Sequence[str],
    *,
    prog: str | None = None,
    description: str | None = None,
) -> C:
    """Build a config from command-line arguments.

    Args:
        config_class: a dataclass; its fields may be dataclasses.
        argv: arguments without the program's name: `--config FILE` and flags such as `--trainer.seed 7`.
        prog: name of the program, for the help.
        description: what the program does, with examples, for the help.

    Raises:
        FileNotFoundError: no config file.
        ValueError: a file that is no TOML or YAML, an unknown field or flag, a missing or wrong value.
        SystemExit: after `--help`.
    """
    path, flags = _take_config_flag(list(argv))
    options: dict[str, Any] = {}
    if path is not None:
        options["default"] = load_config_file(config_class, path)
    about = (
        f"{description or ''}\n\n--config FILE is a TOML or YAML file of the fields below; flags replace its values."
    )
    try:
        return _parse_flags(config_class, flags, prog=prog, description=about.strip(), **options)
    except ValueError as error:
        missing = re.findall(r"--[\w.-]+(?= [A-Z{])", str(error)) if path is None else []
        if not missing or not str(error).startswith("Required options"):
            raise
        raise ValueError(
            f"there is no --config FILE, and {', '.join(missing)} have no default: give a config, or these flags"
        ) from None


def load_config_file(config_class: type[C], path: str | Path) -> C:
    """Build a config from a TOML or YAML file.

    Raises:
        FileNotFoundError: no file.
        ValueError: a file that cannot be read, an unknown field, a missing or wrong value.
    """
    path = find_config(path)
    content = _read(path)
    try:
        _check_fields(config_class, content, prefix="")
        return dacite.from_dict(config_class, content, dacite.Config(strict=True, cast=[tuple]))
    except dacite.MissingValueError as error:
        raise ValueError(f"{path}: {error.field_path} is missing; it has no default: add it") from None
    except dacite.WrongTypeError as error:
        raise ValueError(
            f"{path}: {error.field_path} is {error.value!r}; it must be {_type_name(error.field_type)}: correct it"
        ) from None
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path}: {error.args[0] if error.args else error}") from None


def find_config(path: str | Path) -> Path:
    """The file that a config's path names: that very file, or else the one inside an installed package.

    So `hstu/configs/random.toml` is found in a checkout and, where evenrank is installed, in any folder.

    Args:
        path: what `--config` was given; the first part of a relative path may be the name of an importable package.

    Returns:
        An existing file, or `path` as it is where there is none.
    """
    path = Path(path)
    package, *inside = path.parts or ("",)
    if not path.is_file() and inside and package.isidentifier():
        with contextlib.suppress(ValueError):  # a module that has no spec, such as __main__
            spec = importlib.util.find_spec(package)
            for folder in (spec and spec.submodule_search_locations) or ():
                if Path(folder, *inside).is_file():
                    return Path(folder, *inside)
    return path


def _take_config_flag(argv: list[str]) -> tuple[Path | None, list[str]]:
    """The value of `--config FILE` or `--config=FILE`, and the other arguments."""
    path: Path | None = None
    rest: list[str] = []
    arguments = iter(argv)
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if name != "--config":
            rest.append(argument)
            continue
        if not equals:
            value = next(arguments, "")
        if not value or path is not None:
            raise ValueError(
                f"--config is {'without a value' if not value else 'given twice'}; it names one TOML or YAML file: "
                "write --config FILE"
            )
        path = Path(value)
    return path, rest


def _read(path: Path) -> Mapping[str, Any]:
    if path.suffix not in (".toml", ".yaml", ".yml"):
        raise ValueError(f"{path} ends in {path.suffix!r}; a config is a .toml, .yaml or .yml file: rename it")
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; --config names a TOML or YAML file: correct the path")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no UTF-8 text ({error.reason} at byte {error.start}): save it as UTF-8") from None
    try:
        content = tomllib.loads(text) if path.suffix == ".toml" else yaml.safe_load(text)
    except (tomllib.TOMLDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path} is no valid {path.suffix[1:].upper()} ({reason}): correct the line") from None
    if not isinstance(content, Mapping):
        raise ValueError(f"{path} holds {type(content).__name__}; a config holds fields with their values: add them")
    return content


def _check_fields(config_class: Any, content: Mapping[str, Any], prefix: str) -> None:
    """Raise ValueError for a field that the dataclass does not have; dacite does not say where it stands."""
    hints = typing.get_type_hints(config_class)
    valid = [field.name for field in dataclasses.fields(config_class) if field.init]
    for name, value in content.items():
        if name not in valid:
            close = difflib.get_close_matches(str(name), valid, n=1)
            raise ValueError(
                f"field {prefix}{name} does not exist; {prefix.rstrip('.') or 'the config'} has {', '.join(valid)}: "
                + (f"write {close[0]}" if close else "remove it")
            )
        nested = _dataclass_in(hints[name])
        if nested is not None and isinstance(value, Mapping):
            _check_fields(nested, value, prefix=f"{prefix}{name}.")


def _dataclass_in(hint: Any) -> Any:
    """The dataclass that a type is, or that it is together with None; None for other types."""
    options = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    found = [option for option in options if dataclasses.is_dataclass(option)]
    return found[0] if len(found) == 1 else None


def _type_name(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")


def _parse_flags(config_class: type[C], flags: list[str], **options: Any) -> C:
    asks_for_help = "--help" in flags or "-h" in flags
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            return tyro.cli(
                config_class,
                args=flags,
                # Under torchrun every rank reads the flags; one of them shows the help.
                console_outputs=not asks_for_help or dist.get_node_local_rank(0) == 0,
                **options,
            )
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        raise ValueError(parser_error(errors.getvalue())) from None
