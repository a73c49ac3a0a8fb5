"""Every pipeline, balanced, with the trainer's optimizer, changes weights as the stock one with a plain optimizer.

The stock classes run, on pretended streams where they ask for some, users' subclasses of them, and models in torch's
own wrappers. SemiSync trains on embeddings of one batch before.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torchrec.distributed.memory_stashing import MemoryStashingManager
from torchrec.distributed.train_pipeline import GradientAccumulationConfig, GradientAccumulationWrapper
from torchrec.distributed.train_pipeline.train_pipelines import (
    TorchCompileConfig,
    TrainPipelinePT2,
    TrainPipelineSemiSync,
    TrainPipelineSparseDist,
    TrainPipelineSparseDistCompAutograd,
)

from commons.pipeline import balanced
from commons.pipeline.balanced import HOOKS
from commons.pipeline.hooks import BalancedPipeline
from commons.trainer import TrainerArgs, loop
from commons.trainer.config.args import OptimizationArgs
from commons.trainer.optimize.updates import DeferredOptimizer, StepUpdate
from tests.helpers.cuda.pretended_streams import pretended_streams, replaced, with_streams
from tests.helpers.models import torchrec_model as models
from tests.helpers.models.torchrec_model import (
    LEARNING_RATE,
    PlainModel,
    build_plain,
    build_sharded,
    head_of,
    rank_batches,
    weights_of,
)
from tests.helpers.pipelines.pipeline_classes import BALANCED_SUBCLASSES, REFUSED_SUBCLASSES, torchrec_pipelines
from tests.helpers.pipelines.shuffled_pipelines import (
    STOCK,
    STOCK_EVALUATIONS,
    STOCK_WITH_STREAMS,
    CubicShuffler,
    before_a_commit,
    largest_difference,
    require_pipeline,
    steps_of,
)
from tests.helpers.pipelines.trainer_loops import Parts, StatedHead
from tests.helpers.ranks.faults import error_of
from tests.helpers.ranks.on_ranks import on_two_ranks
from tests.helpers.ranks.rank_pool import RankPool

CPU = torch.device("cpu")
STEPS = 7
Pipelines: TypeAlias = "dict[str, tuple[type, dict[str, Any]]]"
PIPELINES: Pipelines = STOCK | STOCK_WITH_STREAMS
PIPELINES["semi-sync, gradients of the batch before"] = (
    TrainPipelineSemiSync,
    {"start_batch": 2, "stash_gradients": True},
)
# As users write them; the last lose a batch or the shuffle.
SUBCLASSES, REFUSED = (
    {each.__name__: (each, {}) for each in some} for some in (BALANCED_SUBCLASSES, REFUSED_SUBCLASSES)
)
# Those that the trainer makes by a name of its own.
OF_TRAINER = {"none": "base", "native": "sparse", "prefetch": "prefetch", "fused": "fused", "semi_sync": "semi-sync"}
# With the cheapest of compilers; TorchRec changes torch's settings for good, so these have ranks of their own. PT2 has
# plain embeddings: to compile TorchRec's takes ten seconds of a processor, and nothing in there is evenrank's.
COMPILED: Pipelines = {
    "pt2": (TrainPipelinePT2, {"compile_configs": TorchCompileConfig(backend="eager", compile_on_iter=STEPS - 1)}),
    "compiled autograd": (TrainPipelineSparseDistCompAutograd, {}),
}


def make_model(build: Callable[[], tuple[Any, Any]] = build_sharded) -> tuple[Any, Any]:
    model, optimizer = build()
    head_of(model).__class__ = StatedHead
    MemoryStashingManager.reset()
    model._compiled_autograd_options = {"backend": "eager", "dynamic": True, "fullgraph": False}
    return model, optimizer


def batches() -> Any:
    return rank_batches(dist.get_rank(), STEPS, [6])


def _stock(name: str, build: Callable[[], tuple[Any, Any]] = build_sharded) -> dict[str, torch.Tensor]:
    """Weights that the stock pipeline trains, each rank on its own batches."""
    pipeline_class, options = (PIPELINES | SUBCLASSES)[name]
    with pretended_streams():
        model, optimizer = make_model(build)
        pipeline = with_streams(pipeline_class(model, optimizer, CPU, **options))
        list(steps_of(pipeline, batches()))
        return weights_of(model)


def _balanced(
    name: str, pipelines: Pipelines = PIPELINES, build: Callable[[], tuple[Any, Any]] = build_sharded
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Weights before and after balanced training with the trainer's optimizer; each step has the stats of its batch."""
    pipeline_class, options = pipelines[name]
    shuffler = CubicShuffler()
    with pretended_streams():
        model, optimizer = make_model(build)
        before = weights_of(model)
        update = StepUpdate(OptimizationArgs(), optimizer, model, STEPS, CPU)
        # That class reads the optimizer's state as soon as it has stepped, when the trainer's has not.
        deferred = optimizer if name == "optimizer stashed" else DeferredOptimizer(optimizer)
        arguments = {"model": model, "optimizer": deferred, "device": CPU}
        pipeline = balanced(pipeline_class)(**arguments, batch_shuffler=shuffler, **options)
        with_streams(pipeline)
        source, moved = batches(), 0
        with contextlib.suppress(StopIteration):
            for step in range(STEPS + 1):
                if deferred is not optimizer:
                    update.before_step(step)
                output = pipeline.progress(source)
                assert pipeline.last_stats.step == step
                moved += pipeline.last_stats.moved
                if deferred is not optimizer:
                    update.after_step(step, output.num_loss_tokens)
    shuffler.close()
    assert moved >= STEPS - 2
    return before, weights_of(model)


