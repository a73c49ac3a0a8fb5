"""Configs: a TOML, YAML or JSON file of nested dataclasses, with a command-line flag for every field.

Flags replace values of the file. Without a file, flags must set every field that has no default.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import re
import sys
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import dacite
import torch.distributed as dist
import tyro

from commons.parser import run_parser, without_boolean_values, wrapped_help
from commons.trainer.config.files import GIN_REMEDY, find_config, read_config_file
from commons.user_package import import_user_modules

C = TypeVar("C")
# The values of a config file for fields of these types.
_WRITTEN_AS: dict[Any, Any] = {tuple: (list, tuple), list: list, dict: Mapping, type(None): type(None)}


def load_config(
    config_class: type[C], argv: Sequence[str], *, prog: str | None = None, description: str | None = None
) -> C:
    """Build a config, a dataclass whose fields may be dataclasses, from command-line arguments.

    Args:
        config_class: the dataclass.
        argv: arguments without the program's name: `--config FILE` and flags such as `--trainer.seed 7`.
        prog: name of the program, for the help.
        description: purpose of the program with examples, for the help.

    Raises:
        FileNotFoundError: no config file.
        ValueError: a file that is no config, an unknown field or flag, a missing or wrong value.
        SystemExit: after `--help`.
    """
    path, flags = _take_config_flag(argv)
    options: dict[str, Any] = {}
    # Imported modules may register names that the file and the flags contain; here, an error does not name the file.
    imports = parse_known(flags, "--import", nargs="*")[0]
    if imports and "imports" not in _fields(config_class):
        raise ValueError(
            f"--import is {' '.join(imports)}, and {config_class.__name__} has no field 'imports', which this flag "
            "sets: leave it out, and import the module where your recipe is defined"
        )
    import_user_modules(imports)
    if path is not None:
        options["default"] = load_config_file(config_class, path, replaced={"imports": imports} if imports else None)
    about = (
        f"{description or ''}\n\n--config FILE is a TOML, YAML or JSON file with the fields below, such as a run's "
        "config.json; flags replace values of the file."
    )
    try:
        return _parse_flags(config_class, flags, prog=prog, description=about.strip(), **options)
    except ValueError as error:
        missing = re.search(r" requires (--.+): see ", str(error))
        if path is not None or missing is None:
            raise
        raise ValueError(
            f"there is no --config FILE, and {missing[1]} have no default: give a config, or these flags"
        ) from None


def load_config_file(
    config_class: type[C], path: str | Path, *, section: str | None = None, replaced: Mapping[str, Any] | None = None
) -> C:
    """Build a config from a TOML, YAML or JSON file, such as the config.json of a run folder.

    Args:
        config_class: a dataclass; its fields may be dataclasses.
        path: the file.
        section: the table of the file to read, such as "dataset"; None for the whole file.
        replaced: values of fields that replace the file's values.

    Raises:
        FileNotFoundError: no file.
        ValueError: a file that cannot be read, unknown fields, a missing or wrong value.
    """
    path = find_config(path)
    content = read_config_file(path)
    if section is not None:
        if not isinstance(content.get(section), Mapping):
            raise ValueError(f"{path} has no [{section}]: add it, or give another config")
        content = content[section]
    where = path if section is None else f"{path} [{section}]"
    return make_config(config_class, {**content, **(replaced or {})}, where=str(where))


def make_config(config_class: type[C], content: Mapping[str, Any], *, where: str = "config") -> C:
    """Build a config from the nested dictionaries of a config file; `where` names the file in errors.

    First imports the modules in `imports`, because they may register names that other fields contain.

    Raises:
        ValueError: unknown fields, a missing or wrong value, a module that cannot be imported.
    """
    try:
        _require_fields(config_class, content)
        _require_collections(config_class, content)
        if isinstance(imports := content.get("imports"), (list, tuple)):
            import_user_modules(name for name in imports if isinstance(name, str))
        return dacite.from_dict(config_class, content, dacite.Config(strict=True, cast=[tuple]))
    except dacite.WrongTypeError as error:
        hint = error.field_type
        names = (str(each) if typing.get_args(each) else each.__name__ for each in _options(hint))
        kind = " | ".join(names).replace("typing.", "").replace("NoneType", "None")
        kind = "true or false" if hint is bool else kind  # "yes" is a text in YAML 1.2
        kind = f"a list, {kind}" if tuple in _kinds(hint) else kind
        value = textwrap.shorten(repr(error.value), 400, placeholder=" …")
        raise ValueError(f"{where}: {error.field_path} is {value}; it must be {kind}: correct it") from None
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{where}: {error.args[0] if error.args else error}") from None


def require_shuffler(name: str, imports: Sequence[str] = ()) -> None:
    """Import the user's modules, then raise ValueError unless a shuffler of this name is registered."""
    from commons.distributed.batch_shuffler_factory import BatchShufflerFactory  # here: it needs TorchRec

    import_user_modules(imports)
    if not BatchShufflerFactory.is_registered(name):
        raise ValueError(
            f"shuffler_type is {name!r}; registered are {', '.join(sorted(BatchShufflerFactory.list_available()))}: "
            "choose one, or give the module that registers yours with --import"
        )


