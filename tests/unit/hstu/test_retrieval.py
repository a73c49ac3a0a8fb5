"""Retrieval: the loss against loops over pairs, negatives that belong to their row, and settings."""

import dataclasses

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from commons.datasets.hstu_batch import FeatureConfig, HSTUBatch, padded_kjt
from commons.datasets.loader.resumable import ResumableLoader
from commons.datasets.random.dataset import RandomHSTUDataset
from commons.datasets.samplers.epoch import BatchOrderSampler, ShardedBatchSampler
from commons.trainer import DatasetArgs, TrainerArgs
from hstu.metrics import count_items
from hstu.model import HSTURetrievalModel, RetrievalConfig
from hstu.model.retrieval import unit
from hstu.negatives import draw_negatives, sample_negatives, with_negatives
from hstu.recipe import HSTURecipe
from hstu.train_config import ModelArgs, TrainConfig
from tests.helpers.models.hstu_models import CONFIG as RANKING
from tests.helpers.models.hstu_models import HSTU, TABLES, model_of, plain_model, random_batch

CPU = torch.device("cpu")
NUM_ITEMS = TABLES["item"]
CONFIG = RetrievalConfig(HSTU, TABLES, "item", temperature=0.3, embedding_dims={"item": 5})
DRAWN = dataclasses.replace(CONFIG, num_negatives=7)


def with_drawn(batch: HSTUBatch, num_negatives=7) -> HSTUBatch:
    rows = np.arange(batch.actual_batch_size)
    drawn = draw_negatives(rows, num_negatives, NUM_ITEMS, seed=3, epoch=1)
    return with_negatives(batch, "item_negatives", torch.from_numpy(drawn))


# ------------------------------------------------------------------------------------------------------------- loss


def reference_terms(model: HSTURetrievalModel, batch: HSTUBatch) -> list[torch.Tensor]:
    """Loss terms of a batch, one prediction and one negative at a time."""
    config = model.config
    table = model.embedding.collections["5"].embeddings["item"].weight
    predictions = []  # query, true id, negatives of the row
    for row in range(batch.actual_batch_size):
        alone = batch.index_select([row])
        ids = alone.features["item"].values().tolist()
        hidden = model.dense.encode(model.embedding(alone.features), alone).values
        num_contextual = sum(alone.features[name].values().numel() for name in alone.contextual_feature_names)
        ends = torch.arange(hidden.shape[0])[num_contextual:]
        if batch.action_feature_name is not None:
            ends = ends[1::2]
        for place, true in enumerate(ids[1:]):
            query = unit(model.dense.query(hidden[ends[place]])[None])[0]
            drawn = alone.features["item_negatives"].values().tolist() if config.num_negatives > 0 else None
            predictions.append((query, true, drawn))
    terms = []
    for query, true, drawn in predictions:
        negatives = drawn if drawn is not None else [other for _, other, _ in predictions]
        scores = [query @ table[item] / table[item].norm() / config.temperature for item in [true, *negatives]]
        total = scores[0].exp()
        for item, score in zip(negatives, scores[1:]):
            if item != true:
                total = total + score.exp()
        terms.append(total.log() - scores[0])
    return terms


@pytest.mark.parametrize("with_actions", [True, False])
@pytest.mark.parametrize("config", [CONFIG, DRAWN], ids=["in-batch", "drawn"])
def test_loss_and_gradients_equal_the_reference(config, with_actions, monkeypatch):
    monkeypatch.setattr("hstu.model.retrieval._MAX_SCORES", 50)  # several chunks
    if not with_actions:
        tables = {name: rows for name, rows in TABLES.items() if name != "action"}
        config = dataclasses.replace(config, embedding_tables=tables)
    model = plain_model(config)
    batch = random_batch(actual_batch_size=5, with_actions=with_actions)
    if config.num_negatives > 0:
        batch = with_drawn(batch)
    loss, output = model(batch)
    terms = reference_terms(model, batch)
    assert output.num_loss_tokens == len(terms) > 10
    assert output.queries.shape == (0, 5) and output.targets.shape == (0,)
    torch.testing.assert_close(output.loss_sum, torch.stack(terms).sum().detach(), rtol=0, atol=1e-10)
    torch.testing.assert_close(loss, torch.stack(terms).mean(), rtol=0, atol=1e-10)
    gradients = torch.autograd.grad(loss, model.parameters())
    wanted = torch.autograd.grad(torch.stack(terms).mean(), model.parameters(), allow_unused=True)
    for (name, parameter), gradient, want in zip(model.named_parameters(), gradients, wanted):
        want = torch.zeros_like(parameter) if want is None else want
        torch.testing.assert_close(gradient, want, rtol=0, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}")


