"""The HSTU model: tokens, layers and ranking head against slow references, and what must not change a row's result."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from commons.datasets.hstu_batch import HSTUBatch
from hstu.model import ExecutionConfig, HSTUEncoder, HSTURankingModel, interleave_tokens
from hstu.model.layer import RelativePositionBias, distance_buckets
from hstu.model.ranking import stack_labels
from tests.helpers.models.hstu_models import CONFIG, HSTU, TABLES, plain_model, random_batch, with_timestamps
from tests.helpers.models.reference_attention import reference_attention


def reference_logits(model: HSTURankingModel, batch: HSTUBatch) -> torch.Tensor:
    """The model one row at a time, from the formulas of the paper, with loops over features, items and pairs."""
    config = model.config.hstu
    weights = dict(model.named_parameters())
    heads, width = config.num_attention_heads, config.num_attention_heads * config.kv_channels

    def norm(x, name):
        mean, variance = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
        scale = (variance + config.layer_norm_eps).rsqrt() * weights[f"{name}.weight"]
        return (x - mean) * scale + weights[f"{name}.bias"]

    def linear(x, name):
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    logits = []
    for row in range(batch.batch_size):
        ids = {
            key: jagged.values()[jagged.offsets()[row] : jagged.offsets()[row + 1]]
            for key, jagged in batch.features.to_dict().items()
        }
        tables = {
            key: weights[f"embedding.collections.{width}.embeddings.{key}.weight"]
            for key, width in model.config.table_widths.items()
        }
        look_up = {key: table[ids[key]] for key, table in tables.items()}
        for key in model.config.embedding_dims:
            look_up[key] = linear(look_up[key], f"dense.projections.{key}")
        tokens, item_places, times = [], [], []
        for key in batch.contextual_feature_names:
            tokens += look_up[key]
        num_contextual = len(tokens)
        when = ids["timestamp"].tolist() if config.time_bias else [0] * len(ids["item"])
        times = when[:1] * num_contextual or [0] * num_contextual
        for index in range(len(ids["item"])):
            item_places.append(len(tokens))
            tokens.append(look_up["item"][index])
            times.append(when[index])
            if batch.action_feature_name is not None:
                tokens.append(look_up["action"][index])
                times.append(when[index])
        if not tokens:
            continue
        num_candidates = 0 if batch.num_candidates is None else int(batch.num_candidates[row])
        num_targets = num_candidates * (1 if batch.action_feature_name is None else 2)
        x = torch.stack(tokens)
        for layer in range(config.num_layers):
            name = f"dense.encoder.layers.{layer}"
            u, v, q, k = torch.nn.functional.silu(linear(norm(x, f"{name}.input_norm"), f"{name}.uvqk")).split(width, 1)
            attended = reference_attention(
                *(part.reshape(len(tokens), heads, -1) for part in (q, k, v)),
                weights[f"{name}.position_bias.weight"],
                [len(tokens)],
                [num_targets],
                normalizer=config.max_sequence_length,
                is_causal=config.is_causal,
                group_size=config.target_group_size,
                contextual=[num_contextual] if config.contextual_mask else None,
                max_attn_len=config.max_attn_len,
                times=torch.tensor(times) if config.time_bias else None,
                time_bias=weights.get(f"{name}.time_bias"),
            )
            x = x + linear(norm(attended.reshape(len(tokens), width), f"{name}.attention_norm") * u, f"{name}.output")
        x = norm(x, "dense.encoder.norm")
        predicted = item_places[len(item_places) - num_candidates :] if batch.max_num_candidates else item_places
        for place in predicted:
            logits.append(linear(torch.relu(linear(x[place], "dense.head.0")), "dense.head.2"))
    return torch.stack(logits)


@pytest.mark.parametrize("with_actions", [True, False])
@pytest.mark.parametrize("max_num_candidates", [0, 4])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"target_group_size": 2},
        {"is_causal": False},
        {"contextual_mask": True, "target_group_size": 3},
        {"max_attn_len": 4, "contextual_mask": True, "target_group_size": 2},
        {"max_attn_len": 4, "is_causal": False, "time_bias": True},
        {"time_bias": True, "time_buckets": 12},
        {"contextual_mask": True, "time_bias": True, "execution": ExecutionConfig(activation_checkpointing=True)},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
@pytest.mark.parametrize("embedding_dims", [{}, {"item": 5, "user": 4, "tags": 4}], ids=["one width", "three widths"])
def test_logits_loss_and_gradients_equal_the_reference(with_actions, max_num_candidates, options, embedding_dims):
    hstu = dataclasses.replace(HSTU, **options)
    tables = {name: rows for name, rows in TABLES.items() if with_actions or name != "action"}
    model = plain_model(dataclasses.replace(CONFIG, hstu=hstu, embedding_tables=tables, embedding_dims=embedding_dims))
    batch = random_batch(with_actions=with_actions, max_num_candidates=max_num_candidates, actual_batch_size=5)
    if hstu.time_bias:
        batch = with_timestamps(batch)
    logits = reference_logits(model, batch)
    leaks = not hstu.is_causal or (hstu.contextual_mask and not max_num_candidates)
    if with_actions and leaks:
        with pytest.raises(ValueError, match=r"(is_causal is False|contextual_mask is True) and batches have"):
            model(batch)
        ours = model.dense.logits(model.embedding(batch.features), batch)
        torch.testing.assert_close(ours, logits, rtol=0, atol=1e-10)
        return
    loss, output = model(batch)
    torch.testing.assert_close(output.logits, logits.detach(), rtol=0, atol=1e-10)
    labels = torch.stack([batch.labels["task_0"].values(), batch.labels["task_1"].values()], dim=1).double()
    assert torch.equal(output.labels, labels)
    probability = logits.sigmoid()
    terms = -(labels * probability.log() + (1 - labels) * (1 - probability).log())
    assert output.num_loss_tokens == terms.numel() == batch.num_loss_tokens()
    torch.testing.assert_close(loss, terms.mean(), rtol=0, atol=1e-10)
    torch.testing.assert_close(output.loss_sum, terms.sum().detach(), rtol=0, atol=1e-10)
    gradients = torch.autograd.grad(loss, model.parameters(), retain_graph=True)
    wanted = torch.autograd.grad(terms.mean(), model.parameters())
    for (name, _), gradient, want in zip(model.named_parameters(), gradients, wanted):
        torch.testing.assert_close(gradient, want, rtol=0, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}")


def test_both_kinds_of_embeddings_answer_alike_and_share_their_names():
    sharded, plain = HSTURankingModel(CONFIG), HSTURankingModel(CONFIG, plain_embeddings=True)
    for model in (sharded, plain):  # and start within the same range
        weight = model.embedding.collections["8"].embeddings["item"].weight
        assert 0.9 < float(weight.detach().abs().max()) * len(weight) ** 0.5 <= 1
    plain.load_state_dict(sharded.state_dict())
    batch = random_batch()
    loss, output = sharded(batch)
    assert torch.equal(output.logits, plain(batch)[1].logits)
    assert loss.requires_grad
    assert not any(tensor.requires_grad for tensor in (output.logits, output.labels, output.loss_sum))


def test_layers_in_another_dtype_take_float32_embeddings():
    model = HSTURankingModel(CONFIG)
    model.dense.to(torch.bfloat16)
    loss, output = model(random_batch())
    loss.backward()
    assert output.logits.dtype == torch.float32 and bool(loss.isfinite())


def test_dropout_acts_in_training_alone():
    model = HSTURankingModel(dataclasses.replace(CONFIG, hstu=dataclasses.replace(HSTU, dropout=0.5)))
    batch = random_batch()
    assert not torch.equal(model(batch)[1].logits, model(batch)[1].logits)
    model.eval()
    assert torch.equal(model(batch)[1].logits, model(batch)[1].logits)


def test_the_tower_scores_a_batch_without_labels():
    model = HSTURankingModel(CONFIG)
    batch = random_batch()
    unlabelled = dataclasses.replace(batch, labels=None)
    logits = model.dense.logits(model.embedding(batch.features), unlabelled)
    assert torch.equal(logits, model(batch)[1].logits)
    with pytest.raises(TypeError, match="labels are NoneType"):
        model(unlabelled)


def test_labels_that_do_not_fit_are_named():
    labels = KeyedJaggedTensor(keys=["task_0", "task_1"], values=torch.zeros(6), lengths=torch.tensor([3, 3]))
    assert stack_labels(labels, 2, 3).shape == (3, 2)
    with pytest.raises(ValueError, match=r"labels have keys \['task_0', 'task_1'\], the model has 3 tasks"):
        stack_labels(labels, 3, 2)
    with pytest.raises(ValueError, match=r"labels have \[3, 3\] values for 2 tasks and 4 predictions"):
        stack_labels(labels, 2, 4)


def test_tokens_of_rows_are_counted():
    lengths = map(torch.tensor, ([1, 3], [2, 1], [2, 1]))
    user, items, actions = (JaggedTensor(torch.zeros(sum(part), 2), lengths=part) for part in lengths)
    for each, step in ((actions, 2), (None, 1)):
        sequence = interleave_tokens([user], items, each)
        assert sequence.lengths.tolist() == [1 + 2 * step, 3 + step]
        assert sequence.num_contextual.tolist() == [1, 3]


def test_a_feature_without_a_table_is_named():
    model = HSTURankingModel(dataclasses.replace(CONFIG, embedding_tables={"item": 50, "action": 4, "tags": 9}))
    with pytest.raises(KeyError, match=r"features \['user'\] have no table, the model has \['item', 'action', 'tags'"):
        model(random_batch())


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("kind", ["direct", "bucketed", "none"])
def test_position_bias_by_rising_distance(kind, is_causal):
    config = dataclasses.replace(HSTU, position_bias=kind, is_causal=is_causal, position_buckets=6)
    module = RelativePositionBias(config)
    bias = module()
    if kind == "none":
        assert bias is None and not list(module.parameters())
        return
    reach = config.max_sequence_length
    assert bias.shape == (2, reach if is_causal else 2 * reach - 1)
    if kind == "direct":
        assert torch.equal(bias, module.weight)
    if kind == "bucketed":
        assert module.weight.shape == (2, 6 if is_causal else 12)
        present = bias[:, -reach:]  # distances from 0 on
        assert torch.equal(present[:, :3], module.weight[:, :3])  # exact
        assert torch.equal(present[:, -1], module.weight[:, 5])  # the longest distance is in the last bucket


@given(st.integers(2, 40), st.integers(1, 300))
def test_buckets_rise_with_the_distance_and_tell_the_sign(num_buckets, reach):
    buckets = distance_buckets(torch.arange(reach), num_buckets, reach)
    assert int(buckets[0]) == 0 and int(buckets.max()) < num_buckets
    assert bool((buckets.diff() >= 0).all())
    negative = distance_buckets(-torch.arange(1, reach), num_buckets, reach)
    assert torch.equal(negative, buckets[1:] + num_buckets)


@pytest.mark.parametrize("kind", ["direct", "bucketed", "none"])
def test_an_encoder_without_tokens_keeps_its_graph(kind):
    encoder = HSTUEncoder(dataclasses.replace(HSTU, position_bias=kind))
    encoder(torch.empty(0, 8), torch.zeros(3, dtype=torch.int64)).sum().backward()
    assert all(parameter.grad is not None for parameter in encoder.parameters())
