"""Options of the HSTU model that change how it computes, not what: execution, widths of tables, times, settings."""

import copy
import dataclasses
import functools
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from commons.trainer import DatasetArgs, TrainerArgs
from hstu.model import (
    ExecutionConfig,
    HSTUEncoder,
    HSTURankingModel,
    RankingConfig,
    RetrievalConfig,
    execution,
    layer,
)
from hstu.model.execution import choose_execution
from hstu.recipe import HSTURecipe, weights_of
from hstu.train_config import ModelArgs, TrainConfig
from sid_gr.model import SIDGRConfig
from tests.helpers.models.hstu_models import CONFIG, HSTU, TABLES, random_batch, with_execution, with_timestamps

RETRIEVAL = RetrievalConfig(HSTU, TABLES, "item")
RUN = TrainConfig(TrainerArgs(1, 1), DatasetArgs("random", 5, max_num_candidates=3))
NO_MODULES = ("type", "items", "training", "user.id", "")  # names that torch refuses for a module
TIMED = dataclasses.replace(CONFIG, hstu=dataclasses.replace(HSTU, time_bias=True))


def test_bfloat16_computes_the_layers_and_leaves_weights_and_loss_in_float32():
    exact, fast = HSTURankingModel(CONFIG), HSTURankingModel(with_execution(CONFIG, compute_dtype="bf16"))
    fast.load_state_dict(exact.state_dict())
    seen = []
    fast.dense.encoder.layers[0].uvqk.register_forward_hook(lambda _, __, output: seen.append(output.dtype))
    loss, output = fast(random_batch())
    loss.backward()
    expected_loss, expected = exact(random_batch())
    assert seen == [torch.bfloat16] and loss.dtype == output.logits.dtype == torch.float32
    assert not torch.equal(output.logits, expected.logits)
    torch.testing.assert_close(output.logits, expected.logits, rtol=0, atol=0.05)
    torch.testing.assert_close(loss, expected_loss, rtol=0.02, atol=0)
    assert all(parameter.grad.dtype == torch.float32 for parameter in fast.parameters())


@pytest.mark.parametrize("compute_dtype", ["fp32", "bf16"])
def test_checkpointed_layers_have_the_same_gradients_dropout_included(compute_dtype):
    hstu = dataclasses.replace(HSTU, dropout=0.3)
    base = dataclasses.replace(CONFIG, hstu=hstu)
    gradients = []
    for saves_memory in (False, True):
        torch.manual_seed(0)
        model = HSTURankingModel(
            with_execution(base, activation_checkpointing=saves_memory, compute_dtype=compute_dtype)
        )
        calls = []
        model.dense.encoder.layers[0].uvqk.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        model(random_batch())[0].backward()
        assert len(calls) == 1 + saves_memory  # computed again, rather than kept
        gradients.append([parameter.grad for parameter in model.parameters()])
    for plain, recomputed in zip(*gradients):
        assert torch.equal(plain, recomputed)


@pytest.fixture
def compiling(monkeypatch):
    """torch.compile as it is, but for the code that it generates; the number of graphs made so far."""
    with_eager = functools.partial(torch.compile, backend="eager")
    monkeypatch.setattr(torch, "compile", with_eager)
    monkeypatch.setattr(execution, "compile_problem", lambda device: None)
    layer._compiled.cache_clear()
    torch._dynamo.reset()
    counters.clear()
    yield lambda: counters["stats"]["unique_graphs"]
    layer._compiled.cache_clear()
    torch._dynamo.reset()


@pytest.mark.slow
def test_compiled_layers_compute_the_same_and_are_compiled_once_for_all_lengths(compiling):
    """One graph on either side of the attention, for four layers and twenty batches of other lengths."""
    base = dataclasses.replace(CONFIG, hstu=dataclasses.replace(HSTU, num_layers=4, dropout=0.3))
    plain, made = HSTURankingModel(base), HSTURankingModel(with_execution(base, compile=True))
    made.load_state_dict(plain.state_dict())
    tokens = set()

    def same(batch):
        losses = []
        for model in (plain, made):
            torch.manual_seed(0)
            losses.append(model(batch)[0])
            losses[-1].backward()
        assert torch.equal(*losses)

    for seed in range(20):
        batch = random_batch(1 + seed % 5, longest=2 + seed % 16, seed=seed)
        tokens.add(int(batch.sequence_lengths()[0].sum()))
        same(batch)
    assert len(tokens) > 15 and compiling() == 2
    # No tokens, and one: sizes that torch.compile never takes for others. Then again, in evaluation.
    lone = dataclasses.replace(random_batch(1, longest=0), contextual_feature_names=["user"])
    for _ in range(2):
        same(random_batch(actual_batch_size=0))
        same(lone)
        for model in (plain, made):
            model.train(not model.training)
    assert compiling() <= 8
    for parameter, other in zip(plain.parameters(), made.parameters()):
        assert torch.equal(parameter.grad, other.grad)


