"""Every pipeline class of the installed TorchRec is balanced or refused, and so is what else users may pass."""

from __future__ import annotations

import contextlib
import itertools
import re
from importlib import metadata
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from packaging.version import Version
from torchrec.distributed.train_pipeline.train_pipelines import TrainPipelineBase, TrainPipelineSparseDist

from commons.distributed.batch_shuffler import IdentityBalancedBatchShuffler
from commons.pipeline import TrainPipelineFactory, balanced
from commons.pipeline.balanced import HOOKS, REFUSED
from commons.releases import DEFAULT_TORCH, NEWEST_TORCHREC, OLDEST_TORCHREC, RELEASES
from tests.helpers.models import torchrec_model as models
from tests.helpers.models.torchrec_model import head_of, rank_batches
from tests.helpers.pipelines.pipeline_classes import torchrec_pipelines
from tests.helpers.pipelines.shuffled_pipelines import (
    EVALUATIONS,
    PIPELINES,
    CubicShuffler,
    before_a_commit,
    expected_ids,
    steps_of,
)
from tests.helpers.ranks.on_ranks import of_all, on_two_ranks

INSTALLED = torchrec_pipelines()


def test_every_class_of_this_torchrec_is_balanced_or_refused():
    unlisted = sorted(INSTALLED.keys() - HOOKS.keys() - REFUSED.keys())
    assert not unlisted, (
        f"TorchRec {metadata.version('torchrec')} has the pipelines {unlisted}: find out where each copies its batches "
        "and add it to HOOKS, with a test that its weights are those of the stock class, or to REFUSED, with a "
        "sentence that says why and what to use; then to docs/pipelines.md"
    )
    assert len(INSTALLED) > 15 and not HOOKS.keys() & REFUSED.keys()


# TorchRec 1.6 lacks methods that some hooks need; the pinned release and later ones have all.
@pytest.mark.skipif(
    Version(metadata.version("torchrec")) < Version(RELEASES[DEFAULT_TORCH]), reason="older releases lack some methods"
)
@pytest.mark.parametrize("name", sorted(INSTALLED.keys() & HOOKS.keys()))
def test_new_releases_of_torchrec_have_what_every_hook_needs(name):
    """Elsewhere, cases of classes that lack it are skipped."""
    assert issubclass(balanced(INSTALLED[name]), INSTALLED[name])


def test_a_class_that_a_new_torchrec_brings_is_refused():
    new = type("TrainPipelineNew", (TrainPipelineSparseDist,), {"__module__": TrainPipelineSparseDist.__module__})
    with pytest.raises(TypeError, match="TrainPipelineNew is not a supported pipeline, .*supported are TrainPipeline"):
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


MODEL = torch.nn.Linear(1, 1)
ARGUMENTS = {
    "model": MODEL,
    "optimizer": torch.optim.SGD(MODEL.parameters(), lr=0.1),
    "device": torch.device("cpu"),
    "batch_shuffler": IdentityBalancedBatchShuffler(),
}


def test_what_cannot_be_hooked_is_refused():
    with pytest.raises(TypeError, match="dict is not a supported pipeline, .*TrainPipelineSparseDist"):
        balanced(dict)
    with pytest.raises(TypeError, match=r"is an object of TrainPipelineBase; .*: write balanced\(TrainPipelineBase\)"):
        balanced(TrainPipelineBase(torch.nn.Linear(1, 1), None, torch.device("cpu")))

    for name in ("TrainPipelineBase", 3):
        with pytest.raises(
            TypeError, match=r"is an object of (str|int); .*: write balanced\(TrainPipelineSparseDist\)"
        ):
            balanced(name)

    mine = type("Mine", (TrainPipelineSparseDist,), {})
    once = balanced(mine)
    assert issubclass(once, mine) and balanced(mine) is once and balanced(once) is once
    assert balanced(heir := type("Heir", (once,), {})) is heir
    with pytest.raises(ValueError, match="execute_all_batches is False"):
        once(**ARGUMENTS, execute_all_batches=False)
    with pytest.raises(TypeError, match="batch_shuffler is a str"):
        once(**ARGUMENTS | {"batch_shuffler": "hstu"})
    with pytest.raises(
        TypeError, match=r"batch_shuffler is the class CubicShuffler; .*: pass CubicShuffler\(\.\.\.\)$"
    ):
        once(**ARGUMENTS | {"batch_shuffler": CubicShuffler})


