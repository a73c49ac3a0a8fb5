"""Configs: a TOML, YAML or JSON file of nested dataclasses, with a command-line flag for every field.

The file is read first, flags replace single values of it. Without a file, flags alone must give every field that has
no default.
"""

from __future__ import annotations

import contextlib
import io
import re
import reprlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import dacite
import torch.distributed as dist
import tyro

from commons.console import parser_error
from commons.switches import without_boolean_values
from commons.trainer.config.fields import field_paths, missing_fields, path_elsewhere, require_known_fields
from commons.trainer.config.files import GIN_REMEDY, find_config, read_config_file
from commons.user_package import import_user_modules

__all__ = ["load_config", "load_config_file", "make_config", "read_config_file", "require_shuffler"]

C = TypeVar("C")

# For values in errors: the aliases of a small YAML file can name one part billions of times.
_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxlist, _SHORT.maxdict, _SHORT.maxtuple = 4, 16, 16, 16
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = 400


def load_config(
    config_class: type[C], argv: Sequence[str], *, prog: str | None = None, description: str | None = None
) -> C:
    """Build a config, a dataclass whose fields may be dataclasses, from command-line arguments.

    Args:
        config_class: of the config.
        argv: arguments without the program's name: `--config FILE` and flags such as `--trainer.seed 7`.
        prog: name of the program, for the help.
        description: what the program does, with examples, for the help.

    Raises:
        FileNotFoundError: no config file.
        ValueError: a file that is no config, an unknown field or flag, a missing or wrong value.
        SystemExit: after `--help`.
    """
    path, flags = _take_config_flag(list(argv))
    options: dict[str, Any] = {}
    if path is not None:
        # What is imported may register what the file names.
        imports = _values_of("--import", flags)
        options["default"] = load_config_file(config_class, path, replaced={"imports": imports} if imports else None)
    about = (
        f"{description or ''}\n\n--config FILE is a TOML, YAML or JSON file of the fields below, such as a run's "
        "config.json; flags replace its values."
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


def load_config_file(
    config_class: type[C], path: str | Path, *, section: str | None = None, replaced: Mapping[str, Any] | None = None
) -> C:
    """Build a config from a TOML, YAML or JSON file, such as the config.json that a run leaves in its folder.

    Args:
        config_class: a dataclass; its fields may be dataclasses.
        path: of the file.
        section: the field whose value is the config, such as "dataset"; None for the whole file.
        replaced: values of fields that replace those of the file.

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
    """Build a config from nested dictionaries, as a config file holds them; `where` names them in errors.

    Raises:
        ValueError: unknown fields, a missing or wrong value.
    """
    try:
        require_known_fields(config_class, content)
        return dacite.from_dict(config_class, content, dacite.Config(strict=True, cast=[tuple]))
    except dacite.MissingValueError:
        missing = missing_fields(config_class, content)
        is_one = len(missing) == 1
        raise ValueError(
            f"{where}: {', '.join(missing)} {'is' if is_one else 'are'} missing; {'it has' if is_one else 'they have'} "
            f"no default: add {'it' if is_one else 'them'}"
        ) from None
    except dacite.WrongTypeError as error:
        hint = error.field_type
        kind = hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")
        raise ValueError(
            f"{where}: {error.field_path} is {_SHORT.repr(error.value)}; it must be {kind}: correct it"
        ) from None
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{where}: {error.args[0] if error.args else error}") from None


def require_shuffler(name: str, imports: Sequence[str] = ()) -> None:
    """Import the user's modules, then raise ValueError unless a shuffler of this name is registered."""
    from commons.distributed.batch_shuffler_factory import BatchShufflerFactory  # here: it needs TorchRec

    import_user_modules(imports)
    if not BatchShufflerFactory.is_registered(name):
        raise ValueError(
            f"shuffler_type is {name!r}; registered are {', '.join(sorted(BatchShufflerFactory.list_available()))}: "
            "choose one, or name with --import the module that registers yours"
        )


def _take_config_flag(argv: list[str]) -> tuple[Path | None, list[str]]:
    """The value of `--config FILE` or `--config=FILE`, and the other arguments."""
    path: Path | None = None
    rest: list[str] = []
    arguments = iter(argv)
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if name.replace("_", "-") == "--gin-config-file":
            raise ValueError(f"{name} is recsys-examples'; here --config names a config, and {GIN_REMEDY}")
        if name != "--config":
            rest.append(argument)
            continue
        if not equals:
            value = next(arguments, "")
        if not value or path is not None:
            raise ValueError(
                f"--config is {'without a value' if not value else 'given twice'}; it names one TOML, YAML or JSON "
                "file: write --config FILE"
            )
        path = Path(value)
    return path, rest


def _values_of(flag: str, flags: list[str]) -> list[str]:
    """The values of the last flag of this name, as the parser takes them: up to the next flag."""
    values: list[str] = []
    taking = False
    for argument in flags:
        if argument.startswith("-"):
            name, equals, value = argument.partition("=")
            taking = name == flag
            if taking:
                values = [value] if equals else []
        elif taking:
            values.append(argument)
    return values


def _parse_flags(config_class: type[C], flags: list[str], **options: Any) -> C:
    asks_for_help = "--help" in flags or "-h" in flags
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            return tyro.cli(
                config_class,
                args=without_boolean_values(config_class, flags, has_defaults="default" in options),
                # Under torchrun every rank reads the flags; one of them shows the help.
                console_outputs=not asks_for_help or dist.get_node_local_rank(0) == 0,
                **options,
            )
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        renamed = _renamed_flags(config_class, flags)
        raise ValueError(renamed or parser_error(errors.getvalue())) from None


def _renamed_flags(config_class: Any, flags: list[str]) -> str:
    """What to write for flags that are known by another name, if there are some; else ""."""
    paths = field_paths(config_class)
    said = []
    for flag in flags:
        name = flag.partition("=")[0]
        path = name.removeprefix("--").replace("-", "_")
        written = path_elsewhere(path, paths) if flag.startswith("--") and path not in paths else None
        if written is not None:
            said.append(f"{name} (write --{written.replace('_', '-')})")
    return f"no such flag: {', '.join(said)}" if said else ""
