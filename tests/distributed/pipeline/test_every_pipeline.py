"""Every pipeline class of the installed TorchRec is balanced or refused, and so are users' subclasses of them."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

import pytest
from torchrec.distributed.train_pipeline.train_pipelines import TrainPipelineBase, TrainPipelineSparseDist

from commons.pipeline import balanced
from commons.pipeline.balanced import HOOKS, REFUSED
from tests.helpers.pipelines.pipeline_classes import (
    torchrec_pipelines,
)

INSTALLED = torchrec_pipelines()


def unlisted(classes: dict[str, type]) -> str | None:
    """Classes that balanced() has no word about; None if there are none."""
    names = sorted(classes.keys() - HOOKS.keys() - REFUSED.keys())
    if not names:
        return None
    return (
        f"TorchRec {metadata.version('torchrec')} has the pipelines {', '.join(names)}, which "
        "commons/pipeline/balanced.py does not list: find out where each copies its batches and add it to HOOKS, with "
        "a test that its weights are those of the stock class, or to REFUSED, with a sentence that says why and what "
        "to use; then to docs/pipelines.md"
    )


def test_every_class_of_this_torchrec_is_balanced_or_refused():
    assert (problem := unlisted(INSTALLED)) is None, problem
    assert len(INSTALLED) > 15 and not HOOKS.keys() & REFUSED.keys()


def test_a_balanced_class_is_not_balanced_again():
    once = balanced(TrainPipelineBase)
    assert balanced(once) is once

    class Mine(once):
        pass

    assert balanced(Mine) is Mine


def test_a_class_that_a_new_torchrec_brings_is_told_and_refused():
    module = TrainPipelineSparseDist.__module__
    new = type("TrainPipelineNew", (TrainPipelineSparseDist,), {"__module__": module})
    assert "has the pipelines TrainPipelineNew, which" in unlisted(INSTALLED | {"TrainPipelineNew": new})
    with pytest.raises(
        TypeError, match="TrainPipelineNew has no known place for the shuffle.*supported are TrainPipeline"
    ):
        balanced(new)


@pytest.mark.parametrize("name", sorted(INSTALLED.keys() & REFUSED.keys()))
def test_a_refusal_says_why_and_what_to_use(name):
    with pytest.raises(TypeError, match=f"^{name} {re.escape(REFUSED[name])}$"):
        balanced(INSTALLED[name])
    mine = type("Mine", (INSTALLED[name],), {})
    with pytest.raises(TypeError, match=f"^Mine is a {name}, which {re.escape(REFUSED[name])}$"):
        balanced(mine)


def test_the_page_lists_every_class():
    page = (Path(__file__).parents[3] / "docs" / "pipelines.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)`[^|]*\| (balanced|refused)", page, re.MULTILINE))
    assert rows == dict.fromkeys(HOOKS, "balanced") | dict.fromkeys(REFUSED, "refused")
