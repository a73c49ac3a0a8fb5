"""`import evenrank`: every public name of the design, lazily, and the version."""

import ast
import importlib.metadata
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import evenrank
from commons.perf_model.attention_pairs import attention_pairs
from hstu.model import HSTUConfig
from tests.helpers.jobs.programs import run_program
from tests.helpers.models.hstu_models import random_batch

# What users call, by the headings of the design.
PUBLIC = {
    "batch": "BaseBatch HSTUBatch FeatureConfig RandomDistribution GPTSIDBatch register_batch_type",
    "workload": "HSTUAttentionTask SelfAttentionTask",
    "plan": "karmarkar_karp lower_bound partition Partition partition_grid Grid",
    "shuffler": "ShufflerOptions BaseTaskBalancedBatchShuffler IdentityBalancedBatchShuffler ShuffleHandle "
    "ShuffleStats TokensBalancedBatchShuffler HSTUBalancedBatchShuffler SIDGRBalancedBatchShuffler RankMissingError "
    "ShufflerAbortedError BatchShufflerFactory register_batch_shuffler",
    "loss": "global_mean_loss mean_over_ranks",
    "pipeline": "balanced balanced_iter shuffle_stage windowed_iter TrainPipelineFactory",
    "samplers": "BalancedBatchSampler BudgetBatchSampler",
    "trainer": "TrainerArgs DatasetArgs",
    "micro-batches": "ffd_allocate kk_allocate refined_allocate padded_allocate get_allocate_fn packing_metrics "
    "MicroBatchSpec MicroBatches pack_micro_batches PackedRows pack_rows count_loss_tokens",
    "dispatch": "split_balanced BalancedChunks scatter_balanced BalancedShare redistribute_balanced RedistributedRows "
    "SingleRankLoader Trim trim_batch",
    "version": "__version__",
}
CONTRACT = [name for names in PUBLIC.values() for name in names.split()]


def test_every_public_name_is_there_and_resolves():
    assert sorted(evenrank.__all__) == sorted(CONTRACT)
    for name in CONTRACT:
        value = getattr(evenrank, name)
        assert isinstance(value, str) if name == "__version__" else value.__name__ == name
    assert set(CONTRACT) <= set(dir(evenrank))
    star: dict[str, object] = {}
    exec("from evenrank import *", star)
    assert set(CONTRACT) <= set(star)


def test_type_checkers_see_the_same_names_from_the_same_modules():
    tree = ast.parse(Path(evenrank.__file__).read_text(encoding="utf-8"))
    shown = {
        (alias.asname, node.module)
        for branch in tree.body
        if isinstance(branch, ast.If)
        for node in branch.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname == alias.name
    }
    assert shown == set(evenrank._MODULE_OF.items())
    # With a `__getattr__` that they see, they take `from evenrank import ShufflerOption` as right.
    assert "__getattr__" not in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


BATCHES_OF_ONE_TYPE = """
from collections.abc import Iterator

import evenrank
from typing_extensions import assert_type


def use(batch: evenrank.HSTUBatch, own: evenrank.HSTUBalancedBatchShuffler, data: Iterator[evenrank.HSTUBatch]) -> None:
    assert_type(own.shuffle(batch), evenrank.HSTUBatch)
    assert_type(next(evenrank.windowed_iter(data, own, 2)), evenrank.HSTUBatch)
    assert_type(next(evenrank.balanced_iter(data, own)), evenrank.HSTUBatch)
    assert_type(evenrank.redistribute_balanced(batch, [1]).batch, evenrank.HSTUBatch)
    assert_type(evenrank.scatter_balanced(batch, [1]).batch, evenrank.HSTUBatch)
    assert_type(next(iter(evenrank.SingleRankLoader([batch]))), evenrank.HSTUBatch)
    assert_type(evenrank.split_balanced(batch, 1, [1])[0], evenrank.HSTUBatch)
    # Ranks without a batch need no annotation.
    share, rows, loader = evenrank.scatter_balanced(None, None), evenrank.redistribute_balanced(None, None), None
    more = share.scatter_more(None)
    batches = evenrank.SingleRankLoader(loader)


def name(batches: evenrank.SingleRankLoader) -> None: ...
"""