def compare_with_stock(
    ranks: RankPool, name: str, most: float = 1e-5, build: Callable[[], tuple[Any, Any]] = build_sharded
) -> None:
    before, after = ranks.run(_balanced, name, PIPELINES | SUBCLASSES, build)[0]
    assert all(float((after[each] - before[each]).abs().max()) > 1e-3 for each in after)
    assert largest_difference(after, ranks.run(_stock, name, build)[0]) < most


# The first of each class.
FIRST = list({each: name for name, (each, _) in reversed(PIPELINES.items())}.values())


@pytest.mark.parametrize("name", before_a_commit(FIRST, PIPELINES))
def test_weights_change_as_those_of_the_stock_pipeline(two_ranks, name):
    require_pipeline(*PIPELINES[name])
    compare_with_stock(two_ranks, name)


@pytest.mark.parametrize("name", SUBCLASSES)
def test_a_subclass_that_copies_by_itself_is_balanced(two_ranks, name):
    compare_with_stock(two_ranks, name)


@pytest.mark.parametrize("name", REFUSED)
@on_two_ranks
def test_a_subclass_that_loses_a_batch_or_the_shuffle_is_told_so(name):
    said = REFUSED_SUBCLASSES[REFUSED[name][0]]
    assert said in error_of(_balanced, name, REFUSED)
    if name != "SkipsTheCopy":  # that error comes after the step
        on_rank_1 = error_of(_balanced, name, {name: REFUSED[name] if dist.get_rank() == 1 else PIPELINES["sparse"]})
        quoted = "" if dist.get_rank() == 1 else "RankMissingError: rank 1 failed in the exchange of step 0: "
        assert on_rank_1.startswith(f"{quoted}ValueError: Balanced{name} {said}")


def _wrapped(wrapper: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model: nn.Module = PlainModel()
    if wrapper == "DDP":
        model = DistributedDataParallel(model)
    else:
        fully_shard(model.head.linear)
        fully_shard(model)
    return model, torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)


@pytest.mark.parametrize("wrapper", ["DDP", "FSDP"])
def test_models_in_torch_s_own_wrappers_train_the_same(two_ranks, wrapper):
    compare_with_stock(two_ranks, "base", 1e-10, functools.partial(_wrapped, wrapper))


def _accumulated(balance: bool) -> tuple[dict[str, torch.Tensor], int]:
    """Of an odd number of steps, the last of which the loop states."""
    model, optimizer = make_model()
    shuffler, stock = CubicShuffler(), TrainPipelineSparseDist
    arguments = model, optimizer, CPU
    pipeline: Any = balanced(stock)(*arguments, batch_shuffler=shuffler) if balance else stock(*arguments)
    wrapped = GradientAccumulationWrapper(pipeline, optimizer, model, GradientAccumulationConfig(num_steps=2))
    source, moved = batches(), 0
    with contextlib.suppress(StopIteration):
        for step in range(STEPS + 1):
            wrapped.progress(source, is_last_batch=step == STEPS - 1)
            moved += balance and bool(wrapped.last_stats.moved)
    shuffler.close()
    return weights_of(model), moved


def test_gradients_accumulate_around_a_balanced_pipeline(two_ranks):
    on, off = (two_ranks.run(_accumulated, balance) for balance in (True, False))
    assert on[0][1] >= STEPS - 2
    assert largest_difference(on[0][0], off[0][0]) < 1e-5
    assert largest_difference(on[0][0], on[1][0]) < 1e-6


