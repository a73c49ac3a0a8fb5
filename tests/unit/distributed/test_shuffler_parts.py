"""The shuffler's parts without ranks: options, registry, and a group of one."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import json
import threading
import time
import weakref
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from torchrec.distributed.train_pipeline.train_pipelines import TrainPipelineBase
from torchrec.distributed.train_pipeline.utils import _rewrite_model

import hstu
import sid_gr
from commons.distributed.batch_shuffler import BaseTaskBalancedBatchShuffler, IdentityBalancedBatchShuffler
from commons.distributed.batch_shuffler_factory import BatchShufflerFactory, register_batch_shuffler
from commons.distributed.channel import groups
from commons.distributed.engine.worker import DaemonWorker
from commons.distributed.options import ShufflerOptions
from commons.distributed.tokens_shuffler import TokensBalancedBatchShuffler
from commons.pipeline import TrainPipelineFactory, balanced, balanced_iter, shuffle_stage, windowed_iter
from commons.pipeline.look_ahead import ShufflingBatch
from tests.helpers.batches.easyrec import clicks, easyrec_batch
from tests.helpers.batches.random_batches import random_batch, rows_as_values


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mode": "on"}, "mode is 'on'; it must be one of 'balance', 'observe', 'off'"),
        ({"partitioner": "kk"}, "partitioner is 'kk'.*'karmarkar_karp'"),
        ({"transport": "rdma"}, "transport is 'rdma'"),
        ({"slack": -0.1}, "slack is -0.1"),
        ({"slack": float("nan")}, "slack is nan"),
        ({"min_gain": 2}, "min_gain is 2"),
        ({"min_gain": True}, "min_gain is True"),
        ({"timeout": 0}, "timeout is 0"),
        ({"timeout": 1.1e9}, "timeout is 1100000000.0; it is a number of seconds above 0 and at most 1e9"),
        ({"verify": 1}, "verify is 1; it is True or False"),
        ({"calibration": ""}, "calibration is ''; it names a file, or is None"),
        ({"ranks_per_node": 0}, "ranks_per_node is 0"),
        ({"ranks_per_node": True}, "ranks_per_node is True"),
        ({"max_tokens_per_rank": 2**63}, r"it is a positive integer below 2\*\*63, or None"),
        ({"max_tokens_per_rank": 1.5}, "max_tokens_per_rank is 1.5"),
        ({"speeds": "fast"}, "speeds is 'fast'; it must be one of 'equal', 'observe', 'measured': choose one"),
        ({"speeds": "measured", "partitioner": "snake"}, "partitioner is 'snake', which makes equal loads"),
    ],
)
def test_options_are_validated_when_made(changes, message):
    with pytest.raises(ValueError, match=message):
        ShufflerOptions(**changes)
    with pytest.raises(dataclasses.FrozenInstanceError):  # nor are they changed behind the checks
        OPTIONS.mode = "on"


OPTIONS = ShufflerOptions()


def test_options_may_be_numpys_and_paths():
    """The message was that np.float32(0.5) must be in [0, 1]."""
    numbers = {"slack": np.float32(0.5), "min_gain": np.float16(0.25), "timeout": np.int64(9), "verify": np.bool_(True)}
    numbers |= {"ranks_per_node": np.int64(8), "max_tokens_per_rank": np.uint32(9), "calibration": Path("c.toml")}
    options = ShufflerOptions(**numbers)
    expected = {"slack": 0.5, "min_gain": 0.25, "timeout": 9, "verify": True}
    expected |= {"ranks_per_node": 8, "max_tokens_per_rank": 9, "calibration": "c.toml"}
    assert options == ShufflerOptions("balance", **expected)
    json.dumps(dataclasses.asdict(options))  # ranks compare them as JSON
    with contextlib.closing(IdentityBalancedBatchShuffler(options)) as identity:
        assert identity.options == dataclasses.replace(options, mode="off")


def test_the_registry():
    assert {"identity", "tokens"} <= set(BatchShufflerFactory.list_available())
    for name, kind in (("hstu", hstu.HSTUBalancedBatchShuffler), ("sid_gr", sid_gr.SIDGRBalancedBatchShuffler)):
        with contextlib.closing(BatchShufflerFactory.create(name, hidden_size=8, num_heads=2, head_dim=4)) as made:
            assert type(made) is BatchShufflerFactory.list_available()[name] is kind

    @register_batch_shuffler("mine")
    class Mine(IdentityBalancedBatchShuffler):
        pass

    try:
        assert BatchShufflerFactory.is_registered("mine") and isinstance(BatchShufflerFactory.create("mine"), Mine)
        with pytest.raises(ValueError, match="'mine' is already registered as Mine"):
            BatchShufflerFactory.register("mine", Mine)
    finally:
        BatchShufflerFactory.unregister("mine")
    for call in (BatchShufflerFactory.create, BatchShufflerFactory.unregister):
        with pytest.raises(KeyError, match="'mine' is not registered. Available shufflers: .*identity.*import hstu"):
            call("mine")
    none = pytest.raises(KeyError, match="'identity' is not registered. Available shufflers: none")
    with mock.patch.dict(BatchShufflerFactory._registry, clear=True), none:
        BatchShufflerFactory.create("identity")
    for name, kind in ((None, TypeError), (3, TypeError), ("", ValueError)):
        with pytest.raises(kind, match=f"the name of a batch shuffler is {name!r}; it must be a string that is not"):
            BatchShufflerFactory.register(name, IdentityBalancedBatchShuffler)
        with pytest.raises(kind, match=f"the name of a pipeline is {name!r}; it must be a string that is not"):
            TrainPipelineFactory.register(name, balanced(TrainPipelineBase))
    shuffler = BatchShufflerFactory.create_from_config({"type": "tokens", "feature_names": ["item"]})
    assert isinstance(shuffler, TokensBalancedBatchShuffler) and shuffler.feature_names == ["item"]
    with pytest.raises(KeyError, match="has the keys .*'name'.*; the name of the shuffler is under 'type': add it"):
        BatchShufflerFactory.create_from_config({"name": "tokens"})


def test_no_key_to_count_is_a_mistake():
    with pytest.raises(ValueError, match=r"feature_names is \[\]; .* at least one key are counted: name it"):
        TokensBalancedBatchShuffler([])


def test_a_batch_without_tokens_says_what_to_write():
    @dataclasses.dataclass
    class Scores:
        scores: torch.Tensor

    said = "Scores has no KeyedJaggedTensor or JaggedTensor to count tokens in; .*: write a shuffler"
    with contextlib.closing(TokensBalancedBatchShuffler()) as shuffler, pytest.raises(ValueError, match=said):
        shuffler.shuffle(Scores(torch.zeros(3)))


def test_tokens_of_nested_batches():
    """Keys of all jagged tensors at any depth, but those of labels; those of one name count together."""
    ids = [3, 7, 12]
    batch, short = easyrec_batch(ids), [sample % 3 for sample in ids]
    long = [clicks(sample) for sample in ids]
    sums = {("price",): long, ("clicks",): [a + b for a, b in zip(long, short)], ("id", "score"): None, None: None}
    sums["id", "score"] = sums["clicks",]
    sums[None] = [3 * a + 5 * b for a, b in zip(long, short)]  # id, clicks, price; tags, clicks, shown, score, dwell
    for names, expected in sums.items():
        assert TokensBalancedBatchShuffler(names).get_workloads(batch).tolist() == expected
    labelled = dataclasses.replace(batch, labels={"row": batch.labels["row"], **batch.jagged_labels}, jagged_labels={})
    expected = [3 * a + 4 * b for a, b in zip(long, short)]
    assert TokensBalancedBatchShuffler().get_workloads(labelled).tolist() == expected
    with pytest.raises(KeyError, match=r"features \['dwell'\] are not among the batch's keys \['clicks', 'id', 'tags'"):
        TokensBalancedBatchShuffler(["dwell"]).get_workloads(labelled)


def test_groups_that_are_not_connected_in_time_end_in_one_line(monkeypatch):
    monkeypatch.setattr(groups, "_GRACE_SECONDS", 0.0)
    stands_still = threading.Event()
    try:
        making = groups.MakingOfGroups(stands_still.wait, 0.2)
        with pytest.raises(RuntimeError, match="process groups were not connected within 0.2 s"):
            making.wait(datetime.timedelta(seconds=60))
        assert making.is_completed() and not stands_still.is_set()
    finally:
        stands_still.set()
    making = groups.MakingOfGroups(lambda: 7, 60.0)
    making.wait(datetime.timedelta(seconds=60))
    assert making.result == 7


class WithoutSuper(TokensBalancedBatchShuffler):
    def __init__(self):
        self.feature_names = None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (BaseTaskBalancedBatchShuffler, "abstract"),
        (BatchShufflerFactory, "class methods only and should not be instantiated: call .*create"),
        (lambda: BatchShufflerFactory.register("dict", dict), "not a batch shuffler"),
        (lambda: BatchShufflerFactory.register("three", 3), "3 is not a batch shuffler"),
        (
            lambda: register_batch_shuffler(WithoutSuper),
            "the name of a batch shuffler is <class .*WithoutSuper'>; it must",
        ),
        (
            lambda: WithoutSuper().shuffle(random_batch(0, 2)),
            r"WithoutSuper has no engine; the constructor of .*: call super\(\).__init__\(options, pg_group\) in",
        ),
        (lambda: balanced_iter(iter([]), WithoutSuper), r"shuffler is the class WithoutSuper; .*: pass WithoutSuper\("),
        (lambda: shuffle_stage(3, None), r"shuffler is an int; it must .*: such as TokensBalancedBatchShuffler\("),
        (lambda: windowed_iter(iter([]), "hstu", 4), "shuffler is a str; it must be an object of a class that derives"),
        (lambda: BatchShufflerFactory.create_from_config("tokens"), "the shuffler config is a str; it is a dictionary"),
        (lambda: TrainPipelineFactory.register("mine", 3), "pipeline 'mine' is 3, which cannot be called; .* give a"),
        (
            lambda: IdentityBalancedBatchShuffler().finish_shuffle(random_batch(0, 2), None),
            "handle is a NoneType; finish_shuffle takes the result of start_shuffle: pass that",
        ),
        (lambda: IdentityBalancedBatchShuffler({"mode": "off"}), "options is a dict"),
        (lambda: TokensBalancedBatchShuffler(OPTIONS), "feature_names is a ShufflerOptions.*: pass options=..."),
        (lambda: TokensBalancedBatchShuffler(None, OPTIONS, "dp"), "the group is of type str; it must be a process"),
        (lambda: IdentityBalancedBatchShuffler(OPTIONS, OPTIONS), "the group is of type ShufflerOptions"),
        (lambda: BatchShufflerFactory.create("hstu", hidden_size=OPTIONS, num_heads=2, head_dim=4), "hidden_size is a"),
        (lambda: hstu.HSTUBalancedBatchShuffler(8, 2, 4, OPTIONS), "num_layers is a ShufflerOptions.*options="),
        (lambda: hstu.HSTUBalancedBatchShuffler(8, 2, 4, causal=OPTIONS), "causal is a ShufflerOptions.*options="),
        (lambda: sid_gr.SIDGRBalancedBatchShuffler(8, 2, 4, OPTIONS), "num_layers is a ShufflerOptions.*options="),
    ],
)
def test_arguments_of_another_kind_are_named(make, message):
    with pytest.raises(TypeError, match=message):
        make()
    assert "mine" not in TrainPipelineFactory.list_available()


def test_reading_an_attribute_before_it_is_there_is_an_ordinary_error():
    class Careful(TokensBalancedBatchShuffler):
        def __init__(self):
            self.had_options = hasattr(self, "options") or getattr(self, "engine", None) is not None
            super().__init__()

        @property
        def size(self):
            return self.feature_names.size

    careful = Careful()
    assert not careful.had_options and careful.options.mode == "balance"
    with pytest.raises(AttributeError, match="'NoneType' object has no attribute 'size'"):
        _ = careful.size
    careful.close()


def test_a_batch_whose_copy_torchrec_turns_into_proxies_is_unchanged():
    """In pipelines that copy batches on a thread, the batch is still with its handle when the model is traced."""

    class Proxied:
        values = 3

        def to_proxy(self):  # of a copy, so it may change the object
            self.values = torch.fx.PH
            return self

    class Model(torch.nn.Module):
        def forward(self, inputs):
            return torch.zeros(())

    batch = Proxied()
    _rewrite_model(Model(), context=None, dist_stream=None, batch=ShufflingBatch(batch, None))
    assert batch.values == 3


def test_a_group_of_one_returns_the_batch():
    batch = random_batch(0, 5, 4)
    shuffler = TokensBalancedBatchShuffler()
    result, indices, workloads = shuffler.shuffle(batch, return_indices=True, return_workloads=True)
    assert rows_as_values(result, padding=True) == rows_as_values(batch, padding=True)
    assert indices.tolist() == [0, 1, 2, 3]
    assert torch.equal(workloads, shuffler.get_workloads(batch)[:4])
    assert not shuffler.last_stats.moved and shuffler.last_stats.imbalance_before == 0.0
    with pytest.raises(ValueError, match="rank 0: this batch differs from the first"):
        shuffler.shuffle(random_batch(0, 5, tiny_dtype=torch.int32))
    shuffler.close()


def test_an_idle_worker_keeps_nothing_of_its_last_job():
    class Held:
        pass

    held, worker = Held(), DaemonWorker("idle")
    gone = weakref.ref(held)
    assert worker.submit(functools.partial(id, held)).result() == id(held)
    del held
    deadline = time.monotonic() + 60
    while gone() is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert gone() is None and not worker.has_ended
    assert worker.stop(timeout=60) and worker.has_ended


class _LearnedCosts(BaseTaskBalancedBatchShuffler, torch.nn.Module):
    def __init__(self):
        torch.nn.Module.__init__(self)
        BaseTaskBalancedBatchShuffler.__init__(self)
        self.cost = torch.nn.Linear(1, 1)

    def get_workloads(self, batch):
        return self.cost(batch)


def test_a_shuffler_may_also_be_a_module():
    with contextlib.closing(_LearnedCosts()) as shuffler:
        assert isinstance(shuffler.cost, torch.nn.Linear)
        with pytest.raises(AttributeError, match="no attribute 'other'"):
            _ = shuffler.other
