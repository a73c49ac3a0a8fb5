"""The licence of every package in this environment: `python ci/licences.py`, with the Python of .venv.

Status 1 and a line for each package that names none, or one whose terms would reach the code that imports it. A package
that installs nothing but metadata needs none.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterable
from importlib.metadata import Distribution, distributions
from typing import NoReturn

_OWN = "evenrank"
_CLASSIFIER = re.compile(r"License :: (?:OSI Approved :: )?(?!DFSG)(.+)")
# The lesser GPL is none of these: it asks nothing of a program that imports the library.
_REACHES_IMPORTERS = re.compile(r"\b(?:A?GPL|SSPL)|(?<!Lesser )General Public License")
_LONGEST = 90
# The status where nobody reads the list to its end.
_CLOSED_PIPE = 1


class _Parser(argparse.ArgumentParser):
    """One that says a mistake in a line, without the usage."""

    def error(self, message: str) -> NoReturn:
        """End the program with status 2."""
        self.exit(2, f"error: {message}\n")


def licence_of(package: Distribution) -> str:
    """What a package's metadata says of its licence; "" where they say nothing."""
    metadata = package.metadata
    if "License-Expression" in metadata:
        return metadata["License-Expression"]
    classified = [found[1] for line in metadata.get_all("Classifier") or () if (found := _CLASSIFIER.fullmatch(line))]
    # In older metadata the field may hold the whole text of the licence.
    text = "".join(metadata.get_all("License") or ())
    lines = [line.strip() for line in text.splitlines() if re.search(r"\w", line)]
    named = " OR ".join(classified) or (lines[0] if lines and lines[0] != "UNKNOWN" else "")
    return named or ("" if _has_files(package) else "none: nothing but the names of other packages")


def _has_files(package: Distribution) -> bool:
    """Whether a package installs more than its metadata; one that does not, such as cuda-toolkit, has only needs."""
    return package.files is None or any(".dist-info" not in file.parts[0] for file in package.files)


def problems_of(licences: Iterable[tuple[str, str]]) -> list[str]:
    """A line for every package, of pairs of name and licence, that should not be used."""
    problems = []
    for name, licence in licences:
        if not licence:
            problems.append(f"{name} names no licence; every package that is installed has one: ask its authors")
        elif all(_REACHES_IMPORTERS.search(choice) for choice in licence.split(" OR ")):
            problems.append(f"{name} has {licence}, whose terms reach the code that imports it: use another package")
    return problems


def main() -> int:
    """Print the list; returns the exit status."""
    _Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    try:
        status = print_licences()
        sys.stdout.flush()
    except BrokenPipeError:
        # The rest goes nowhere; the interpreter would flush it once more, and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _CLOSED_PIPE
    return status


def print_licences() -> int:
    """Print a line for each package; 1 if there is a problem, else 0."""
    packages = {package.metadata["Name"]: package for package in distributions()}
    names = sorted(packages.keys() - {_OWN}, key=str.lower)
    licences = [(name, licence_of(packages[name])) for name in names]
    width = max(map(len, names))
    for name, licence in licences:
        print(f"{name:{width}}  {packages[name].version:16}  {licence[:_LONGEST]}")  # noqa: T201
    problems = problems_of(licences)
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)  # noqa: T201
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