def parse_known(argv: Sequence[str], flag: str, **options: Any) -> tuple[list[str], list[str]]:
    """The values of one flag, and the other arguments; `options` are those of argparse."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(flag, dest="values", default=[], **options)
    known, rest = parser.parse_known_args(argv)
    return known.values, rest


def same_fields(config_class: Any, source: Any) -> dict[str, Any]:
    """The values of `source` whose fields `config_class` has too, by name.

    >>> @dataclasses.dataclass
    ... class Model:
    ...     width: int
    ...     weights: object = None
    >>> same_fields(Model, dataclasses.make_dataclass("Args", [("width", int), ("seed", int)])(8, 1))
    {'width': 8}
    """
    return {name: getattr(source, name) for name in _fields(config_class) if hasattr(source, name)}


def _take_config_flag(argv: Sequence[str]) -> tuple[Path | None, list[str]]:
    """The value of `--config FILE` or `--config=FILE`, and the other arguments."""
    for argument in argv:
        name = argument.partition("=")[0]
        if name.replace("_", "-") == "--gin-config-file":
            raise ValueError(f"{name} is a flag of recsys-examples; here the flag is --config, and {GIN_REMEDY}")
    paths, rest = parse_known(argv, "--config", nargs="?", const="", action="append")
    if len(paths) > 1 or "" in paths:
        raise ValueError(
            f"--config is {'given twice' if len(paths) > 1 else 'without a value'}; it takes one TOML, YAML or JSON "
            "file: write --config FILE"
        )
    return (Path(paths[0]) if paths else None), rest


def _parse_flags(config_class: type[C], flags: list[str], **options: Any) -> C:
    arguments = without_boolean_values(config_class, flags, has_defaults="default" in options, has_words=False)
    try:
        parsed, printed = run_parser(lambda: tyro.cli(config_class, args=arguments, **options))
    except ValueError as error:
        unknown = re.match(r"(Unrecognized options: --([\w.-]+).*): see --help$", str(error))
        paths = _field_paths(config_class)
        if unknown is None or (path := _replacement_of(unknown[2].replace("-", "_"), paths)) is None:
            raise
        raise ValueError(f"{unknown[1]}; perhaps you meant --{path.replace('_', '-')}") from None
    if parsed is None:
        if dist.get_node_local_rank(0) == 0:  # under torchrun every rank parses the flags
            sys.stdout.write(wrapped_help(printed))
        raise SystemExit(0)
    return parsed


def _require_fields(config_class: Any, content: Mapping[str, Any]) -> None:
    """Raise ValueError that lists all unknown fields or, if there are none, all missing fields without a default.

    dacite stops at the first wrong field.
    """
    differences = list(_differences(config_class, content))
    missing = [path for path, is_unknown in differences if not is_unknown]
    if unknown := [path for path, is_unknown in differences if is_unknown]:
        paths = _field_paths(config_class)
        written = {path: _replacement_of(path, paths) for path in unknown}
        parts = [f"{path} ({f'write {written[path]}' if written[path] else 'remove it'})" for path in unknown]
        for section in dict.fromkeys(path.rpartition(".")[0] for path in unknown if not written[path]):
            valid = [path.removeprefix(f"{section}.") for path in paths if path.rpartition(".")[0] == section]
            if valid:
                parts.append(f"{section or 'the config'} has {', '.join(valid)}")
        subject = "this field does" if len(unknown) == 1 else "these fields do"
        raise ValueError(f"{subject} not exist: {'; '.join(parts)}")
    if missing:
        are, they_have, them = ("is", "it has", "it") if len(missing) == 1 else ("are", "they have", "them")
        raise ValueError(f"{', '.join(missing)} {are} missing; {they_have} no default: add {them}")


def _differences(config_class: Any, content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, bool]]:
    """Paths of unknown fields of the content (True), and of missing fields without a default (False)."""
    hints, fields = typing.get_type_hints(config_class), _fields(config_class)
    for name, value in content.items():
        if name not in fields:
            yield f"{prefix}{name}", True
        elif (nested := _dataclass_in(hints[name])) is not None and isinstance(value, Mapping):
            yield from _differences(nested, value, f"{prefix}{name}.")
    for name, field in fields.items():
        if name not in content and field.default is field.default_factory is dataclasses.MISSING:
            yield f"{prefix}{name}", False


def _require_collections(config_class: Any, content: Mapping[str, Any], prefix: str = "") -> None:
    """Raise WrongTypeError for a value that should be a list or a table and is not: dacite makes letters of a text."""
    hints = typing.get_type_hints(config_class)
    for name, value in content.items():
        nested, path = _dataclass_in(hints[name]), f"{prefix}{name}"
        if nested is not None and isinstance(value, Mapping):
            _require_collections(nested, value, f"{path}.")
        accepted: list[Any] = [_WRITTEN_AS.get(kind) for kind in _kinds(hints[name])]
        if None not in accepted and not any(isinstance(value, each) for each in accepted):
            raise dacite.WrongTypeError(hints[name], value, path)


def _field_paths(config_class: Any) -> list[str]:
    """Paths such as "model.hidden_size" of all fields; the fields of a nested dataclass follow its own path."""
    hints = typing.get_type_hints(config_class)
    paths = []
    for name in _fields(config_class):
        nested = _dataclass_in(hints[name])
        paths += [name, *(f"{name}.{path}" for path in ([] if nested is None else _field_paths(nested)))]
    return paths


def _replacement_of(path: str, paths: list[str]) -> str | None:
    """The path to write instead of an unknown path: the only one of this name, or a similar one in its section."""
    section, _, name = path.rpartition(".")
    siblings = {each.rpartition(".")[2]: each for each in paths if each.rpartition(".")[0] == section}
    elsewhere = [each for each in paths if each.rpartition(".")[2] == name]
    if len(elsewhere) == 1:
        return elsewhere[0]
    close = difflib.get_close_matches(name, siblings, n=1)
    return siblings[close[0]] if close else None


def _fields(config_class: Any) -> dict[str, dataclasses.Field[Any]]:
    return {field.name: field for field in dataclasses.fields(config_class) if field.init}


def _dataclass_in(hint: Any) -> Any:
    """The dataclass in a type hint, which is a dataclass or a union with one; None for other types."""
    return next((option for option in _options(hint) if dataclasses.is_dataclass(option)), None)


def _options(hint: Any) -> tuple[Any, ...]:
    """The types in a union; another type hint alone."""
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def _kinds(hint: Any) -> list[Any]:
    """The types in a type hint, without their arguments."""
    return [typing.get_origin(option) or option for option in _options(hint)]
