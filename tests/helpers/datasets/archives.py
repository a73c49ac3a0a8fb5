"""Zip and tar files of contents by name, and what preprocessing says of bad ones."""

from __future__ import annotations

import io
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest


def write_zip(path: Path, members: Mapping[str, str | bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def write_tar(path: Path, members: Mapping[str, str | bytes]) -> Path:
    with tarfile.open(path, "w:gz", compresslevel=1) as archive:
        for name, content in members.items():
            data = content.encode() if isinstance(content, str) else content
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def error_of(preprocess, source, kind=ValueError) -> str:
    """The one line that preprocessing an archive ends with; no output is left behind."""
    output = source.parent / "output"
    with pytest.raises(kind) as caught:
        preprocess(source, output)
    message = str(caught.value)
    assert "\n" not in message and str(source) in message and not output.exists()
    return message
