"""Fields of a config by their path, and what to write for one that does not exist."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any


def same_fields(config_class: Any, source: Any) -> dict[str, Any]:
    """The values of a config that are fields of another dataclass too: what is stated in both has one name.

    >>> @dataclasses.dataclass
    ... class Model:
    ...     width: int
    ...     weights: object = None
    >>> same_fields(Model, dataclasses.make_dataclass("Args", [("width", int), ("seed", int)])(8, 1))
    {'width': 8}
    """
    return {name: getattr(source, name) for name in _names(config_class) if hasattr(source, name)}


def field_paths(config_class: Any) -> list[str]:
    """Paths of all fields, those of nested dataclasses below theirs.

    >>> @dataclasses.dataclass
    ... class Inner:
    ...     width: int
    >>> field_paths(dataclasses.make_dataclass("Outer", [("seed", int), ("model", Inner)]))
    ['seed', 'model', 'model.width']
    """
    hints = typing.get_type_hints(config_class)
    paths = []
    for name in _names(config_class):
        paths.append(name)
        nested = _dataclass_in(hints[name])
        if nested is not None:
            paths += [f"{name}.{path}" for path in field_paths(nested)]
    return paths


def require_known_fields(config_class: Any, content: Mapping[str, Any]) -> None:
    """Raise ValueError with all fields that the dataclass does not have; dacite stops at the first."""
    paths = field_paths(config_class)
    unknown = list(_unknown(config_class, content, paths, prefix=""))
    if not unknown:
        return
    said = [f"{path} ({'remove it' if written is None else f'write {written}'})" for path, written in unknown]
    without = [path for path, written in unknown if written is None]
    for section in dict.fromkeys(path.rpartition(".")[0] for path in without):
        valid = [path.removeprefix(f"{section}.") for path in paths if path.rpartition(".")[0] == section]
        if valid:
            said.append(f"{section or 'the config'} has {', '.join(valid)}")
    raise ValueError(f"{'this field does' if len(unknown) == 1 else 'these fields do'} not exist: {'; '.join(said)}")


def missing_fields(config_class: Any, content: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Paths of all fields that have no default and no value; dacite stops at the first."""
    hints = typing.get_type_hints(config_class)
    missing = []
    for field in dataclasses.fields(config_class):
        path, nested = f"{prefix}{field.name}", _dataclass_in(hints[field.name])
        if field.name in content:
            value = content[field.name]
            missing += missing_fields(nested, value, f"{path}.") if nested and isinstance(value, Mapping) else []
        elif field.init and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            missing.append(path)
    return missing


def path_elsewhere(path: str, paths: list[str]) -> str | None:
    """Where a field is set that stands in another section; None if there is none of that name, or several.

    >>> [path_elsewhere(path, ["trainer.seed", "model.dropout"]) for path in ("seed", "trainer.sed")]
    ['trainer.seed', None]
    """
    elsewhere = [each for each in paths if each.rpartition(".")[2] == path.rpartition(".")[2]]
    return elsewhere[0] if len(elsewhere) == 1 else None


def _replacement_of(path: str, paths: list[str]) -> str | None:
    """The path to write for one that is not among `paths`; None where nothing comes near it."""
    section, _, name = path.rpartition(".")
    siblings = {each.rpartition(".")[2]: each for each in paths if each.rpartition(".")[0] == section}
    close = difflib.get_close_matches(name, siblings, n=1)
    return path_elsewhere(path, paths) or (siblings[close[0]] if close else None)


def _unknown(
    config_class: Any, content: Mapping[str, Any], paths: list[str], prefix: str
) -> Iterator[tuple[str, str | None]]:
    """Paths of the file that are none of the config, each with the one to write for it."""
    hints = typing.get_type_hints(config_class)
    valid = _names(config_class)
    for name, value in content.items():
        path = f"{prefix}{name}"
        if name in valid:
            nested = _dataclass_in(hints[name])
            if nested is not None and isinstance(value, Mapping):
                yield from _unknown(nested, value, paths, prefix=f"{path}.")
        else:
            yield path, _replacement_of(path, paths)


def _names(config_class: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(config_class) if field.init]


def _dataclass_in(hint: Any) -> Any:
    """The dataclass that a type is, or that it is together with None; None for other types."""
    options = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    found = [option for option in options if dataclasses.is_dataclass(option)]
    return found[0] if len(found) == 1 else None
