"""Arguments of programs, parsed by tyro, whose errors, help and boolean flags are changed here.

- A mistake is a ValueError of one line instead of a box.
- The description in the help is wrapped at the width of the terminal, and the help has no colours if NO_COLOR is set.
- A boolean flag may have a value, such as `--trainer.shuffle-eval False`. tyro turns a boolean field into the pair
  `--shuffle-eval` and `--no-shuffle-eval`, which take no value. Users give a value nevertheless, because boolean fields
  that may be None, such as `--model.compile False`, need one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
import shutil
import sys
import textwrap
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from commons.console import one_line

C = TypeVar("C")
_VALUES = {"true": True, "false": False}


def parse_arguments(config_class: type[C], argv: Sequence[str], prog: str, **options: Any) -> C | None:
    """Parse arguments, without the name of the program, into a dataclass; prints the help and returns None for --help.

    `options` are tyro's, such as `default`. ValueError for a mistake.
    """
    import tyro  # here, because `evenrank doctor` runs without it

    parsed, printed = run_parser(
        lambda: tyro.cli(config_class, args=without_boolean_values(config_class, argv), prog=prog, **options)
    )
    sys.stdout.write(wrapped_help(printed))
    return parsed


def run_parser(parse: Callable[[], C]) -> tuple[C | None, str]:
    """The result of a function that calls tyro, and "", or None and the help or completion that tyro prints instead.

    ValueError for a mistake.
    """
    output, errors = _Output(), io.StringIO()
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
            return parse(), ""
    except SystemExit as stop:
        if stop.code not in (0, None):
            raise ValueError(parser_error(errors.getvalue())) from None
        return None, output.getvalue()


class _Output(io.StringIO):
    """A replacement of stdout while tyro prints, with stdout's encoding; a terminal if stdout is one."""

    def __init__(self) -> None:
        super().__init__()
        self._stdout = sys.stdout

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The encoding of stdout."""
        return self._stdout.encoding

    def isatty(self) -> bool:
        """Whether stdout is a terminal with colours; checks NO_COLOR, which tyro does not."""
        from rich.console import Console

        return self._stdout.isatty() and not Console(file=self._stdout).no_color


def parser_error(text: str) -> str:
    """The message in tyro's error box as one line, without the names that tyro puts in front of evenrank's message.

    >>> parser_error("╭─ Value error ─╮\\n│ Error parsing trainer: seed is -1 │\\n╰───────────────╯")
    'seed is -1'
    >>> box = "╭─ Unrecognized options ─╮\\n│ Unrecognized options: --rank │\\n│ ──── │\\n│ Perhaps you meant: │\\n"
    >>> parser_error(box + "│ --ranks [INT [INT ...]] │\\n│ Numbers of ranks. │\\n│ in evenrank --help │\\n╰──╯")
    'Unrecognized options: --rank; perhaps you meant --ranks'
    >>> parser_error("╭─ Invalid choice ─╮\\n│ invalid choice 'gpt' for argument '--task'. │\\n╰──╯")
    "Invalid choice: 'gpt' for argument '--task'."
    """
    line = one_line(text).split("; For full helptext")[0]
    required = re.fullmatch(r"Required options[:;] Missing from ([^:]+): (.*)", line)
    if required:
        missing = re.findall(r"(?:^|\(required\) )(\{[^}]*\}|\S+)", required[2])
        return f"{required[1]} requires {', '.join(missing)}: see {required[1]} --help"
    line = re.sub(r"\. Got errors: .*?(?=; Argument helptext|$)", "", line)  # of every type in a union
    line = re.sub(r"; Argument helptext: --\S+ ((?:\S*(?:[A-Z]{3}|[][{}])\S* )+).*", r"; it takes \1", line).rstrip()
    line = re.sub(r"^Value error[:;] ", "", line)
    line = re.sub(r"^Error parsing (?!--)[\w.-]*: ", "", line)
    line = re.sub(r"(\}) \.$", r"\1", line)  # Missing subcommand
    line = re.sub(r"^(Unrecognized options|Invalid choice)[:;] \1:?", r"\1:", line, flags=re.IGNORECASE)
    error, *suggestions = re.split("; (?:Perhaps you meant|Arguments similar to [^:]+): ", line)
    # Without the help that follows each name; of the pair of a boolean, `--a, --no-a`, the one that is meant.
    pairs = re.findall(r"(--[\w.-]+)(?:, (--(?:[\w-]+\.)*no-[\w-]+)|(?= [\[{A-Z]))", " ".join(suggestions))
    turns_off = re.search(r": --(?:\S+\.)?no-", error)
    names = dict.fromkeys((off if turns_off else "") or name for name, off in pairs)
    if names:
        return f"{error}; perhaps you meant {' or '.join(names)}"
    if line.startswith("Unrecognized options: "):
        line += ": see --help" if ": --" in line else "; a value follows its option: see --help"
    return line


def wrapped_help(text: str, width: int | None = None) -> str:
    """Wrap the description in tyro's help, whose lines may have any length, at the width of the terminal.

    Indented lines, such as examples, are not wrapped.

    >>> print(wrapped_help("usage: x\\n\\nSays what is installed or missing.\\n\\n  x --report long/folder\\n╭─", 23))
    usage: x
    <BLANKLINE>
    Says what is installed
    or missing.
    <BLANKLINE>
      x --report long/folder
    ╭─
    """
    if "usage" not in text.partition("\n")[0]:  # a script for the completion of a shell
        return text
    width = shutil.get_terminal_size().columns if width is None else width
    description, box, rest = text.partition("╭")
    lines = []
    for line in description.split("\n"):
        fits = len(line) <= width or line.startswith((" ", "\x1b"))
        lines += [line] if fits else textwrap.wrap(line, width, break_long_words=False, break_on_hyphens=False)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)) + box + rest


def without_boolean_values(
    config_class: Any, argv: Sequence[str], *, has_defaults: bool = False, has_words: bool = True
) -> list[str]:
    """Replace each boolean flag and its value, True or False, with the flag of the pair that means it.

    ValueError for another value.

    Args:
        config_class: the dataclass that the arguments are parsed into.
        argv: arguments without the name of the program.
        has_defaults: whether a config file gives every field a default; the parser requires a value for a boolean field
            without a default, so the flag of such a field is not replaced.
        has_words: whether a word after a boolean flag may be another argument, such as a file, instead of its value.

    >>> @dataclasses.dataclass
    ... class Inner:
    ...     is_fast: bool = True
    >>> config_class = dataclasses.make_dataclass("Outer", [("seed", int), ("model", Inner)])
    >>> without_boolean_values(config_class, ["--model.is-fast", "False", "--seed", "3"])
    ['--model.no-is-fast', '--seed', '3']
    """
    pairs = dict(_pairs(config_class, "--", has_defaults))
    written: list[str] = []
    arguments = list(argv)
    while arguments:
        argument = arguments.pop(0)
        name, equals, value = argument.partition("=")
        off = pairs.get(name.replace("_", "-"))
        if not equals and arguments:
            value = arguments[0]
        given = _VALUES.get(value.lower())
        if off is not None and given is None and (equals or not (has_words or value.startswith("-") or not value)):
            raise ValueError(f"{name} is {value!r}; a boolean flag takes True, False or no value: write one")
        if off is None or given is None:
            written.append(argument)
            continue
        written.append(name if given else off)
        if not equals:
            arguments.pop(0)
    return written


def _pairs(config_class: Any, prefix: str, has_defaults: bool) -> Iterator[tuple[str, str]]:
    """The flag that turns a field on, and the one that turns it off, of every boolean field that has a default."""
    hints = typing.get_type_hints(config_class)
    for field in dataclasses.fields(config_class):
        name, hint = field.name.replace("_", "-"), hints[field.name]
        is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
        options = typing.get_args(hint) if is_union else (hint,)
        if hint is bool and field.init and (has_defaults or _has_default(field)):
            yield f"{prefix}{name}", f"{prefix}no-{name}"
        for nested in filter(dataclasses.is_dataclass, options):
            # The parser adds no prefix for fields of this name (options of a command).
            yield from _pairs(nested, prefix if field.name.startswith("of_") else f"{prefix}{name}.", has_defaults)


def _has_default(field: dataclasses.Field[Any]) -> bool:
    return field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