@pytest.mark.slow
def test_type_checkers_see_batches_leave_with_the_type_that_they_came_with(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(BATCHES_OF_ONE_TYPE)
    checks = ["--strict", "--follow-imports=silent", f"--cache-dir={tmp_path / 'cache'}"]
    done = run_program(sys.executable, "-m", "mypy", *checks, script, timeout=500)
    assert "Success" in done.stdout, done.stdout + done.stderr


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'evenrank' has no attribute 'blanced'"):
        _ = evenrank.blanced
    with pytest.raises(ImportError, match="cannot import name 'blanced'"):
        exec("from evenrank import blanced")


def test_the_version_is_that_of_the_package():
    assert evenrank.__version__ == importlib.metadata.version("evenrank")


WORK = [5, 4, 3, 2, 1, 9]
SHARED = torch.arange(6), WORK


def _sampler(make, **options):
    return json.dumps(make(WORK, num_ranks=1, rank=0, **options).identity())


def _shuffler(**options):
    shuffler = evenrank.HSTUBalancedBatchShuffler(4, 2, 2, **options)
    return shuffler.task, shuffler.action_interleaved, shuffler.contextual_mask


# By the boolean's name, functions and classes that take it.
TAKING = {
    "equal_size": [
        lambda value: evenrank.karmarkar_karp(WORK, 2, value),
        lambda value: evenrank.lower_bound(WORK, 2, value),
        lambda value: evenrank.partition_grid(WORK, 2, 2, equal_size=value).loads.tolist(),
        lambda value: evenrank.ffd_allocate(WORK, 20, equal_size=value),
        lambda value: evenrank.redistribute_balanced(torch.arange(6), WORK, equal_size=value).batch.tolist(),
        lambda value: evenrank.scatter_balanced(torch.arange(6), WORK, equal_size=value).batch.tolist(),
        lambda value: evenrank.ShufflerOptions(equal_size=value),
    ],
    "best_effort": [lambda value: evenrank.partition(WORK, 2, best_effort=value).loads.tolist()],
    "to_all": [lambda value: evenrank.scatter_balanced(*SHARED).gather_back(SHARED[0], to_all=value).tolist()],
    "pin_memory": [lambda value: next(iter(evenrank.SingleRankLoader([SHARED[0]], pin_memory=value))).tolist()],
    "pad": [lambda value: repr(evenrank.split_balanced(torch.arange(6), 4, WORK, pad=value))],
    "joint": [
        lambda value: evenrank.pack_micro_batches(torch.arange(6), evenrank.MicroBatchSpec(), WORK, joint=value).groups
    ],
    "shuffle": [
        lambda value: _sampler(evenrank.BudgetBatchSampler, budget_per_rank=9, shuffle=value),
        lambda value: evenrank.DatasetArgs("random", 9, shuffle=value),
    ],
    "drop_last": [lambda value: _sampler(evenrank.BalancedBatchSampler, batch_size=4, drop_last=value)],
    "padded": [lambda value: _sampler(evenrank.BalancedBatchSampler, batch_size=4, padded=value)],
    "causal": [
        lambda value: evenrank.HSTUAttentionTask(4, 2, 2, causal=value),
        lambda value: _shuffler(causal=value),
        lambda value: attention_pairs(9, causal=value),
    ],
    "gated_ffn": [lambda value: evenrank.SelfAttentionTask(4, 2, 2, gated_ffn=value)],
    "action_interleaved": [
        lambda value: _shuffler(action_interleaved=value),
        lambda value: random_batch(2).sequence_lengths(value)[0].shape,
    ],
    "contextual_mask": [lambda value: _shuffler(contextual_mask=value)],
    "is_causal": [lambda value: HSTUConfig(8, 1, 2, 4, is_causal=value, max_sequence_length=9)],
    "is_jagged": [lambda value: evenrank.FeatureConfig(["item"], [9], 9, value)],
    "balance_sampler": [lambda value: evenrank.TrainerArgs(2, 2, balance_sampler=value).balancing],
}


@pytest.mark.parametrize(("name", "take"), [(name, take) for name, functions in TAKING.items() for take in functions])
def test_a_boolean_may_be_numpys_and_is_no_text(name, take):
    """A text such as "no" was taken as true."""
    assert [take(np.bool_(value)) for value in (True, False)] == [take(True), take(False)]
    for value in ("no", "False"):
        with pytest.raises(ValueError, match=f"{name} is '{value}'; it is True or False: choose one"):
            take(value)


# Where the checkout is not installed, there is no metadata to read a version from.
NOT_INSTALLED = """
import importlib.metadata, sys

def unknown(name):
    raise importlib.metadata.PackageNotFoundError(name)

importlib.metadata.version = unknown
import evenrank
print(evenrank.__version__, "torch" in sys.modules)
evenrank.MicroBatchSpec, evenrank.split_balanced, evenrank.partition
print("torch" in sys.modules, "torchrec" in sys.modules)
"""


@pytest.mark.slow
def test_importing_it_brings_nothing_until_a_name_is_used_and_needs_no_installation():
    shown = run_program(sys.executable, "-c", NOT_INSTALLED)
    assert shown.stdout.splitlines() == [f"{evenrank.__version__} False", "True False"], shown.stderr


def test_a_name_that_needs_torchrec_says_so(monkeypatch):
    def missing(_):
        raise ModuleNotFoundError("No module named 'torchrec'", name="torchrec")

    monkeypatch.setattr(evenrank, "import_module", missing)
    monkeypatch.delitem(vars(evenrank), "balanced", raising=False)
    with pytest.raises(ModuleNotFoundError, match=r"^evenrank\.balanced needs torchrec, .* the extra 'cuda', or 'cpu'"):
        _ = evenrank.balanced
