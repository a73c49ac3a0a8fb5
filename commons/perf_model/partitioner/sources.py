"""The C++ sources of the native core, and their hash; setup.py also runs this file, before anything is installed."""

from __future__ import annotations

import hashlib
from pathlib import Path

NATIVE = Path(__file__).parent / "native"


def hash_of_sources(folder: Path = NATIVE) -> str:
    """A hash of the C++ files in a folder without comments and blank lines, 12 hexadecimal digits."""
    hashed = hashlib.blake2b(digest_size=6)
    for path in sorted(each for each in folder.iterdir() if each.suffix in (".cpp", ".hpp")):
        lines = (line.split("//")[0].strip() for line in path.read_text(encoding="utf-8").splitlines())
        hashed.update("\n".join([path.name, *filter(None, lines)]).encode())
    return hashed.hexdigest()
