"""Arguments that are lists of names: one string in their place, whose letters would be the names, is refused."""

import pytest
import torch
import torch.distributed as dist

from commons.datasets.hstu_batch import FeatureConfig, HSTUBatch
from commons.datasets.loader.data_loader import get_data_loader
from commons.datasets.random.dataset import RandomHSTUDataset
from commons.datasets.sequences.event_columns import EventColumns
from commons.distributed.tokens_shuffler import TokensBalancedBatchShuffler
from commons.sequence_batch.batch import BaseBatch
from commons.sequence_batch.schema import register_batch_type
from commons.trainer import TrainerArgs
from commons.trainer.sharding import shard_model
from hstu.batch_shuffler import HSTUBalancedBatchShuffler
from tests.helpers.models.hstu_models import random_batch

ITEMS = FeatureConfig(["item"], [9], 5, is_jagged=True)


class Counting(TokensBalancedBatchShuffler):
    def __init__(self, token_feature_names):
        super().__init__()
        self.token_feature_names = token_feature_names


def shard(tables, monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    shard_model(torch.nn.Linear(1, 1), tables, device=torch.device("cpu"))


MAKERS = {
    "feature_names": [
        lambda names, _: FeatureConfig(names, [9], 5, is_jagged=True),
        lambda names, _: TokensBalancedBatchShuffler(names),
    ],
    "token_feature_names": [
        lambda names, _: HSTUBalancedBatchShuffler(8, 2, 4, token_feature_names=names),
        lambda names, _: Counting(names).shuffle(random_batch(2)),
    ],
    "contextual_feature_names": [
        lambda names, _: BaseBatch(random_batch(2).features, contextual_feature_names=names),
        lambda names, _: HSTUBatch.random(2, [ITEMS], "item", names, device="cpu"),
        lambda names, _: RandomHSTUDataset([ITEMS], "item", names, batch_size=2, num_batches=2),
        lambda names, _: get_data_loader(
            "ml-1m",
            batch_size=2,
            dataset_path="nowhere",
            max_history_seqlen=5,
            contextual_feature_names=names,
        ),
    ],
    "per_rank": [lambda names, _: register_batch_type(per_rank=names)],
    "host_fields": [lambda names, _: type("Counted", (BaseBatch,), {"host_fields": names})],
    "columns.actions": [lambda names, _: EventColumns(actions=names)],
    "columns.context": [lambda names, _: EventColumns(context=names)],
    "eval_metrics": [lambda names, _: TrainerArgs(4, 4, eval_metrics=names)],
    "sinks": [lambda names, _: TrainerArgs(4, 4, sinks=names)],
    "tables": [shard],
}


@pytest.mark.parametrize(("argument", "make"), [(argument, make) for argument, all_ in MAKERS.items() for make in all_])
def test_a_string_is_no_list_of_names(argument, make, monkeypatch):
    with pytest.raises(TypeError, match=rf"{argument} is 'item'; it must be a list of names: write \['item'\]$"):
        make("item", monkeypatch)
    with pytest.raises(TypeError, match=rf"{argument} is \[7\]; names are strings: correct it$"):
        make([7], monkeypatch)


def test_names_may_come_from_an_iterator():
    """Which can be read only once: a check that reads it would leave nothing."""
    batch = BaseBatch(random_batch(2).features, contextual_feature_names=iter(["item"]))
    args = TrainerArgs(4, 4, eval_metrics=(f"HR@{k}" for k in (1, 5)), sinks=iter(["tensorboard"]))
    columns = EventColumns(actions=iter(["buy", "like"]), context=iter([]))
    counted = type("Counted", (BaseBatch,), {"host_fields": iter(["batch_size"])})
    assert batch.contextual_feature_names == ["item"]
    assert (args.eval_metrics, args.sinks) == (("HR@1", "HR@5"), ("tensorboard",))
    assert (columns.actions, columns.context) == (("buy", "like"), ())
    assert FeatureConfig(iter(["item"]), [9], 5, is_jagged=True).feature_names == ["item"]
    assert counted.host_fields == ("batch_size",)
    plain = type("Plain", (BaseBatch,), {})
    assert type("Both", (plain, counted), {}).host_fields == counted.host_fields  # inherited through a class without