@pytest.mark.slow
def test_a_copy_of_a_compiled_model_has_weights_of_its_own(compiling):
    model, batch = HSTURankingModel(with_execution(CONFIG, compile=True)), random_batch()
    before = model(batch)[1].logits
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.dense.encoder.parameters():
            parameter.zero_()
    assert not torch.equal(model(batch)[1].logits, before)
    assert torch.equal(twin(batch)[1].logits, before)


@pytest.mark.parametrize(
    ("asked", "device", "compiles"),
    [(None, "cuda", True), (None, "cpu", False), (False, "cuda", False), (True, "cuda", True)],
)
def test_on_cuda_the_layers_are_compiled_unless_told_otherwise(asked, device, compiles):
    args = ModelArgs(compile=asked, kernel_backend="pytorch")
    assert choose_execution(args.hstu_config(9), torch.device(device)).compiles is compiles


# ------------------------------------------------------------------------------------------------------------ times


@pytest.mark.parametrize("plain", [True, False])
def test_timestamps_are_no_ids(plain):
    model = HSTURankingModel(TIMED, plain_embeddings=plain)
    loss, _ = model(with_timestamps(random_batch()))
    loss.backward()
    assert model.dense.encoder.layers[0].time_bias.grad.abs().sum() > 0


def test_times_that_are_missing_are_named():
    model = HSTURankingModel(TIMED)
    with pytest.raises(ValueError, match="time_bias is True and there are no times; .* the feature 'timestamp'"):
        model(random_batch())
    batch = with_timestamps(random_batch())
    features = batch.features
    lengths = features.lengths().clone()
    lengths[-6] -= 1  # a time less, in the first row
    values = torch.cat([features.values()[: -int(features.lengths()[-6:].sum())], features["timestamp"].values()[1:]])
    short = KeyedJaggedTensor(keys=features.keys(), values=values, lengths=lengths, stride=6)
    with pytest.raises(ValueError, match=r"'timestamp' has \d+ values, there are \d+ items; every item has one time"):
        model(dataclasses.replace(batch, features=short))
    with pytest.raises(ValueError, match="time_bias is True and there are no times"):
        HSTUEncoder(TIMED.hstu)(torch.zeros(3, 8), torch.tensor([3]))


# --------------------------------------------------------------------------------------------------------- settings