WITHOUT_PREDICTIONS = [
    (config, longest, rows)
    for config in (CONFIG, DRAWN, dataclasses.replace(CONFIG, in_batch_pool="global"), RANKING)
    for longest, rows in ((0, 6), (9, 0), (1, 6))
    if longest != 1 or config is not RANKING  # which predicts a single item too
]


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize(("config", "longest", "real_rows"), WITHOUT_PREDICTIONS)
def test_without_predictions_the_loss_is_zero_and_every_parameter_has_a_gradient(config, plain, longest, real_rows):
    model = model_of(config, plain_embeddings=plain)
    batch = random_batch(longest=longest, actual_batch_size=real_rows)
    loss, output = model(with_drawn(batch) if config is DRAWN else batch)
    assert loss.item() == 0.0 and output.num_loss_tokens == 0
    assert config is not RANKING or output.logits.shape == output.labels.shape == (0, 2)
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name


@pytest.mark.parametrize("config", [CONFIG, DRAWN])
def test_evaluation_asks_for_the_last_item_of_every_row_that_has_two(config):
    model = plain_model(config).eval()
    batch = random_batch(12, longest=4, actual_batch_size=11)
    if config.num_negatives > 0:
        batch = with_drawn(batch, num_negatives=0)  # the feature is there and empty
    with torch.no_grad():
        loss, output = model(batch)
    lengths = batch.features["item"].lengths().tolist()
    assert {0, 1} & set(lengths) and loss.item() == 0.0 and output.num_loss_tokens == 0
    rows = [row for row, length in enumerate(lengths) if length >= 2]
    items = batch.features["item"].values().split(lengths)
    assert output.targets.tolist() == [int(items[row][-1]) for row in rows]
    for query, row in zip(output.queries, rows):
        alone = batch.index_select([row])
        hidden = model.dense.encode(model.embedding(alone.features), alone).values
        expected = unit(model.dense.query(hidden[-3])[None])[0]  # the last item and its action are the last tokens
        torch.testing.assert_close(query, expected, rtol=0, atol=1e-12)


def test_what_is_no_batch_for_retrieval_is_named():
    model = HSTURetrievalModel(DRAWN)
    batch = random_batch()
    with pytest.raises(ValueError, match="'item_negatives' has 18 ids for 6 rows; every row has num_negatives = 7 ids"):
        model(with_drawn(batch, num_negatives=3))
    candidates = torch.zeros(6, dtype=torch.int64)
    with pytest.raises(ValueError, match="max_num_candidates is 2; retrieval predicts every next item"):
        model(with_drawn(dataclasses.replace(batch, max_num_candidates=2, num_candidates=candidates)))
    other = dataclasses.replace(DRAWN, item_feature_name="user")
    with pytest.raises(ValueError, match="the batch's item feature is 'item', the model's 'user'"):
        HSTURetrievalModel(other, plain_embeddings=True).dense([], batch)


# -------------------------------------------------------------------------------------------------------- negatives


def test_negatives_follow_from_seed_epoch_and_row():
    rows = np.arange(50)
    drawn = draw_negatives(rows, 8, 1000, seed=1, epoch=2)
    assert drawn.shape == (50, 8) and drawn.min() >= 0 and drawn.max() < 1000
    again = draw_negatives(rows[[7, 3]], 8, 1000, seed=1, epoch=2)
    assert np.array_equal(again, drawn[[7, 3]])
    assert np.array_equal(draw_negatives(rows, 5, 1000, seed=1, epoch=2), drawn[:, :5])
    for other in (draw_negatives(rows, 8, 1000, seed=2, epoch=2), draw_negatives(rows, 8, 1000, seed=1, epoch=3)):
        assert (other == drawn).mean() < 0.05
    assert len(np.unique(drawn)) > 300  # rows differ, and the places within a row


def test_negatives_are_uniform():
    counts = np.bincount(draw_negatives(np.arange(4000), 25, 10, seed=0, epoch=0).ravel(), minlength=10)
    # χ² with 9 degrees of freedom exceeds 33.7 once in ten thousand draws.
    assert ((counts - 10_000) ** 2 / 10_000).sum() < 33.7


