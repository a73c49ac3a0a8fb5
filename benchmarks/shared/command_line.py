"""The command line of benchmark programs: a mistake there is one line and status 2."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import inspect
import io
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, TypeVar

import torch
import tyro

from commons.checks import require_at_least
from commons.console import print_error
from commons.parser import parser_error

R = TypeVar("R")
Quick = Annotated[bool, tyro.conf.arg(help="few cases, for a look; writes nothing")]

# Status of a program whose packages are missing; ci/bench.sh leaves it out.
_SKIPPED = 77
# Options whose numbers may be 0; all others count something of which there is at least one.
_FROM_ZERO = ("seed", "warmup")
# Where it has several numbers, these are seeds; a single one is how many.
_SEEDS = "seeds"


def from_command_line(
    program: Callable[..., R],
    description: str | None,
    at_least: Mapping[str, int] | None = None,
    needs: Sequence[str] = (),
) -> R:
    """Call a program with the arguments of its command line.

    Args:
        program: a function with annotated keywords, or a dataclass.
        description: text of its help.
        at_least: the least of integers by name, where that is neither 1 nor the 0 of a seed or a warm-up.
        needs: packages that `make install` does not install, as pip names them.

    Raises:
        SystemExit: with status 2 for arguments that are unknown, malformed or out of range, with one line of text;
            with status 0 for `--help`; with status 77, and one line, if a package is missing.
    """
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            call, values = _parse(program, description)
        for name, value in values.items():
            _require_in_range(name, value, at_least or {})
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        _refuse(parser_error(errors.getvalue()))
    except ValueError as error:
        _refuse(str(error))
    missing = [package for package in needs if importlib.util.find_spec(package) is None]
    if missing:
        print(
            f"skipped: {program_name()} needs {', '.join(missing)}: install with `make test-extras` or pip",
            file=sys.stderr,
        )
        raise SystemExit(_SKIPPED)
    return call()


def program_name() -> str:
    """The module that runs as `python -m`."""
    spec = sys.modules["__main__"].__spec__
    return "a program" if spec is None else spec.name.removesuffix(".__main__")


def _parse(program: Callable[..., R], description: str | None) -> tuple[Callable[[], R], dict[str, Any]]:
    """The requested call, and its arguments by name."""
    prog = f"python -m {program_name()}"
    if isinstance(program, type):
        made: Any = tyro.cli(program, prog=prog, description=description)
        return lambda: made, {field.name: getattr(made, field.name) for field in dataclasses.fields(made)}

    @functools.wraps(program)
    def parsed(*args: Any, **keywords: Any) -> inspect.BoundArguments:
        return inspect.signature(program).bind(*args, **keywords)

    bound: Any = tyro.cli(parsed, prog=prog, description=description)
    return functools.partial(program, *bound.args, **bound.kwargs), dict(bound.arguments)


def _require_in_range(name: str, value: Any, at_least: Mapping[str, int]) -> None:
    """Raise ValueError for integers that are too small, and for a GPU that is not there."""
    option = f"--{name.replace('_', '-')}"
    from_zero = name in _FROM_ZERO or (name == _SEEDS and isinstance(value, tuple))
    least = at_least.get(name, 0 if from_zero else 1)
    if value == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"{option} is cuda; no CUDA device is visible: use cpu, if only to run the code")
    for each in value if isinstance(value, (tuple, list)) else (value,):
        if isinstance(each, int) and not isinstance(each, bool):
            require_at_least(option, each, least)


def _refuse(message: str) -> None:
    print_error(message)
    raise SystemExit(2)
