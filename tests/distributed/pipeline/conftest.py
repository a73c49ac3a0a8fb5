"""Cases of pipelines that the installed TorchRec does not have are skipped."""

from __future__ import annotations

import pytest

from tests.helpers.pipelines.shuffled_pipelines import EVALUATIONS, PIPELINES, require_pipeline


@pytest.fixture(autouse=True)
def _of_this_torchrec(request: pytest.FixtureRequest) -> None:
    parameters = request.node.callspec.params.values() if hasattr(request.node, "callspec") else ()
    for value in parameters:
        if isinstance(value, str) and value in PIPELINES | EVALUATIONS:
            require_pipeline(*(PIPELINES | EVALUATIONS)[value])