def test_every_option_reaches_the_model():
    widths = {"item_embedding_dim": 32, "contextual_embedding_dim": 16}
    layers = {"dropout": 0.1, "time_bias": True, "time_buckets": 20, "max_attn_len": 7}
    execution = {"compute_dtype": "bf16", "activation_checkpointing": True}
    model = ModelArgs(**widths, **layers, **execution, num_negatives=64, temperature=0.1)
    config = TrainConfig(TrainerArgs(4, 8), DatasetArgs("ml-1m", 10), model, task="retrieval")
    tables = {"movie_id": 9, "rating": 6, "age": 7, "zip": 8}
    names = {"item_feature_name": "movie_id", "contextual_feature_names": ("age", "zip")}
    data = SimpleNamespace(vocabulary_sizes=tables, max_sequence_length=30, **names)
    recipe = HSTURecipe(config, torch.device("cpu"))
    made = recipe.config_on(data)
    assert recipe.compute_dtype is torch.bfloat16 and recipe.loss_scaler is None
    assert made.table_widths == {"movie_id": 32, "rating": 64, "age": 16, "zip": 16}
    assert (made.num_negatives, made.temperature, made.item_dim) == (64, 0.1, 32)
    assert {name: getattr(made.hstu, name) for name in layers} == layers and model.cost_dimensions["max_attn_len"] == 7
    assert made.hstu.execution == ExecutionConfig("bf16", activation_checkpointing=True, compile=None)
    options = {"is_causal", "contextual_mask", "target_group_size", "position_bias", "position_buckets"}
    assert options < {field.name for field in dataclasses.fields(ModelArgs)}


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        (RUN, {"task": "retreival"}, "task is 'retreival'; it must be one of 'ranking', .*: write 'retrieval'"),
        (RUN.optimizer, {"dense_optimizer": "adamw"}, "dense_optimizer is 'adamw'; .* 'adam', 'sgd': write 'adam'"),
        (RUN.dataset.columns, {"time_unit": "h"}, "time_unit is 'h'; it must be one of 's', 'ms', 'us', 'ns'"),
        (HSTU, {"hidden_size": 0}, "hidden_size is 0"),
        (HSTU, {"kv_channels": 2.5}, "kv_channels is 2.5"),
        (HSTU, {"target_group_size": 0}, "target_group_size is 0"),
        (HSTU, {"time_buckets": 0}, "time_buckets is 0"),
        (HSTU, {"max_attn_len": 0}, "max_attn_len is 0; it must be an integer of at least 1: .*, or leave it out"),
        *((HSTU, {"max_attn_len": each}, "max_attn_len is .*, or leave it out") for each in (-1, 2.5, "x", True)),
        (HSTU, {"dropout": 1.0}, "dropout is 1.0"),
        (HSTU, {"position_bias": "sine"}, "position_bias is 'sine'"),
        (HSTU, {"position_buckets": 1}, "position_buckets is 1"),
        (HSTU, {"layer_norm_eps": 0.0}, "layer_norm_eps is 0.0"),
        (CONFIG, {"num_tasks": 0}, "num_tasks is 0"),
        (CONFIG, {"num_tasks": 3}, r"prediction_head_arch is \[6, 2\], num_tasks is 3"),
        (CONFIG, {"prediction_head_arch": ()}, r"prediction_head_arch is \[\]"),
        (CONFIG, {"prediction_head_arch": (0, 2)}, "a width in prediction_head_arch is 0"),
        (CONFIG, {"embedding_tables": {}}, "embedding_tables is empty"),
        (CONFIG, {"embedding_tables": {"item": 0}}, r"embedding_tables\['item'\] is 0"),
        *((CONFIG, {"embedding_tables": {"item": 9, each: 2}}, "rename the feature") for each in NO_MODULES),
        (CONFIG, {"embedding_dims": {"movie": 3}}, r"embedding_dims has \['movie'\], the tables are"),
        (CONFIG, {"embedding_dims": {"item": 0}}, r"embedding_dims\['item'\] is 0"),
        (RETRIEVAL, {"item_feature_name": "movie"}, "item_feature_name is 'movie', the tables are"),
        (RETRIEVAL, {"num_negatives": 0}, "num_negatives is 0"),
        (RETRIEVAL, {"temperature": 0.0}, "temperature is 0.0"),
        (RETRIEVAL, {"in_batch_pool": "node"}, "in_batch_pool is 'node'; it must be one of 'rank', 'global'"),
        (RETRIEVAL, {"hstu": dataclasses.replace(HSTU, is_causal=False)}, "is_causal is False; retrieval predicts"),
        (RETRIEVAL, {"hstu": dataclasses.replace(HSTU, contextual_mask=True)}, "contextual_mask is True; retrieval"),
        (RETRIEVAL, {"embedding_tables": {}}, "embedding_tables is empty"),
        (ExecutionConfig(), {"compute_dtype": "fp8"}, "'fp8'; it must be one of 'fp32', 'bf16', 'fp16'"),
        (ExecutionConfig(), {"kernel_backend": "hstu_attn"}, "it must be one of 'auto', 'pytorch', 'triton'"),
        (RUN, {"task": "retrieval"}, "task is 'retrieval' and max_num_candidates is 3"),
        (RUN, {"task": "retrieval", "dataset": DatasetArgs("random", 1)}, "'retrieval' and max_history_seqlen is 1"),
    ],
)
def test_settings_are_checked(config, change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(config, **change)


def test_a_checkpoint_fits_however_the_model_is_executed_and_regularised():
    fast = with_execution(CONFIG, compute_dtype="bf16", activation_checkpointing=True)
    assert weights_of(fast) == weights_of(CONFIG)
    dropped = dataclasses.replace(HSTU, dropout=0.5)
    assert weights_of(dataclasses.replace(CONFIG, hstu=dropped)) == weights_of(CONFIG)
    sampled = dataclasses.replace(RETRIEVAL, num_negatives=5, temperature=1.0, in_batch_pool="global")
    assert weights_of(sampled) == weights_of(RETRIEVAL)
    other = dataclasses.replace(CONFIG, hstu=dataclasses.replace(HSTU, contextual_mask=True))
    assert weights_of(other) != weights_of(CONFIG)


def test_sizes_may_be_numpys():
    """As `ids.max() + 1` is: they were refused as no integers."""
    size = np.int64(5)
    configs = [
        RankingConfig(HSTU, {"item": size}, [size], size, embedding_dims={"item": size}),
        RetrievalConfig(HSTU, {"item": size}, item_feature_name="item", num_negatives=size),
        SIDGRConfig(np.array([5, 5]), size, size, 1, 1),
    ]
    json.dumps([dataclasses.asdict(config) for config in configs])
    assert type(ModelArgs(num_negatives=size).num_negatives) is int