def loaders(num_workers):
    features = [FeatureConfig(["user"], [20], 1, False), FeatureConfig(["item", "action"], [NUM_ITEMS, 4], 9, True)]
    sizes = {"batch_size": 3, "num_batches": 4, "last_batch_size": 2}
    dataset = RandomHSTUDataset(features, "item", ["user"], "action", **sizes)
    loader = ResumableLoader(dataset, BatchOrderSampler(4, shuffle=True, seed=5), num_workers=num_workers)
    return loader, sample_negatives(loader, "item_negatives", 6, NUM_ITEMS, seed=9)


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_loader_with_negatives_has_the_same_batches_in_the_same_order(num_workers):
    plain, sampled = loaders(num_workers)
    assert len(sampled) == len(plain)
    epochs = [(list(plain), list(sampled)) for _ in range(2)]
    for epoch, (batches, extended) in enumerate(epochs):
        order = BatchOrderSampler(4, shuffle=True, seed=5).order(4, epoch).tolist()
        for number, batch, more in zip(order, batches, extended):
            for key in ("user", "item", "action"):
                assert torch.equal(more.features[key].values(), batch.features[key].values())
            rows = np.arange(number * 3, number * 3 + batch.actual_batch_size)
            drawn = draw_negatives(rows, 6, NUM_ITEMS, seed=9, epoch=epoch)
            assert more.features["item_negatives"].values().tolist() == drawn.ravel().tolist()
            assert more.features["item_negatives"].lengths().tolist() == [6] * len(rows) + [0] * (3 - len(rows))
            assert more.actual_batch_size == batch.actual_batch_size
    # Resumed within an epoch, also with workers: the same negatives as without a stop.
    _, resumed = loaders(num_workers)
    resumed.sampler.set_epoch(1)
    resumed.sampler.start_at(2)
    rest = [batch.features["item_negatives"].values().tolist() for batch in resumed]
    assert rest == [batch.features["item_negatives"].values().tolist() for batch in epochs[1][1][2:]]


class NumberedRows(Dataset[HSTUBatch]):
    """Rows that say which they are: row r has the one item r."""

    def __getitem__(self, rows: list[int]) -> HSTUBatch:
        ids = torch.tensor(rows)
        features = padded_kjt({"item": ids}, {"item": torch.ones_like(ids)}, 4)
        return HSTUBatch(features, 4, {"item": 1}, actual_batch_size=len(rows), item_feature_name="item")


def negatives_by_row(world_size: int, epoch: int) -> dict[int, list[int]]:
    drawn = {}
    for rank in range(world_size):
        sampler = ShardedBatchSampler(23, 4, rank=rank, world_size=world_size, shuffle=True, seed=2)
        options = {"seed": 9, "rank": rank, "world_size": world_size}
        loader = sample_negatives(ResumableLoader(NumberedRows(), sampler), "negatives", 5, NUM_ITEMS, **options)
        loader.sampler.set_epoch(epoch)
        for batch in loader:
            negatives = batch.features["negatives"].values().view(-1, 5)
            drawn |= dict(zip(batch.features["item"].values().tolist(), negatives.tolist()))
    return drawn


def test_a_row_has_the_same_negatives_on_any_number_of_ranks():
    alone = negatives_by_row(1, epoch=0)
    assert sorted(alone) == list(range(23))
    assert negatives_by_row(2, epoch=0) == negatives_by_row(4, epoch=0) == alone
    assert negatives_by_row(2, epoch=1) != alone


@pytest.mark.parametrize(("task", "num_negatives"), [("retrieval", -1), ("retrieval", 6), ("ranking", 6)])
def test_the_cost_of_a_model_with_a_time_bias_can_be_measured(task, num_negatives):
    model = ModelArgs(8, 1, 2, 4, num_negatives=num_negatives, time_bias=True)
    target = HSTURecipe(TrainConfig(TrainerArgs(3, 3), DatasetArgs("random", 12, num_batches=1), model, task=task), CPU)
    batch = target.make_batch([4, 12, 0])
    target.train_step(batch)
    tables = [module for module in target.measured_model.modules() if isinstance(module, torch.nn.Embedding)]
    assert max(table.num_embeddings for table in tables) == 10_000  # of 100,000 users
    tokens, targets, contextual = target.row_tokens(batch)
    assert tokens.tolist() == [2 + 8, 2 + 24, 2] and targets.tolist() == [0, 0, 0] and contextual is None
    first, second, last = (row.tolist() for row in batch.features["timestamp"].to_dense())
    assert sorted(first) == first and (len(first), len(second), last) == (4, 12, [])


def test_items_are_counted():
    batches = [random_batch(seed=seed, actual_batch_size=4) for seed in range(3)]
    counts = count_items(batches, NUM_ITEMS, device=CPU)
    everything = torch.cat([batch.features["item"].values() for batch in batches]).tolist()
    assert counts.tolist() == [everything.count(item) for item in range(NUM_ITEMS)]
