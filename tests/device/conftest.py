"""Tests on a device that is pretended; they say why they skip where they cannot."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.cuda.pretended_process import PretendedProcess, build_library, cannot_pretend


@pytest.fixture(scope="package")
def pretended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PretendedProcess]:
    """A process in which tensors may be on CUDA."""
    reason = cannot_pretend()
    if reason:
        pytest.skip(reason)
    process = PretendedProcess(build_library(tmp_path_factory.mktemp("pretended_cuda")))
    yield process
    process.stop()