def _compiled(name: str, build: Callable[[], tuple[Any, Any]]) -> dict[str, torch.Tensor]:
    torch._dynamo.config.optimize_ddp = "python_reducer"  # what compiled autograd asks for
    _, weights = _balanced(name, COMPILED, build)
    assert torch._dynamo.utils.counters["frames"]["ok"] or torch._dynamo.utils.counters["compiled_autograd"]["captures"]
    return weights


@pytest.mark.slow
@pytest.mark.parametrize("name", list(COMPILED))
def test_compiled_pipelines_train_the_same(two_ranks, own_two_ranks, name):
    build = build_plain if name == "pt2" else build_sharded
    compiled = own_two_ranks.run(_compiled, name, build)
    assert largest_difference(compiled[0], two_ranks.run(_stock, "base", build)[0]) < 1e-5
    assert largest_difference(compiled[0], compiled[1]) < 1e-6


def _after_one_step(name: str, with_pec: bool) -> list[torch.Tensor]:
    """The tables that a stock pipeline trains in one step, with PECEmbeddingCollection or EmbeddingCollection."""
    changes = contextlib.ExitStack()
    if with_pec:
        from torchrec.distributed.pec_embedding import PECEmbeddingCollectionSharder
        from torchrec.modules.pec_embedding_modules import PECEmbeddingCollection

        plain = models.EmbeddingCollection
        wrapped = replaced(
            (models, "EmbeddingCollection", lambda **options: PECEmbeddingCollection(plain(**options))),
            (models, "EmbeddingCollectionSharder", PECEmbeddingCollectionSharder),
        )
        changes.enter_context(wrapped)
    with pretended_streams(), changes:
        model, optimizer = make_model(lambda: build_sharded("row_wise"))
        pipeline = with_streams(torchrec_pipelines()[name](model, optimizer, CPU))
        pipeline.progress(itertools.islice(batches(), 1))
        return [weight for each, weight in weights_of(model).items() if "embedding" in each]


@pytest.mark.slow
@pytest.mark.skipif("TrainPipelinePEC" not in torchrec_pipelines(), reason="needs TorchRec 1.9")
def test_why_pec_is_refused(two_ranks):
    """Where this fails, TorchRec has changed it, and it may be balanced."""
    expected, alike, pec = (
        two_ranks.run(_after_one_step, name, with_pec)[0]
        for name, with_pec in (
            ("TrainPipelineSparseDist", False),
            ("TrainPipelinePEC", False),
            ("TrainPipelinePEC", True),
        )
    )
    assert all(torch.equal(*pair) for pair in zip(expected, alike, strict=True))
    assert all(float((one - other).abs().max()) > 1e-3 for one, other in zip(expected, pec, strict=True))


def test_every_balanced_class_is_compared():
    """Those that evaluate: tests/distributed/pipeline/test_pipelines.py."""
    compared = PIPELINES | COMPILED | STOCK_EVALUATIONS
    names = {each.__name__ for each, _ in compared.values()} - {"CopiesOnWorker"}
    assert HOOKS.keys() & torchrec_pipelines().keys() == names


def _training_loop(run_dir: str, pipeline_type: str, accumulation_steps: int) -> dict[str, torch.Tensor]:
    """Weights of the trainer's loop."""
    shuffler = CubicShuffler()
    construct = BalancedPipeline.__init__

    def construct_with_streams(pipeline: Any, *args: Any, **kwargs: Any) -> None:
        construct(pipeline, *args, **kwargs)
        with_streams(pipeline)

    with (
        pretended_streams(),
        replaced((loop, "CUDA_PIPELINES", ()), (BalancedPipeline, "__init__", construct_with_streams)),
    ):
        model, optimizer = make_model()
        optimization = OptimizationArgs(accumulation_steps=accumulation_steps)
        args = TrainerArgs(6, 6, run_dir=run_dir, pipeline_type=pipeline_type, optimization=optimization)
        recipe = Parts(args, model, optimizer, [shuffler], DataLoader(list(batches()), batch_size=None))
        assert loop.TrainingLoop(recipe).run().steps == STEPS
    return weights_of(model)


@pytest.mark.parametrize("name", before_a_commit(["prefetch"], OF_TRAINER))
def test_the_trainer_trains_with_every_pipeline(two_ranks, tmp_path, name):
    require_pipeline(*PIPELINES[OF_TRAINER[name]])
    # In so few batches semi_sync is still synchronous.
    expected = two_ranks.run(_stock, "sparse")[0]
    assert largest_difference(two_ranks.run(_training_loop, str(tmp_path), name, 1)[0], expected) < 1e-5


def test_semi_sync_accumulates(two_ranks, tmp_path):
    semi_sync, native = (two_ranks.run(_training_loop, str(tmp_path), name, 3)[0] for name in ("semi_sync", "native"))
    assert largest_difference(semi_sync, native) < 1e-5