def test_pipelines_by_name():
    assert isinstance(TrainPipelineFactory.create("none", **ARGUMENTS), TrainPipelineBase)
    assert isinstance(TrainPipelineFactory.create("native", **ARGUMENTS), TrainPipelineSparseDist)
    with pytest.raises(ValueError, match="'nativ' is not registered; valid names are 'fused', 'native', 'none', 'pre"):
        TrainPipelineFactory.create("nativ", **ARGUMENTS)
    with pytest.raises(ValueError, match="already registered"):
        TrainPipelineFactory.register("none", balanced(TrainPipelineBase))


class _TakesAll(TrainPipelineBase):
    def __init__(self, model, optimizer, device, **kwargs):
        super().__init__(model, optimizer, device)


class _TakesAShuffler(TrainPipelineBase):
    def __init__(self, model, optimizer, device, batch_shuffler):
        super().__init__(model, optimizer, device)
        self.given = batch_shuffler


def test_a_registered_class_of_torchrec_is_balanced_and_one_that_takes_a_shuffler_is_not(monkeypatch):
    monkeypatch.setattr(TrainPipelineFactory, "_makers", {})
    mine = type("Mine", (TrainPipelineBase,), {})
    made = {}
    for name, each in {"own": mine, "balanced": balanced(mine), "all": _TakesAll, "names": _TakesAShuffler}.items():
        TrainPipelineFactory.register(name, each)
        made[name] = TrainPipelineFactory.create(name, **ARGUMENTS)
    assert type(made["own"]) is type(made["balanced"]) is balanced(mine)
    assert type(made["all"]) is balanced(_TakesAll)  # its constructor would drop the shuffler without a message
    assert type(made["names"]) is _TakesAShuffler and made["names"].given is ARGUMENTS["batch_shuffler"]
    TrainPipelineFactory.register("refused", INSTALLED["StagedTrainPipeline"])
    with pytest.raises(TypeError, match="StagedTrainPipeline copies batches in one of your stages"):
        TrainPipelineFactory.create("refused", **ARGUMENTS)


def test_where_one_pipeline_cannot_be_balanced_the_others_can(monkeypatch):
    """As with a TorchRec that lacks what a hook needs."""
    monkeypatch.delattr(TrainPipelineBase, "_copy_batch_to_gpu")
    balanced.cache_clear()
    refusal = (
        r"^TrainPipelineBase of TorchRec 1\.\S+ has no _copy_batch_to_gpu, which the shuffle needs as a hook; TorchRec "
    )
    with pytest.raises(
        TypeError, match=refusal + f"{OLDEST_TORCHREC} to {NEWEST_TORCHREC} have it: install one of them$"
    ):
        balanced(TrainPipelineBase)
    assert TrainPipelineFactory.list_available() == ["fused", "native", "none", "prefetch", "semi_sync"]
    assert issubclass(balanced(TrainPipelineSparseDist), TrainPipelineSparseDist)


# TorchRec's hybrid class cannot be filled before its first step, nor can prefetch of TorchRec 1.6: its `_fill_pipeline`
# is its own, and `progress` never trains what `fill_pipeline` reads.
FILLED = [
    name
    for name, (each, _) in (PIPELINES | EVALUATIONS).items()
    if getattr(each, "_fill_pipeline", None) is TrainPipelineSparseDist._fill_pipeline and "hybrid" not in name
]


@pytest.mark.parametrize("name", before_a_commit(["sparse", "copies on a thread"], FILLED))
@on_two_ranks
def test_a_pipeline_that_a_user_fills_before_the_first_step_shuffles_every_batch(name):
    pipeline_class, options = (PIPELINES | EVALUATIONS)[name]
    model, optimizer = models.build_sharded()
    model.train(name not in EVALUATIONS)
    with contextlib.closing(CubicShuffler()) as shuffler:
        pipeline = balanced(pipeline_class)(model, optimizer, torch.device("cpu"), batch_shuffler=shuffler, **options)
        source = rank_batches(dist.get_rank(), 3 + dist.get_rank(), [6])
        pipeline.fill_pipeline(source)
        assert [pipeline.last_stats.step for _ in steps_of(pipeline, source)] == [0, 1, 2, 3]
        pipeline.reset()
    assert sorted(of_all(itertools.chain(*head_of(model).seen))) == expected_ids([3, 4], 2, sizes=[6])
