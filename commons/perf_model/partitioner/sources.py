"""Which C++ sources the native core is built from; setup.py runs this file too, before anything is installed."""

from __future__ import annotations

import hashlib
from pathlib import Path

NATIVE = Path(__file__).parent / "native"


def hash_of_sources(folder: Path = NATIVE) -> str:
    """12 hexadecimal digits over the C++ in a folder, without its comments and blank lines."""
    hashed = hashlib.blake2b(digest_size=6)
    for path in sorted(each for each in folder.iterdir() if each.suffix in (".cpp", ".hpp")):
        lines = (line.split("//")[0].strip() for line in path.read_text(encoding="utf-8").splitlines())
        hashed.update("\n".join([path.name, *filter(None, lines)]).encode())
    return hashed.hexdigest()
