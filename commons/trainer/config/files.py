"""Config files as nested dictionaries: TOML, YAML, or the config.json of a run folder."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from commons.checks import require_file

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

GIN_REMEDY = (
    'the guide "Coming from recsys-examples" (docs/from_recsys_examples.md in the project) lists the setting for each '
    "of its settings: write a .toml file"
)


def find_config(path: str | Path) -> Path:
    """The file at `path`, or else the file at that path inside an installed package.

    The first part of a relative path may be the name of an importable package: `hstu/configs/random.toml` is found in a
    checkout and, if evenrank is installed, from any folder. Without such a file, returns `path` unchanged.
    """
    path = Path(path)
    package, *inside = path.parts or ("",)
    if not path.is_file() and inside and package.isidentifier():
        with contextlib.suppress(ValueError):  # a module without a spec, such as __main__
            spec = importlib.util.find_spec(package)
            for folder in (spec and spec.submodule_search_locations) or ():
                if Path(folder, *inside).is_file():
                    return Path(folder, *inside)
    return path


def read_config_file(path: Path) -> Mapping[str, Any]:
    """The content of a config file, not yet checked.

    Raises:
        OSError: no file.
        ValueError: a file of another type, or one that cannot be parsed.
    """
    if path.suffix == ".gin":
        raise ValueError(f"{path} is a gin file; configs are .toml, .yaml, .yml or .json files here, and {GIN_REMEDY}")
    require_file(path, "--config is a TOML, YAML or JSON file: correct the path")
    if path.suffix not in _PARSERS:
        raise ValueError(f"{path} ends in {path.suffix!r}; a config is a .toml, .yaml, .yml or .json file: rename it")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no UTF-8 text ({error.reason} at byte {error.start}): save it as UTF-8") from None
    name, parse = _PARSERS[path.suffix]
    try:
        content = parse(text)
    except (ValueError, YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path} is no valid {name} ({reason}): correct the line") from None
    if not isinstance(content, Mapping):
        raise ValueError(f"{path} contains {type(content).__name__}; a config has fields with values: add them")
    return content


def _parse_yaml(text: str) -> Any:
    try:
        return YAML(typ="safe", pure=True).load(text)  # YAML 1.2: 1e-3 is a number, off is text, keys are unique
    except MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f" in line {error.problem_mark.line + 1}"
        raise ValueError(f"{error.problem or error.context}{line}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} occurs twice")
    return content


_PARSERS: dict[str, tuple[str, Callable[[str], Any]]] = {
    ".toml": ("TOML", tomllib.loads),
    ".yaml": ("YAML", _parse_yaml),
    ".yml": ("YAML", _parse_yaml),
    ".json": ("JSON", partial(json.loads, object_pairs_hook=_unique)),
}
