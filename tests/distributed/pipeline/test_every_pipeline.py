"""Every pipeline class of the installed TorchRec is balanced or refused, and so are users' subclasses of them."""

from __future__ import annotations

import contextlib
import re
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchrec.distributed.train_pipeline import GradientAccumulationConfig, GradientAccumulationWrapper
from torchrec.distributed.train_pipeline.train_pipelines import TrainPipelineBase, TrainPipelineSparseDist

from commons.distributed.options import ShufflerOptions
from commons.pipeline import balanced
from commons.pipeline.balanced import HOOKS, REFUSED
from tests.helpers.models.torchrec_model import build_sharded, head_of, rank_batches, weights_of
from tests.helpers.pipelines.pipeline_classes import (
    BALANCED_SUBCLASSES,
    REFUSED_SUBCLASSES,
    OneAhead,
    OwnBaseCopy,
    OwnCopy,
    OwnSchedule,
    torchrec_pipelines,
)
from tests.helpers.pipelines.shuffled_pipelines import (
    EVALUATIONS,
    CubicShuffler,
    before_a_commit,
    evaluate,
    expected_ids,
    largest_difference,
    require_pipeline,
    steps_of,
)
from tests.helpers.ranks.faults import raised_by

CPU = torch.device("cpu")
STEPS = 6
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


def _subclass(pipeline_class: type, kind: str) -> tuple[dict[str, torch.Tensor], list[list[int]], int, float]:
    model, optimizer = build_sharded()
    before = weights_of(model)
    shuffler = CubicShuffler(ShufflerOptions(mode=kind, timeout=60.0))
    trainer = balanced(pipeline_class)(model, optimizer, CPU, batch_shuffler=shuffler)
    source = rank_batches(dist.get_rank(), STEPS, [6])
    moved = sum(bool(trainer.last_stats and trainer.last_stats.moved) for _ in steps_of(trainer, source))
    shuffler.close()
    after = weights_of(model)
    return after, head_of(model).seen, moved, min(float((after[each] - before[each]).abs().max()) for each in after)


@pytest.mark.parametrize(
    "pipeline_class",
    before_a_commit([OwnCopy, OneAhead, OwnSchedule, OwnBaseCopy], BALANCED_SUBCLASSES),
    ids=lambda each: each.__name__,
)
def test_a_subclass_that_copies_by_itself_is_balanced(two_ranks, pipeline_class):
    on, off = (two_ranks.run(_subclass, pipeline_class, kind) for kind in ("balance", "off"))
    assert largest_difference(on[0][0], off[0][0]) < 1e-5
    assert sorted(i for _, seen, *_ in on for step in seen for i in step) == expected_ids_of_full_batches()
    assert [seen for _, seen, *_ in on] != [seen for _, seen, *_ in off]
    assert on[0][2] >= STEPS - 2 and on[0][3] > 1e-3


def expected_ids_of_full_batches() -> list[int]:
    """Ids of the rows of two ranks."""
    batches = [batch for rank in range(2) for batch in rank_batches(rank, STEPS, [6])]
    return sorted(int(i) for batch in batches for i in batch.sample_id)


def _refused_subclass(pipeline_class: type) -> str:
    return raised_by(lambda: _subclass(pipeline_class, "balance"))


@pytest.mark.parametrize("pipeline_class", list(REFUSED_SUBCLASSES), ids=lambda each: each.__name__)
def test_a_subclass_that_loses_a_batch_or_the_shuffle_is_told_so(two_ranks, pipeline_class):
    for message in two_ranks.run(_refused_subclass, pipeline_class):
        assert REFUSED_SUBCLASSES[pipeline_class] in message


def _accumulated(balance: bool) -> tuple[dict[str, torch.Tensor], int]:
    """Of an odd number of steps, the last of which the loop states."""
    model, optimizer = build_sharded()
    shuffler, stock = CubicShuffler(), TrainPipelineSparseDist
    arguments = model, optimizer, CPU
    pipeline: Any = balanced(stock)(*arguments, batch_shuffler=shuffler) if balance else stock(*arguments)
    wrapped = GradientAccumulationWrapper(pipeline, optimizer, model, GradientAccumulationConfig(num_steps=2))
    source = rank_batches(dist.get_rank(), STEPS - 1, [6])
    moved = 0
    with contextlib.suppress(StopIteration):
        for step in range(STEPS):
            wrapped.progress(source, is_last_batch=step == STEPS - 2)
            moved += balance and bool(wrapped.last_stats.moved)
    shuffler.close()
    return weights_of(model), moved


def test_gradients_accumulate_around_a_balanced_pipeline(two_ranks):
    on, off = (two_ranks.run(_accumulated, balance) for balance in (True, False))
    assert on[0][1] >= STEPS - 3
    assert largest_difference(on[0][0], off[0][0]) < 1e-5
    assert largest_difference(on[0][0], on[1][0]) < 1e-6


@pytest.mark.parametrize("pipeline", before_a_commit(["eval", "eval fused, lookups ahead"], EVALUATIONS))
def test_evaluations_see_every_sample_once_and_give_the_same_number(ranks, pipeline):
    require_pipeline(*EVALUATIONS[pipeline])
    counts = [5, 3, 0, 7][: ranks.world_size]
    on, off = (ranks.run(evaluate, counts, kind, 2, pipeline) for kind in ("balance", "identity"))
    expected = sorted(expected_ids(counts, ranks.world_size) + expected_ids(counts, ranks.world_size, 10))
    for results in (on, off):
        assert sorted(i for seen, _, _ in results for step in seen for i in step) == expected
    assert sum(error for _, error, _ in on) == pytest.approx(sum(error for _, error, _ in off), rel=1e-5)
    assert on[0][2] == sorted(on[0][2]) and len(on[0][2]) == 2 * max(counts)
